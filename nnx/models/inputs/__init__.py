"""What published models take: text, images and sound. See README.md in this folder."""
