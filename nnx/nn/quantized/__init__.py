"""Weights stored as small integers."""
