"""The `streetcar` command."""
