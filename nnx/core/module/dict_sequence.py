"""`Dict` and `Sequence`: a mutable mapping and a mutable sequence that are Modules themselves."""

import inspect
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from nnx.core.errors import BAD_KEY, HOLE_IN_SEQUENCE, MISSING_ITEM
from nnx.core.module.attributes import assign, holds_modules, store, wrappers
from nnx.core.module.info import info_of
from nnx.core.module.module import Module
from nnx.core.state.paths import is_dunder, segment_of
from nnx.core.state.updates import check_level, remove
from nnx.core.variables.refs import Ref
from nnx.core.variables.variables import Spec

T = TypeVar("T")


class Dict(Module, MutableMapping[str, Any]):
    """A mapping of Modules (and any other values) by name; keys are also attributes.

    >>> heads = nnx.Dict(cat=jnp.sin, dog=jnp.cos)
    >>> sorted(heads), heads.cat is heads["cat"]
    (['cat', 'dog'], True)
    """

    def __init__(self, items: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), /, **more: Any):
        for key, value in {**dict(items), **more}.items():
            self[key] = value

    def __getitem__(self, key: str) -> Any:
        name = self._stored(key)
        if name not in info_of(self).kinds:
            raise KeyError(key)
        return getattr(self, name)

    def __setitem__(self, key: str, value: Any) -> None:
        name = self._nnx_attribute_name(key)
        if name == key:
            setattr(self, name, value)
        else:
            check_level(self, f"setting {key!r}")
            assign(self, name, value)

    def _nnx_set_item(self, segment: str, value: Any) -> None:
        self[segment] = value

    def __delitem__(self, key: str) -> None:
        name = self._stored(key)
        if name not in info_of(self).kinds:
            raise KeyError(key)
        check_level(self, f"deleting {key!r}")
        remove(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter([segment_of(name) for name in info_of(self).kinds])

    def __len__(self) -> int:
        return len(info_of(self).kinds)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and bool(key) and self._stored(key) in info_of(self).kinds

    def _stored(self, key: Any) -> str:
        return self._nnx_attribute_name(key) if isinstance(key, str) and key else ""

    @classmethod
    def _nnx_attribute_name(cls, segment: Any) -> str:
        if not isinstance(segment, str) or not segment or "/" in segment:
            raise ValueError(BAD_KEY.format(key=segment))
        return f"/{segment}" if hasattr(cls, segment) or is_dunder(segment) else segment

    @classmethod
    def _nnx_reserves(cls, name: str) -> bool:
        return hasattr(Dict, name)

    @classmethod
    def _nnx_check_new_name(cls, name: str) -> None:
        pass  # any name is an item

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __hash__(self) -> int: ...
        def __eq__(self, other: object, /) -> bool: ...
    else:
        __hash__ = Module.__hash__  # a Mapping compares by content and has no hash; a Module compares by identity
        __eq__ = Module.__eq__


class Sequence(Module, MutableSequence[Any]):
    """A list of Modules (and any other values). Calling it runs the items in order.

    A tuple that an item returns becomes the positional arguments of the next, a dict the keyword arguments. `ctx` is
    passed to the items that accept it.

    >>> model = nnx.Sequence([jnp.sin, jnp.cos])
    >>> len(model), float(model(0.0))
    (2, 1.0)
    """

    def __init__(self, items: Iterable[Any] = ()):
        for i, item in enumerate(items):
            setattr(self, str(i), item)

    def __len__(self) -> int:
        numbers = [int(name) for name in info_of(self).kinds if name.isdecimal()]
        return max(numbers) + 1 if numbers else 0

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._item(i) for i in range(*index.indices(len(self)))]
        return self._item(self._position(index))

    def _item(self, i: int) -> Any:
        name = str(i)
        if name not in info_of(self).kinds:
            raise AttributeError(MISSING_ITEM.format(index=i, owner=type(self).__name__), name=name, obj=self)
        return getattr(self, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            items = self._raw_items()
            items[index] = list(value)
            self._replace_all(items)
        else:
            setattr(self, str(self._position(index)), value)

    def __delitem__(self, index: Any) -> None:
        items = self._raw_items()
        del items[index if isinstance(index, slice) else self._position(index)]
        self._replace_all(items)

    def insert(self, index: int, value: Any) -> None:
        """Inserts a value before position `index`."""
        items = self._raw_items()
        if index >= len(items):
            setattr(self, str(len(items)), value)
            return
        items.insert(index, value)
        self._replace_all(items)

    def reverse(self) -> None:
        """Reverses the order of the items, in place."""
        self._replace_all(self._raw_items()[::-1])

    def __add__(self, other: "Sequence | list[Any] | tuple[Any, ...]") -> "Sequence":
        """Returns a new Sequence with the items of both; Modules are shared with it, as in lists."""
        items = _items_in_containers(other)
        return NotImplemented if items is None else Sequence([*self._raw_items(), *items])

    def __radd__(self, other: "list[Any] | tuple[Any, ...]") -> "Sequence":
        items = _items_in_containers(other)
        return NotImplemented if items is None else Sequence([*items, *self._raw_items()])

    def _position(self, index: Any) -> int:
        try:
            position = index.__index__()
        except AttributeError:
            raise TypeError(f"{type(self).__name__} indices must be integers or slices, got {index!r}") from None
        length = len(self)
        if position < 0:
            position += length
        if not 0 <= position < length:
            raise IndexError(f"index {index} is out of range for {type(self).__name__} of length {length}")
        return position

    def _raw_items(self) -> list[Any]:
        """Returns the items in their containers, so that moving an item keeps its type."""
        return [_with_kind(self, i) for i in range(len(self))]

    def _replace_all(self, items: list[Any]) -> None:
        check_level(self, "changing the items")
        new = Sequence(items)  # if one of them cannot be an item, this raises before anything has changed
        for i in range(len(self)):
            remove(self, str(i))
        for name, kind in info_of(new).kinds.items():
            store(self, name, kind, new.__dict__[name])

    def _nnx_set_item(self, segment: str, value: Any) -> None:
        if segment.isdecimal() and int(segment) > len(self):
            text = HOLE_IN_SEQUENCE.format(index=segment, owner=type(self).__name__, length=len(self))
            raise IndexError(text)
        setattr(self, segment, value)

    def __call__(self, *args: Any, ctx: Any = None, **kwargs: Any) -> Any:
        """Runs the items in order."""
        out: Any = args[0] if len(args) == 1 and not kwargs else None
        for i, item in enumerate(self):
            if not callable(item):
                raise TypeError(f"Item {i} of {type(self).__name__} is not callable: {item!r}")
            if i and isinstance(out, tuple):
                args, kwargs = out, {}
            elif i and isinstance(out, dict):
                args, kwargs = (), out
            elif i:
                args, kwargs = (out,), {}
            extra = {"ctx": ctx} if ctx is not None and "ctx" not in kwargs and accepts_ctx(item) else {}
            out = item(*args, **kwargs, **extra)
        return out if len(self) or out is not None else args

    if TYPE_CHECKING:

        def __hash__(self) -> int: ...
        def __eq__(self, other: object, /) -> bool: ...
    else:
        __hash__ = Module.__hash__
        __eq__ = Module.__eq__


def _items_in_containers(items: Any) -> list[Any] | None:
    if isinstance(items, Sequence):
        return [_with_kind(items, i) for i in range(len(items))]
    return list(items) if isinstance(items, (list, tuple)) else None


def _with_kind(sequence: Sequence, i: int) -> Any:
    kind = info_of(sequence).kinds.get(str(i))
    if isinstance(kind, Ref):
        return kind
    value = sequence[i]
    return kind.box(value) if isinstance(kind, Spec) else value


_known_to_take_ctx: "weakref.WeakKeyDictionary[Any, bool]" = weakref.WeakKeyDictionary()


def accepts_ctx(function: Any) -> bool:
    """Whether a callable takes a keyword argument `ctx`."""
    if isinstance(function, types.MethodType):
        function = function.__func__
    elif isinstance(function, Module):
        function = type(function).__call__
    try:
        answer = _known_to_take_ctx.get(function)
        if answer is None:
            answer = _known_to_take_ctx[function] = _takes_ctx(function)
        return answer
    except TypeError:  # it cannot be hashed, or does not support weak references
        return _takes_ctx(function)


def _takes_ctx(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "ctx" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def from_plain(value: Any) -> Any:
    """Returns the Sequence or Dict of a plain list, tuple or dict; inner ones that hold Modules are converted too."""
    root = _empty(value)
    todo = [(root, value)]
    while todo:  # no recursion: lists may nest deeply
        module, container = todo.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, item in items:
            if type(item) in wrappers and holds_modules(item):
                todo.append((_empty(item), item))
                item = todo[-1][0]
            if isinstance(container, dict):
                module[key] = item
            else:
                setattr(module, str(key), item)
    return root


def _empty(value: Any) -> Any:
    return Dict() if isinstance(value, dict) else Sequence()


wrappers.update({list: from_plain, tuple: from_plain, dict: from_plain})
