"""What loading does on eight virtual devices, printed as JSON; `test_sharded_loading.py` starts it and reads that."""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

import nnx
from nnx.models.architecture import abstract_model, values_by_path
from nnx.models.families.families import config_from_dict
from nnx.models.pretrained import pending_tensor
from nnx.models.registry import DECODERS
from nnx.storage.safetensors.header import NAMES
from tests.models.published import (
    DIFFERENT,
    encoder_outputs,
    golden_arrays,
    golden_directory,
    relative_error,
    sending_to_cpus,
    tokens_for,
)

RULES = {
    "tensor": nnx.tensor_parallel_rules("model"),
    "fsdp": nnx.fsdp_rules("data"),
    "both": nnx.fsdp_tensor_parallel_rules("data", "model"),
}
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
SHARD = 5 * 10**9


WITH_LOGITS = ["deepseek_v3", "gpt_oss", "llama", "qwen3_next"]
"""The models whose logits are compared: a model with the same values has the same ones, and compiling takes long."""


def settings(name: str) -> list[str]:
    """One of the three ways to split a model, and for a few models two; the next model has others."""
    first = (DIFFERENT.index(name) + 1) % len(RULES)
    ways = [*RULES, *RULES][first : first + 2]
    return ways if name in ("gpt2", "llama", "phi3", "qwen3") else ways[:1]


def small_models() -> dict:
    """For each golden and its settings: whether a sharded model has the values of one device, and what is split.

    Half of the models are loaded as on accelerators, in all combinations with lists and scans. For some goldens also
    how far the logits are, each split and built in another way.
    """
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    found = {}
    for index, name in enumerate(DIFFERENT):
        whole = nnx.models.from_pretrained(golden_directory(name))
        for number, setting in enumerate(settings(name)):
            scanned = (number + index) % 2 == 0
            with sending_to_cpus() if (number + index // 2) % 2 == 0 else contextlib.nullcontext():
                rules = RULES[setting]
                model = nnx.models.from_pretrained(golden_directory(name), mesh=mesh, rules=rules, scan_layers=scanned)
            parts = {
                path: [list(leaf.value.shape), list(leaf.value.addressable_shards[0].data.shape)]
                for path, leaf in model.get_state().items()
            }
            listed = model.unscanned().get_state()
            same = all(np.array_equal(listed[path].value, leaf.value) for path, leaf in whole.get_state().items())
            found[f"{name} {setting}"] = {"parts": parts, "same": same, "scanned": scanned}
        if name in WITH_LOGITS:
            number = WITH_LOGITS.index(name)
            setting, scanned = list(RULES)[number % len(RULES)], number < len(RULES)
            model = nnx.models.from_pretrained(
                golden_directory(name), mesh=mesh, rules=RULES[setting], scan_layers=scanned
            )
            tokens = tokens_for(whole.config, 2, 9)
            forward = nnx.jit(lambda model, tokens: model(tokens))
            out, expected = (np.asarray(forward(each, tokens)) for each in (model, whole))
            found[f"{name} logits"] = float(np.abs(out - expected).max() / np.abs(expected).max())
    return found


def encoders() -> dict:
    """For some goldens of encoders: how far the outputs of a sharded model are from those of `transformers`."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    found = {}
    for name in ("bert_masked_lm", "vit_classifier", "clip", "resnet_classifier"):
        inputs, expected = golden_arrays(name)
        model = nnx.models.from_pretrained(golden_directory(name), mesh=mesh, rules=RULES["both"])
        out = encoder_outputs(model, inputs)
        parts = {
            path: [list(leaf.value.shape), list(leaf.value.addressable_shards[0].data.shape)]
            for path, leaf in model.get_state().items()
        }
        errors = [relative_error(out[key], expected[key]) for key in expected]
        found[name] = {"error": max(errors), "parts": parts}
    return found


def write_sparse(directory: Path, fields: dict) -> int:
    """Writes a checkpoint of zeros that takes no room on the disk; returns the number of its bytes."""
    (directory / "config.json").write_text(json.dumps(fields))
    config = config_from_dict(fields)
    values = values_by_path(abstract_model(DECODERS, config, np.dtype("bfloat16")))
    shards: list[dict] = [{}]
    size = total = 0
    for link in DECODERS.links(config, values):
        tensor = pending_tensor(link, values)
        if size + tensor.nbytes > SHARD:
            shards.append({})
            size = 0
        span = [size, size + tensor.nbytes]
        shards[-1][link.name] = {"dtype": NAMES[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": span}
        size += tensor.nbytes
        total += tensor.nbytes
    weight_map = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        header = json.dumps(shard).encode()
        with open(directory / name, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + max(entry["data_offsets"][1] for entry in shard.values()))
        weight_map |= dict.fromkeys(shard, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def peak() -> int:
    """Returns the largest resident memory of this process so far, in bytes.

    `resource.getrusage` would also count the process that started this one.
    """
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def large_model(fields: dict) -> dict:
    """What an abstract load of a large model returns."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with tempfile.TemporaryDirectory() as directory:
        total = write_sparse(Path(directory), fields)
        load = nnx.models.from_pretrained
        model = load(directory, mesh=mesh, rules=RULES["both"], scan_layers=True, abstract=True)
        traced = nnx.eval_shape(lambda: load(directory, scan_layers=True))
    leaves = {path: leaf.value for path, leaf in model.get_state().items()}
    same = {path: leaf.value.shape for path, leaf in traced.get_state().items()}
    return {
        "bytes": total,
        "parameters": sum(int(np.prod(leaf.shape)) for leaf in leaves.values()),
        "specs": {path: [list(leaf.shape), list(map(str, leaf.sharding.spec))] for path, leaf in leaves.items()},
        "traced alike": same == {path: leaf.shape for path, leaf in leaves.items()},
        "dtypes": sorted({str(leaf.dtype) for leaf in leaves.values()}),
    }


if __name__ == "__main__":
    if sys.argv[1] == "small":
        result = {**small_models(), **encoders()}
    else:
        result = {"8B": large_model(LLAMA_8B), "70B": large_model(LLAMA_70B)}
        result["peak bytes"] = peak()
    print(json.dumps(result))
