"""What does it cost to build an empty Module?"""

import equinox as eqx
import flax.nnx

import nnx
from benchmarks.harness import OURS, Row, Settings, interleave, time_row


def measure(settings: Settings) -> list[Row]:
    contenders = {OURS: nnx.Module, "equinox": eqx.Module, "flax": flax.nnx.Module}
    return [time_row("build an empty Module()", interleave(contenders, seconds=settings.seconds(3)), 5e-6)]
