"""Errors never show what a lifted function is made of: its flat results, or the functions that JAX runs."""

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import nnx

INTERNAL = re.compile(
    r"Returned object|0x[0-9a-f]{6}|data\[\d|output component|_rem_singleton|\[<flat index|loop_carry|nnx/transforms"
)


def linear() -> nnx.Linear:
    return nnx.Linear(2, 2, ctx=nnx.context(0))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "jit returns a text": (lambda: nnx.jit(lambda m, x: "text")(linear(), 1.0), "returned a str, which is neither"),
    "remat returns a text": (lambda: nnx.remat(lambda m, x: "text")(linear(), 1.0), "returned a str, which is neither"),
    "scan collects a text": (
        lambda: nnx.scan(lambda m, c, x: (c, "text"), length=3)(linear(), jnp.ones(2), jnp.ones(3)),
        "returned a str, which is neither",
    ),
    "eval_shape returns a text": (lambda: nnx.eval_shape(lambda m: "text", linear()), "returned a str"),
    "checkify returns a text": (lambda: nnx.checkify(lambda m: "text")(linear()), "returned a str"),
    "jit takes a text": (lambda: nnx.jit(lambda m, x: x)(linear(), "text"), "x is 'text', a str"),
    "branches of other shapes": (
        lambda: nnx.cond(jnp.array(True), lambda m: jnp.ones(2), lambda m: jnp.ones(3), linear()),
        "true_fun has type float32[2]",
    ),
    "branches of other structures": (
        lambda: nnx.cond(jnp.array(True), lambda m: (m, 1.0), lambda m: 2.0, linear()),
        "branch 0 returns (<Module 0: Linear>, *)",
    ),
    "a loop changes a shape": (
        lambda: nnx.fori_loop(0, 3, lambda i, c: (c[0], jnp.ones(3)), (linear(), jnp.ones(2))),
        "has type float32[2]",
    ),
    "a scan changes a dtype": (
        lambda: nnx.scan(lambda m, c, x: (c.astype(jnp.bfloat16), x), length=3)(linear(), jnp.ones(2), jnp.ones(3)),
        "The input carry component carry has type float32[2]",
    ),
    "a scan changes a structure": (
        lambda: nnx.scan(lambda m, c, x: ((c, c), x), length=3)(linear(), jnp.ones(2), jnp.ones(3)),
        "a carry of the structure * and returned (*, *)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_speaks_of_what_the_user_wrote(case):
    wrong, says = WRONG[case]
    with pytest.raises((TypeError, ValueError)) as raised:
        wrong()
    assert says in str(raised.value) and not INTERNAL.search(str(raised.value))


def asks(x: Any) -> Any:
    return x if x.sum() > 0 else -x  # line to find


ASKING: dict[str, Callable[[], Any]] = {
    "scan": lambda: nnx.scan(lambda m, c, x: (asks(c), x), length=3)(linear(), jnp.ones(2), jnp.ones(3)),
    "cond": lambda: nnx.cond(jnp.array(True), lambda m, x: asks(x), lambda m, x: x, linear(), jnp.ones(2)),
    "fori_loop": lambda: nnx.fori_loop(0, 3, lambda i, c: (c[0], asks(c[1])), (linear(), jnp.ones(2))),
    "while_loop": lambda: nnx.while_loop(lambda c: True, lambda c: (c[0], asks(c[1])), (linear(), jnp.ones(2))),
    "remat in jit": lambda: nnx.jit(nnx.remat(lambda m, x: asks(x)))(linear(), jnp.ones(2)),
}


@pytest.mark.parametrize("case", ASKING)
def test_an_error_about_a_tracer_names_the_users_line_and_what_to_write(case):
    with pytest.raises(TypeError) as raised:
        ASKING[case]()
    text = str(raised.value)
    assert f"asks at {__file__}:{asks.__code__.co_firstlineno + 1}" in text and "nnx.cond" in text
    assert not INTERNAL.search(text)


def test_a_value_asked_for_in_vmap_names_no_line_of_the_package():
    with pytest.raises(TypeError) as raised:
        nnx.vmap(lambda m, x: float(x), in_axes=(None, 0))(linear(), jnp.ones(2))
    assert not INTERNAL.search(str(raised.value)) and "object id" not in str(raised.value)
