"""Normalization, of activations and of weights. See README.md in this folder."""
