"""The order of rows: which rank gets which row in which step, and the readers that make batches in that order."""
