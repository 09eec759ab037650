"""Mistakes that a type checker must find: every `ignore` below is an error if it is not needed. Never run."""

import jax
import jax.numpy as jnp

import nnx


class Linear(nnx.Module):
    def __init__(self, din: int, dout: int):
        self.kernel = nnx.Param(jnp.zeros((din, dout)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel


@nnx.dataclass
class Affine(nnx.Module):
    kernel: jax.Array = nnx.param_field()


def an_array_is_no_container(model: Linear) -> None:
    print(model.kernel.value)  # pyright: ignore[reportAttributeAccessIssue]
    print(model.kernel.upper())  # pyright: ignore[reportAttributeAccessIssue]


def constructor_arguments_are_checked() -> None:
    Linear("two", 3)  # pyright: ignore[reportArgumentType]
    Linear(2)  # pyright: ignore[reportCallIssue]
    Affine(weight=jnp.ones(2))  # pyright: ignore[reportCallIssue]


def call_arguments_are_checked(model: Linear) -> None:
    model()  # pyright: ignore[reportCallIssue]


def a_filter_by_position_makes_a_decorator() -> None:
    nnx.grad(nnx.Param)(3)  # pyright: ignore[reportArgumentType]
    nnx.jacfwd("params", allow_int=True)  # pyright: ignore[reportCallIssue]


def a_context_is_seeded_by_what_can_seed_it(ctx: nnx.Context) -> None:
    ctx.make_rng(3)  # pyright: ignore[reportArgumentType]


def names_from_elsewhere_are_not_part_of_it(model: Linear) -> None:
    print(nnx.Rngs)  # pyright: ignore[reportAttributeAccessIssue]
    print(model.parameters())  # pyright: ignore[reportAttributeAccessIssue]


def the_rooms_of_the_package_are_not_part_of_it() -> None:
    print(nnx.core)  # pyright: ignore[reportAttributeAccessIssue]
    print(nnx.training.optimizer)  # pyright: ignore[reportAttributeAccessIssue]
