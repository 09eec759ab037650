"""What needs a GPU: training steps (`train`) and writing text (`decode`), next to hand-written JAX and PyTorch.

`moe` compares mixtures of experts with dense layers, on a CPU as well.
"""
