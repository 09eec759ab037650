"""What assigning to an attribute means: which kind the attribute gets, and which changes are structural.

A value falls into a *category* by its type alone; the kind also depends on what is there already and on the content.
"""

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import numpy as np

from nnx.core.caches import outlives_caches
from nnx.core.context import Context
from nnx.core.errors import (
    BAD_NAME,
    CAPTURES_MODULE,
    DUNDER_NAME,
    HOLDS_JAX_REF,
    INCOMPATIBLE_CONTAINER,
    MODULE_INTO_VARIABLE,
    NOT_DATA,
    OWN_OF_VIEW,
    STATIC_HOLDS_ARRAY,
    STORES_CONTEXT,
)
from nnx.core.foreign_models import refuse_equinox_module, refuse_foreign_model
from nnx.core.module.info import ModuleBase, info_of
from nnx.core.module.kinds import NODE, STATIC, SUBMODULE, TREE, TREE_SPEC, Absent, explain_missing, is_cell, is_static
from nnx.core.repr import short
from nnx.core.statics.captures import find_array, find_captured
from nnx.core.structure.versions import forget_flat_forms
from nnx.core.trace import is_tracer
from nnx.core.variables.foreign_dicts import refuse_foreign_dicts
from nnx.core.variables.refs import Ref
from nnx.core.variables.ties import is_mutable_tree, is_news
from nnx.core.variables.trees import contains_itself, find_module, fresh, items_of, leaf_types
from nnx.core.variables.variables import Container, ContainerMetadata, Node, Spec, Static, spec_of

# Categories of value, found once per type
_CONTAINER, _REF, _MODULE, _ARRAY, _ATOM, _PLAIN, _OTHER = range(7)

_ATOMS = (int, float, complex, bool, str, bytes, type(None), type, np.dtype, types.BuiltinFunctionType)
_NUMBERS = (int, float, complex, np.generic)
_categories: dict[type, int] = {list: _PLAIN, tuple: _PLAIN, dict: _PLAIN}
_node_types: tuple[type, ...] = (jax.Array, jax.core.Tracer, jax.ShapeDtypeStruct, np.ndarray)

wrappers: dict[type, Callable[[Any], Any]] = {}
"""The functions that turn a plain list, tuple or dict of Modules into a Module; entered by dict_sequence."""


def register_node_type(cls: type) -> None:
    """Makes values of a type nodes: assigned to a Module or Pytree attribute, they are data.

    Args:
        cls: the type. JAX must accept its values, as arrays or as a registered pytree.

    Raises:
        TypeError: `cls` is not a class.
    """
    global _node_types
    if not isinstance(cls, type):
        raise TypeError(f"nnx.register_node_type takes a class, got {short(cls)}.")
    _node_types = (*_node_types, cls)
    _categories.pop(cls, None)


def is_node_type(value: Any) -> bool:
    """Whether a value has the type of an array, a registered type, or that of a Node container."""
    return _category(value) == _ARRAY or isinstance(value, Node)


def _category(value: Any) -> int:
    cls = type(value)
    category = _categories.get(cls)
    if category is None:
        if isinstance(value, ModuleBase):
            return _MODULE
        if isinstance(value, Container):
            category = _CONTAINER
        elif isinstance(value, Ref):
            category = _REF
        elif isinstance(value, _node_types):
            category = _ARRAY
        elif cls in _ATOMS or isinstance(value, np.dtype):  # every dtype has a class of its own
            category = _ATOM
        else:
            category = _OTHER
        if outlives_caches(cls):
            _categories[cls] = category
    return category


def assign(module: Any, name: str, value: Any) -> None:
    """Sets an attribute. The caller has checked the trace level.

    Raises:
        ValueError: the value does not fit the attribute, or cannot be an attribute.
    """
    info = module._nnx_info
    old = info.kinds.get(name)
    category = _category(value)
    if old is None and category == _CONTAINER and value._spec.is_plain:  # the fast path of constructors
        inner = value.value
        if leaf_types.get(type(inner)) and name.isidentifier():
            info.bind(module.__dict__, name, value._spec, inner)
            return
    if type(old) is Spec:
        if category == _ARRAY and old.is_plain:  # the fast path of training steps
            module.__dict__[name] = value
            return
        _assign_to_variable(module, name, old, category, value)
    elif old is NODE and category == _ARRAY:
        module.__dict__[name] = value
    elif type(old) is Ref and category != _REF:
        _refuse_module(module, name, spec_of(old), category, value)
        old.write(value)
    else:
        kind, value = decide(module, name, category, value)
        store(module, name, kind, value)


def _assign_to_variable(module: Any, name: str, spec: Spec, category: int, value: Any) -> None:
    if category == _REF:
        store(module, name, value, value)
        return
    if category == _CONTAINER:
        if spec_of(value) is not spec:
            target = f"attribute {name!r} of {type(module).__name__}"
            raise ValueError(INCOMPATIBLE_CONTAINER.format(target=target, old=spec, new=spec_of(value)))
        value = value.value if spec.type is Static else fresh(value.value)
    else:
        _refuse_module(module, name, spec, category, value)
    if spec.type is Static:
        _refuse_captured(module, name, value)
        store(module, name, spec, value)
        return
    if spec.on_set is not None:
        value = spec.on_set(value, spec.metadata)
    if is_news(value, module.__dict__.get(name)):
        info_of(module).changed()
    module.__dict__[name] = value


def _refuse_module(module: Any, name: str, spec: Spec, category: int, value: Any) -> None:
    found = find_module(value) if category in (_PLAIN, _OTHER) else None
    if isinstance(found, jax.Ref):
        _refuse_jax_ref(module, name, value)
    if category == _MODULE or found is not None or (category == _PLAIN and holds_modules(value)):
        owner, text = type(module).__name__, type(value).__name__
        raise ValueError(MODULE_INTO_VARIABLE.format(value=text, name=name, owner=owner, type=spec.type.__name__))


def decide(module: Any, name: str, category: int, value: Any) -> tuple[Any, Any]:
    """Returns the kind an attribute gets from this value, and what is stored."""
    if category == _ATOM:
        return STATIC, value
    if category == _ARRAY:
        if is_tracer(value) and isinstance(value, jax.Ref):  # made in this trace, or an argument of it
            _refuse_jax_ref(module, name, value)
        return NODE, value
    if category == _MODULE:
        return SUBMODULE, value
    if category == _REF:
        return value, value
    if category == _CONTAINER:
        spec = spec_of(value)
        if spec.type is Static:
            _refuse_captured(module, name, value.value)
            return spec, value.value
        inner = fresh(value.value)
        return spec, inner if spec.on_set is None else spec.on_set(inner, spec.metadata)
    if _is_made_of_atoms(value):
        return STATIC, value
    if isinstance(value, ContainerMetadata):
        raise ValueError(
            f"Cannot assign attribute {name!r} of {type(module).__name__}: the result of an initializer with metadata "
            f"has to be wrapped in a container, e.g. nnx.Param({name}_init(...))."
        )
    if isinstance(value, Context):
        raise ValueError(STORES_CONTEXT.format(name=name, owner=type(module).__name__))
    refuse_foreign_model(value, f"The attribute {name!r} of {type(module).__name__}")
    if category == _PLAIN and holds_modules(value):
        return SUBMODULE, wrappers[type(value)](value)
    if _is_data(module, name, value):
        return TREE, value
    refuse_foreign_dicts(value, f"The attribute {name!r} of {type(module).__name__}", with_arrays=True)
    _refuse_captured(module, name, value)
    _refuse_array(module, name, value)
    return STATIC, value


def _is_made_of_atoms(value: Any) -> bool:
    """Whether a value is a tuple of atoms or a function of nothing but code and atoms.

    Most settings of a layer are, and for these no search for arrays and Modules is needed: searches would take a third
    of the time to build a large model.
    """
    if type(value) is tuple:
        held: Any = value
    elif type(value) is types.FunctionType and value.__closure__ is None and not value.__dict__:
        held = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    else:
        return False
    return all(map(_ATOMS.__contains__, map(type, held)))


def store(module: Any, name: str, kind: Any, value: Any) -> None:
    """Stores a value whose kind has been decided, and notes the structural change if it is one."""
    info, values = info_of(module), module.__dict__
    if info.is_view:
        _store_in_view(module, info, name, kind, value)
        return
    old = info.kinds.get(name)
    if old is None and not name.isidentifier():
        _refuse_bad_name(module, name)
    if old is kind and kind in (NODE, TREE):
        if is_news(value, values.get(name)):
            info.changed()
        values[name] = value
        return
    if old is kind and (kind is STATIC or kind is SUBMODULE):
        before = values[name]
        if before is value:
            return
        if kind is STATIC and type(before) is type(value) and _category(value) == _ATOM and _same_atom(before, value):
            return
    if (old is None or is_cell(old)) and is_cell(kind) and not is_mutable_tree(value):
        info.bind(values, name, kind, value)
        return
    _restructure(module, name, kind, value)


def _restructure(module: Any, name: str, kind: Any, value: Any) -> None:
    """Stores a value where flat forms have to notice: another kind, submodule or static value, or a mutable tree."""
    info, values = info_of(module), module.__dict__
    old = info.kinds.get(name)
    # A Ref knows its owners, so that a write through one attribute reaches the others. Attaching comes first: it raises
    # if the Ref is of another trace level, and then nothing has changed.
    if type(kind) is Ref:
        kind.attach(module, name)
        value = kind.__dict__["value"]
    if type(old) is Ref:
        old.detach(module, name)
        if old is kind:  # assigned to the attribute it was on: detaching has removed the new owner as well
            kind.attach(module, name)
    info.kinds[name] = kind
    values[name] = value
    if type(old) is Absent:
        info.keep_place(values)
    if kind is STATIC and type(value) in wrappers:
        info.undecided = True
    info.changed()
    if old is SUBMODULE:
        forget_flat_forms()


def _store_in_view(view: Any, info: Any, name: str, kind: Any, value: Any) -> None:
    if not info.owns(name):
        store(info.source, name, kind, info.stored(value))
        return
    if not is_static(kind):
        raise ValueError(OWN_OF_VIEW.format(name=name, owner=type(view).__name__, value=short(value)))
    info.own[name] = value
    info.changed()


def static_value(module: Any, name: str, value: Any) -> Any:
    """Returns a value for a static attribute.

    Raises:
        ValueError: it would not be static if it were assigned, or it cannot be an attribute.
    """
    kind, value = decide(module, name, _category(value), value)
    if not is_static(kind):
        raise ValueError(OWN_OF_VIEW.format(name=name, owner=type(module).__name__, value=short(value)))
    return value


def refuse_state(module: Any, name: str, value: Any) -> None:
    """Raises AttributeError if a value for a name of Python's own, such as `__doc__`, holds data or Modules."""
    kind, _ = decide(module, name, _category(value), value)
    if not is_static(kind):
        raise AttributeError(DUNDER_NAME.format(name=name, owner=type(module).__name__, value=short(value)))


def _refuse_bad_name(module: Any, name: str) -> None:
    segment = name[1:] if name[:1] == "/" else name  # how a Dict stores a key that is also an attribute of its class
    if not segment or "/" in segment or module._nnx_attribute_name(segment) != name:
        raise ValueError(BAD_NAME.format(name=name, owner=type(module).__name__))


def _same_atom(before: Any, value: Any) -> bool:
    return before == value and not isinstance(value, (float, complex))


def holds_modules(value: Any) -> bool:
    """Whether a plain list, tuple or dict holds Modules, containers or Refs, at any depth."""
    stack, seen = [value], set()
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        for inner in items_of(item):
            category = _category(inner)
            if category in (_MODULE, _CONTAINER, _REF):
                return True
            if category == _PLAIN:
                stack.append(inner)
    return False


def _is_data(module: Any, name: str, value: Any) -> bool:
    """Whether a value is a pytree that holds arrays.

    Raises:
        ValueError: it is, but it also holds something that JAX does not accept.
    """
    if isinstance(value, (list, dict, tuple)) and contains_itself(value):
        return False
    try:
        leaves = jax.tree.leaves(value)
    except (TypeError, ValueError):  # a dict whose keys cannot be sorted is not a pytree
        return False
    if len(leaves) == 1 and leaves[0] is value:
        return False
    if not any(_category(leaf) == _ARRAY for leaf in leaves):
        return False
    refuse_equinox_module(value, name, type(module).__name__)
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        if _category(leaf) != _ARRAY and not isinstance(leaf, _NUMBERS):
            route = f"{name}{jax.tree_util.keystr(path)}"
            text = {"name": name, "owner": type(module).__name__, "type": type(value).__name__}
            raise ValueError(NOT_DATA.format(**text, route=route, leaf=short(leaf)))
    return True


def _refuse_captured(module: Any, name: str, value: Any) -> None:
    if _category(value) == _ATOM:
        return
    found = find_captured(value, (ModuleBase, jax.Ref))
    if found is not None:
        captured, route = found
        if isinstance(captured, jax.Ref):
            _refuse_jax_ref(module, name, value, route)
        text = CAPTURES_MODULE.format(
            name=name, owner=type(module).__name__, value=short(value), route=f"{type(captured).__name__}: {route}"
        )
        raise ValueError(text)


def _refuse_array(module: Any, name: str, value: Any) -> None:
    found = None if isinstance(value, types.FunctionType) else find_array(value)
    if found is not None:
        array, route = found
        route = f"{short(array)} at {route.replace('it', name, 1)}"
        text = {"name": name, "owner": type(module).__name__, "value": short(value), "route": route}
        raise ValueError(STATIC_HOLDS_ARRAY.format(**text))


def _refuse_jax_ref(module: Any, name: str, value: Any, route: str = "it") -> None:
    holds = "is" if isinstance(value, jax.Ref) else "holds"
    raise ValueError(HOLDS_JAX_REF.format(name=name, owner=type(module).__name__, holds=holds, route=route))


def decide_again(module: Any) -> None:
    """Decides again about the static lists and dicts of a constructor: by now they may hold Modules or arrays."""
    kinds, values = info_of(module).kinds, module.__dict__
    info_of(module).undecided = False
    filled = [name for name, kind in kinds.items() if kind is STATIC and type(values[name]) in wrappers]
    for name in filled:
        value = values[name]
        if value:
            kind, stored = decide(module, name, _PLAIN, value)
            if kind is not STATIC:
                store(module, name, kind, stored)


def set_spec(module: Any, name: str, spec: Spec) -> None:
    """Gives a variable another type or other metadata; its value stays."""
    kinds = info_of(module).kinds
    if type(kinds[name]) is Ref:
        kinds[name].respecify(spec)
    else:
        kinds[name] = spec
        info_of(module).changed()


def variable_of(module: Any, name: str) -> Any:
    """Returns the container behind an attribute: its type and metadata with the current value.

    Raises:
        AttributeError: there is no such attribute.
        ValueError: the attribute is a submodule or a static value.
    """
    info = info_of(module)
    kind = info.kinds.get(name)
    if type(kind) is Ref:
        return kind.variable
    if type(kind) is Spec:
        return kind.box(module.__dict__[name])
    if kind is NODE or kind is TREE:
        return TREE_SPEC.box(module.__dict__[name])
    if type(kind) is Absent:
        explain_missing(module, name)
    if kind is None:
        getattr(module, name)  # explains what is missing
    what = "a submodule" if kind is SUBMODULE else "a static attribute"
    raise ValueError(f"{name!r} of {type(module).__name__} is {what}, not a variable.")
