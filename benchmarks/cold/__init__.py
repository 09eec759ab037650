"""The models of `benchmarks.cold_start`: the same four in each library, written the way its users would write them.

Each library has one file. It maps the names of `batches.NAMES` to functions that build a model (`MODELS`), and its
`first_loss(model, x, y)` makes an Adam optimizer, takes one compiled training step and returns the loss.
"""
