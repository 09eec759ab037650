"""`nnx.jit` and its parts; see ../README.md for the vocabulary."""
