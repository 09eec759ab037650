"""The names of activations: which results of a layer `nnx.remat(policy=...)` can keep.

| layer | name | activation |
|---|---|---|
| `MultiHeadAttention` | "query", "key", "value" | the projections, after norm and rotation |
| | "attention" | the attended values of all heads, before the output projection |
| | "attention_out" | the output |
| `MLP`, `GatedMLP`, `MoE` | "mlp_hidden" | the hidden features, before the activation function |
| | "mlp_out" | the output |

Hidden features are named before the activation function, because its gradient needs what went into it. Names are
attached inside `nnx.remat` only: elsewhere they have no use, and each would add half a millisecond to the time it takes
to trace a gradient. A body that is compiled on its own is traced once for all callers, so it uses JAX's
`checkpoint_name` directly.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

from nnx.transforms.control.remat import is_recomputed


def named(x: jax.Array, name: str) -> jax.Array:
    """Returns an activation with a name for the policy of the `nnx.remat` around it, if there is one."""
    return checkpoint_name(x, name) if is_recomputed() else x
