"""Sharding: logical axis names, and how they meet the axes of a mesh."""
