"""Published architectures besides the decoder. See README.md in this folder."""
