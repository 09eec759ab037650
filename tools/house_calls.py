"""Counts the Python frames of NNX that common calls run through, and prints them as JSON.

`tools/house.py` starts this program with PYTHONPATH set to the tree that it measures, so it uses only names that old
trees have too.

Each call is counted as `[frames, files, switches]`: the functions of NNX that Python enters, the files they are in, and
how many of them are entered from another file (or from outside the package). All of it counts the calling thread only.
Every call is made once beforehand on other objects, so that imports and process-wide caches do not count.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

import nnx

PACKAGE = os.path.dirname(nnx.__file__) + os.sep


class Block(nnx.Module):
    """A layer that a Scan can repeat."""

    def __init__(self, *, ctx: nnx.Context):
        self.linear = nnx.Linear(4, 4, ctx=ctx)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(self.linear(x)), None


def caller_in_package(frame: FrameType) -> FrameType | None:
    """Returns the innermost caller that belongs to NNX, looking through frames of JAX and Python."""
    caller = frame.f_back
    while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
        caller = caller.f_back
    return caller


def count(call: Callable[[], Any]) -> list[int]:
    """Runs a call and returns its frames, files and switches."""
    frames, switches, files = 0, 0, set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal frames, switches
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(PACKAGE):
            return
        caller = caller_in_package(frame)
        frames += 1
        files.add(name)
        switches += caller is None or caller.f_code.co_filename != name

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [frames, len(files), switches]


def jitted_calls() -> dict[str, list[int]]:
    """Counts the first and second call of `nnx.jit`, without and with a gradient inside."""
    x = jnp.ones((3, 4))
    model, other = nnx.Linear(4, 4, ctx=nnx.context(0)), nnx.Linear(4, 4, ctx=nnx.context(1))

    @nnx.jit
    def forward(model: nnx.Linear, x: jax.Array) -> jax.Array:
        return model(x)

    @nnx.jit
    def gradient(model: nnx.Linear, x: jax.Array) -> Any:
        return nnx.value_and_grad(lambda model: model(x).sum())(model)

    return {
        "nnx.jit, first call": count(lambda: forward(model, x)),
        "nnx.jit, second call": count(lambda: forward(model, x)),
        "value_and_grad in nnx.jit, first call": count(lambda: gradient(other, x)),
        "value_and_grad in nnx.jit, second call": count(lambda: gradient(other, x)),
    }


def eager_calls() -> dict[str, list[int]]:
    """Counts an eager `nnx.Scan` and the assignment of an attribute."""
    x = jnp.ones((3, 4))
    stack = nnx.Scan(Block, variable_axes={nnx.Param: 0}, split_rngs="params", length=3)(ctx=nnx.context(0))
    model = nnx.Linear(4, 4, ctx=nnx.context(0))
    return {
        "eager nnx.Scan, first call": count(lambda: stack(x)),
        "eager nnx.Scan, second call": count(lambda: stack(x)),
        "assignment to an attribute": count(lambda: setattr(model, "kernel", jnp.ones((4, 4)))),
        "assignment of a new attribute": count(lambda: setattr(model, "added", nnx.Param(jnp.ones(2)))),
    }


def storage_calls(folder: Path, features: int) -> dict[str, list[int]]:
    """Counts saving and loading a checkpoint, opening a published model and generating with it."""
    model = nnx.Linear(4, 4, ctx=nnx.context(0))
    config = nnx.models.DecoderConfig(
        model_type="llama",
        vocab_size=16,
        features=features,
        hidden_features=16,
        num_layers=1,
        num_heads=2,
        max_length=16,
    )
    nnx.models.save_pretrained(nnx.models.Decoder(config, ctx=nnx.context(0)), folder / "pretrained")
    opened = []
    prompts = jnp.ones((1, 4), jnp.int32)
    return {
        "nnx.save": count(lambda: nnx.save(folder / "checkpoint", model)),
        "nnx.load": count(lambda: nnx.load(folder / "checkpoint", model)),
        "from_pretrained": count(lambda: opened.append(nnx.models.from_pretrained(folder / "pretrained"))),
        "nnx.generate, first call": count(lambda: nnx.generate(opened[0], prompts, max_new_tokens=2, temperature=0)),
        "nnx.generate, second call": count(lambda: nnx.generate(opened[0], prompts, max_new_tokens=2, temperature=0)),
    }


def all_calls(features: int) -> dict[str, list[int]]:
    """Makes every call once and returns its counts."""
    with tempfile.TemporaryDirectory() as folder:
        return jitted_calls() | eager_calls() | storage_calls(Path(folder), features)


if __name__ == "__main__":
    all_calls(features=8)
    # Models of one structure share the compiled programs of `nnx.generate`, so this one has a different width.
    json.dump(all_calls(features=16), sys.stdout)
