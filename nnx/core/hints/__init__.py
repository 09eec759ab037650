"""Names and habits from elsewhere, and what to write here. See README.md in this folder."""
