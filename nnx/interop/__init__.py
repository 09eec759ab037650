"""To and from other programs: PyTorch's weights, exported programs. See README.md in this folder."""
