"""Layers, one idea per file; their public names come from the package root."""
