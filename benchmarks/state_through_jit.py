"""What does a State cost as an argument and result of raw `jax.jit`, compared with the same leaves in nested dicts?"""

from collections.abc import Callable
from typing import Any

import flax.nnx
import jax

from benchmarks.blocks import Blocks, FlaxBlocks, raw_blocks
from benchmarks.harness import OURS, Row, Settings, interleave, ratio_row


def plus_one(tree: Any) -> Callable[[], Any]:
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))

    def run() -> Any:
        nonlocal tree
        tree = step(tree)
        return tree

    return run


def measure(settings: Settings) -> list[Row]:
    contenders = {
        OURS: plus_one(Blocks(100).get_state()),
        "nested dicts": plus_one(raw_blocks(100)),
        "flax": plus_one(flax.nnx.state(FlaxBlocks(100))),
    }
    timings = interleave(contenders, seconds=settings.seconds(10))
    return [ratio_row("State through jax.jit, 300 leaves plus one", timings, "nested dicts", 1.25)]
