"""What dedicated ranks offer: parameters (parameter_store.py) and training data (data_server.py)."""
