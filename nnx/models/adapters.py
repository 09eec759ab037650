"""`load_adapter` and `save_adapter`: low-rank adaptations in the directories of PEFT.

Such a directory has an `adapter_config.json` and `adapter_model.safetensors`. For each adapted tensor of the published
model, such as `model.layers.0.self_attn.q_proj.weight`, the file has two matrices, `…q_proj.lora_A.weight`
`[rank, inputs]` and `…q_proj.lora_B.weight` `[outputs, rank]`. A fused tensor holds several of our kernels, which then
share the first matrix and have some rows each of the second.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from nnx.core.context import context
from nnx.core.module.module import Module
from nnx.core.trace import is_tracer
from nnx.models.files.directory import read_json
from nnx.models.registry import architecture_of
from nnx.nn.initializers import zeros
from nnx.nn.linear import Linear, LinearGeneral
from nnx.nn.lora import LoRA, LoRALinear, LoRALinearGeneral, add_lora
from nnx.storage.errors import CheckpointError
from nnx.storage.files import atomic_file, local_path
from nnx.storage.processes import Exchange, is_first
from nnx.storage.safetensors.file import Pending, TensorFile
from nnx.storage.safetensors.safetensors import write_arrays
from nnx.storage.safetensors.shards import refuse_pickles

NO_ADAPTER = (
    "{path} contains no {name}, so it is not the directory of an adapter. `load_adapter` reads what PEFT writes with "
    "`save_pretrained`: adapter_config.json and adapter_model.safetensors."
)
NOT_LORA = "{where}: {key}={got!r} is not supported{only}."
NO_PLACE = (
    "The adapter in {path} does not fit this {model}:\n{lines}\nIt was made for another model, or adapts layers that "
    "nnx.add_lora does not know."
)
ADAPTED_ALREADY = (
    "load_adapter: this model has low-rank adaptations already, at {paths}. Call `nnx.merge_lora(model)` to make them "
    "part of the weights, or load the model again."
)
NOTHING_TO_SAVE = "save_adapter: this {model} has no low-rank adaptations. Add them with `nnx.add_lora(model, rank)`."
WITHOUT_NAME = (
    "save_adapter: the format has no place for the adaptations of {paths}: only those of kernels with a tensor of "
    "their own in a published {family} can be written. nnx.save saves any model."
)
ABSTRACT = "save_adapter: the adaptation of {path!r} has no values."

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])(?:\.default)?\.weight")
# For entries that change what an adapter computes, the values without effect; other entries say how it was trained.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "modules_to_save": ([],),
    "lora_bias": (False,),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "arrow_config": (),
}
# Ways to initialize that change the weights of the model itself; `convert` in PEFT makes an ordinary adapter of them.
_CHANGES_WEIGHTS = ("pissa", "olora", "loftq", "corda", "lora_ga")
_SHOWN = 20


class KernelPlace(NamedTuple):
    """Where an adaptation belongs: the kernel's layer, its index in a stack, and its rows of a fused tensor, if any."""

    path: str
    index: tuple[int, ...]
    rows: np.ndarray | None


@dataclasses.dataclass
class Adaptation:
    """The two matrices of one layer, or of each entry of a stack, as `LoRA` holds them, and the scale of each."""

    a: dict[tuple[int, ...], np.ndarray] = dataclasses.field(default_factory=dict)
    b: dict[tuple[int, ...], np.ndarray] = dataclasses.field(default_factory=dict)
    scale: dict[tuple[int, ...], float] = dataclasses.field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The rank of the layer: the largest in a stack, whose other entries are filled up with zeros."""
        return max(a.shape[1] for a in self.a.values())


def load_adapter(model: Module, directory: str | os.PathLike[str]) -> list[str]:
    """Adds the low-rank adaptations in a directory of PEFT to a model, in place.

    The layers become those of `nnx.add_lora`: `nnx.merge_lora` adds the adaptations to the weights, and
    `wrt=nnx.LoRAParam` trains them on. The model may be quantized or scanned.

    Args:
        model: a model of `nnx.models`, usually from `from_pretrained`.
        directory: a directory with `adapter_config.json` and `adapter_model.safetensors`.

    Returns:
        The paths of the changed layers.

    Raises:
        FileNotFoundError: the directory or one of its files does not exist.
        ValueError: the adapter is of a kind that is not supported, or the model has adaptations already.
        CheckpointError: the file is damaged, or its tensors do not fit the model; the message lists all of them.

    >>> import tempfile
    >>> config = nnx.models.DecoderConfig(
    ...     model_type="llama", vocab_size=64, features=8, hidden_features=16, num_layers=1, num_heads=2, max_length=32)
    >>> model = nnx.models.Decoder(config, ctx=nnx.context(0))
    >>> paths = nnx.add_lora(model, 2, where="**/attention/query", ctx=nnx.context(1))
    >>> directory = tempfile.mkdtemp()
    >>> nnx.models.save_adapter(model, directory)
    >>> fresh = nnx.models.Decoder(config, ctx=nnx.context(0))
    >>> nnx.models.load_adapter(fresh, directory)
    ['layers/0/attention/query']
    """
    path = local_path(directory).absolute()
    refuse_pickles(path)
    for name in (_CONFIG, _WEIGHTS):
        if not (path / name).is_file():
            raise FileNotFoundError(NO_ADAPTER.format(path=path, name=name))
    settings = read_json(path / _CONFIG)
    _check_settings(settings, str(path / _CONFIG))
    layers = dict(Module.named_modules(model))
    adapted = [name for name, layer in layers.items() if isinstance(layer, (LoRA, LoRALinear, LoRALinearGeneral))]
    if adapted:
        raise ValueError(ADAPTED_ALREADY.format(paths=_listed(adapted)))
    with TensorFile(path / _WEIGHTS) as file:
        found = _read(file, settings, model, layers, path)
    for rank in {adaptation.rank for adaptation in found.values()}:
        group = {name for name, adaptation in found.items() if adaptation.rank == rank}
        # Zeros, because what is drawn would be replaced at once.
        add_lora(model, rank, where=lambda at, _, group=group: at in group, a_initializer=zeros(), ctx=context(0))
    for name, adaptation in found.items():
        _fill(layers[name], adaptation)
    return sorted(found, key=list(layers).index)


def save_adapter(model: Module, directory: str | os.PathLike[str]) -> None:
    """Writes the low-rank adaptations of a model as a directory that PEFT and `load_adapter` load.

    Adaptations of kernels that are one tensor in the published model become one, of the sum of their ranks unless
    they share their first matrix. The model itself is not written.

    Args:
        model: a model of `nnx.models` with the layers of `nnx.add_lora`.
        directory: the directory, which is created if needed.

    Raises:
        TypeError: the model is not one of `nnx.models`.
        ValueError: the model has no adaptations, or some for which the format has no place.
        OSError: the files could not be written; for the weights, it is a `CheckpointError`.
    """
    adapted = {
        name: cast(Any, layer)
        for name, layer in Module.named_modules(model)
        if isinstance(layer, (LoRALinear, LoRALinearGeneral))
    }
    if not adapted:
        raise ValueError(NOTHING_TO_SAVE.format(model=type(model).__name__))
    for name, layer in adapted.items():
        if isinstance(layer.lora.lora_a, jax.ShapeDtypeStruct) or is_tracer(layer.lora.lora_a):
            raise ValueError(ABSTRACT.format(path=name))
    tensors: dict[str, Any] = {}
    scales: dict[str, tuple[int, float]] = {}
    stored_by_input, written = False, set()
    for module, (places, transposed) in _places(model).items():
        held = [(place, adapted[place.path].lora) for place in places if place.path in adapted]
        if held:
            a, b, scale = _joined(places, held)
            tensors |= {f"{_PREFIX}{module}.lora_A.weight": a, f"{_PREFIX}{module}.lora_B.weight": b}
            scales[module] = (a.shape[0], scale)
            written |= {place.path for place, _ in held}
            stored_by_input |= not transposed
    if missing := adapted.keys() - written:
        raise ValueError(WITHOUT_NAME.format(paths=_listed(missing), family=cast(Any, model).config.model_type))
    path = local_path(directory).absolute()
    pending = {name: Pending(np.dtype(array.dtype), array.shape) for name, array in tensors.items()}
    write_arrays(path / _WEIGHTS, pending, lambda name: tensors[name], max_shard_size=None, metadata={"format": "pt"})
    text = json.dumps(_settings(model, scales, stored_by_input), indent=2) + "\n"

    def write_config() -> None:
        if is_first():
            with atomic_file(path / _CONFIG) as opened:
                opened.write(text.encode())

    Exchange(f"nnx.models.save_adapter({str(directory)!r})").together(write_config)


# Which layer a name is about


def _places(model: Module) -> dict[str, tuple[list[KernelPlace], bool]]:
    """Returns the places of every linear layer's tensor, by its module in the published model.

    The second of each pair says whether the tensor is `[outputs, inputs]`.
    """
    layers: dict[str, Any] = dict(Module.named_modules(model))
    kernels = {f"{name}/kernel": name for name, layer in layers.items() if isinstance(layer, (Linear, LinearGeneral))}
    paths = [path for path, leaf in Module.get_state(model).items() if getattr(leaf, "value", leaf) is not None]
    found = {}
    for link in architecture_of(model).links(cast(Any, model).config, paths, ()):
        if all(parameter.path in kernels for parameter in link.parameters):
            names = [kernels[parameter.path] for parameter in link.parameters]
            rows = _rows(link, [_outputs(layers[name]) for name in names]) if len(names) > 1 else [None]
            places = [
                KernelPlace(name, parameter.index, of)
                for name, parameter, of in zip(names, link.parameters, rows, strict=True)
            ]
            found[link.name.removesuffix(".weight")] = places, link.layout.transposed
    return found


def _outputs(layer: Linear | LinearGeneral) -> tuple[int, ...]:
    return (layer.out_features,) if isinstance(layer, Linear) else layer.out_features


def _rows(link: Any, outputs: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Returns which outputs of a fused tensor are those of each parameter, found by fusing their numbers."""
    ends = np.cumsum([math.prod(shape) for shape in outputs])
    shapes = [(*(1,) * link.layout.inputs, *shape) for shape in outputs]
    numbers = [np.arange(end - math.prod(shape), end).reshape(shape) for end, shape in zip(ends, shapes, strict=True)]
    fused = link.layout.joined([link.layout.to_tensor(array) for array in numbers], shapes)
    order = np.argsort(np.asarray(fused).reshape(-1))
    return np.split(order, ends[:-1])


def _places_of(module: str, known: Mapping[str, Any]) -> list[KernelPlace] | None:
    """Returns the places of a module named in an adapter, whose names may start otherwise than those of the model."""
    if module in known:
        return known[module][0]
    ends = [name for name in known if module.endswith(f".{name}") or name.endswith(f".{module}")]
    return known[ends[0]][0] if len(ends) == 1 else None


# Reading


def _check_settings(settings: Mapping[str, Any], where: str) -> None:
    if settings.get("peft_type") != "LORA":
        only = "; only 'LORA' is"
        raise ValueError(NOT_LORA.format(where=where, key="peft_type", got=settings.get("peft_type"), only=only))
    for key, neutral in _NEUTRAL.items():
        got = settings.get(key)
        if got is not None and got not in neutral:
            only = ". Merge the adapter into the model with PEFT (`merge_and_unload`), and open the result"
            raise ValueError(NOT_LORA.format(where=where, key=key, got=got, only=only))
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGES_WEIGHTS):
        only = ", because it changes the weights of the model as well. Convert it to an ordinary adapter with PEFT"
        raise ValueError(NOT_LORA.format(where=where, key="init_lora_weights", got=start, only=only))


def _read(
    file: TensorFile, settings: Mapping[str, Any], model: Module, layers: Mapping[str, Any], path: Path
) -> dict[str, Adaptation]:
    """Returns the adaptation of each layer by path, after checking that all tensors have a place."""
    known, found, lines = _places(model), {}, []
    pairs: dict[str, dict[str, str]] = {}
    for name in file.tensors:
        match = _NAME.fullmatch(name)
        if match is None:
            # PEFT adds copies of the embedding or the output layer if the latter is adapted.
            if not _is_copy(file, name, model):
                lines.append(f"unexpected: {name}")
        else:
            pairs.setdefault(match["module"].removeprefix(_PREFIX), {})[match["matrix"]] = name
    for module, names in pairs.items():
        places = _places_of(module, known)
        if places is None or names.keys() != {"A", "B"}:
            lines.append(f"no linear layer: {module}" if places is None else f"one of two matrices: {module}")
            continue
        a, b = (file.read(names[matrix]) for matrix in "AB")
        shapes = [_matrix_shape(layers[place.path]) for place in places]
        wanted = (len(a), shapes[0][0]), (sum(outputs for _, outputs in shapes), len(a))
        if (a.shape, b.shape) != wanted:
            lines.append(f"wrong shapes: {module} has {a.shape} and {b.shape}, expected {wanted[0]} and {wanted[1]}")
            continue
        scale = _scale(settings, module, len(a))
        for place in places:
            held = found.setdefault(place.path, Adaptation())
            held.a[place.index] = a.T
            held.b[place.index] = (b if place.rows is None else b[place.rows]).T
            held.scale[place.index] = scale
    if lines:
        lines[_SHOWN:] = [f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        shown = "\n".join(f"  {line}" for line in lines)
        raise CheckpointError(NO_PLACE.format(path=path, model=type(model).__name__, lines=shown))
    return found


def _is_copy(file: TensorFile, name: str, model: Module) -> bool:
    """Whether a tensor is a copy of one of the model's, which it therefore does not change."""
    state = Module.get_state(model)
    values = {path: getattr(leaf, "value", leaf) for path, leaf in state.items()}
    plain = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
    for link in architecture_of(model).links(cast(Any, model).config, list(values), ()):
        if link.name == plain and len(link.parameters) == 1:
            path, index = link.parameters[0]
            ours = np.asarray(link.layout.to_tensor(values[path][index] if index else values[path]))
            theirs = file.read(name)
            return theirs.shape == ours.shape and np.array_equal(theirs.astype(ours.dtype), ours)
    return False


def _matrix_shape(layer: Linear | LinearGeneral) -> tuple[int, int]:
    if isinstance(layer, Linear):
        return layer.in_features, layer.out_features
    return math.prod(layer.in_features), math.prod(layer.out_features)


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """Returns the factor on the product of the two matrices of a module."""
    patterns = settings.get("alpha_pattern") or {}
    matching = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    alpha = next(matching, settings.get("lora_alpha", 8))
    return alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank


def _fill(layer: Any, adaptation: Adaptation) -> None:
    """Gives the new adaptation of a layer its values; entries of a stack that have none stay zero."""
    lora: LoRA = layer.lora
    lora.scale = next(iter(adaptation.scale.values()))
    a, b = np.zeros(lora.lora_a.shape, np.float32), np.zeros(lora.lora_b.shape, np.float32)
    for index, matrix in adaptation.a.items():
        rank = matrix.shape[1]
        a[(*index, slice(None), slice(rank))] = matrix
        # A stack has one scale, so the others go into the second matrix.
        b[(*index, slice(rank))] = adaptation.b[index].astype(np.float32) * (adaptation.scale[index] / lora.scale)
    dtype = next(iter(adaptation.a.values())).dtype
    lora.lora_a, lora.lora_b = (_like(layer.kernel, jnp.asarray(array, dtype)) for array in (a, b))
    lora.param_dtype = np.dtype(dtype)


def _like(kernel: jax.Array, array: jax.Array) -> jax.Array:
    """Returns an array on the devices of a kernel, whole on each of them."""
    sharding = getattr(kernel, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
        return jax.device_put(array, NamedSharding(sharding.mesh, PartitionSpec()))
    return array


# Writing


def _joined(places: list[KernelPlace], held: list[tuple[KernelPlace, LoRA]]) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the two matrices of a tensor and their scale: those of one layer, or of several that are fused."""
    matrices = {
        place.path: (np.asarray(lora.lora_a[place.index]), np.asarray(lora.lora_b[place.index])) for place, lora in held
    }
    if len(places) == 1:
        a, b = matrices[places[0].path]
        return np.ascontiguousarray(a.T), np.ascontiguousarray(b.T), held[0][1].scale
    first, scale = next(iter(matrices.values()))[0], held[0][1].scale
    shared = all(np.array_equal(a, first) for a, _ in matrices.values())
    rank = first.shape[1] if shared else sum(a.shape[1] for a, _ in matrices.values())
    outputs = sum(len(place.rows) for place in places if place.rows is not None)
    joined_b, start = np.zeros((outputs, rank), first.dtype), 0
    for place, lora in held:
        b = matrices[place.path][1].T.astype(np.float32) * (lora.scale / scale)
        stop = start + b.shape[1]
        joined_b[place.rows, start:stop] = b.astype(first.dtype)
        start = start if shared else stop
    joined_a = first if shared else np.concatenate([a for a, _ in matrices.values()], axis=1)
    return np.ascontiguousarray(joined_a.T), joined_b, scale


def _settings(model: Module, scales: Mapping[str, tuple[int, float]], stored_by_input: bool) -> dict[str, Any]:
    """Returns the entries of the `adapter_config.json`."""
    alphas = {module: rank * scale for module, (rank, scale) in scales.items()}
    ranks = {module: rank for module, (rank, _) in scales.items()}
    rank, alpha = (max(set(found), key=list(found).count) for found in (list(ranks.values()), list(alphas.values())))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if hasattr(model, "init_cache") else None,
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": _number(alpha),
        # Whole names: the end of one, such as q_proj, would also stand for layers without an adaptation.
        "target_modules": sorted(scales),
        "rank_pattern": {re.escape(module): each for module, each in ranks.items() if each != rank},
        "alpha_pattern": {re.escape(module): _number(each) for module, each in alphas.items() if each != alpha},
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": stored_by_input,
        "bias": "none",
        "modules_to_save": None,
        "lora_dropout": 0.0,
        "inference_mode": True,
    }


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _listed(names: Any) -> str:
    names = sorted(names)
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
