"""Constructors under `@nnx.vmap`, `@nnx.scan` and `@nnx.remat`: they must leave `self` as the plain constructor does.

Under `vmap` and `scan` every variable is stacked, so what the plain constructor made is stacked before comparing.
"""

import random
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

import nnx
from tests.fuzz.graphs import Builder, Features
from tests.fuzz.programs import definition
from tests.fuzz.walks import cells_of, mapped_in_order, modules_of, tied

DECORATORS = {
    "vmap": "nnx.vmap(variable_axes={...: 0}, axis_size=2)",
    "scan": "nnx.scan(variable_axes={...: 0}, length=2)",
    "remat": "nnx.remat",
}


@dataclass
class Construction:
    """A class whose constructor builds a random graph around `self`."""

    seed: int
    features: Features
    decorator: str
    build: list[str]

    def sources(self) -> str:
        body = definition("__init__(self, k)", ["m0 = self", *self.build]).replace("\n", "\n    ")
        plain = f"class Eager(Plain):\n    {body}"
        lifted = f"class Lifted(Plain):\n    @{DECORATORS[self.decorator]}\n    {body}"
        return f"{plain}\n\n\n{lifted}\n"

    def listing(self) -> str:
        return f"from tests.fuzz.vocabulary import *\n\n\n{self.sources()}\n\nprint(Lifted(1))"

    def expression(self) -> str:
        return f"{self.decorator} on __init__"


def draw_construction(seed: int, features: Features) -> Construction:
    rng = random.Random(seed)
    decorator = rng.choice([name for name in DECORATORS if features.on(f"{name} constructor")])
    lines = Builder(rng, features, stacked=False).build().lines
    inner = [line for line in lines if not line.startswith(("m0 = ", "return ", "ctx, ", "out"))]
    return Construction(seed, features, decorator, inner)


def stack_everything(root: Any) -> None:
    """Gives every variable a leading axis of two."""
    cells = cells_of(modules_of([root]))
    variables = [cell for cell in cells if isinstance(cell[0].variable(cell[1]), nnx.Variable)]
    for module, name in [group[0] for group in tied(variables)]:
        setattr(module, name, mapped_in_order(twice, vars(module)[name]))
    memo: dict[int, Any] = {}
    for module, name in cells:
        if (module, name) not in variables:
            value = vars(module)[name]
            if id(value) not in memo:  # one pytree under two attributes stays one
                memo[id(value)] = mapped_in_order(twice, value)
            setattr(module, name, memo[id(value)])


def twice(value: Any) -> Any:
    return jnp.stack([jnp.asarray(value)] * 2)
