"""Recurrent cells and the networks that run them. See README.md in this folder."""
