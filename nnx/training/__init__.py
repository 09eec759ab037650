"""Training a model: optimizers, averages, metrics and checkpoints. See README.md in this folder."""
