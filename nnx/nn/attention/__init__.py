"""Attention, its cache and its positions."""
