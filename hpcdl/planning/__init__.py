"""What a training will cost before it runs: memory, and the limits of parallelism."""
