"""Parameter servers: the store, its servers and clients, clocks, replication."""
