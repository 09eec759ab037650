"""What a type checker makes of functions that look inside a model: what they take and return. Never run."""

from typing import Any, assert_type

import jax

import nnx


class Model(nnx.Module):
    def __init__(self, features: int, *, ctx: nnx.Context):
        self.linear = nnx.Linear(features, features, ctx=ctx)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def loss(model: Model, x: jax.Array) -> float:
    return float(model(x).sum())


def hook(path: str, module: nnx.Module, call: Any, x: jax.Array) -> jax.Array:
    return call(x)


def a_capture_returns_the_result_and_a_dict(model: Model, x: jax.Array) -> None:
    assert_type(nnx.capture(loss, where="linear")(model, x), tuple[float, dict[str, Any]])
    assert_type(nnx.capture(model, where=nnx.Linear)(x), tuple[jax.Array, dict[str, Any]])
    assert_type(nnx.capture(loss, grads=True)(model, x), tuple[float, dict[str, Any], dict[str, Any]])
    assert_type(nnx.capture(where="linear", methods=("encode",))(loss)(model, x), tuple[float, dict[str, Any]])


def an_intervention_keeps_arguments_and_result(model: Model, x: jax.Array) -> None:
    assert_type(nnx.intercept(loss, hook, where="linear")(model, x), float)
    assert_type(nnx.intercept(hook=hook)(loss)(model, x), float)


def finding_nans_returns_a_record_or_nothing(model: Model, x: jax.Array) -> None:
    found = nnx.find_nans(loss)(model, x)
    assert_type(found, nnx.NotFinite | None)
    if found is not None:
        assert_type(found.path, str)


def mistakes(model: Model, x: jax.Array) -> None:
    nnx.capture(loss)(model)  # pyright: ignore[reportCallIssue]
    nnx.capture(loss, wheer="linear")  # pyright: ignore[reportCallIssue]
    nnx.intercept(loss)  # pyright: ignore[reportCallIssue]
