"""Chips: what is known about the processors that a plan can be made for.

Rates of multiplication are peaks of data sheets, in operations per second. `attainable` is the part of them that long
matrix products and long copies reach, and `attention` the part that fused attention does; they are what makes an
estimate of time realistic. For GPUs they were measured on an H200. Links are the network between the chips of a pod of
TPUs or of a node of GPUs, in bytes per second that one chip can receive; for TPUs along one dimension of the torus, in
both directions together.
"""

from typing import NamedTuple

GIB = 2**30


class Chip(NamedTuple):
    """One kind of processor.

    Attributes:
        name: the first part of the name of a machine, as in "v5e-16".
        platform: "tpu", "cuda" or "cpu".
        kind: the `device_kind` that JAX shows.
        rates: the operations per second of products, by the kind of number: "bf16", "f32", "tf32", "8-bit".
        memory: the bytes of memory that programs can use.
        bandwidth: the bytes per second of that memory.
        links: the bytes per second that a chip receives from its neighbors.
        network: the bytes per second that a chip receives from other nodes; for TPUs the same as `links`.
        host: the bytes per second between the chip and the memory of its host.
        attainable: the parts of the rates of products and of the bandwidth that long programs reach.
        attention: the parts of the rates of products that cuDNN's attention reaches, forward and backward together, for
            heads of up to 64 features and for larger ones. Exponentials take as long for either.
        clock: the cycles per second in which the compiler for TPUs estimates; 0 for others.
        node: the chips that links join: those of a node of GPUs, or of the largest slice of TPUs.
        note: what to know about these figures.
    """

    name: str
    platform: str
    kind: str
    rates: dict[str, float]
    memory: int
    bandwidth: float
    links: float
    network: float
    host: float
    attainable: tuple[float, float]
    attention: tuple[float, float] = (0.28, 0.5)
    clock: float = 0.0
    node: int = 8
    note: str = ""

    def rate(self, dtype: str) -> float:
        """Returns the peak rate of products of numbers of a dtype, as HLO names it: "bf16", "f32", "f8e4m3fn"."""
        if dtype in ("bf16", "f16", "f32", "f64", "tf32"):
            known = {"f16": "bf16", "f64": "f32"}.get(dtype, dtype)
            return self.rates.get(known) or self.rates["bf16"]
        return self.rates["8-bit"]


def _tpu(
    name: str, kind: str, rates: tuple[float, float], memory: float, bandwidth: float, links: float, clock: float
) -> Chip:
    # On a TPU, products of float32 take the time of bfloat16 unless a higher precision is asked for.
    by_dtype = {"bf16": rates[0], "8-bit": rates[1]}
    node = 256 if name in ("v5e", "v6e") else 4096
    bytes_of_memory = int(memory * GIB)
    return Chip(
        name, "tpu", kind, by_dtype, bytes_of_memory, bandwidth, links, links, 15e9, (0.87, 0.9), clock=clock, node=node
    )


def _gpu(name: str, kind: str, memory: int, bandwidth: float, links: float, network: float, note: str = "") -> Chip:
    hopper = {"bf16": 989.4e12, "tf32": 494.7e12, "f32": 66.9e12, "8-bit": 1978.9e12}
    ampere = {"bf16": 312e12, "tf32": 156e12, "f32": 19.5e12, "8-bit": 624e12}
    rates = ampere if name == "a100" else hopper
    host = 25e9 if name == "a100" else 55e9
    return Chip(name, "cuda", kind, rates, memory, bandwidth, links, network, host, (0.68, 0.87), node=8, note=note)


# The memory of a TPU is what its compiler accepts, the rest is reserved. That of a GPU is what the device says that it
# has; see `Machine.memory` for the part that JAX takes of it.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _tpu("v4", "TPU v4", (275e12, 275e12), 30.75, 1.228e12, 90e9, 1.05e9),
        _tpu("v5e", "TPU v5 lite", (197e12, 394e12), 15.75, 0.819e12, 90e9, 1.5e9),
        _tpu("v5p", "TPU v5", (459e12, 918e12), 95.74, 2.765e12, 180e9, 1.75e9),
        _tpu("v6e", "TPU v6 lite", (918e12, 1836e12), 31.25, 1.64e12, 180e9, 1.75e9),
        _gpu("a100", "NVIDIA A100-SXM4-80GB", 85_100_000_000, 2.039e12, 300e9, 25e9, "written from its data sheet"),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 84_929_347_584, 3.352e12, 450e9, 50e9),
        _gpu("h200", "NVIDIA H200", 150_109_880_320, 4.814e12, 450e9, 50e9),
        Chip(
            "cpu", "cpu", "cpu", {}, 0, 0.0, 0.0, 0.0, 0.0, (1, 1), node=1, note="virtual devices: no estimate of time"
        ),
    )
}
