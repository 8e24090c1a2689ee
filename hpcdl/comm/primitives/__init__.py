"""Algorithms of the primitives, one per file: all-to-all, barrier, chain (broadcast and reduce)."""

LATENCY_BYTES = 25_000  # that a link carries in the latency of a message: 2 us at 12.5 GB/s, as in planning/cluster.py
