"""Mixtures of experts. See README.md in this folder."""
