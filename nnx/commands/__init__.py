"""The command line, `python -m nnx`. See README.md in this folder."""
