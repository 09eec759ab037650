"""Sharding: logical axis names, and the rules that map them to the axes of a mesh. See README.md in this folder."""
