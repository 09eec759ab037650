"""Attention, its cache and its positions. See README.md in this folder."""
