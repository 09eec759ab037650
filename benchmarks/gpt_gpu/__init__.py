"""How fast GPT-2 trains: the step of examples/gpt beside the best hand-written JAX, and PyTorch where it is there."""
