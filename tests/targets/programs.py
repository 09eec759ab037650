"""Programs that the tests of targets compile."""

from typing import Any

import jax
import jax.numpy as jnp

import nnx
from tests.targets import topologies


def decode(features: int, rows: int, aligned: bool, *, in_mesh: bool = True) -> tuple[Any, int]:
    """A loop that writes eight tokens with two layers of attention, and the entries of one array of a cache.

    Arguments that are on a device, and not in a mesh, do not tell a traced function what it is compiled for.
    """
    heads, length = 4, 2048
    empty = jax.eval_shape(lambda: nnx.LayerCache.empty(rows, length, heads, features, dtype=jnp.bfloat16))
    caches = [nnx.LayerCache(empty.key, empty.value, aligned)] * 2

    def write(caches: Any, lengths: jax.Array, x: jax.Array) -> Any:
        def step(carry: Any, _: Any) -> Any:
            caches, lengths, x = carry
            written = []
            for cache in caches:
                cache = cache.append(x[:, :, ::2], x[:, :, 1::2], lengths)
                options = {"key_value_seq_lengths": lengths + 1, "assume_seen": True}
                x = nnx.dot_product_attention(x, cache.key, cache.value, **options)
                written.append(cache)
            return (written, lengths + 1, x), None

        return jax.lax.scan(step, (caches, lengths, x), length=8)[0]

    given = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows, 1, 2 * heads, features), jnp.bfloat16)
    arguments = topologies.whole((caches, *given), topologies.mesh() if in_mesh else topologies.devices()[0])
    return topologies.compiled(write, *arguments, donate_argnums=0), rows * length * heads * features
