"""`python -m nnx convert SOURCE TARGET`: from one format to another.

The format of a target is told by its name: a file `*.safetensors`, otherwise a checkpoint of NNX. A published directory
can also be written again as one, with another dtype or other shards.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import nnx
from nnx.commands.command import Command
from nnx.commands.tables import bytes_text
from nnx.core.hints.hints import refuse_foreign_file

EXISTS = "{path} exists already. Remove it, choose another name, or pass --overwrite."
NO_CONFIG = "{path} is no published model (it has no config.json), so it cannot be written as one."


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a checkpoint, a safetensors file, or a published directory")
    parser.add_argument("target", type=Path, help="FILE.safetensors, or the directory of a checkpoint")
    parser.add_argument("--published", action="store_true", help="write a published directory again, as one")
    parser.add_argument("--dtype", help='convert floating-point arrays, e.g. "bfloat16"')
    parser.add_argument("--params", action="store_true", help="of a checkpoint, take the Params only")
    parser.add_argument("--max-shard-size", help='the largest safetensors file, e.g. "5GB"')
    parser.add_argument("--overwrite", action="store_true", help="replace the target")


def _run(arguments: argparse.Namespace) -> int:
    source, target = arguments.source, arguments.target
    if source.suffix != ".safetensors":
        refuse_foreign_file(source)
    if target.exists() and not arguments.overwrite:
        raise FileExistsError(EXISTS.format(path=target))
    dtype = None if arguments.dtype is None else jnp.dtype(arguments.dtype)
    if (source / "config.json").is_file():
        model = nnx.models.from_pretrained(source, dtype=dtype)
        if arguments.published:
            _write_published(target, model, arguments.max_shard_size)
        else:
            _write(target, model.get_state(), arguments.max_shard_size)
        return 0
    if arguments.published:
        raise ValueError(NO_CONFIG.format(path=source))
    _write(target, _read(source, dtype, arguments.params), arguments.max_shard_size)
    return 0


def _read(source: Path, dtype: Any, only_params: bool) -> nnx.State:
    """Returns what a checkpoint or safetensors file holds; what was a Param is one again."""
    entries = nnx.checkpoint_entries(source)
    is_file = source.suffix == ".safetensors" or source.name.endswith(".safetensors.index.json")
    nested = nnx.load_safetensors(source) if is_file else nnx.load(source)
    values = {}
    for path, entry in entries.items():
        is_param = entry.type == "Param" or (not entry.type and is_file)
        if entry.kind != "text" and (is_param or not only_params):
            value = _converted(_at(nested, path), dtype)
            values[path] = nnx.Param(value) if is_param else value
    return nnx.State(values)


def _at(nested: Any, path: str) -> Any:
    if path in nested:
        return nested[path]
    for segment in path.split("/"):
        nested = nested[segment]
    return nested


def _converted(value: Any, dtype: Any) -> Any:
    is_float = dtype is not None and hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)
    return np.asarray(value).astype(dtype) if is_float else value


def _write(target: Path, state: nnx.State, max_shard_size: str | None) -> None:
    if target.suffix == ".safetensors":
        nnx.save_safetensors(target, state, max_shard_size=max_shard_size)
    else:
        nnx.save(target, state)
    _report(target, state)


def _write_published(target: Path, model: Any, max_shard_size: str | None) -> None:
    nnx.models.save_pretrained(model, target, max_shard_size=max_shard_size or "5GB")
    _report(target, model.get_state())


def _report(target: Path, state: nnx.State) -> None:
    arrays = jax.tree.leaves(state)
    print(f"{target}: {len(arrays):,} arrays, {bytes_text(sum(np.asarray(a).nbytes for a in arrays))}")


COMMAND = Command(
    help="convert between checkpoints of NNX, safetensors files and published directories",
    examples={
        "convert checkpoints/1000 model.safetensors --params": "the parameters, to share",
        "convert model.safetensors checkpoint --dtype bfloat16": "a checkpoint for nnx.load",
        "convert Qwen3-4B small --published --dtype bfloat16": "a published model in another dtype",
    },
    add_arguments=_add_arguments,
    run=_run,
)
