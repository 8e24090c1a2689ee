"""Gossip: topologies, mixing matrices, rounds with neighbours, asynchronous pairwise averaging."""
