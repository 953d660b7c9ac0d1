"""Which KV blocks exist, who holds them, what they contain: the only writer of block state."""
