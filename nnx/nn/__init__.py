"""Layers, one family a file; their public names come from the package root."""
