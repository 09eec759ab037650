"""Checksums of initial values, to compare versions: `initial_values.json` holds those of version 0.2.

python -m tests.nn.initial_values     prints them; in a checkout of another version, with this file copied there
"""

import itertools
import json
import pathlib
import zlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import nnx

STORED = pathlib.Path(__file__).with_name("initial_values.json")
DTYPES = ("float32", "float16", "bfloat16")
NOT_ORTHOGONAL = nnx.initializers.zeros()
"""The last bits of a QR decomposition can change from one process to the next."""

LAYERS: dict[str, Callable[..., nnx.Module]] = {
    "Linear(3, 4)": lambda **d: nnx.Linear(3, 4, **d),
    "Linear(70, 71)": lambda **d: nnx.Linear(70, 71, **d),
    "Linear(300, 512)": lambda **d: nnx.Linear(300, 512, **d),
    "LinearGeneral((2, 3), (4, 5))": lambda **d: nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), **d),
    "LinearGeneral with a batch axis": lambda **d: nnx.LinearGeneral(3, 4, batch_axis={0: 2}, **d),
    "Einsum": lambda **d: nnx.Einsum("...ta,hab->...thb", (3, 2, 4), (3, 4), **d),
    "Bilinear": lambda **d: nnx.Bilinear(3, 4, 5, **d),
    "Conv(3, 4, (3, 2))": lambda **d: nnx.Conv(3, 4, (3, 2), **d),
    "Conv in groups": lambda **d: nnx.Conv(8, 64, (5, 5), feature_group_count=4, **d),
    "ConvTranspose": lambda **d: nnx.ConvTranspose(3, 2, (3, 3), strides=2, **d),
    "Embed": lambda **d: nnx.Embed(11, 5, **d),
    "LearnedPositionEmbed": lambda **d: nnx.LearnedPositionEmbed(7, 12, **d),
    "LoRA": lambda **d: nnx.LoRA(13, 2, 4, **d),
    "MultiHeadAttention": lambda **d: nnx.MultiHeadAttention(4, 24, num_kv_heads=2, normalize_qk=True, **d),
    "GatedMLP": lambda **d: nnx.GatedMLP(9, 17, **d),
    "MoE": lambda **d: nnx.MoE(3, 4, 4, 2, num_shared=1, **d),
    "BatchNorm": lambda **d: nnx.BatchNorm(6, **d),
    "OptimizedLSTMCell": lambda **d: nnx.OptimizedLSTMCell(3, 6, recurrent_kernel_init=NOT_ORTHOGONAL, **d),
    "GRUCell": lambda **d: nnx.GRUCell(3, 6, recurrent_kernel_init=NOT_ORTHOGONAL, **d),
}
FIRST = "Linear(70, 71)", "Embed", "LoRA", "LearnedPositionEmbed"
"""One layer for each distribution."""


def checksum(module: nnx.Module) -> str:
    """Returns a checksum of every bit of a Module's state, with its paths, dtypes and shapes."""
    total = 0
    for path, leaf in module.get_state().items():
        value = np.asarray(leaf.value if isinstance(leaf, nnx.Node) else leaf)
        total = zlib.crc32(f"{path} {value.dtype} {value.shape}".encode() + value.tobytes(), total)
    return f"{total:08x}"


def generator() -> str:
    """Returns a checksum of what JAX itself draws here; it can differ between versions and processors."""
    total = 0
    for make, dtype in itertools.product(("lecun_normal", "normal", "he_uniform"), DTYPES):
        draw = jax.jit(getattr(jax.nn.initializers, make)(), static_argnums=(1, 2))
        total = zlib.crc32(np.asarray(draw(jax.random.key(1), (13, 17), jnp.dtype(dtype))).tobytes(), total)
    return f"{total:08x}"


def checksums() -> Iterator[tuple[str, str]]:
    """Yields a name and a checksum for every case."""
    for name, make in LAYERS.items():
        yield name, checksum(make(ctx=nnx.context(3)))
    for name, dtype in itertools.product(FIRST, ("float16", "bfloat16")):
        yield f"{name}, {dtype}", checksum(LAYERS[name](param_dtype=jnp.dtype(dtype), ctx=nnx.context(3)))
    make = LAYERS[FIRST[0]]
    yield "legacy key", checksum(make(ctx=nnx.context(jax.random.PRNGKey(3))))
    yield "rbg", checksum(make(ctx=nnx.context(jax.random.key(3, impl="rbg"))))
    yield "in jit", checksum(nnx.jit(lambda ctx: make(ctx=ctx))(nnx.context(3)))
    yield "complex64", checksum(make(param_dtype=jnp.complex64, ctx=nnx.context(3)))
    with jax.threefry_partitionable(False):
        yield "not partitionable", checksum(make(ctx=nnx.context(3)))
    stacked = nnx.Vmap(nnx.Linear, variable_axes={nnx.Param: 0}, split_rngs="params", axis_size=3)
    yield "stacked", checksum(stacked(3, 4, ctx=nnx.context(3)))


if __name__ == "__main__":
    found = {"jax": jax.__version__, "generator": generator(), "values": dict(checksums())}
    print(json.dumps(found, indent=1))
