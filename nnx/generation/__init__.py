"""Writing with a model: sampling rules and the compiled loop of `nnx.generate`."""
