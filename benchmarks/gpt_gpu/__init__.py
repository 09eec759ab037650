"""How fast GPT-2 trains: the step of examples/gpt next to the best hand-written JAX, and PyTorch if it is installed."""
