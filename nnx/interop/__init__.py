"""Other people's weights: reading and writing the formats they come in."""
