"""What published models take: text, images and sound."""
