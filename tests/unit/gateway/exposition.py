"""Reads the Prometheus text format."""

from __future__ import annotations


def samples(text: bytes) -> dict[str, float]:
    """`name{labels}` -> value; comments and creation times are left out."""
    lines = [line for line in text.decode().splitlines() if line and line[0] != "#"]
    pairs = (line.rpartition(" ") for line in lines)
    return {name: float(value) for name, _space, value in pairs if "_created" not in name}
