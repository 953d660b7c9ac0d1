"""The operations again, in Triton: compiled for the device at hand on first use.

Importing a module of this package imports triton, so nothing imports it where triton may be
missing.
"""
