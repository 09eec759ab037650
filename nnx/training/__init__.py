"""Fitting a model: optimizers, averages, metrics, modes, and checkpoints."""
