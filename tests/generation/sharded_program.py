"""What test_sharded looks at: run with eight virtual devices, prints one JSON object."""

import json
from unittest import mock

import jax
import numpy as np

import nnx
from nnx.generation import programs
from tests.generation.models import decoder, random_prompts

PROMPTS, LENGTHS = random_prompts(4, 9), np.array([9, 2, 5, 1])
SETTINGS = {
    "tensor parallel": ((("model", 8),), nnx.tensor_parallel_rules()),
    "fsdp and tensor parallel": ((("data", 2), ("model", 4)), nnx.fsdp_tensor_parallel_rules()),
}


def make(scanned):
    return decoder(changes={"num_heads": 8, "num_kv_heads": 8}, scan_layers=scanned)


def texts(model):
    """Greedy and drawn tokens, and a stream, which runs the loop once per token."""
    options = {"lengths": LENGTHS, "max_new_tokens": 6}
    streamed = []
    nnx.generate(model, PROMPTS, temperature=0, stream=streamed.append, **options)
    return {
        "greedy": nnx.generate(model, PROMPTS, temperature=0, prefill_chunk=4, **options).tolist(),
        "drawn": nnx.generate(model, PROMPTS, num_samples=2, ctx=nnx.context(sample=0), **options).tolist(),
        "streamed": np.stack(streamed, 1).tolist(),
    }


def parts(model):
    """The shapes of a kernel and of the keys of a layer, whole and on one device, after reading the prompts."""
    found = {}

    def recording_read(pure, *args, **kwargs):
        progress, unstacked = programs.read(pure, *args, **kwargs)
        arrays = {
            "kernel": (unstacked or pure).states["layers/1/attention/query/kernel"].value,
            "cache": progress.cache.layers[0].key,
        }
        found.update({name: [x.shape, x.addressable_shards[0].data.shape] for name, x in arrays.items()})
        return progress, unstacked

    with mock.patch("nnx.generation.generate.read", recording_read):
        nnx.generate(model, PROMPTS, max_new_tokens=2, temperature=0)
    return found


def main():
    found = {"one device": texts(make(scanned=False))}
    for name, (axes, rules) in SETTINGS.items():
        sizes = tuple(size for _, size in axes)
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(sizes), tuple(axis for axis, _ in axes))
        for scanned in (False, True):
            model = make(scanned)
            nnx.shard(model, mesh, rules)
            key = f"{name}, {'scanned' if scanned else 'in a list'}"
            found[key] = {**texts(model), **parts(model)}
    found["one device, scanned"] = texts(make(scanned=True))
    print(json.dumps(found))


if __name__ == "__main__":
    assert len(jax.devices()) == 8, jax.devices()
    main()
