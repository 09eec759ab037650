"""Checkpoints: saving, loading, and the steps of a run. See README.md in this folder."""
