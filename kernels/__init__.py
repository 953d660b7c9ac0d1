"""Numerical operations on tensors, one per file, each with its contract in the docstring.

Every operation states shapes and dtypes first, then the formula. The torch implementations here are
the reference that every faster backend is tested against.

Device: touches tensors; knows nothing of models, sequences or the bus.
"""
