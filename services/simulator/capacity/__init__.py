"""Capacity planning: the real scheduler and ledger cores on a step-time model, in virtual time."""
