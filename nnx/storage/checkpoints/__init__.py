"""Checkpoints: saving, loading, and the steps of a run."""
