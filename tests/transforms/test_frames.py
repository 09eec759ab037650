"""A repeated call runs hardly any Python, of this package or of JAX, whatever the first call had to find out."""

import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import nnx


class Model(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(3))
        self.count = nnx.Variable(jnp.array(0))


def step(model: Model, x: Any) -> Any:
    model.scale *= 0.5
    model.count += 1
    return model.scale * x


def frames(call: Callable[[], Any]) -> list[str]:
    """Returns the Python functions that run during a call, apart from the call itself."""
    names: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names[1:]


def goes_through_python(names: list[str]) -> bool:
    """Whether JAX dispatched a jitted function from Python, which takes some 340 frames, and not from C++."""
    return any("cache_miss" in name or "_python_pjit_helper" in name for name in names)


@pytest.mark.parametrize("donated", [(), (0,)])
def test_repeated_jitted_call_is_one_frame_for_every_shape(donated):
    jitted, model = nnx.jit(step, donate_argnums=donated), Model()
    one, many = jnp.ones(3), jnp.ones((2, 3))
    for x in (one, many):
        for _ in range(3):
            jitted(model, x)
    for x in (many, one, many):
        jitted(model, x)
        assert len(frames(lambda: jitted(model, x))) == 1  # noqa: B023  (called at once)


def test_repeated_call_with_a_captured_module_goes_through_the_fast_dispatch_of_jax():
    captured, model, x = Model(), Model(), jnp.ones(3)

    @nnx.jit
    def jitted(model, x):
        return step(model, x) * captured.scale

    for _ in range(3):
        jitted(model, x)
    assert not goes_through_python(frames(lambda: jitted(model, x)))


def test_repeated_eager_scan_goes_through_the_fast_dispatch_of_jax():
    model, x = Model(), jnp.ones(3)

    @nnx.scan(length=3)
    def run(model, carry, _):
        return carry + step(model, carry), None

    for _ in range(3):
        run(model, x, None)
    assert not goes_through_python(frames(lambda: run(model, x, None)))
