"""Safetensors files: one, or several with an index. See README.md in this folder."""
