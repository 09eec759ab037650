"""A Module and its attributes."""
