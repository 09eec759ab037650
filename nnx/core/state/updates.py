"""Writing State into Modules and removing it from them: all or nothing."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from nnx.core.errors import INCOMPATIBLE_CONTAINER, MUTATE_AT_OTHER_LEVEL, UNKNOWN_PATH, TraceContextError
from nnx.core.module.info import ModuleBase, info_of, values_of
from nnx.core.module.kinds import NODE, SUBMODULE, TREE, TREE_SPEC, Absent, explain_missing, is_cell, is_static
from nnx.core.repr import short
from nnx.core.state.paths import join, segment_of
from nnx.core.state.state import State, parts_of
from nnx.core.structure.flat import Flat, flat_of
from nnx.core.structure.versions import forget_flat_forms
from nnx.core.trace import current_level, same_level
from nnx.core.variables.refs import Ref
from nnx.core.variables.ties import is_mutable_tree, is_news
from nnx.core.variables.trees import fresh, in_order, key_order, leaf_types
from nnx.core.variables.variables import Container, Spec, spec_of


def check_level(module: Any, action: str) -> None:
    """Raises TraceContextError if `module` was made at another trace level."""
    if not same_level(info_of(module).level):
        raise TraceContextError(MUTATE_AT_OTHER_LEVEL.format(action=action, owner=type(module).__name__))


def check_levels(modules: Iterable[Any], action: str) -> None:
    """Raises TraceContextError if one of the Modules was made at another trace level."""
    level = current_level()
    for module in modules:
        if info_of(module).level is not level:
            check_level(module, action)


def update(root: Any, *states: State) -> None:
    """Writes the leaves of the States into the graph; later ones win. If one does not fit, nothing is changed."""
    flat = flat_of(root)
    check_levels(_owners(flat), "update_state")
    # Everything is checked before the first write, so an update that does not fit changes nothing.
    writes: list[tuple[int, Any]] = []
    additions: list[tuple[Any, str, Any, Any]] = []
    kinds = flat.key.kinds
    for state in states:
        layout, leaves = parts_of(state)
        for i, path, leaf in zip(flat.indices(layout), layout.paths, leaves, strict=True):
            if i >= 0:
                value = _fitting_value(kinds[i], leaf, path)
                if not leaf_types.get(type(value)):  # the dicts of a State may have been through JAX, which sorts them
                    value = in_order(value, key_order(flat.dicts[i][flat.names[i]], complete=True))
                writes.append((i, value))
            else:
                additions.append(_addition(root, path, leaf))
    note_mutable_trees(flat, [i for i, _ in writes], [value for _, value in writes])
    for i, value in writes:
        flat.write(i, value)
    for owner, name, kind, value in additions:
        info = info_of(owner)
        if info.kinds.get(name) is None and not is_mutable_tree(value):
            info.bind(owner.__dict__, name, kind, value)
        else:
            info.kinds[name] = kind
            owner.__dict__[name] = value
            info.keep_place(owner.__dict__)
            info.changed()


def note_mutable_trees(flat: Flat, cells: Sequence[int], values: Sequence[Any]) -> None:
    """Notes a structural change where a cell is about to hold its first mutable tree, or its first dict."""
    if all(map(leaf_types.get, set(map(type, values)))):
        return
    for i, value in zip(cells, values):
        if is_news(value, flat.dicts[i][flat.names[i]]):
            module = flat.modules[flat.key.cells[i].module]()
            if module is not None:
                info_of(module).changed()


def to_states(updates: Iterable[Any]) -> list[State]:
    """Returns the States of updates, which can be States, tuples of them, Pures and Modules."""
    states: list[State] = []
    for update in updates:
        if isinstance(update, State):
            states.append(update)
        elif isinstance(update, ModuleBase):
            states.append(flat_of(update).state())
        elif hasattr(update, "moduledef"):
            states.append(update.get_state())
        elif isinstance(update, (tuple, list)):
            states.extend(to_states(update))
        else:
            raise TypeError(
                f"An update is a State, a tuple of States, a Pure, or a Module of the same type; got {short(update)}."
            )
    return states


def _owners(flat: Flat) -> list[Any]:
    return [module for module in (weak() for weak in flat.modules) if module is not None]


def _fitting_value(kind: Any, leaf: Any, path: str) -> Any:
    if isinstance(leaf, Container):
        spec = spec_of(leaf)
        if spec is not kind and not (spec is TREE_SPEC and (kind is TREE or kind is NODE)):
            raise ValueError(INCOMPATIBLE_CONTAINER.format(target=repr(path), old=_kind_text(kind), new=spec))
        leaf = leaf.value
    elif isinstance(leaf, ModuleBase):
        reason = f"the new value is a Module ({type(leaf).__name__}), not data"
        raise ValueError(UNKNOWN_PATH.format(path=path, reason=reason))
    elif isinstance(leaf, jax.Ref):
        reason = "the new value is a jax.Ref, which no attribute can be; give its value, `ref[...]`"
        raise ValueError(UNKNOWN_PATH.format(path=path, reason=reason))
    value = fresh(leaf)
    if type(kind) is Spec and kind.on_set is not None:
        value = kind.on_set(value, kind.metadata)
    return value


def _kind_text(kind: Any) -> str:
    return {NODE: "a bare array", TREE: "a pytree of arrays"}.get(kind) or repr(kind)


def resolve(root: Any, path: str) -> tuple[Any, str]:
    """Returns the Module a path leads to, and the name of the attribute in it, which need not exist."""
    *parents, last = path.split("/")
    module, so_far = root, ""
    for segment in parents:
        name = stored_name(module, segment)
        so_far = join(so_far, segment)
        if info_of(module).kinds.get(name) is not SUBMODULE:
            raise ValueError(UNKNOWN_PATH.format(path=path, reason=f"there is no Module at {so_far!r}"))
        module = values_of(module)[name]
    if not last:
        raise ValueError(UNKNOWN_PATH.format(path=path, reason="the last segment of the path is empty"))
    return module, stored_name(module, last)


def get_path(root: Any, path: str) -> Any:
    """Returns what is at a path: a Module, the value of a variable, or a static value. `""` is the root itself.

    Raises:
        ValueError: there is nothing at the path.
    """
    if path == "":
        return root
    owner, name = resolve(root, path)
    if name not in info_of(owner).kinds:
        raise ValueError(f"There is nothing at {path!r}: {type(owner).__name__} has no attribute {name!r}.")
    values = values_of(owner)
    return values[name] if name in values else explain_missing(owner, name)


def set_path(root: Any, path: str, value: Any) -> None:
    """Assigns to the attribute at a path, as `setattr` on its owner would."""
    if path == "":
        raise ValueError("set_path() cannot replace the Module itself, which is what the path '' means.")
    owner, name = resolve(root, path)
    owner._nnx_set_item(segment_of(name), value)


def stored_name(module: Any, segment: str) -> str:
    """Returns the name under which a Module stores what a path calls `segment`."""
    mangled = f"/{segment}"
    return mangled if mangled in info_of(module).kinds else segment


def _addition(root: Any, path: str, leaf: Any) -> tuple[Any, str, Any, Any]:
    """Returns the Module, name, kind and value of a new variable, for a leaf at a path that leads to no cell yet."""
    owner, name = resolve(root, path)
    kind = info_of(owner).kinds.get(name)
    if kind is None:
        name = owner._nnx_attribute_name(name)
    elif type(kind) is not Absent:
        what = "a submodule" if kind is SUBMODULE else "a static attribute"
        reason = f"it is {what} of {type(owner).__name__}, not a variable"
        raise ValueError(UNKNOWN_PATH.format(path=path, reason=reason))
    if isinstance(leaf, Container):
        if is_static(spec_of(leaf)):
            raise ValueError(UNKNOWN_PATH.format(path=path, reason="an nnx.Static is not state"))
        new = TREE if spec_of(leaf) is TREE_SPEC and type(kind) is Absent and kind.spec is TREE else spec_of(leaf)
    elif type(kind) is Absent:
        new = kind.spec
    else:
        new = NODE if fresh(leaf) is leaf else TREE
    return owner, name, new, _fitting_value(new, leaf, path)


def pop(root: Any, filters: Sequence[Any]) -> Any:
    """Removes the entries that match the filters from the graph and returns them: one State, or one per filter."""
    if not filters:
        raise ValueError(
            "pop_state needs at least one filter that says what to remove, e.g. pop_state(nnx.Intermediate); "
            "`...` removes everything."
        )
    flat = flat_of(root)
    states = flat.state().filter(*filters)
    cell_at = flat.key.layout.index
    popped = [cell_at[path] for state in (states if isinstance(states, tuple) else (states,)) for path in state]
    _remove_cells(root, flat, popped)
    return states


def _remove_cells(root: Any, flat: Flat, cells: Sequence[int]) -> None:
    """Removes every attribute of the graph that holds one of the cells."""
    modules = [weak() for weak in flat.modules]
    places = [(modules[flat.key.owners[cell]], flat.names[cell]) for cell in cells]
    check_levels([module for module, _ in places] or [root], "pop_state")
    inside = {id(module.__dict__) for module in modules}  # the owner of a Ref is never a view, but may be viewed here
    for module, name in places:
        kind = info_of(module).kinds[name]
        if type(kind) is not Ref:
            remove(module, name)
        else:
            for owner, owner_name in kind.owners():
                if id(owner.__dict__) in inside:
                    remove(owner, owner_name)


def remove(module: Any, name: str) -> None:
    """Removes an attribute of any kind. The caller has checked the trace level."""
    info: Any = info_of(module)
    if info.is_view:
        info.own.pop(name, None)
        remove(info.source, name)
        return
    if is_cell(info.kinds[name]):
        info.unbind(module.__dict__, name)
        return
    kind = info.kinds.pop(name)
    module.__dict__.pop(name, None)
    if type(kind) is Ref:
        kind.detach(module, name)
    info.changed()
    if kind is SUBMODULE:
        forget_flat_forms()
