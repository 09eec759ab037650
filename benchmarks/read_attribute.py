"""What does it cost to read a parameter outside of any transform? (Includes the call of the lambda.)"""

import equinox as eqx
import flax.nnx
import jax
import jax.numpy as jnp

import nnx
from benchmarks.harness import OURS, Row, Settings, interleave, ratio_row, time_row


class Ours(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((8, 8)))


class Plain:
    def __init__(self):
        self.kernel = jnp.ones((8, 8))


class Equinox(eqx.Module):
    kernel: jax.Array


class Flax(flax.nnx.Module):
    def __init__(self):
        self.kernel = flax.nnx.Param(jnp.ones((8, 8)))


def measure(settings: Settings) -> list[Row]:
    ours, plain, equinox, flax_module = Ours(), Plain(), Equinox(jnp.ones((8, 8))), Flax()
    timings = interleave(
        {
            OURS: lambda: ours.kernel,
            "equinox": lambda: equinox.kernel,
            "plain Python": lambda: plain.kernel,
            "flax": lambda: flax_module.kernel[...],
        },
        seconds=settings.seconds(4),
    )
    return [
        time_row("read m.kernel", timings, 70e-9),
        ratio_row("read m.kernel, against equinox", timings, "equinox", 0.1),
    ]
