"""Fault injection and stragglers: what --inject and --straggler do."""
