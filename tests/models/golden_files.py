"""Goldens: tiny published models as a few lines of text, whose weights anybody can compute.

A *golden* is a file `golden/NAME.json`: the `config.json` of a published directory, the shapes of its tensors, inputs
of the model, and what `transformers` computes with them. Weights are not stored. Each is a function of the tensor's
name, of its shape and of a seed, in integer arithmetic, so every platform and every version of NumPy has the same ones.
Of an output, the golden has *sums*: its last axis, summed with random weights that are fixed like those of the model.

`tools/make_golden.py` writes these files, with `transformers`; the tests read them, without it.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "golden"
DIGITS = 7  # of the sums in a file; float32 has fewer


def noise(name: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Returns numbers in [-1, 1), of 24 bits each, that depend on nothing but the arguments."""
    start = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")
    # The finalizer of SplitMix64, on a counter. Arrays of uint64 wrap around silently.
    x = np.arange(math.prod(shape), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return ((x >> np.uint64(40)).astype(np.float64) / 2**23 - 1).reshape(shape)


def weight(name: str, shape: tuple[int, ...], *, seed: int, gain: float) -> np.ndarray:
    """Returns the tensor of a model, such that every part of the model matters and no norm is nearly constant.

    Args:
        name, shape: the tensor's name and shape in the checkpoint.
        seed: the seed of the model.
        gain: the size of matrices, other than embeddings, relative to one that keeps the size of its input.
    """
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    drawn = noise(name, *shape, seed=seed)
    if len(shape) < 2:  # scales and variances are around one, biases around zero
        return np.asarray(drawn / 2 + name.endswith(("weight", "running_var")), np.float32)
    inputs = min(shape[-2:]) if "experts" in name else math.prod(shape[1:])
    if re.search(r"embed|shared\.weight|wte|wpe", name):
        gain = 1.5
    elif name.endswith("Attention.q.weight"):  # T5 does not scale the logits of attention
        gain /= 4
    return (drawn * (gain * math.sqrt(3 / inputs))).astype(np.float32)


def sums(output: Any) -> np.ndarray:
    """Returns the last axis of an array, summed with fixed random weights; as large as the array's own entries."""
    array = np.asarray(output, np.float64)
    return array @ (noise("sums", array.shape[-1]) * math.sqrt(3 / array.shape[-1]))


def random_input(name: str, *shape: int) -> np.ndarray:
    """Returns the floats that a golden mentions by their shape, such as images."""
    return (noise(name, *shape) * math.sqrt(3)).astype(np.float32)


def read(name: str) -> dict[str, Any]:
    """Returns a golden: its entries as in the file, but with `inputs`, `outputs` and `greedy` as arrays."""
    golden = json.loads((FOLDER / f"{name}.json").read_text())
    golden["tensors"] = unfolded(golden["tensors"])
    for key, given in golden["inputs"].items():
        is_shape = isinstance(given, dict)
        golden["inputs"][key] = random_input(key, *given["shape"]) if is_shape else _whole_numbers(given)
    golden["outputs"] = {key: np.array(values) for key, values in golden["outputs"].items()}
    if "greedy" in golden:
        golden["greedy"] = _whole_numbers(golden["greedy"])
    return golden


def weights(golden: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns all tensors of a golden's model."""
    options = {"seed": golden["seed"], "gain": golden["gain"]}
    return {name: weight(name, shape, **options) for name, shape in golden["tensors"].items()}


def write(name: str, golden: Mapping[str, Any]) -> Path:
    """Writes a golden, one entry per line; the inverse of `read`."""
    golden = {**golden, "tensors": folded(golden["tensors"])}
    golden["outputs"] = {key: _rounded(values.tolist()) for key, values in golden["outputs"].items()}
    lines = []
    for key, value in golden.items():
        if key in ("config", "tensors", "inputs", "outputs"):
            inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    file = FOLDER / f"{name}.json"
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return file


def folded(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """Returns shapes by name, with one entry for layers and experts that are alike: `layers.{0-3}.mlp.up.weight`."""
    groups: dict[tuple[str, tuple[int, ...]], list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        numbers = tuple(int(number) for number in re.findall(r"(?<=\.)\d+(?=\.)", name))
        groups.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "{}", name), tuple(shape)), []).append(numbers)
    found = {}
    for (pattern, shape), numbers in groups.items():
        ends = [(min(axis), max(axis)) for axis in zip(*numbers, strict=True)]
        if set(itertools.product(*(range(first, last + 1) for first, last in ends))) == set(numbers):
            ranges = (str(first) if first == last else f"{{{first}-{last}}}" for first, last in ends)
            found[pattern.format(*ranges)] = list(shape)
        else:
            found |= {pattern.format(*each): list(shape) for each in numbers}
    return found


def unfolded(shapes: Mapping[str, list[int]]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor; the inverse of `folded`."""
    found = {}
    for pattern, shape in shapes.items():
        ranges = [range(int(first), int(last) + 1) for first, last in re.findall(r"\{(\d+)-(\d+)\}", pattern)]
        blank = re.sub(r"\{\d+-\d+\}", "{}", pattern)
        found |= {blank.format(*numbers): tuple(shape) for numbers in itertools.product(*ranges)}
    return found


def _whole_numbers(values: Any) -> np.ndarray:
    array = np.array(values)
    return array if array.dtype == bool else array.astype(np.int32)


def _rounded(values: Any) -> Any:
    return [_rounded(each) for each in values] if isinstance(values, list) else float(f"{values:.{DIGITS}g}")
