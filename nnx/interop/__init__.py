"""Interoperability: reading and writing weights in formats that other libraries use."""
