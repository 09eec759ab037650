"""Writing with a model: sampling rules and the compiled loop. See README.md in this folder."""
