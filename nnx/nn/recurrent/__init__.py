"""Recurrent cells and the networks that run them."""
