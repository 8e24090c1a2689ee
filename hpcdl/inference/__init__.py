"""A trained model, rows to predict, predictions, scores, and samples of a posterior."""
