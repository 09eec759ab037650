"""The families of published decoders, one file per maker. See README.md in this folder."""
