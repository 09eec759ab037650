"""The names of activations: which results of a layer `nnx.remat(policy=...)` can keep.

| layer | name | activation |
|---|---|---|
| `MultiHeadAttention` | "query", "key", "value" | the projections, after norm and rotation |
| | "attention" | the attended values of all heads, before the output projection |
| | "attention_out" | the output |
| `MLP`, `GatedMLP`, `MoE` | "mlp_hidden" | the hidden features, before the activation function |
| | "mlp_out" | the output |

Hidden features are named before the activation function, because its gradient needs what went into it.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

from nnx.core.trace import is_tracer


def named(x: jax.Array, name: str) -> jax.Array:
    """Returns an activation with a name for remat policies. Outside of transforms there is nothing to name."""
    return checkpoint_name(x, name) if is_tracer(x) else x
