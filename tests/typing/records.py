"""What a type checker makes of Pytrees and dataclass Modules. Read by pyright, never run."""

from typing import assert_type

import jax
import jax.numpy as jnp

import nnx


class Point(nnx.Pytree):
    def __init__(self, x: float, name: str):
        self.x = nnx.Node(jnp.asarray(x))
        self.name = name


@nnx.dataclass
class Affine(nnx.Module):
    kernel: jax.Array = nnx.param_field()
    offset: float = 0.0
    name: str = nnx.static_field(default="affine")


@nnx.dataclass(frozen=True)
class Frozen(nnx.Module):
    kernel: jax.Array = nnx.param_field()


def records_read_back_raw_values(point: Point) -> None:
    assert_type(point.x, jax.Array)
    assert_type(point.name, str)
    assert_type(point.replace(name="there"), Point)


def dataclass_modules_have_the_fields_as_arguments() -> None:
    affine = Affine(jnp.ones(2), offset=1.0, name="mine")
    assert_type(affine, Affine)
    assert_type(affine.kernel, jax.Array)
    assert_type(Frozen(jnp.ones(2)).kernel, jax.Array)
