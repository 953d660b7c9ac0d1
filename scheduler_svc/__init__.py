"""Which sequences run, and how many tokens of each: the only writer of sequence state."""
