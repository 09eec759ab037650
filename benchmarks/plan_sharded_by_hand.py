"""A Llama model and its Adam step written by hand in JAX: nested dicts, specs next to shapes, one scan over layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.plan_sharded import config_of, cross_entropy

Arrays = dict[str, Any]


def shapes_and_specs(config: Any) -> dict[str, tuple[tuple[int, ...], PartitionSpec]]:
    """The shape and the split of every parameter; those of the layers are stacked."""
    d, h, n, k, f = config.features, config.head_dim, config.num_heads, config.num_kv_heads, config.hidden_features
    layers, spec = config.num_layers, PartitionSpec
    return {
        "embed": ((config.vocab_size, d), spec("model", "data")),
        "norm": ((d,), spec(None)),
        "head": ((d, config.vocab_size), spec("data", "model")),
        "layers/attention_norm": ((layers, d), spec(None, None)),
        "layers/query": ((layers, d, n, h), spec(None, "data", "model", None)),
        "layers/key": ((layers, d, k, h), spec(None, "data", "model", None)),
        "layers/value": ((layers, d, k, h), spec(None, "data", "model", None)),
        "layers/out": ((layers, n, h, d), spec(None, "model", None, "data")),
        "layers/mlp_norm": ((layers, d), spec(None, None)),
        "layers/gate": ((layers, d, f), spec(None, "data", "model")),
        "layers/up": ((layers, d, f), spec(None, "data", "model")),
        "layers/down": ((layers, f, d), spec(None, "model", "data")),
    }


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + epsilon)
    return (scaled * scale).astype(x.dtype)


def rotate(x: jax.Array, base: float) -> jax.Array:  # [batch, length, heads, head_dim]
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1).astype(x.dtype)


def block(config: Any, x: jax.Array, layer: Arrays) -> jax.Array:  # [batch, length, features]
    w = {name: value.astype(x.dtype) for name, value in layer.items() if "norm" not in name}
    y = rms_norm(x, layer["attention_norm"], config.norm_epsilon)
    query, key, value = (jnp.einsum("btd,dnh->btnh", y, w[name]) for name in ("query", "key", "value"))
    query, key = rotate(query, config.rotary.base), rotate(key, config.rotary.base)
    y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + jnp.einsum("btnh,nhd->btd", y, w["out"])
    y = rms_norm(x, layer["mlp_norm"], config.norm_epsilon)
    x = x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]
    return jax.lax.with_sharding_constraint(x, PartitionSpec("data", None, None))


def forward(config: Any, params: Arrays, tokens: jax.Array) -> jax.Array:
    layers = {name.removeprefix("layers/"): value for name, value in params.items() if name.startswith("layers/")}
    x = params["embed"].at[tokens].get().astype(jnp.bfloat16)
    x = jax.lax.with_sharding_constraint(x, PartitionSpec("data", None, None))
    body = jax.checkpoint(lambda x, layer: (block(config, x, layer), None))
    x, _ = jax.lax.scan(body, x, layers)
    x = rms_norm(x, params["norm"], config.norm_epsilon)
    return x @ params["head"].astype(x.dtype)


def lower_by_hand(model: str, mesh: Any, tokens: Any) -> Callable[[], Any]:
    """Returns a function that lowers the step."""
    config, tx = config_of(model), optax.adam(1e-4)
    table = shapes_and_specs(config)
    shardings = {name: NamedSharding(mesh, spec) for name, (_, spec) in table.items()}
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=shardings[name]) for name, (shape, _) in table.items()
    }
    whole = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree_utils.tree_map_params(
        tx,
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(tx.init, params),
        shardings,
        transform_non_params=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
    )

    def train_step(params: Arrays, opt_state: Any, tokens: jax.Array) -> Any:
        def loss_fn(params: Arrays) -> jax.Array:
            return cross_entropy(forward(config, params, tokens[:, :-1]).astype(jnp.float32), tokens[:, 1:])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    out = (shardings, jax.tree.map(lambda x: x.sharding, opt_state), None)
    return lambda: jax.jit(train_step, donate_argnums=(0, 1), out_shardings=out).lower(params, opt_state, tokens)
