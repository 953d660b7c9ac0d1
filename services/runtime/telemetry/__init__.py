"""Traces: what a service records, keeps, shares, answers and exports.

Shell.
"""
