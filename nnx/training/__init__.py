"""Training a model: optimizers, averages and metrics. See README.md in this folder."""
