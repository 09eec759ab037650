"""What do the less common forms of a jitted call cost, compared with the same step written by hand?

The question `train_step` covers the most common call, a Module and then arrays. Here the call has static arguments, its
changes are discarded, its Modules and arrays are inside dicts and lists, weights are tied, or the model records values
with `sow`. Everything runs over 30 Variables and computes next to nothing, so that the library's overhead remains.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import flax.nnx
import jax
import jax.numpy as jnp

import nnx
from benchmarks.blocks import WIDTH, Block, Blocks, EquinoxBlock, FlaxBlocks, Raw, equinox_blocks, raw_blocks
from benchmarks.harness import OURS, Contender, Row, Settings, interleave, ratio_row

BLOCKS = 10
LIMIT = 1.25
POPPED = 5.0  # the structure changes twice per step, and nothing is prepared for that
RATE = 1e-3


def measure(settings: Settings) -> Iterator[Row]:
    questions: dict[str, Callable[[], dict[str, Contender]]] = {
        "a static argument": _static,
        "a static keyword argument": _static_keyword,
        "stateful=False": _stateless,
        "Modules in a dict": _nested,
        "a batch that is a dict": _batch,
        "tied weights (Ref)": _tied,
        "sown values that stay": _sown_before,
        "values sown and popped inside": _sown_inside,
        "values sown inside and popped by the caller": _sown_and_popped,
    }
    for name, contenders in questions.items():
        timings = interleave(contenders(), seconds=settings.seconds(10))
        goal = POPPED if contenders is _sown_and_popped else LIMIT
        yield ratio_row(f"step over {3 * BLOCKS} Variables, {name}", timings, "raw", goal)


# The step, by hand and lifted. By hand, what changes is an argument of its own, and only that is returned.


def _run_blocks(blocks: Any, x: jax.Array, activate: Callable[[jax.Array], jax.Array] = jnp.asarray) -> jax.Array:
    for block in blocks:
        x = activate(x @ block.kernel + block.bias)
        block.kernel -= RATE * block.kernel
        block.counter += 1
    return x


def _run_raw(changing: Raw, constant: Raw, x: jax.Array, activate: Any = jnp.asarray) -> tuple[Raw, jax.Array]:
    new = {}
    for name, block in changing.items():
        x = activate(x @ block["kernel"] + constant[name]["bias"])
        new[name] = {"kernel": block["kernel"] - RATE * block["kernel"], "counter": block["counter"] + 1}
    return new, x


def _parts(blocks: int = BLOCKS) -> tuple[Raw, Raw]:
    raw = raw_blocks(blocks)["blocks"]
    changing = {name: {k: block[k] for k in ("kernel", "counter")} for name, block in raw.items()}
    return changing, {name: {"bias": block["bias"]} for name, block in raw.items()}


def _repeat_raw(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Contender:
    """Returns a contender that threads what changes from call to call."""
    changing, constant = _parts()

    def run() -> Any:
        nonlocal changing
        changing, out = step(changing, constant, *args, **kwargs)
        return out

    return run


# The forms of the call.

ACTIVATIONS = {"linear": jnp.asarray, "tanh": jnp.tanh}


def _static() -> dict[str, Contender]:
    x, ours, peer = jnp.ones((WIDTH,)), Blocks(BLOCKS), FlaxBlocks(BLOCKS)

    @nnx.jit(static_argnums=2)
    def step(model: Blocks, x: jax.Array, activation: str) -> jax.Array:
        return _run_blocks(model.blocks, x, ACTIVATIONS[activation])

    @functools.partial(jax.jit, static_argnums=3)
    def raw_step(changing: Raw, constant: Raw, x: jax.Array, activation: str) -> Any:
        return _run_raw(changing, constant, x, ACTIVATIONS[activation])

    @functools.partial(flax.nnx.jit, static_argnums=2)
    def flax_step(model: FlaxBlocks, x: jax.Array, activation: str) -> jax.Array:
        return _run_flax(model, x, ACTIVATIONS[activation])

    return {
        OURS: lambda: step(ours, x, "linear"),
        "raw": _repeat_raw(raw_step, x, "linear"),
        "flax": lambda: flax_step(peer, x, "linear"),
    }


def _run_flax(model: FlaxBlocks, x: jax.Array, activate: Callable[[jax.Array], jax.Array]) -> jax.Array:
    for block in model.blocks:
        x = activate(x @ block.kernel[...] + block.bias[...])
        block.kernel[...] -= RATE * block.kernel[...]
        block.counter[...] += 1
    return x


def _static_keyword() -> dict[str, Contender]:
    x, ours = jnp.ones((WIDTH,)), Blocks(BLOCKS)

    @nnx.jit(static_argnames="activation")
    def step(model: Blocks, x: jax.Array, *, activation: str) -> jax.Array:
        return _run_blocks(model.blocks, x, ACTIVATIONS[activation])

    @functools.partial(jax.jit, static_argnames="activation")
    def raw_step(changing: Raw, constant: Raw, x: jax.Array, *, activation: str) -> Any:
        return _run_raw(changing, constant, x, ACTIVATIONS[activation])

    return {
        OURS: lambda: step(ours, x, activation="linear"),
        "raw": _repeat_raw(raw_step, x, activation="linear"),
    }


def _stateless() -> dict[str, Contender]:
    """An evaluation: what the step changes is not kept, so the hand-written one does not even return it."""
    x, ours, params, peer = jnp.ones((WIDTH,)), Blocks(BLOCKS), _parts(), equinox_blocks(BLOCKS)

    @nnx.jit(stateful=False)
    def step(model: Blocks, x: jax.Array) -> jax.Array:
        return _run_blocks(model.blocks, x)

    @jax.jit
    def raw_step(changing: Raw, constant: Raw, x: jax.Array) -> jax.Array:
        return _run_raw(changing, constant, x)[1]

    @eqx.filter_jit
    def equinox_step(blocks: list[EquinoxBlock], x: jax.Array) -> jax.Array:
        for block in blocks:
            x = x @ block.kernel + block.bias
        return x

    return {
        OURS: lambda: step(ours, x),
        "raw": lambda: raw_step(*params, x),
        "equinox": lambda: equinox_step(peer.blocks, x),
    }


def _nested() -> dict[str, Contender]:
    x, models = jnp.ones((WIDTH,)), {"encoder": Blocks(BLOCKS // 2), "heads": [Blocks(1) for _ in range(BLOCKS // 2)]}

    @nnx.jit
    def step(models: dict[str, Any], x: jax.Array) -> jax.Array:
        blocks = [block for model in (models["encoder"], *models["heads"]) for block in model.blocks]
        return _run_blocks(blocks, x)

    return {OURS: lambda: step(models, x), "raw": _repeat_raw(jax.jit(_run_raw), x)}


def _batch() -> dict[str, Contender]:
    batch, ours = {"x": jnp.ones((WIDTH,)), "y": jnp.ones((WIDTH,))}, Blocks(BLOCKS)

    @nnx.jit
    def step(model: Blocks, batch: dict[str, jax.Array]) -> jax.Array:
        return _run_blocks(model.blocks, batch["x"]) - batch["y"]

    @jax.jit
    def raw_step(changing: Raw, constant: Raw, batch: dict[str, jax.Array]) -> Any:
        new, out = _run_raw(changing, constant, batch["x"])
        return new, out - batch["y"]

    return {OURS: lambda: step(ours, batch), "raw": _repeat_raw(raw_step, batch)}


class _Tied(nnx.Module):
    """Blocks of which each two share their kernel: twice as many as without, so that the Variables are as many."""

    def __init__(self) -> None:
        self.blocks = [Block(i) for i in range(BLOCKS)]
        self.mirrored = [nnx.Dict() for _ in range(BLOCKS)]
        for block, mirror in zip(self.blocks, self.mirrored):
            kernel = nnx.Ref(nnx.Param(block.kernel))
            del block.kernel
            block.kernel = mirror.kernel = kernel


def _tied() -> dict[str, Contender]:
    x, ours = jnp.ones((WIDTH,)), _Tied()

    @nnx.jit
    def step(model: _Tied, x: jax.Array) -> jax.Array:
        x = _run_blocks(model.blocks, x)
        for block in model.mirrored:
            x = x @ block.kernel.T
        return x

    @jax.jit
    def raw_step(changing: Raw, constant: Raw, x: jax.Array) -> Any:
        new, x = _run_raw(changing, constant, x)
        for block in new.values():
            x = x @ block["kernel"].T
        return new, x

    return {OURS: lambda: step(ours, x), "raw": _repeat_raw(raw_step, x)}


def _sown_before() -> dict[str, Contender]:
    """The model holds values that an earlier, eager call has sown."""
    x, ours = jnp.ones((WIDTH,)), Blocks(BLOCKS)
    for block in ours.blocks:
        block.sow(nnx.Intermediate, "norm", jnp.linalg.norm(block.kernel))
    sown = [leaf.value for leaf in ours.filter(nnx.Intermediate).values()]

    @nnx.jit
    def step(model: Blocks, x: jax.Array) -> jax.Array:
        return _run_blocks(model.blocks, x)

    @jax.jit
    def raw_step(changing: Raw, constant: Raw, x: jax.Array, sown: Any) -> Any:
        return _run_raw(changing, constant, x)

    with warnings.catch_warnings(action="ignore"):  # the first call says that they have not been popped
        step(ours, x)
    return {OURS: lambda: step(ours, x), "raw": _repeat_raw(raw_step, x, sown)}


def _sown_inside() -> dict[str, Contender]:
    x, ours = jnp.ones((WIDTH,)), Blocks(BLOCKS)

    @nnx.jit
    def step(model: Blocks, x: jax.Array) -> Any:
        for block in model.blocks:
            x = x @ block.kernel + block.bias
            block.sow(nnx.Intermediate, "out", x)
            block.kernel -= RATE * block.kernel
            block.counter += 1
        return x, model.pop_state(nnx.Intermediate)

    return {OURS: lambda: step(ours, x), "raw": _repeat_raw(jax.jit(_run_raw_sowing), x)}


def _run_raw_sowing(changing: Raw, constant: Raw, x: jax.Array) -> Any:
    new, sown = {}, {}
    for name, block in changing.items():
        x = x @ block["kernel"] + constant[name]["bias"]
        sown[name] = (x,)
        new[name] = {"kernel": block["kernel"] - RATE * block["kernel"], "counter": block["counter"] + 1}
    return new, (x, sown)


def _sown_and_popped() -> dict[str, Contender]:
    """Each call adds variables to the model and the caller removes them: two structural changes."""
    x, ours = jnp.ones((WIDTH,)), Blocks(BLOCKS)

    @nnx.jit
    def step(model: Blocks, x: jax.Array) -> jax.Array:
        for block in model.blocks:
            x = x @ block.kernel + block.bias
            block.sow(nnx.Intermediate, "out", x)
            block.kernel -= RATE * block.kernel
            block.counter += 1
        return x

    def run() -> jax.Array:
        out = step(ours, x)
        ours.pop_state(nnx.Intermediate)
        return out

    raw_step = _repeat_raw(jax.jit(_run_raw_sowing), x)
    return {OURS: run, "raw": lambda: raw_step()[0]}
