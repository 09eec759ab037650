"""What mixes the tokens of a decoder's layers. See README.md in this folder."""
