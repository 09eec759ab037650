"""`load_exported`: a program that `export` wrote, without the Python code it was made from.

The *description* of an export is JSON with a checksum: the sizes and checksums of its files, the names of its weights,
and the forms of its arguments and of its result (see `export_trees`).
"""

import os
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from nnx.core.extras import require
from nnx.core.repr import short
from nnx.core.state.paths import listing
from nnx.core.state.state import State
from nnx.interop.export_trees import check_form, flattened, rebuilt
from nnx.storage.errors import CheckpointError
from nnx.storage.files import local_path, open_regular
from nnx.storage.safetensors.safetensors import load_safetensors
from nnx.storage.sealed import is_intact, read_object

FORMAT = "nnx export"
VERSION = 1
DESCRIPTION = "export.json"
PROGRAM = "program.bin"
WEIGHTS = "weights.safetensors"

NOTHING_THERE = "There is no exported program at {path}: the path does not exist."
UNFINISHED = "{path} is not an exported program: it has no {file}, which nnx.export writes last."
OTHER_FORMAT = "{path} is not an exported program: the format in its {file} is {found}, expected {expected!r}."
NEWER = "The exported program at {path} has format version {found}; this version of NNX reads up to version {known}."
DAMAGED = "The exported program at {path} is damaged: {reason}. Export it again."
WRONG_ARGUMENTS = "{name} takes {expected} positional arguments and {names} by name; got {got} and {given}."
WRONG_INPUT = "{name}: input {number} should be {expected}, as when it was exported; got {got}."


class Exported:
    """A program loaded by `nnx.load_exported`; call it as the function that was exported, without the fixed arguments.

    It can be called inside `jax.jit` and `nnx.jit`, too. It has no derivative.

    Attributes:
        name: the name of the function.
        platforms: the platforms that it was compiled for.
        weights: the arrays of its Modules by path. They are data: replace entries to run with other weights.
    """

    def __init__(self, fields: dict[str, Any], program: jax.export.Exported, weights: dict[str, jax.Array]):
        self.name: str = fields["name"]
        self.platforms: tuple[str, ...] = tuple(fields["platforms"])
        self.weights: dict[str, jax.Array] = weights
        self._fields = fields
        self._order = tuple(weights)
        self._call = jax.jit(program.call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program.

        Raises:
            TypeError: there are other arguments than those of the program, or they have other dtypes or nesting.
            ValueError: an array has a shape the program does not take, or it was not compiled for this platform.
        """
        forms, named = self._fields["args"], self._fields["kwargs"]
        if len(args) != len(forms) or set(kwargs) != set(named):
            names, given = (listing(names) or "none" for names in (named, kwargs))
            text = WRONG_ARGUMENTS.format(name=self.name, expected=len(forms), names=names, got=len(args), given=given)
            raise TypeError(text)
        given = [x for i, form in enumerate(forms) for x in flattened(form, args[i], self.name, f"argument {i}")]
        for name, form in named.items():
            given += flattened(form, kwargs[name], self.name, f"argument {name!r}")
        arrays = [self._checked(i, value) for i, value in enumerate(given)]
        outputs = self._call([self.weights[name] for name in self._order], arrays)
        return rebuilt(self._fields["result"], outputs)

    def _checked(self, number: int, value: Any) -> jax.Array:
        expected, array = self._fields["inputs"][number], jnp.asarray(value)
        (dtype, sizes), (given_dtype, given_sizes) = map(_parsed, (expected, array_type(array)))
        # A symbolic size is the text of an expression; JAX checks it against the other inputs.
        fits = len(sizes) == len(given_sizes) and all(
            size == given or not size.isdecimal() for size, given in zip(sizes, given_sizes, strict=True)
        )
        if dtype != given_dtype or not fits:
            error = TypeError if fits else ValueError
            raise error(WRONG_INPUT.format(name=self.name, number=number, expected=expected, got=array_type(array)))
        return array

    def __repr__(self) -> str:
        inputs = ", ".join(self._fields["inputs"])
        return f"Exported({self.name}({inputs}), platforms={self.platforms}, weights={len(self.weights)})"


def load_exported(directory: str | os.PathLike[str]) -> Exported:
    """Loads a program that `nnx.export` wrote; the Python code of the model is not needed.

    Args:
        directory: the directory.

    Returns:
        The program, which is called with the arrays that `nnx.export` was given.

    Raises:
        FileNotFoundError: there is nothing at the path.
        CheckpointError: it is not an exported program, or damaged.
        ImportError: the extra "export" is not installed.

    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> nnx.export(directory, lambda x: {"double": 2 * x}, jnp.ones(3))
    >>> nnx.load_exported(directory)(jnp.arange(3.0))["double"].tolist()
    [0.0, 2.0, 4.0]
    """
    require("flatbuffers", "export", "nnx.load_exported")
    path = local_path(directory).absolute()
    if not path.exists():
        raise FileNotFoundError(NOTHING_THERE.format(path=path))
    if not (path / DESCRIPTION).is_file():
        raise CheckpointError(UNFINISHED.format(path=path, file=DESCRIPTION))
    fields = _description(path)
    target = {name: _abstract(text) for name, text in fields["weights"].items()}
    program = _program(path, fields)
    loaded = load_safetensors(path / WEIGHTS, State(target))
    return Exported(fields, program, {name: loaded[name] for name in target})


def array_type(array: Any) -> str:
    """Returns dtype and shape of an array, abstract or not, as text such as `float32[batch,3]`."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def weight_type(array: jax.Array) -> str:
    """Returns dtype and shape of a weight as text; that of PRNG keys is `key(threefry2x32)[]`."""
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array_type(array)
    return f"key({jax.random.key_impl(array)})[{','.join(map(str, array.shape))}]"


def _parsed(text: str) -> tuple[str, list[str]]:
    dtype, bracket, sizes = text.removesuffix("]").partition("[")
    if not dtype or not bracket or not text.endswith("]"):
        raise ValueError(f"an array is {text!r}")
    return dtype, sizes.split(",") if sizes else []


def _abstract(text: str) -> jax.ShapeDtypeStruct:
    name, sizes = _parsed(text)
    shape = tuple(map(int, sizes))
    if name.startswith("key("):
        impl = name.removeprefix("key(").removesuffix(")")
        return jax.ShapeDtypeStruct(shape, jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(name))


def _description(path: Path) -> dict[str, Any]:
    try:
        fields, raw = read_object(path / DESCRIPTION)
        if fields.get("format") != FORMAT:
            found = short(fields.get("format"))
            raise CheckpointError(OTHER_FORMAT.format(path=path, file=DESCRIPTION, found=found, expected=FORMAT))
        if type(fields["version"]) is not int or fields["version"] > VERSION:
            raise CheckpointError(NEWER.format(path=path, found=short(fields["version"]), known=VERSION))
        if not is_intact(raw):
            raise ValueError("its checksum does not match")
        fields.pop("crc32")
        _check_fields(fields)
        return fields
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        reason = f"{DESCRIPTION} cannot be read ({type(error).__name__}: {short(str(error))})"
        raise CheckpointError(DAMAGED.format(path=path, reason=reason)) from error


def _check_fields(fields: dict[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError if a description does not have the fields that are used."""
    for text in fields["weights"].values():
        _abstract(text)
    for text in fields["inputs"]:
        _parsed(text)
    forms = [*fields["args"], *fields["kwargs"].values()]
    if [number for form in forms for number in check_form(form)] != list(range(len(fields["inputs"]))):
        raise ValueError("its arguments are not its inputs")
    check_form(fields["result"])
    if not isinstance(fields["name"], str) or not all(isinstance(name, str) for name in fields["platforms"]):
        raise ValueError("its name or platforms are not text")


def _program(path: Path, fields: dict[str, Any]) -> jax.export.Exported:
    """Reads the program and checks it against its description."""
    try:
        with open_regular(path / PROGRAM) as file:
            data = file.read()
        expected = fields["program"]
        if len(data) != expected["size"] or zlib.crc32(data) != expected["crc32"]:
            raise ValueError(f"{PROGRAM} is not the file that was written")
        program = jax.export.deserialize(bytearray(data))
        counts = len(fields["weights"]) + len(fields["inputs"]), len(check_form(fields["result"]))
        if (len(program.in_avals), len(program.out_avals)) != counts:
            raise ValueError(f"{PROGRAM} has other inputs and outputs than {DESCRIPTION} says")
        return program
    except Exception as error:  # what a parser raises for bytes that are not a program is not documented
        raise CheckpointError(DAMAGED.format(path=path, reason=f"{type(error).__name__}: {error}")) from error
