"""Settings that layers share: compiled bodies and the functions a user can replace in them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import nnx
from nnx.nn.support.settings import Hook, compiled_body


def counting(function):
    """Returns `function` and a list that grows by one entry with every call."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    return counted, calls


def promote_to_half(arrays, dtype=None):
    return tuple(None if a is None else a.astype(jnp.float16) for a in arrays)


REPLACEABLE = {
    "Linear dot_general": (lambda f: nnx.Linear(3, 4, dot_general=f, ctx=nnx.context(0)), lax.dot_general, (2, 3)),
    "Linear promote_dtype": (lambda f: nnx.Linear(3, 4, promote_dtype=f, ctx=nnx.context(0)), promote_to_half, (2, 3)),
    "Einsum einsum_op": (
        lambda f: nnx.Einsum("ab,bc->ac", (3, 4), einsum_op=f, ctx=nnx.context(0)),
        jnp.einsum,
        (2, 3),
    ),
    "Conv conv_general_dilated": (
        lambda f: nnx.Conv(3, 4, (3,), conv_general_dilated=f, ctx=nnx.context(0)),
        lax.conv_general_dilated,
        (5, 3),
    ),
    "LayerNorm promote_dtype": (lambda f: nnx.LayerNorm(3, promote_dtype=f), promote_to_half, (2, 3)),
    "BatchNorm promote_dtype": (
        lambda f: nnx.BatchNorm(3, use_running_average=True, promote_dtype=f),
        promote_to_half,
        (2, 3),
    ),
    "LoRA promote_dtype": (lambda f: nnx.LoRA(3, 2, 4, promote_dtype=f, ctx=nnx.context(0)), promote_to_half, (2, 3)),
    "PReLU promote_dtype": (lambda f: nnx.PReLU(promote_dtype=f), promote_to_half, (2, 3)),
}


@pytest.mark.parametrize("name", REPLACEABLE)
def test_a_function_of_the_user_runs_on_every_call(name):
    make, function, shape = REPLACEABLE[name]
    counted, calls = counting(function)
    layer, x = make(counted), jnp.ones(shape)
    first = layer(x)
    once = len(calls)
    assert once >= 1
    assert jnp.array_equal(layer(x), first)
    assert len(calls) == 2 * once


def test_equal_settings_share_one_compiled_body():
    first, second = (nnx.Linear(3, 4, ctx=nnx.context(seed)) for seed in (0, 1))
    jaxpr = jax.make_jaxpr(lambda x: second(first(x)[:, :3]))(jnp.ones((2, 3)))
    bodies = [equation.params["jaxpr"] for equation in jaxpr.eqns if equation.primitive.name in ("pjit", "jit")]
    assert len(bodies) == 2 and bodies[0] is bodies[1]


def test_a_setting_with_a_default_is_static_and_a_hook_is_not():
    traces = []

    @compiled_body
    def body(x: Any, *, times: int = 2, shift: Hook[Any] = abs) -> Any:
        traces.append(times)
        return shift(x) * times

    assert [int(body(jnp.array(-3), **settings)) for settings in ({}, {"times": 4}, {"times": 4}, {})] == [6, 12, 12, 6]
    assert traces == [2, 4]
    assert [int(body(jnp.array(-3), times=4, shift=jnp.negative)) for _ in range(2)] == [12, 12]
    assert traces == [2, 4, 4, 4]


def test_different_settings_have_different_bodies():
    x = jnp.ones((2, 3))
    exact = nnx.Linear(3, 4, ctx=nnx.context(0))
    half = nnx.Linear(3, 4, dtype=jnp.bfloat16, ctx=nnx.context(0))
    assert (exact(x).dtype, half(x).dtype, exact(x).dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
