"""What a Module is. See README.md in this folder."""
