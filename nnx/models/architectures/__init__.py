"""Published architectures besides the decoder."""
