"""Model files: where they are, what they contain."""
