"""Checkpoints: the file, its shards, the state of a run in it, rollback, export."""
