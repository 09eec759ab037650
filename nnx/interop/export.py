"""`export`: a function of Modules as a compiled program in a directory, with the weights next to it.

The directory holds `program.bin`, a function of weights and inputs that `jax.export` serialized; `weights.safetensors`;
and `export.json`, which describes both (see `exported`). The description is removed first and written last, so a
directory that has one is complete.
"""

import contextlib
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from nnx.core.extras import require
from nnx.core.module.info import ModuleBase
from nnx.core.repr import short
from nnx.core.state.state import State
from nnx.interop.export_trees import form_of
from nnx.interop.exported import DESCRIPTION, FORMAT, PROGRAM, VERSION, WEIGHTS, array_type, weight_type
from nnx.sharding.target import compiling_for
from nnx.storage.errors import CheckpointError
from nnx.storage.files import atomic_file, local_path
from nnx.storage.safetensors.safetensors import save_safetensors
from nnx.storage.sealed import seal
from nnx.transforms.engine.call import Call, callee_of, cell_paths
from nnx.transforms.engine.leave import run

CONTEXT_GIVEN = """nnx.export: the arguments contain a Context, whose keys would be the same in every call of the \
program. Make it from a key inside the function, and pass the key: \
nnx.export(directory, lambda model, x, key: model(x, ctx=nnx.context(key)), model, x, key)."""
MIXED = """nnx.export: {where} holds arrays and {value}. Arguments with arrays become arguments of the program, and \
Modules and Python values are fixed: pass them as separate arguments."""
RETURNS = "make arrays of other values (jnp.asarray)"
RETURNS_MODULE = "nnx.export: the function returns a Module. Return its state: model.get_state(), or a part of it."
NO_BATCH = """nnx.export: symbolic_batch=True makes the first axis of every input symbolic, but {where}. Leave it out, \
and pass jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 3"), dtype) for inputs with symbolic axes."""
NOT_A_DIRECTORY = "nnx.export: {path} exists and is not a directory."

# `jax.export` refuses programs that call what it has no guarantee for, such as the GPU kernels of `nnx.MoE`. They are
# part of the program; the docstring of `export` explains what that means for its lifetime.
_KERNELS = (jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton"),)


class _ExportedProgram(NamedTuple):
    """A traced function: the serialized program and what has to be known to call it."""

    data: bytes
    weights: dict[str, Any]
    fields: dict[str, Any]


def export(
    directory: str | os.PathLike[str],
    f: Any,
    *args: Any,
    platforms: Sequence[str] | None = None,
    symbolic_batch: bool = False,
    **kwargs: Any,
) -> None:
    """Writes a function as a program that `nnx.load_exported` runs without the Python code of the model.

    Arguments with arrays are the arguments of the program, in the same order and nesting; only their shapes and dtypes
    are used. All other arguments are fixed: the weights of Modules are stored in `weights.safetensors`, under their
    paths, and Python values become part of the program. The program is pure: state that the function changes is
    discarded. To get it, return it: `lambda model, x: (model(x), model.filter(nnx.BatchStat))`.

    Serializing a program needs the extra "export". Programs run on later versions of JAX, within the guarantees of
    `jax.export`. Those do not cover GPU kernels: a program for a GPU that contains an `nnx.MoE` may need the version of
    JAX that wrote it. Build the layer with `implementation="xla"` to avoid that.

    Args:
        directory: the directory to write. An export that it holds is replaced.
        f: a function, a Module, or a method of one. Switch models with modes to `model.eval()` first.
        *args, **kwargs: its arguments; a `jax.ShapeDtypeStruct` can take the place of an array.
        platforms: the platforms to compile for, e.g. `("cpu", "cuda", "tpu")`; by default, the current one.
        symbolic_batch: whether the first axis of all inputs is a batch, whose size can differ from call to call. For
            other symbolic axes, pass a `jax.ShapeDtypeStruct` with a `jax.export.symbolic_shape`.

    Raises:
        TypeError: an argument or a result is not made of arrays in dicts, lists and tuples.
        ImportError: the extra "export" is not installed.
        CheckpointError: the directory could not be written.

    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> model = nnx.Linear(2, 3, ctx=nnx.context(0))
    >>> nnx.export(directory, model, jnp.ones((1, 2)), symbolic_batch=True)
    >>> program = nnx.load_exported(directory)
    >>> bool(jnp.allclose(program(jnp.ones((5, 2))), model(jnp.ones((5, 2)))))
    True
    """
    require("flatbuffers", "export", "nnx.export")
    path = local_path(directory).absolute()
    callee = callee_of(f, "nnx.export")
    _write(path, _trace(callee, args, kwargs, platforms, symbolic_batch))


def _write(path: Path, program: _ExportedProgram) -> None:
    """Writes the files of an export: the description last, because without it there is none."""
    try:
        if path.exists() and not path.is_dir():
            raise CheckpointError(NOT_A_DIRECTORY.format(path=path))
        path.mkdir(parents=True, exist_ok=True)
        (path / DESCRIPTION).unlink(missing_ok=True)
        with atomic_file(path / PROGRAM) as file:
            file.write(program.data)
        save_safetensors(path / WEIGHTS, State(program.weights))
        with atomic_file(path / DESCRIPTION) as file:
            file.write(seal(program.fields).encode())
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"nnx.export: {path} cannot be written ({error}).") from error


def _trace(callee: Any, args: Any, kwargs: Any, platforms: Any, symbolic_batch: bool) -> _ExportedProgram:
    call = Call((*callee.bound, *args), kwargs)
    if call.contexts:
        raise TypeError(CONTEXT_GIVEN)
    inputs: list[Any] = []
    args_form = [_argument_form(arg, inputs, f"argument {i}") for i, arg in enumerate(args) if _is_input(arg)]
    kwargs_form = {
        name: _argument_form(arg, inputs, f"argument {name!r}") for name, arg in kwargs.items() if _is_input(arg)
    }
    positions = _positions(call.data, inputs)
    weights, cells_of = _weights(call)
    results: list[Any] = []

    def pure(arrays: list[jax.Array], given: list[jax.Array]) -> list[Any]:
        data = list(call.data)
        for position, value in zip(positions, given, strict=True):
            data[position] = value
        outcome = run(callee.fun, call.signature, call.statics, cells_of(arrays), data, [], "nnx.export")
        if outcome.effects.returns_modules:
            raise TypeError(RETURNS_MODULE)
        outputs: list[Any] = []
        results[:] = [form_of(outcome.out, outputs, "the result", RETURNS)]
        return outputs

    specs = _specs(inputs, symbolic_batch)
    stored = [jax.ShapeDtypeStruct(weight.shape, weight.dtype) for weight in weights.values()]
    with _compiling_for(platforms):
        exported = jax.export.export(jax.jit(pure), platforms=platforms, disabled_checks=_KERNELS)(stored, specs)
    data = bytes(exported.serialize())
    forms = {"args": args_form, "kwargs": kwargs_form, "result": results[0]}
    fields = {
        **{"format": FORMAT, "version": VERSION, "jax": jax.__version__},
        **{"name": callee.name, "platforms": list(exported.platforms)},
        "program": {"size": len(data), "crc32": zlib.crc32(data)},
        "weights": {name: weight_type(weight) for name, weight in weights.items()},
        "inputs": [array_type(spec) for spec in specs],
    }
    return _ExportedProgram(data, weights, fields | forms)


def _compiling_for(platforms: Sequence[str] | None) -> Any:
    """Returns the block in which kernels are chosen that run on all of these platforms."""
    if platforms is None:
        return contextlib.nullcontext()
    return compiling_for(platforms[0] if len(platforms) == 1 else "any")


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def _is_input(argument: Any) -> bool:
    """Whether an argument has arrays, so that it is an argument of the program."""
    return any(map(_is_array, jax.tree.leaves(argument)))


def _argument_form(argument: Any, inputs: list[Any], where: str) -> Any:
    fixed = next((leaf for leaf in jax.tree.leaves(argument) if not _is_array(leaf)), None)
    if fixed is not None:
        value = f"a Module, {type(fixed).__name__}" if isinstance(fixed, ModuleBase) else short(fixed)
        raise TypeError(MIXED.format(where=where, value=value))
    return form_of(argument, inputs, where, "pass the parts of other containers one by one")


def _positions(data: list[Any], inputs: list[Any]) -> list[int]:
    """Returns where the inputs are among the data of the call; both are in the order of the leaves."""
    positions = [i for i, leaf in enumerate(data) if _is_array(leaf)]
    by_identity: dict[int, list[int]] = {}
    for i in reversed(positions):
        by_identity.setdefault(id(data[i]), []).append(i)
    return [by_identity[id(array)].pop() for array in inputs]


def _weights(call: Call) -> tuple[dict[str, jax.Array], Any]:
    """Returns the arrays of all Modules by name, and a function from such arrays to the cells of the call."""
    weights: dict[str, jax.Array] = {}
    cells = call.cells()
    for path, cell in zip(cell_paths(call.signature.key), cells, strict=True):
        leaves = jax.tree.leaves(cell)
        for i, leaf in enumerate(leaves):
            weights[path if len(leaves) == 1 else f"{path}/{i}"] = jnp.asarray(leaf)
    treedef = jax.tree.structure(cells)
    return weights, lambda arrays: jax.tree.unflatten(treedef, arrays)


def _specs(inputs: list[Any], symbolic_batch: bool) -> list[jax.ShapeDtypeStruct]:
    dtypes = [
        array.dtype if jnp.issubdtype(array.dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(array.dtype)
        for array in inputs
    ]
    shapes = [tuple(array.shape) for array in inputs]
    if symbolic_batch:
        sizes = {shape[0] if shape else None for shape in shapes}
        if len(sizes) != 1 or None in sizes:
            where = "there are none" if not sizes else f"they have the shapes {', '.join(map(str, shapes))}"
            raise ValueError(NO_BATCH.format(where=where))
        (batch,) = jax.export.symbolic_shape("batch")
        shapes = [(batch, *shape[1:]) for shape in shapes]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
