"""A Module and its attributes. See README.md in this folder."""
