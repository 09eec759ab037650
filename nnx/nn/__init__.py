"""Layers, one idea per file; their public names come from the package root. See README.md in this folder."""
