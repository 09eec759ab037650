"""Weights in files: checkpoints, safetensors, and what fits where. See README.md in this folder."""
