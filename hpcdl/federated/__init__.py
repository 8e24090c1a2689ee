"""Federated learning: clients, their messages, sums of messages, secure sums, and private averages."""
