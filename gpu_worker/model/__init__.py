"""The decoder and the loading of its weights."""
