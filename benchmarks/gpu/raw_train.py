"""The step a careful person would write without a library: parameters in dicts, layers in a Python loop.

Computes in bfloat16 with float32 parameters, cuDNN attention on a GPU, bfloat16 logits, and a cross-entropy with a
hand-written gradient that keeps nothing but the logits. `tuned` adds the two things that examples/gpt does beyond that:
positions looked up for each text, and a gelu that is recomputed in the backward pass. `from_model` takes the weights of
the nnx model, so that the two can be compared number by number.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey

Params = dict[str, Any]
DTYPE = jnp.bfloat16


def from_model(params: dict[str, Any]) -> Params:
    """Copies the parameters of `examples.gpt.model.GPT` into nested dicts, one dict per layer."""
    blocks = params["blocks"]["scan_module"]
    attention = blocks["attention"]
    depth, width = blocks["norm1"]["scale"].shape
    stacked = {
        "norm1": blocks["norm1"],
        "query": attention["query"],
        "key": attention["key"],
        "value": attention["value"],
        "out": {"kernel": attention["out"]["kernel"].reshape(depth, -1, width), "bias": attention["out"]["bias"]},
        "norm2": blocks["norm2"],
        "up": blocks["up"],
        "down": blocks["down"],
    }
    copied = {
        "embed": params["embed"]["embedding"],
        "position": params["position"]["embedding"],
        "norm": params["norm"],
        "layers": [jax.tree.map(lambda x: x[i], stacked) for i in range(depth)],  # noqa: B023
    }
    return jax.tree.map(jnp.copy, copied)


def _norm(params: Params, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, -1, keepdims=True)
    variance = jnp.maximum(jnp.mean(wide * wide, -1, keepdims=True) - mean * mean, 0.0)
    y = (wide - mean) * (jax.lax.rsqrt(variance + 1e-5) * params["scale"]) + params["bias"]
    return y.astype(x.dtype)


def _linear(params: Params, x: jax.Array) -> jax.Array:
    kernel, bias = params["kernel"].astype(x.dtype), params["bias"].astype(x.dtype)
    return jax.lax.dot_general(x, kernel, (((2,), (0,)), ((), ()))) + bias


def _block(params: Params, x: jax.Array, implementation: str, gelu: Any) -> jax.Array:
    h = _norm(params["norm1"], x)
    query, key, value = (_linear(params[name], h) for name in ("query", "key", "value"))  # [B, T, H, D]
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)  # type: ignore
    x = x + _linear(params["out"], attended.reshape(x.shape))
    h = gelu(_linear(params["up"], _norm(params["norm2"], x)))
    return x + _linear(params["down"], h)


def logits(params: Params, tokens: jax.Array, tuned: bool) -> jax.Array:
    """Returns `[batch, length, vocab]` in bfloat16."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    vectors = params["position"][positions if tuned else slice(tokens.shape[1])]
    x = params["embed"][tokens].astype(DTYPE) + vectors.astype(DTYPE)
    gelu = jax.checkpoint(jax.nn.gelu) if tuned else jax.nn.gelu
    for layer in params["layers"]:
        x = _block(layer, x, implementation, gelu)
    x = _norm(params["norm"], x)
    return jax.lax.dot_general(x, params["embed"].astype(DTYPE), (((2,), (1,)), ((), ())))


@jax.custom_vjp
def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy."""
    return _forward(logits, targets)[0]


def _forward(logits: jax.Array, targets: jax.Array) -> Any:
    log_sum = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0].astype(jnp.float32)
    return jnp.mean(log_sum - chosen), (logits, targets, log_sum)


def _backward(kept: Any, g: jax.Array) -> Any:
    logits, targets, log_sum = kept
    softmax = jnp.exp(logits.astype(jnp.float32) - log_sum[..., None])
    one_hot = targets[..., None] == jnp.arange(logits.shape[-1])
    return ((softmax - one_hot) * (g / targets.size)).astype(logits.dtype), None


cross_entropy.defvjp(_forward, _backward)


def loss(params: Params, tokens: jax.Array, tuned: bool) -> jax.Array:
    return cross_entropy(logits(params, tokens[:, :-1], tuned), tokens[:, 1:])


def decayed(params: Params) -> Any:
    """Returns true for what weight decay applies to: matrices, not biases and norms."""
    return jax.tree.map_with_path(lambda path, _: path[-1] not in (DictKey("bias"), DictKey("scale")), params)


def make_step(tx: optax.GradientTransformation, tuned: bool, compiler_options: dict[str, Any]) -> Any:
    """Makes `step(params, opt_state, tokens)`, which returns the new parameters, optimizer state and loss."""

    def step(params: Params, opt_state: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, tokens, tuned)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value  # type: ignore[return-value]

    return jax.jit(step, donate_argnums=(0, 1), compiler_options=compiler_options)
