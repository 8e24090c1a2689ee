"""Forecasts of a training run before it starts: memory, time, and the limits of parallelism."""
