"""Fault injection (--inject) and stragglers (--straggler)."""
