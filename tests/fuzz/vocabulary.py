"""What random programs are made of: Module classes, one class per sort of static value, and small helpers.

A *sort* is one kind of static value: how to write it as source for a number `k` (values of different `k` behave
differently), and how to change it in place, if it can be. `canonical` describes any static value completely and
independently of identity; `digest` turns that into a small number, so that a program's result depends on everything
the value holds.
"""

import collections
import copy
import dataclasses
import enum
import functools
import struct
import types
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nnx


class Boom(Exception):
    """What a program raises part-way."""


# Modules


class Count(nnx.Variable):
    """A Variable type of the user's."""


class Plain(nnx.Module):
    def scale(self) -> float:
        return 2.0

    def read(self) -> Any:
        return fold(vars(self).get("v0", 1.0)) * self.scale()


class Other(nnx.Module):
    def scale(self) -> float:
        return 3.0

    def read(self) -> Any:
        return fold(vars(self).get("v0", 2.0)) * self.scale()


@nnx.dataclass
class Record(nnx.Module):
    """A dataclass Module with fields."""

    v0: Any = nnx.param_field()
    s0: Any = nnx.static_field(default=7)

    scale = Plain.scale
    read = Plain.read


@dataclasses.dataclass(eq=False)
class Standard(nnx.Module):
    """A Module under the standard library's decorator."""

    v0: Any
    s0: Any = 7

    scale = Other.scale
    read = Other.read


# Static values


class Color(enum.Enum):
    RED = 0
    GREEN = 1
    BLUE = 2
    BLACK = 3


@dataclasses.dataclass
class Config:
    s: Any
    items: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    s: Any


@dataclasses.dataclass
class Base:
    a: int = 0


class Derived(Base):
    """A subclass of a dataclass whose constructor sets an attribute that is not a field."""

    def __init__(self, s: Any):
        super().__init__()
        self.s = s


@dataclasses.dataclass
class PostInit:
    a: int = 0
    seed: dataclasses.InitVar[int] = 0

    def __post_init__(self, seed: int):
        self.s = seed


@dataclasses.dataclass
class Uncompared:
    s: Any = dataclasses.field(compare=False)


@dataclasses.dataclass(slots=True)
class Slotted:
    s: Any


class Point(NamedTuple):
    x: int
    y: int


class TaggedPoint(Point):
    """A namedtuple subclass with attributes."""


class Bag(list):
    """A list subclass with attributes."""


class Table(dict):
    """A dict subclass with attributes."""


class Group(set):
    """A set subclass with attributes."""


class Token:
    """An object with its own equality: the author's promise."""

    def __init__(self, k: int):
        self.k = k

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Token) and self.k == other.k

    def __hash__(self) -> int:
        return hash(("Token", self.k))


class Opaque:
    """An object compared by identity."""

    def __init__(self, k: int):
        self.k = k


def tagged(value: Any, s: Any) -> Any:
    """Sets an attribute and returns the value."""
    value.s = s
    return value


def knot(k: int) -> list[Any]:
    """A list that contains itself."""
    items: list[Any] = [k]
    items.append(items)
    return items


def ring(k: int) -> Any:
    """A namespace that contains itself."""
    space = types.SimpleNamespace(s=k)
    space.me = space
    return space


def adder(k: Any) -> Callable[[int], Any]:
    return lambda v: v + k


def loop(k: int) -> Callable[[int], Any]:
    """A function that closes over a list that holds it."""
    items: list[Any] = [k]
    items.append(lambda v: v + items[0])
    return items[1]


def over(config: Any) -> Callable[[int], Any]:
    """A function that closes over an object."""
    return lambda v: (v, canonical(config))


def with_default(k: int) -> Callable[..., Any]:
    return lambda v, a=k: v * a


def with_attribute(k: int) -> Callable[[int], Any]:
    """A function that closes over itself."""

    def function(v: int) -> Any:
        return v + vars(function)["k"]

    vars(function)["k"] = k
    return function


def plus(a: int, b: int = 0) -> int:
    return a + b


def zero(*_: Any) -> int:
    return 0


def one(*_: Any) -> int:
    return 1


def double(v: int) -> int:
    return 2 * v


def triple(v: int) -> int:
    return 3 * v


OPAQUE = [Opaque(k) for k in range(4)]
FACTORIES = [zero, one, list, dict]
FUNCTIONS = [double, triple, zlib.crc32, abs]
UNITS = ["D", "h", "m", "s"]
DTYPES = [np.float32, np.int32, np.int8, np.bool_]
JITTED = [nnx.jit(lambda v: v + 1), nnx.jit(lambda v: v + 2), nnx.jit(lambda v: v + 3), nnx.jit(lambda v: v + 4)]


class Sort(NamedTuple):
    """One sort of static value: its source for a number `{k}`, and statements that change `{t}` in place."""

    name: str
    source: str
    changes: tuple[str, ...] = ()


FLOATS = [0.0, -0.0, float("nan"), 1.0]

SORTS = [
    Sort("int", "{k}"),
    Sort("bool", "bool({k})"),
    Sort("float", "FLOATS[{k}]"),
    Sort("number types", "(1, 1.0, True, 1j)[{k}]"),
    Sort("string", "'s{k}'"),
    Sort("bytes", "b's{k}'"),
    Sort("none", "None"),
    Sort("range", "range({k})"),
    Sort("slice", "slice({k}, None)"),
    Sort("enum", "Color({k})"),
    Sort("tuple", "(1, {k})"),
    Sort("tuple of list", "(1, [{k}])", ("{t}[1].append({k})",)),
    Sort("frozenset", "frozenset({{{k}, 9}})"),
    Sort("list", "[{k}]", ("{t}.append({k})", "{t}[0] = {k}", "{t}.clear()")),
    Sort("nested list", "[[{k}], [0]]", ("{t}[0].append({k})", "{t}[1][0] = {k}")),
    Sort("dict", "{{'k': {k}}}", ("{t}['k'] = {k}", "{t}['z'] = {k}", "{t}.pop('z', None)")),
    Sort("dict of list", "{{'k': [{k}]}}", ("{t}['k'].append({k})",)),
    Sort("set", "{{{k}, 9}}", ("{t}.add({k})", "{t}.discard(9)")),
    Sort("self-containing list", "knot({k})", ("{t}[0] = {k}",)),
    Sort("self-containing namespace", "ring({k})", ("{t}.s = {k}",)),
    Sort("dataclass", "Config({k})", ("{t}.s = {k}", "{t}.items.append({k})", "{t}.extra = {k}")),
    Sort("frozen dataclass", "Frozen({k})"),
    Sort("frozen dataclass of list", "Frozen([{k}])", ("{t}.s.append({k})",)),
    Sort("derived dataclass", "Derived({k})", ("{t}.s = {k}", "{t}.a = {k}")),
    Sort("post-init dataclass", "PostInit(0, {k})", ("{t}.s = {k}",)),
    Sort("uncompared field", "Uncompared({k})", ("{t}.s = {k}",)),
    Sort("slots dataclass", "Slotted({k})", ("{t}.s = {k}",)),
    Sort("namedtuple", "Point(1, {k})"),
    Sort("tagged namedtuple", "tagged(TaggedPoint(1, 2), {k})", ("{t}.s = {k}",)),
    Sort("namespace", "types.SimpleNamespace(s={k})", ("{t}.s = {k}", "{t}.z = {k}")),
    Sort("list subclass", "tagged(Bag([1]), {k})", ("{t}.s = {k}", "{t}.append({k})")),
    Sort("dict subclass", "tagged(Table(k=1), {k})", ("{t}.s = {k}", "{t}['k'] = {k}")),
    Sort("set subclass", "tagged(Group([1]), {k})", ("{t}.s = {k}", "{t}.add({k})")),
    Sort("defaultdict", "collections.defaultdict(FACTORIES[{k}])", ("{t}['z'] = {k}", "{t}.default_factory = one")),
    Sort("ordered dict", "collections.OrderedDict(k={k})", ("{t}['k'] = {k}",)),
    Sort("counter", "collections.Counter(k={k})", ("{t}['k'] += {k}",)),
    Sort("function", "FUNCTIONS[{k} % 2]"),
    Sort("built-in", "FUNCTIONS[2 + {k} % 2]"),
    Sort("closure", "adder({k})"),
    Sort("closure over dataclass", "over(Derived({k}))"),
    Sort("closure over namespace", "over(types.SimpleNamespace(s={k}))"),
    Sort("closure over list", "over([{k}])"),
    Sort("function default", "with_default({k})"),
    Sort("function attribute", "tagged(adder(1), {k})"),
    Sort("self-containing closure", "with_attribute({k})"),
    Sort("closure over its own list", "loop({k})"),
    Sort("partial", "functools.partial(plus, {k})"),
    Sort("partial keyword", "functools.partial(plus, b={k})"),
    Sort("partial of dataclass", "functools.partial(plus, Derived({k}))"),
    Sort("numpy scalar", "np.float32({k})"),
    Sort("datetime", "np.datetime64(1, UNITS[{k}])"),
    Sort("timedelta", "np.timedelta64(1, UNITS[{k}])"),
    Sort("dtype", "np.dtype(DTYPES[{k}])"),
    Sort("class", "DTYPES[{k}]"),
    Sort("own equality", "Token({k})"),
    Sort("identity", "OPAQUE[{k}]"),
    Sort("partition spec", "jax.sharding.PartitionSpec('a', 's{k}')"),
    Sort("static container", "nnx.Static([{k}])"),
    Sort("static container of dataclass", "nnx.Static(Derived({k}))"),
]

CALLABLES = [
    Sort("jitted", "JITTED[{k}]"),
    Sort("schedule", "optax.cosine_decay_schedule(1.0, 100 + {k})"),
    Sort("linear schedule", "optax.linear_schedule(0.0, 1.0, 8 + {k})"),
]
"""Functions that return arrays; programs call them."""


def canonical(value: Any, numbers: dict[int, int] | None = None, module_number: Callable[[Any], Any] | None = None):
    """A description of a static value: types, and everything it holds. Mutable objects are numbered, so that sharing
    and cycles are part of the description; `numbers` carries the numbering from one value to the next."""
    numbers = {} if numbers is None else numbers
    kept: list[Any] = []  # ids stay valid while we look

    def describe(value: Any) -> Any:
        cls = type(value)
        if cls is float:
            return ("float", struct.pack("d", value).hex())
        if cls is complex:
            return ("complex", struct.pack("dd", value.real, value.imag).hex())
        if cls in (int, bool, str, bytes, type(None), range):
            return (cls.__name__, repr(value))
        if isinstance(value, np.generic):
            return ("numpy", str(value.dtype), value.tobytes().hex())
        if isinstance(value, (type, np.dtype, jax.sharding.PartitionSpec, enum.Enum)):
            return (cls.__name__, str(value))
        if isinstance(value, slice):
            return ("slice", describe(value.start), describe(value.stop), describe(value.step))
        if isinstance(value, types.MethodType):
            module = module_number is not None and isinstance(value.__self__, nnx.Module)
            return ("method", value.__name__, module_number(value.__self__) if module else None)
        if isinstance(value, types.BuiltinFunctionType):
            return ("built-in", value.__name__)
        if hasattr(value, "trace_count"):
            return ("jitted", JITTED.index(value))
        if isinstance(value, types.FunctionType):
            attributes = tuple((name, describe(vars(value)[name])) for name in sorted(vars(value)))
            result = describe(value(2)) if value.__module__ == __name__ else None
            return ("function", value.__qualname__, result, attributes)
        if isinstance(value, functools.partial):
            # numbered apart: like a function, a partial is one value, whose parts a rebuilt Module may share
            parts = canonical((value.args, tuple(value.keywords.items())))
            return ("partial", value.func.__qualname__, parts)
        if isinstance(value, (Token, Opaque)):
            return (cls.__name__, value.k)
        if not isinstance(value, (list, dict, set, frozenset, tuple)) and not hasattr(value, "__dataclass_fields__"):
            if cls is not types.SimpleNamespace:
                return ("object", cls.__name__)
        mutable = not (cls is tuple or cls is frozenset or cls is Point or cls is Frozen)
        if mutable:
            if id(value) in numbers:
                return ("again", numbers[id(value)])
            numbers[id(value)] = len(numbers)
            kept.append(value)
        return (cls.__name__, numbers[id(value)] if mutable else None, *contents(value))

    def contents(value: Any) -> Any:
        if isinstance(value, dict):
            yield tuple((describe(k), describe(v)) for k, v in value.items())
            yield describe(getattr(value, "default_factory", None))
        elif isinstance(value, (set, frozenset)):
            yield tuple(sorted((describe(item) for item in value), key=repr))
        elif isinstance(value, (list, tuple)):
            yield tuple(describe(item) for item in value)
        held = dict(getattr(value, "__dict__", {}))
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            held |= {s: getattr(value, s) for s in slots if s[:2] != "__" and hasattr(value, s)}
        if not isinstance(value, (collections.OrderedDict, collections.Counter)) or held:
            yield tuple((name, describe(held[name])) for name in sorted(held))

    return describe(value)


def digest(value: Any) -> float:
    """A small number that depends on everything a static value holds."""
    return float(zlib.crc32(repr(canonical(value)).encode()) % 61) / 4


# Helpers of programs


_constants: dict[Any, jax.Array] = {}
"""Equal constants are one array, in all programs: donation must leave it to the others."""


def _constant(key: Any, value: np.ndarray) -> jax.Array:
    if key in _constants:
        return _constants[key]
    array = jnp.asarray(value)
    if not isinstance(array, jax.core.Tracer):
        _constants[key] = array
    return array


def num(value: float) -> jax.Array:
    return _constant(float(value), np.array(value, np.float32))


def vec(value: float) -> jax.Array:
    return _constant((float(value),), np.array([value, value + 1], np.float32))


@functools.cache
def key(seed: int) -> jax.Array:
    return jax.random.key(seed)


def fold(value: Any) -> Any:
    """The sum of everything a data value holds."""
    if isinstance(value, (dict, list, tuple)):
        return functools.reduce(lambda total, leaf: total + fold(leaf), jax.tree.leaves(value), 0.0)
    return jnp.sum(value) if getattr(value, "ndim", 0) else value


def at(root: Any, path: str) -> Any:
    """The Module at a path, or None if there is none."""
    for part in path.split("/") if path else ():
        if isinstance(root, nnx.Sequence):
            root = root[int(part)] if int(part) < len(root) else None
        else:
            root = vars(root).get(part)
        if not isinstance(root, nnx.Module):
            return None
    return root


def has(module: Any, *names: str) -> bool:
    return all(name in vars(module) for name in names)


def leaf(value: Any, s: Any = 0) -> Plain:
    """A new Module with one parameter."""
    module = Plain()
    module.v0 = nnx.Param(value)
    module.s0 = s
    return module


def renew(value: Any) -> None:
    """Puts equal lists in the place of those that a static value holds."""
    held = value if isinstance(value, (list, dict)) else getattr(value, "__dict__", {})
    for place, item in held.items() if isinstance(held, dict) else enumerate(held):
        if type(item) is list and item is not value:
            held[place] = [*item]


def change_flag(ctx: Any, k: int) -> None:
    """Changes a mutable flag in place."""
    flag = ctx.get_flag("mode")
    if isinstance(flag, list):
        flag.append(k)
    elif isinstance(flag, dict):
        flag["k"] = k
    elif isinstance(flag, (Derived, types.SimpleNamespace)):
        flag.s = k


def metadata_is_private(k: int) -> None:
    """Changing the metadata of one container in place must not change another."""
    first = nnx.Param(num(0), tags=["a", k])  # alive while the second is made
    if isinstance(first.tags, list):
        first.tags.append("b")
    assert list(nnx.Param(num(0), tags=["a", k]).tags) == ["a", k], "metadata are shared between containers"


def own(value: Any) -> Any:
    """A copy with containers of its own."""
    if isinstance(value, dict):
        return {key: own(item) for key, item in value.items()}
    return [*map(own, value)] if isinstance(value, list) else value


DRAWN: list[Any] = []
"""The keys that programs have drawn."""


def keys(ctx: Any) -> None:
    """Draws a key and notes it, wherever the program runs."""
    data = jax.random.key_data(ctx.make_rng("params"))
    jax.debug.callback(lambda drawn: DRAWN.append(tuple(np.ravel(drawn).tolist())), data)


NAMES = {name: value for name, value in globals().items() if not name.startswith("_")}
"""What the source of a program may name."""

__all__ = [name for name in NAMES if name != "Any"]
assert optax is not None and copy is not None
