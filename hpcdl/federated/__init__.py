"""Clients of federated learning, what they send, how it is summed, secured and kept private."""
