"""Transforms that repeat, choose or rearrange a body: `scan`, `vmap`, loops, branches, `remat` and others."""
