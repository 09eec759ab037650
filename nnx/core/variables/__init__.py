"""Containers, Refs, and the values that an attribute can hold as data. See README.md in this folder."""
