"""Module: a plain mutable Python object whose state can be split off and merged back.

Values are stored raw in the instance `__dict__`. See info for what is kept next to them, attributes for what an
assignment means, and structure/ for how the data of a Module is found.
"""

import abc
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar, overload

from nnx.core.errors import (
    CLASS_OF_VIEW,
    DICT_REPLACED,
    HIDES_METHOD,
    METHOD_AS_DEFAULT,
    MODULE_TO_RAW_JAX,
    NOT_A_MODULE_CLASS,
    RESERVED_NAME,
)
from nnx.core.hints.hints import (
    NO_ARITHMETIC,
    Hint,
    add_hints,
    add_layer_hints,
    explain_constructor,
    forward_only,
    refuse_arithmetic,
    refuse_name,
)
from nnx.core.hints.table import MODULE as HINTS
from nnx.core.module.attributes import assign, decide_again, refuse_state, variable_of
from nnx.core.module.call_chains import Access
from nnx.core.module.copying import deep_copy, shallow_copy
from nnx.core.module.fields import constructor_signature, prepare_dataclass
from nnx.core.module.finalizers import refuse_del
from nnx.core.module.freezing import set_frozen
from nnx.core.module.info import ModuleBase, check_slots, class_of, info_of, is_view, new_module
from nnx.core.module.kinds import SUBMODULE, Absent, absent, is_static, is_variable
from nnx.core.module.modes import set_mode
from nnx.core.module.mutable_leaf import MutableLeaf
from nnx.core.module.printing import module_repr, module_str
from nnx.core.module.scopes import scope_calls
from nnx.core.module.views import make_view
from nnx.core.old_names import adds_hint, former_names
from nnx.core.repr import article, short
from nnx.core.state.filters import Filter
from nnx.core.state.moduledef import ModuleDef
from nnx.core.state.paths import is_dunder
from nnx.core.state.pure import Pure
from nnx.core.state.selectors import ModuleSelector
from nnx.core.state.state import State
from nnx.core.state.updates import check_level, get_path, pop, remove, set_path, stored_name, to_states, update
from nnx.core.structure.build import build
from nnx.core.structure.flat import flat_of
from nnx.core.structure.walk import named_modules, refuse_pytree
from nnx.core.trace import current_level
from nnx.core.variables.refs import Ref
from nnx.core.variables.ties import own_values
from nnx.core.variables.variables import Static, Variable, spec_of

MODE_WITHOUT_ARGUMENT = "It takes no argument: model.train() sets training, model.eval() evaluation."

M = TypeVar("M", bound="Module")


if TYPE_CHECKING:
    from nnx.storage.errors import LoadReport

    _ProtocolType = abc.ABCMeta
else:
    _ProtocolType = type(Protocol)  # an ABCMeta, so that a Module can also implement abstract classes and Protocols


class ModuleType(_ProtocolType):
    """The metaclass of Modules: completes the attributes once the constructor has returned."""

    if not TYPE_CHECKING:  # a checker sees an ABCMeta already
        __instancecheck__ = abc.ABCMeta.__instancecheck__
        __subclasscheck__ = abc.ABCMeta.__subclasscheck__

    def __call__(cls: type[M], *args: Any, **kwargs: Any) -> M:  # pyright: ignore[reportGeneralTypeIssues]
        is_dataclass = cls._nnx_is_dataclass
        if is_dataclass is None:  # decided at the first instance, when decorators have run
            refuse_del(cls)  # again, for bases that have got a `__del__` since
            prepare_dataclass(cls)
            is_dataclass = dataclasses.is_dataclass(cls)
        try:
            module = type.__call__(cls, *args, **kwargs)
        except (TypeError, AttributeError, ValueError) as error:
            explain_constructor(cls, args, kwargs, error)
            raise
        if cls._nnx_is_dataclass is None:
            refuse_pytree(module)
            cls._nnx_is_dataclass = is_dataclass
        if type(module) is cls or isinstance(module, Module):
            if is_dataclass:
                _adopt_fields(module)
            info = info_of(module)
            if info.undecided:
                decide_again(module)
            info.constructing = False
        return module  # pyright: ignore[reportReturnType]  (the check above has narrowed it to Module)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "__del__":
            refuse_del(cls, value)
        super().__setattr__(name, value)
        stack: list[Any] = [cls]  # the name is no longer free, in this class and its subclasses
        while stack:
            affected = stack.pop()
            affected._nnx_free_names.discard(name)
            stack.extend(type.__subclasses__(affected))

    @property
    def __signature__(cls) -> inspect.Signature:
        return constructor_signature(cls)


class Module(ModuleBase, metaclass=ModuleType):
    """The base of all Modules.

    Assigning to an attribute decides its kind: a container makes a variable, which reads back as the raw value; an
    array is a node; a Module is a submodule; lists and dicts of Modules become `nnx.Sequence` and `nnx.Dict`; other
    pytrees of arrays are data; anything else is static.

    >>> class Scale(nnx.Module):
    ...     def __init__(self, features):
    ...         self.features = features
    ...         self.scale = nnx.Param(jnp.ones(features))
    ...     def __call__(self, x):
    ...         return x * self.scale
    >>> model = Scale(3)
    >>> state, moduledef = model.partition()
    >>> state
    State({
      'scale': Param(float32[3]),
    })
    """

    __slots__ = ()
    _nnx_fields: ClassVar[dict[str, Callable[[Any], Any]]] = {}  # how a dataclass wraps the values of its fields
    _nnx_frozen: ClassVar[bool] = False
    _nnx_finalizers: ClassVar[bool] = False  # whether `__del__` is allowed; see finalizers
    _nnx_is_dataclass: ClassVar[bool | None] = None
    _nnx_hideable: ClassVar[frozenset[str]] = frozenset()  # names of methods that an attribute can hide; filled below
    _nnx_free_names: ClassVar[set[str]] = set()  # names known not to be on the class: the next assignment does not look

    def __init_subclass__(cls, *, finalizers: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_slots(cls)
        if finalizers:
            cls._nnx_finalizers = True
        refuse_del(cls)
        cls._nnx_is_dataclass = None
        cls._nnx_free_names = set()
        if "forward" in vars(cls) and not any("__call__" in vars(base) for base in cls.__mro__):
            type.__setattr__(cls, "__call__", forward_only)
        scope_calls(cls)
        add_layer_hints(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return new_module(cls, {}, None, True)

    # Attributes

    def __setattr__(self, name: str, value: Any) -> None:
        info = self._nnx_info
        if info.level is not current_level():
            check_level(self, f"setting {name!r}")
        cls = type(self)
        # The first assignment of a name looks at the class. Later ones, of this or any other instance, need not.
        if name not in info.kinds and name not in cls._nnx_free_names:
            on_class = getattr(cls, name, None)
            if on_class is not None or name[:2] == "__":
                if name in _RESERVED or cls._nnx_reserves(name):
                    raise AttributeError(RESERVED_NAME.format(name=name, owner=cls.__name__))
                if name in Module._nnx_hideable:
                    _check_hiding(self, name, value)
                if name in ("__class__", "__dict__"):
                    self._nnx_become(name, value)
                    return
                if is_dunder(name):
                    refuse_state(self, name, value)
                if is_dunder(name) or hasattr(type(on_class), "__set__"):
                    object.__setattr__(self, name, value)
                    return
            if name in cls._nnx_fields:
                value = cls._nnx_fields[name](value)
            elif on_class is None:
                if not info.constructing:
                    cls._nnx_check_new_name(name)
                cls._nnx_free_names.add(name)
        if cls._nnx_frozen and not info.constructing:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        assign(self, name, value)

    def _nnx_become(self, name: str, value: Any) -> None:
        """Assigns `__class__`, which is a structural change; `__dict__` cannot be replaced."""
        owner = type(self).__name__
        if name == "__dict__":
            raise AttributeError(DICT_REPLACED.format(owner=owner))
        if not (isinstance(value, type) and issubclass(value, Module)):
            raise TypeError(NOT_A_MODULE_CLASS.format(owner=owner, value=short(value)))
        if is_view(self):
            raise TypeError(CLASS_OF_VIEW.format(owner=owner))
        object.__setattr__(self, name, value)
        self._nnx_info.changed()

    def __delattr__(self, name: str) -> None:
        check_level(self, f"deleting {name!r}")
        if name not in self._nnx_info.kinds:
            object.__delattr__(self, name)
            return
        if self._nnx_frozen:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        remove(self, name)

    @classmethod
    def _nnx_attribute_name(cls, segment: str) -> str:
        """Returns the name under which the instance dict stores what a path calls `segment`."""
        if segment in _RESERVED:
            raise ValueError(RESERVED_NAME.format(name=segment, owner=cls.__name__))
        return segment

    @classmethod
    def _nnx_reserves(cls, name: str) -> bool:
        return False

    @classmethod
    def _nnx_check_new_name(cls, name: str) -> None:
        """Raises AttributeError if a finished Module should not get an attribute of this name."""
        refuse_name(cls, name)

    @property
    def __jax_array__(self) -> Any:
        raise ValueError(MODULE_TO_RAW_JAX.format(name=type(self).__name__))

    # NumPy 2.4 reads this where it is asked for the dtype of a value. `jnp.result_type` and `ravel_pytree`, and with
    # them most solvers, ask for that before they try to make an array of it.
    __numpy_dtype__ = __jax_array__

    def _nnx_field(self, name: str) -> Any:
        """Returns an attribute in its container; a submodule as it is."""
        kind = info_of(self).kinds.get(name)
        if kind is SUBMODULE:
            return getattr(self, name)
        return Static(getattr(self, name)) if is_static(kind) else variable_of(self, name)

    # Splitting

    def partition(self, *filters: Filter) -> Pure[Self]:
        """Splits the Module into `(state, moduledef)`; with several filters `((state1, state2, ...), moduledef)`.

        Args:
            *filters: the filters. A node goes to the first one it matches, and every node must match one.

        Raises:
            ValueError: a node matches no filter.
        """
        flat = flat_of(self)
        moduledef: ModuleDef[Self] = ModuleDef(flat.key, flat.statics)
        if not filters:
            return Pure(flat.state(), moduledef)
        return Pure(flat.state().partition(*filters), moduledef)

    def get_state(self) -> State:
        """Returns all state, as one State."""
        return flat_of(self).state()

    def get_module_def(self) -> ModuleDef[Self]:
        """Returns the static half, as a ModuleDef."""
        flat = flat_of(self)
        return ModuleDef(flat.key, flat.statics)

    @overload
    def filter(self, filter: Filter, /) -> State: ...
    @overload
    def filter(self, first: Filter, second: Filter, /, *more: Filter) -> tuple[State, ...]: ...
    def filter(self, *filters: Filter) -> State | tuple[State, ...]:
        """Returns the part of the state that matches, as one State per filter.

        Unlike `partition`, the filters need not cover everything: entries that match no filter are dropped.

        Raises:
            ValueError: no filter was given.

        >>> model = nnx.BatchNorm(3, ctx=nnx.context(0))
        >>> params, stats = model.filter(nnx.Param, nnx.BatchStat)
        >>> list(params), list(stats)
        (['bias', 'scale'], ['mean', 'var'])
        """
        if not filters:
            raise ValueError("filter needs at least one filter, e.g. model.filter(nnx.Param); see get_state() for all.")
        return flat_of(self).state().filter(*filters)

    @overload
    def pop_state(self, filter: Filter, /) -> State: ...
    @overload
    def pop_state(self, first: Filter, second: Filter, /, *more: Filter) -> tuple[State, ...]: ...
    def pop_state(self, *filters: Filter) -> State | tuple[State, ...]:
        """Removes the entries that match from the Module and returns them, as one State per filter.

        Raises:
            ValueError: no filter was given.
        """
        return pop(self, filters)

    def update_state(self, *updates: Any) -> None:
        """Writes States (or tuples of them, a Pure, or a Module of the same type) into this Module.

        Values are updated and new variables are added, behind the others. A value that is a dict keeps the order of its
        items, which JAX sorts. If anything does not fit, nothing is changed.
        """
        for u in updates:
            if isinstance(u, Module) and class_of(u) is not class_of(self):
                raise ValueError(
                    f"update_state takes a Module of the same type, {type(self).__name__}, got {type(u).__name__}. "
                    "To copy only the part of its state that fits, pass that part: other.filter(...)."
                )
        update(self, *to_states(updates))

    def load_state(self, mapping: Mapping[str, Any], *, strict: bool = True, cast: bool = False) -> "LoadReport":
        """Loads a mapping of arrays into this Module in place, like PyTorch's `load_state_dict`.

        The new arrays take the devices and shardings of the old ones.

        Args:
            mapping: a State, or a flat or nested mapping from paths to arrays.
            strict: whether everything must fit: all paths known, every variable given, shapes and dtypes the same. If
                False, what fits is loaded, and the rest of the Module stays as it is.
            cast: whether to convert values to the dtypes of the Module. A complex value never fits a real variable.

        Returns:
            A report of what did not fit; it is false if everything did.

        Raises:
            ValueError: something does not fit, and `strict` is set. Nothing is changed.

        >>> model = nnx.Linear(2, 3, ctx=nnx.context(0))
        >>> report = model.load_state({"kernel": np.ones((2, 3), np.float32)}, strict=False)
        >>> report.missing
        ['bias']
        """
        from nnx.storage.load_state import load_state

        return load_state(self, mapping, strict, cast)

    def clone(self, copy_arrays: bool = False) -> Self:
        """Returns an independent copy with the same sharing.

        Args:
            copy_arrays: whether to copy the buffers of JAX arrays as well. A clone survives the donation of the
                original to `nnx.jit` without it.
        """
        flat = flat_of(self)
        graph = build(flat.key, flat.statics, own_values(flat.values(), flat.ties, copy_arrays))
        return graph.modules[flat.key.roots[0]]

    def view(self: Self, **attributes: Any) -> Self:
        """Returns this model with other values for some static attributes: a second graph on the same variables.

        The attributes are set on every submodule that has them, as `train()` and `eval()` do with modes. They are the
        view's own; everything else is the model's. A variable that is written, added or deleted through either is
        written, added or deleted in both, and a static attribute or submodule that is set through either changes for
        both. Passed to a transform together, they have one gradient. A clone of a view is an ordinary Module.

        Args:
            **attributes: the static attributes and their values.

        Raises:
            ValueError: no submodule has a static attribute of that name, or the value is not static.

        >>> model = nnx.Sequence([nnx.Linear(2, 2, ctx=nnx.context(0)), nnx.Dropout(0.5)]).train()
        >>> evaluated = model.view(deterministic=True)
        >>> model[0].bias += 1
        >>> evaluated[0].bias, evaluated[1].deterministic, model[1].deterministic
        (Array([1., 1.], dtype=float32), True, False)
        """
        return make_view(self, attributes)

    @property
    def apply(self) -> Access:
        """Runs the Module on a copy: `out, new_module = model.apply(x)`, `model.apply.encoder.layers[0](x)`."""

        def run(find: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
            module = Module.clone(self)
            return find(module)(*args, **kwargs), module

        return Access(run)

    # Looking around

    def modules(self) -> Iterator["Module"]:
        """Yields every distinct Module, including this one, depth first, in the order of the attributes."""
        return (module for _, module in named_modules(self))

    def named_modules(self) -> Iterator[tuple[str, "Module"]]:
        """Yields every distinct Module with its canonical path, depth first; the path of this one is `""`."""
        return named_modules(self)

    def for_each(self, module_type: type, fn: Callable[[Any], Any]) -> None:
        """Calls `fn` on every distinct instance of a type in this Module, including itself. Cycles are allowed."""
        for module in list(Module.modules(self)):
            if isinstance(module, module_type):
                fn(module)

    @adds_hint(lambda error, kwargs: MODE_WITHOUT_ARGUMENT)
    def train(self: Self) -> Self:
        """Switches every layer that has a mode (dropout, batch statistics) to training; a call can override it."""
        set_mode(self, True)
        return self

    def eval(self: Self) -> Self:
        """Switches every layer that has a mode to evaluation; a call can override it."""
        set_mode(self, False)
        return self

    def freeze(self: Self, where: Filter | ModuleSelector) -> Self:
        """Marks Variables as not trained, for `nnx.grad`, `nnx.Optimizer` and `nnx.summary`.

        Args:
            where: a Module selector (a Module type, a path or glob such as `"encoder/layers/*"`, `...`), which selects
                everything in those Modules; a filter such as `nnx.LoRAParam` or `nnx.PathMatches("**/bias")`; a
                function `f(path, x)`, which is asked about every Module and every Variable; or a list of these.

        Raises:
            ValueError: `where` selects nothing.

        >>> model = nnx.Linear(2, 3, ctx=nnx.context(0)).freeze(nnx.PathMatches("bias"))
        >>> list(nnx.grad(lambda m: m(jnp.ones(2)).sum())(model))
        ['kernel']
        """
        set_frozen(self, where, True, "freeze")
        return self

    def unfreeze(self: Self, where: Filter | ModuleSelector = ...) -> Self:
        """Removes the mark that `freeze` sets; by default from everything."""
        set_frozen(self, where, False, "unfreeze")
        return self

    def variable(self, name: str) -> Any:
        """Returns the container behind an attribute: its Variable type and metadata, with the current value.

        >>> model = nnx.Dict(w=nnx.Param(jnp.ones(3), ("embed",)))
        >>> model.variable("w")
        Param(float32[3], sharding=('embed',))
        """
        return variable_of(self, stored_name(self, name))

    def collections(self) -> set[str]:
        """Returns the names of the collections present."""
        return {kind.type.collection for kind in flat_of(self).key.kinds if is_variable(kind)}

    @former_names(sep="The separator of paths is always `/`.")
    def mutable_state_dict(self) -> dict[str, MutableLeaf]:
        """Returns `{path: leaf}`; `leaf.value` reads and writes the Module, other attributes read the metadata."""
        return {path: MutableLeaf(self, path) for path in flat_of(self).key.layout.paths}

    def get_path(self, path: str) -> Any:
        """Returns what is at a path: a Module, the value of a variable, or a static value. `""` is the Module itself.

        Raises:
            ValueError: there is nothing at the path.
        """
        return get_path(self, path)

    def set_path(self, path: str, value: Any) -> None:
        """Assigns to the attribute at a path, as `setattr` on its owner would.

        >>> model = nnx.Sequence([nnx.Linear(2, 3, ctx=nnx.context(0))])
        >>> model.set_path("0", nnx.Identity())
        >>> model.get_path("0")
        Identity()
        """
        set_path(self, path, value)

    def _nnx_set_item(self, segment: str, value: Any) -> None:
        setattr(self, segment, value)

    def sow(self, variable_type: type[Variable[Any]], name: str, value: Any) -> None:
        """Appends a value to the tuple in a variable of that type; the first use creates the variable.

        Raises:
            ValueError: the attribute exists but is not a variable, has another type, or does not hold a tuple.

        >>> model = nnx.Dict()
        >>> model.sow(nnx.Intermediate, "norm", 0.5)
        >>> model.sow(nnx.Intermediate, "norm", 0.7)
        >>> model.norm
        (0.5, 0.7)
        """
        info = self._nnx_info
        kind = info.kinds.get(name)
        if kind is None or type(kind) is Absent:
            setattr(self, name, variable_type((value,)))
            info.mark_sown(name)
            return
        spec = spec_of(kind) if isinstance(kind, Ref) else kind
        owner = type(self).__name__
        before = self.__dict__[name]
        if not is_variable(spec):
            raise ValueError(f"Expected {name!r} of {owner} to be a Variable, got {short(before)}.")
        if spec.type is not variable_type:
            raise ValueError(
                f"Expected {name!r} of {owner} to be of type {variable_type.__name__!r}, got {article(repr(spec))}."
            )
        if not isinstance(before, tuple):
            text = f"Expected {name!r} of {owner} to be a tuple, got {short(before)}: sow() appends to tuples."
            raise ValueError(text)
        setattr(self, name, (*before, value))
        info.mark_sown(name)

    def __repr__(self) -> str:
        return module_repr(self)

    def __str__(self) -> str:
        is_own = type(self).__repr__ is Module.__repr__  # otherwise the class defines its own repr
        return module_str(self) if is_own else repr(self)

    def __dir__(self) -> list[str]:
        hinted = {name for base in type(self).__mro__ for name, value in vars(base).items() if type(value) is Hint}
        return [name for name in super().__dir__() if name not in hinted or hasattr(self, name)]

    # Copying

    def __copy__(self) -> Self:
        return shallow_copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return deep_copy(self, memo)

    def __getstate__(self) -> Any:
        kinds = self._nnx_info.kinds
        return kinds, {name: self.__dict__[name] for name in kinds if name in self.__dict__}

    def __setstate__(self, state: Any) -> None:
        kinds, values = state
        info = self._nnx_info
        info.level = current_level()
        for name, kind in kinds.items():
            info.kinds[name] = absent(type(self), kind.spec) if type(kind) is Absent else kind
            if type(kind) is Ref:
                kind.attach(self, name)
        vars(self).update(values)
        info.changed()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_unpickled, (type(self),), self.__getstate__())


_RESERVED = frozenset(("apply", "clone", "filter", "for_each", "get_module_def", "get_state", "mutable_state_dict"))
_RESERVED |= {"partition", "pop_state", "sow", "update_state"}
"""The methods that programs call on any Module; they can never be attributes."""

# Attributes can hide the others: models written before there was such a method may use its name. For their sake, the
# library itself calls every method as `Module.get_state(module)`.
Module._nnx_hideable = frozenset(name for name in vars(Module) if not name.startswith("_")) - _RESERVED


def _check_hiding(module: Module, name: str, value: Any) -> None:
    """Checks the first assignment to an attribute with the name of a method.

    Raises:
        AttributeError: the constructor has returned, so this is more likely a forgotten call: `model.train = False`.
        TypeError: the value is the method itself, which `dataclasses.dataclass` takes for the default of the field.
    """
    owner = type(module).__name__
    if not info_of(module).constructing:
        raise AttributeError(HIDES_METHOD.format(name=name, owner=owner))
    if value is vars(Module)[name]:
        raise TypeError(METHOD_AS_DEFAULT.format(name=name, owner=owner))


def _adopt_fields(module: Module) -> None:
    """Sets the fields that the constructor of a frozen dataclass stored behind `__setattr__`."""
    kinds, values = info_of(module).kinds, vars(module)
    for field in dataclasses.fields(module):  # pyright: ignore[reportArgumentType]
        if field.name in values and field.name not in kinds:
            Module.__setattr__(module, field.name, values.pop(field.name))


def _unpickled(cls: type) -> Any:
    return new_module(cls, {})


add_hints(Module, HINTS)
refuse_arithmetic(Module, NO_ARITHMETIC)
