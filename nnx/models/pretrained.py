"""`from_pretrained` and `save_pretrained`: published models as directories of `config.json` and safetensors.

Loading has three steps. The config is translated and an *abstract* model is built from it, which costs no memory. The
headers of the files are compared with the model, and everything that does not fit is reported in one error. Only then
is each tensor read and put in its place, so nothing is ever half-loaded.
"""

import contextlib
import json
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from nnx.core.hints.hints import explain_keywords
from nnx.core.module.info import info_of
from nnx.core.module.module import Module
from nnx.core.trace import is_tracer
from nnx.models.architecture import Architecture, abstract_model, values_by_path
from nnx.models.files.counts import check_counts
from nnx.models.files.directory import open_weights, read_entries
from nnx.models.files.layouts import Shape
from nnx.models.files.quantized_files import AnyFile, decoding, reopened
from nnx.models.files.reading import Reader, ReadRequest, Region
from nnx.models.files.sending import placed
from nnx.models.files.table import Link, Parameter
from nnx.models.files.text_part import text_entries
from nnx.models.files.tied_head import with_own_head
from nnx.models.registry import architecture_named, architecture_of, entry_names
from nnx.models.savable import SHOWN, check_savable
from nnx.nn.support.settings import as_dtype
from nnx.sharding.placement import shard
from nnx.sharding.rules import RulesLike
from nnx.storage.entry import Entry
from nnx.storage.errors import CheckpointError, LoadReport
from nnx.storage.files import atomic_file, local_path
from nnx.storage.matching import Texts, match, misfit
from nnx.storage.placing import Box
from nnx.storage.processes import Exchange, is_first
from nnx.storage.safetensors.file import Pending
from nnx.storage.safetensors.safetensors import write_arrays
from nnx.storage.safetensors.shards import refuse_pickles

DOES_NOT_FIT = "The tensors in {path} do not fit its config.json (model_type {family!r}):\n{differences}"
NOT_FLOATS = "Parameters are stored as floating-point numbers: expected such a dtype, got {got}."
NO_OPTION = "{where}: {option}={got!r} is not an option of {family} models, whose layers are in a list."
# What a directory holds besides config and weights: a tokenizer in any format, templates, and processors.
_COMPANIONS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja")
_COMPANIONS += ("generation_config.json", "preprocessor_config.json", "processor_config.json", "spiece.model")
_COMPANIONS += ("chat_template.json",)
# The directories that models were loaded from, by ModuleInfo.
_origins: weakref.WeakKeyDictionary[Any, Path] = weakref.WeakKeyDictionary()


@explain_keywords
def from_pretrained(
    directory: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    rules: RulesLike = None,
    scan_layers: bool = False,
    remat: bool | Callable[..., Any] = False,
    abstract: bool = False,
    ignore_entries: Collection[str] = (),
) -> Any:
    """Loads a published model from a directory with `config.json` and safetensors files.

    On a CPU, tensors are read and rearranged one after the other, so there is little more in memory than the model
    and its largest tensor. Accelerators rearrange what they are sent: several tensors are on their way at once, in
    pieces of at most 32 MB. Nothing is downloaded, and no pickle is read. Inside a transform the files are read when
    the compiled program runs; `nnx.eval_shape` therefore reads only their headers.

    Args:
        directory: the directory.
        dtype: the dtype of parameters and computation; by default, that of the first parameter in the file, such as the
            embedding. Weights in 8-bit floats (`"quant_method": "fp8"`) and 4-bit floats (`"mxfp4"`) with scales are
            converted as well.
        mesh: the mesh to place the parameters on; by default that of `jax.set_mesh` or of a `with mesh:` block.
        rules: the rules from logical axis names to mesh axes; by default, those of `nnx.logical_axis_rules`.
        scan_layers, remat: as in `Decoder`; other models do not have these options.
        ignore_entries: the names of entries of `config.json` to read as if they were not there.
        abstract: whether to return the model with `jax.ShapeDtypeStruct`s, which have the shardings, instead of arrays.

    Returns:
        The model, whose attribute `config` describes it: a `Decoder`, or the class that the guide lists for the
        family. (Type checkers see `Any`: annotate the variable with the class you expect.)

    Raises:
        FileNotFoundError: the directory, its config or its weights do not exist.
        ValueError: the config is malformed, of an unknown `model_type`, or not supported.
        CheckpointError: a file is damaged, or its tensors do not fit the config; the message lists all of them.

    >>> import tempfile
    >>> config = nnx.models.DecoderConfig(
    ...     model_type="llama", vocab_size=64, features=8, hidden_features=16, num_layers=1, num_heads=2, max_length=32)
    >>> model = nnx.models.Decoder(config, ctx=nnx.context(0))
    >>> directory = tempfile.mkdtemp()
    >>> nnx.models.save_pretrained(model, directory)
    >>> nnx.models.from_pretrained(directory).get_state() == model.get_state()
    True
    """
    path = local_path(directory).absolute()
    if path.is_dir():
        refuse_pickles(path)
    fields, where = read_entries(path), str(path / "config.json")
    fields = {name: entry for name, entry in fields.items() if name not in ignore_entries}
    fields = text_entries(fields, where)
    architecture = architecture_named(fields.get("model_type"), where)
    decoded = decoding(fields, where)
    with contextlib.ExitStack() as opened:
        files = decoded(open_weights(path, opened))
        found = {name: file.tensors[name] for name, file in files.items()}
        check_counts(fields, found, where, entry_names)
        config = architecture.read_config(fields, where)
        options = _options(path, architecture, config, {"scan_layers": scan_layers, "remat": remat})
        config = with_own_head(architecture, architecture.completed(config, found), files)
        param_dtype = _stored_dtype(architecture, config, found) if dtype is None else as_dtype(dtype)
        if not jnp.issubdtype(param_dtype, jnp.floating):
            raise ValueError(NOT_FLOATS.format(got=param_dtype))
        model = abstract_model(architecture, config, param_dtype, **options)
        targets = values_by_path(model)
        known = architecture.links(config, targets, found)
        _check(path, architecture, config, known, targets, found)
        inside_trace = is_tracer(jnp.zeros(()))
        if mesh is not None or not inside_trace:  # the current mesh is out of reach inside a trace
            shard(model, mesh, rules)
        if not abstract:
            _fill(model, known, files, _placed_when_run if inside_trace else placed)
    _origins[info_of(model)] = path
    return model


def save_pretrained(
    model: Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str | None = "5GB",
    files_from: str | os.PathLike[str] | None = None,
) -> None:
    """Writes a model as a directory that `transformers` and `from_pretrained` load.

    The weights are `model.safetensors`, or several files with an index; they are rearranged and written one by one.
    If the model came from `from_pretrained`, the tokenizer, the chat template and the settings of processors are copied
    from its directory. Files that exist already are not touched. For another model, such as a clone, copy them
    yourself or pass their directory as `files_from`.

    Args:
        model: a model of `nnx.models`; a `Decoder` may be scanned.
        directory: the directory, which is created if needed.
        max_shard_size: the maximum size of a file, in bytes or as a string such as `"5GB"`.
        files_from: a directory to copy the tokenizer and similar files from.

    Raises:
        TypeError: the model is not one of `nnx.models`.
        ValueError: the model is quantized, or has parameters or settings that the format of its family does not have.
        OSError: the files could not be written; for the weights, it is a `CheckpointError`.
    """
    architecture, config = architecture_of(model), cast(Any, model).config
    path = local_path(directory).absolute()
    fields = architecture.write_config(config)
    values = values_by_path(model)
    known = architecture.links(config, values, ())
    check_savable(model, architecture, values, known)
    tensors = {link.name: pending_tensor(link, values) for link in known}
    by_name = {link.name: link for link in known}
    constants = architecture.constants(config, known)
    tensors |= {name: Pending(array.dtype, array.shape) for name, array in constants.items()}
    metadata = {"format": "pt"}  # what transformers writes; it refuses files without it
    write_arrays(
        path / "model.safetensors",
        tensors,
        lambda name: constants[name] if name in constants else _tensor(by_name[name], values),
        max_shard_size=max_shard_size,
        metadata=metadata,
    )
    # Written last: it takes no time, so a killed process hardly ever leaves an old config next to new weights.
    dtype = str(next(values[path].dtype for path in architecture.dtype_paths if path in values))
    text = json.dumps({**fields, "torch_dtype": dtype, "dtype": dtype}, indent=2) + "\n"
    origin = _origins.get(info_of(model)) if files_from is None else local_path(files_from).absolute()

    def write_rest() -> None:
        _write(path / "config.json", text)
        if origin is not None:
            _copy_files(origin, path)

    Exchange(f"nnx.models.save_pretrained({str(directory)!r})").together(write_rest)


# Loading


def _options(path: Path, architecture: Architecture, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that the architecture has; any other must be off."""
    for option, value in options.items():
        if option not in architecture.options and value is not False:
            raise ValueError(NO_OPTION.format(where=path, option=option, got=value, family=config.model_type))
    return {option: value for option, value in options.items() if option in architecture.options}


def _stored_dtype(architecture: Architecture, config: Any, found: Mapping[str, Any]) -> Any:
    names = (link.name for link in architecture.links(config, architecture.dtype_paths, found))
    # A missing tensor is reported with everything else that does not fit.
    return next((found[name].dtype for name in names if name in found), jnp.float32)


def _shape(parameter: Parameter, values: Mapping[str, Any]) -> Shape:
    """Returns the shape of a parameter, of one layer or expert if it is stacked."""
    return tuple(values[parameter.path].shape[len(parameter.index) :])


def pending_tensor(link: Link, values: Mapping[str, Any]) -> Pending:
    """Returns the dtype and shape that the tensor of a link has."""
    parts = [link.layout.tensor_shape(_shape(parameter, values)) for parameter in link.parameters]
    whole = list(parts[0])
    if len(parts) > 1:
        axis = link.layout.output_axis
        whole[axis] = sum(part[axis] for part in parts)
    return Pending(np.dtype(values[link.parameters[0].path].dtype), tuple(whole))


def _check(
    path: Path,
    architecture: Architecture,
    config: Any,
    known: list[Link],
    targets: Mapping[str, Any],
    found: Mapping[str, Any],
) -> None:
    """Raises `CheckpointError` with everything in which the tensors differ from what the model needs."""
    links = {link.name: link for link in known}

    def expected(name: str) -> tuple[Shape, str]:
        paths = ", ".join(parameter.path for parameter in links[name].parameters)
        return pending_tensor(links[name], targets).shape, paths

    def misfit_at(name: str, found_as: str) -> Texts | None:
        tensor, (shape, paths) = found[found_as], expected(name)
        have = Entry("array", str(tensor.dtype), tensor.shape)
        # Floats of any width fit, and become those of the parameter.
        if misfit(have, Entry("array", "float32", shape), "sort") is None:
            return None
        if tensor.shape != shape:
            return f"wrong shape: {name} is {list(tensor.shape)}", f"{list(shape)} for {paths}"
        return f"wrong dtype: {name} is {tensor.dtype}", f"16, 32 or 64-bit floats for {paths}"

    report = LoadReport()
    offered = [name for name in found if not architecture.is_ignored(config, name)]
    match({name: [name] if name in found else [] for name in links}, offered, misfit_at, report)
    lines = [
        f"missing: {name} {list(shape)}, for {paths}" for name in report.missing for shape, paths in [expected(name)]
    ]
    lines += [f"{have}, expected {want}" for have, want in report.mismatched.values()]
    lines += [f"unexpected: {name}" for name in report.unexpected]
    if lines:
        if len(lines) > SHOWN:
            lines[SHOWN:] = [f"… and {len(lines) - SHOWN} more"]
        differences = "\n".join(f"  {line}" for line in lines)
        raise CheckpointError(DOES_NOT_FIT.format(path=path, family=config.model_type, differences=differences))


def _fill(
    model: Module,
    known: list[Link],
    files: Mapping[str, AnyFile],
    place: Callable[[Sequence[ReadRequest]], Sequence[jax.Array]],
) -> None:
    """Fills an abstract model with the values in the files."""
    state, values = Module.get_state(model), values_by_path(model)
    regions, stacks = _located(known, files, values)
    # In the order of the files, so that reading is sequential.
    order = sorted(regions, key=lambda path: _position(regions[path][0]))
    requests = [ReadRequest(regions[path], values[path], stacks[path]) for path in order]
    filled = dict(zip(order, place(requests), strict=True))
    Module.update_state(
        model, state.map(lambda path, leaf: leaf.replace(filled[path] if path in filled else _zeros(leaf)))
    )


def _located(
    known: list[Link], files: Mapping[str, AnyFile], values: Mapping[str, Any]
) -> tuple[dict[str, list[Region]], dict[str, Shape]]:
    """Returns the regions of each parameter, and the sizes of the leading axes that number them."""
    regions: dict[str, list[Region]] = {}
    stacks: dict[str, Shape] = {}
    for link in known:
        offset, layout = 0, link.layout
        shapes = [_shape(parameter, values) for parameter in link.parameters]
        groups = layout.groups(shapes) if layout.grouped else 0
        stride = sum(layout.tensor_shape(shape)[0] for shape in shapes) // groups if groups else 0
        for parameter, shape in zip(link.parameters, shapes, strict=True):
            path = parameter.path
            region = Region(files[link.name], link.name, layout, shape, offset, groups, stride)
            # Layers and experts come in order, so the regions of a stacked parameter are appended by index.
            regions.setdefault(path, []).append(region)
            stacks[path] = tuple(values[path].shape[: len(parameter.index)])
            if len(link.parameters) > 1:
                rows = layout.tensor_shape(shape)[layout.output_axis]
                offset += 1 if layout.interleaved else rows // (groups or 1)
    return regions, stacks


def _position(region: Region) -> tuple[Path, int]:
    return region.file.path, region.file.tensors[region.name].start


def _zeros(leaf: Any) -> jax.Array:
    """Returns the value of a Variable that no checkpoint holds: a loss, before the first call."""
    return jnp.zeros(leaf.value.shape, leaf.value.dtype, device=leaf.value.sharding)


def _placed_when_run(requests: Sequence[ReadRequest]) -> list[jax.Array]:
    """Returns parameters inside a trace: their tensors are read when the compiled program runs, if it ever does."""

    def placed_when_run(request: ReadRequest) -> jax.Array:
        regions, target, stack = request

        def read() -> np.ndarray:
            with contextlib.ExitStack() as opened:
                by_path = {region.file.path: region.file for region in regions}
                files = {path: reopened(file, opened) for path, file in by_path.items()}
                again = [region._replace(file=files[region.file.path]) for region in regions]
                return opened.enter_context(Reader()).read(again, Box.whole(target.shape), target.dtype, stack)

        array = jax.pure_callback(read, jax.ShapeDtypeStruct(target.shape, target.dtype))
        return array if target.sharding is None else jax.lax.with_sharding_constraint(array, target.sharding)

    return list(map(placed_when_run, requests))


# Saving


def _write(file: Path, text: str) -> None:
    if is_first():
        with atomic_file(file) as opened:
            opened.write(text.encode())


def _copy_files(origin: Path, directory: Path) -> None:
    """Copies the tokenizer, the chat template and the settings of processors, where there is no such file."""
    if is_first() and origin != directory and origin.is_dir():
        for pattern in _COMPANIONS:
            for file in origin.glob(pattern):
                if not (directory / file.name).exists():
                    with atomic_file(directory / file.name) as opened:
                        opened.write(file.read_bytes())


def _tensor(link: Link, values: Mapping[str, Any]) -> Any:
    """Returns the tensor of a link; for arrays that are spread over processes, all of them must call it."""
    held = ((values[parameter.path], parameter.index) for parameter in link.parameters)
    arrays = [value[index] if index else value for value, index in held]
    parts = [link.layout.to_tensor(array) for array in arrays]
    return parts[0] if len(parts) == 1 else link.layout.joined(parts, [array.shape for array in arrays])
