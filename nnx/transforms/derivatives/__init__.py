"""Derivatives: `grad` and its relatives."""
