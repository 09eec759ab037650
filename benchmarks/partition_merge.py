"""What does it cost to split a model of 300 Variables and to merge it again?"""

import equinox as eqx
import flax.nnx

from benchmarks.blocks import Blocks, FlaxBlocks, equinox_blocks
from benchmarks.harness import OURS, Row, Settings, interleave, ratio_row, time_row


def measure(settings: Settings) -> list[Row]:
    ours, flax_model, equinox = Blocks(100), FlaxBlocks(100), equinox_blocks(100)
    partition = interleave(
        {
            OURS: ours.partition,
            "equinox": lambda: eqx.partition(equinox, eqx.is_array),
            "flax": lambda: flax.nnx.split(flax_model),
        },
        seconds=settings.seconds(5),
    )
    state, moduledef = ours.partition()
    assert len(state) == 300
    arrays, rest = eqx.partition(equinox, eqx.is_array)
    graphdef, flax_state = flax.nnx.split(flax_model)
    merge = interleave(
        {
            OURS: lambda: moduledef.merge(state),
            "equinox": lambda: eqx.combine(arrays, rest),
            "flax": lambda: flax.nnx.merge(graphdef, flax_state),
        },
        seconds=settings.seconds(5),
    )
    against_partition = {OURS: merge[OURS], "eqx.partition": partition["equinox"]}
    return [
        time_row("partition(), 300 Variables", partition, 400e-6),
        ratio_row("partition(), 300 Variables, against eqx.partition", partition, "equinox", 0.2),
        time_row("merge(), 300 Variables", merge, 400e-6),
        ratio_row("merge(), 300 Variables, against eqx.partition", against_partition, "eqx.partition", 0.2),
    ]
