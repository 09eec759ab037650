"""Weights stored as small integers. See README.md in this folder."""
