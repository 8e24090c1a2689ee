"""Training-data servers: ranks that own examples and make batches of them for workers."""
