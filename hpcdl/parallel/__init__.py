"""Parallel models: sharding units, ZeRO stages, gathered layers (FSDP), pipeline stages, lock-free thread teams."""
