"""Invariants over random Module graphs with sharing, cycles, Refs and nested containers."""

import copy
import functools
import pickle
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import nnx
from tests.models import Count


class A(nnx.Module):
    pass


class B(nnx.Module):
    pass


NAMES = ("a", "b", "c", "d")
STATICS = (0, 1, 1.0, True, None, "text", (1, 2), [1, 2], {"k": [1]}, {1, 2})
VARIABLE_TYPES = (nnx.Param, nnx.BatchStat, Count)


# Recipes: a graph as plain data, so that it can be built again, and in another order.


@dataclass(frozen=True)
class Recipe:
    """The classes of the Modules, the types of the shared cells, and what stands in which slot of which Module."""

    classes: tuple[type, ...]
    refs: tuple[type, ...]
    slots: tuple[tuple[int, str, Any], ...]


@functools.cache
def specs(modules: int, refs: int, depth: int = 2) -> st.SearchStrategy:
    """What an attribute may hold, as data."""
    simple = st.one_of(
        st.tuples(st.just("module"), st.integers(0, modules - 1)),
        st.tuples(
            st.just("variable"), st.sampled_from(VARIABLE_TYPES), st.sampled_from([None, ("x",)]), st.integers(0, 9)
        ),
        st.tuples(st.just("array"), st.integers(0, 9)),
        st.tuples(st.just("tree"), st.integers(0, 9)),
        st.tuples(st.just("static"), st.integers(0, len(STATICS) - 1)),
        *([st.tuples(st.just("ref"), st.integers(0, refs - 1))] if refs else []),
    )
    if depth == 0:
        return simple
    inner = specs(modules, refs, depth - 1)
    return st.one_of(
        simple,
        simple,
        st.tuples(st.just("list"), st.lists(inner, max_size=3).map(tuple)),
        st.tuples(st.just("dict"), st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)),
    )


@st.composite
def recipes(draw) -> Recipe:
    classes = draw(st.lists(st.sampled_from([A, B, nnx.Dict]), min_size=1, max_size=5))
    refs = draw(st.lists(st.sampled_from(VARIABLE_TYPES), max_size=2))
    places = [(i, name) for i in range(len(classes)) for name in NAMES]
    chosen = draw(st.lists(st.sampled_from(places), unique=True, min_size=1, max_size=10))
    slots = [(i, name, draw(specs(len(classes), len(refs)))) for i, name in chosen]
    return Recipe(tuple(classes), tuple(refs), tuple(slots))


def array(size: int, value: float) -> jax.Array:
    """Not weakly typed: JAX 0.10 loses half of that in a pickle, and then types sums of other arrays by it."""
    return jnp.full((size,), value, jnp.float32)


def build(recipe: Recipe, order: list[int] | None = None) -> nnx.Module:
    """The root of the graph that a recipe describes, its slots filled in the given order."""
    modules = [cls() for cls in recipe.classes]
    refs = [nnx.Ref(kind(array(2, 100.0 + i))) for i, kind in enumerate(recipe.refs)]

    def value(spec) -> Any:
        match spec:
            case ("module", i):
                return modules[i]
            case ("variable", kind, sharding, n):
                return kind(array(2, float(n)), sharding)
            case ("array", n):
                return array(3, float(n))
            case ("tree", n):
                items = {"v": [jnp.zeros(1), {"y": n, "x": array(1, float(n))}], "k": array(1, float(n))}
                return items if n % 2 else dict(reversed(items.items()))
            case ("static", i):
                return copy.deepcopy(STATICS[i])
            case ("ref", i):
                return refs[i]
            case ("list", items):
                # A Module or container inside makes it a Sequence, whatever else it holds.
                return [nnx.Param(jnp.zeros(1)), *map(value, items)]
            case ("dict", items):
                return {"first": nnx.Param(jnp.zeros(1)), **{key: value(item) for key, item in items.items()}}
        raise AssertionError(spec)

    for index in order if order is not None else range(len(recipe.slots)):
        owner, name, spec = recipe.slots[index]
        if isinstance(modules[owner], nnx.Dict):
            modules[owner][name] = value(spec)
        else:
            setattr(modules[owner], name, value(spec))
    return modules[0]


# Looking at a graph from outside, without partition.


def members(m: nnx.Module) -> list[tuple[str, Any]]:
    if isinstance(m, nnx.Dict):
        return sorted(m.items())
    if isinstance(m, nnx.Sequence):
        return [(str(i), m[i]) for i in range(len(m)) if hasattr(m, str(i))]  # popping state leaves gaps
    return [(name, getattr(m, name)) for name in (*NAMES, "new") if hasattr(m, name)]


def container_of(m: nnx.Module, name: str) -> Any:
    """The container behind an attribute, or None where it is no variable."""
    leaf = m.mutable_state_dict().get(name)
    if leaf is None:
        return None
    try:
        container = m.variable(name)
    except (AttributeError, ValueError, KeyError, TypeError):
        return None
    return container if isinstance(container, nnx.Variable) else None


def same_static(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_static, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_static(a[k], b[k]) for k in a)
    return a == b


def is_data(value: Any) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))


def differences(left: nnx.Module, right: nnx.Module, *, values: bool) -> list[str]:
    """Walks two graphs side by side; empty when they are isomorphic (with ``values``, equal in their data too)."""
    found: list[str] = []
    partner: dict[int, nnx.Module] = {}
    taken: dict[int, nnx.Module] = {}
    cells: dict[str, list] = {"left": [], "right": []}
    stack = [("", left, right)]
    while stack:
        path, x, y = stack.pop()
        if id(x) in partner or id(y) in taken:
            if partner.get(id(x)) is not y or taken.get(id(y)) is not x:
                found.append(f"{path}: sharing")
            continue
        partner[id(x)], taken[id(y)] = y, x
        if type(x) is not type(y):
            found.append(f"{path}: class")
            continue
        mine, theirs = members(x), members(y)
        if [name for name, _ in mine] != [name for name, _ in theirs]:
            found.append(f"{path}: names")
            continue
        for (name, a), (_, b) in zip(mine, theirs, strict=True):
            here = f"{path}/{name}"
            if isinstance(a, nnx.Module) or isinstance(b, nnx.Module):
                if isinstance(a, nnx.Module) and isinstance(b, nnx.Module):
                    stack.append((here, a, b))
                else:
                    found.append(f"{here}: kind")
                continue
            if is_data(a) != is_data(b):
                found.append(f"{here}: kind")
                continue
            if not is_data(a):
                if not same_static(a, b):
                    found.append(f"{here}: static")
                continue
            p, q = container_of(x, name), container_of(y, name)
            if type(p) is not type(q) or (p is not None and p.sharding != q.sharding):
                found.append(f"{here}: variable")
                continue
            if p is None and jax.tree.structure(a) != jax.tree.structure(b):
                found.append(f"{here}: pytree")
                continue
            cells["left"].append((here, a))
            cells["right"].append((here, b))
            if values:
                same = jax.tree.structure(a) == jax.tree.structure(b) and all(
                    np.array_equal(s, t) for s, t in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
                )
                if not same:
                    found.append(f"{here}: value")
    # Only a shared cell makes two variables hold one array: every recipe makes fresh ones.
    classes = [
        [next(i for i, (_, other) in enumerate(cells[side]) if other is value) for _, value in cells[side]]
        for side in ("left", "right")
    ]
    if not found and classes[0] != classes[1]:
        found.append("shared cells")
    return found


def order_of(m: nnx.Module) -> list[Any]:
    """The attributes of all Modules in order, and the items of the dicts among them."""

    def items(value):
        if isinstance(value, dict):
            return [(key, items(item)) for key, item in value.items()]
        return [items(item) for item in value] if isinstance(value, list | tuple) else None

    return [
        (path, [*vars(module)], [*module] if isinstance(module, nnx.Dict) else None, items(vars(module)))
        for path, module in m.named_modules()
    ]


COPIES = (
    nnx.Module.clone,
    lambda m: m.partition().merge(),
    lambda m: m.partition(nnx.Param, ...).merge(),
    copy.copy,
    copy.deepcopy,
    lambda m: pickle.loads(pickle.dumps(m)),
    lambda m: jax.tree.map(lambda leaf: leaf, m.get_module_def()).merge(m.get_state()),
)


def snapshot(m: nnx.Module):
    state, moduledef = m.partition()
    return [(path, type(leaf), jax.tree.leaves(leaf)) for path, leaf in state.items()], moduledef


def assert_same(before, after):
    assert before[1] == after[1]
    assert [entry[:2] for entry in before[0]] == [entry[:2] for entry in after[0]]
    for (_, _, then), (_, _, now) in zip(before[0], after[0], strict=True):
        assert all(a is b or a == b for a, b in zip(then, now, strict=True))


# The invariants.


@given(recipes())
def test_merge_of_partition_is_isomorphic(recipe):
    m = build(recipe)
    state, moduledef = m.partition()
    again = moduledef.merge(state)
    assert differences(m, again, values=True) == []
    assert again.get_module_def() == moduledef
    assert list(again.get_state()) == list(state)
    assert again.get_state() == state


@given(recipes())
def test_merge_of_many_parts_is_isomorphic(recipe):
    m = build(recipe)
    states, moduledef = m.partition(nnx.Param, "batch_stats", nnx.buffers, ...)
    assert sum(map(len, states)) == len(m.get_state())
    assert differences(m, moduledef.merge(*states), values=True) == []


@given(recipes())
def test_a_graph_is_isomorphic_after_flattening_its_pure(recipe):
    m = build(recipe)
    leaves, treedef = jax.tree.flatten(m.partition())
    assert differences(m, jax.tree.unflatten(treedef, leaves).merge(), values=True) == []


@given(recipes(), st.randoms(use_true_random=False))
def test_state_does_not_depend_on_construction_order_and_moduledef_does(recipe, random):
    order = list(range(len(recipe.slots)))
    random.shuffle(order)
    first, second = build(recipe), build(recipe, order)
    assert list(first.get_state()) == list(second.get_state())
    assert first.get_state() == second.get_state()
    names = [[(path, [*vars(m)]) for path, m in sorted(root.named_modules())] for root in (first, second)]
    assert (first.get_module_def() == second.get_module_def()) == (names[0] == names[1])
    differences = first.get_module_def().diff(second.get_module_def())
    assert len(differences) == sum(one != other for one, other in zip(*names, strict=True))


@given(recipes(), st.sampled_from(COPIES))
def test_every_copy_has_the_order_of_the_original(recipe, make_copy):
    m = build(recipe)
    assert order_of(make_copy(m)) == order_of(m)


@settings(max_examples=25)
@given(recipes(), st.randoms(use_true_random=False))
def test_a_function_sees_and_leaves_the_order_that_plain_python_would(recipe, random):
    places = [(owner, name) for owner, name, _ in recipe.slots]
    moved = random.sample(places, min(2, len(places)))

    def shuffle(root):
        orders = [order_of(root)]
        for module in list(root.modules()):
            for name in [name for owner, name in moved if recipe.classes[owner] is type(module)]:
                if name in vars(module) and isinstance(vars(module)[name], dict) and "v" in vars(module)[name]:
                    vars(module)[name]["k"] = vars(module)[name].pop("k")  # in place
                elif name in vars(module) and not isinstance(vars(module)[name], nnx.Module | dict | list):
                    value = vars(module)[name]
                    delattr(module, name)
                    setattr(module, name, value)
        return [*orders, order_of(root)]

    eager, lifted = build(recipe), build(recipe)
    seen = []
    nnx.eval_shape(lambda m: seen.extend(shuffle(m)), lifted)
    nnx.grad(lambda m, x: (seen.extend(shuffle(m)), x)[1], argnums=1, stateful=False)(lifted, 0.0)
    nnx.remat(lambda m: seen.extend(shuffle(m)))(lifted)
    expected = shuffle(eager)
    assert seen == 3 * expected and order_of(lifted) == order_of(eager)


def mutable_objects(m: nnx.Module) -> set[int]:
    """The ids of all Modules, lists, dicts and sets in a graph."""
    ids: set[int] = set()

    def visit(value):
        if isinstance(value, list | dict | set):
            ids.add(id(value))
        if isinstance(value, list | tuple):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)

    for module in m.modules():
        ids.add(id(module))
        for _, value in members(module):
            if not isinstance(value, nnx.Module):
                visit(value)
    return ids


@pytest.mark.parametrize(
    "rebuild",
    [lambda m: m.clone(), copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["clone", "deepcopy", "pickle"],
)
@given(recipe=recipes())
@settings(max_examples=40)
def test_a_clone_is_isomorphic_and_shares_nothing_but_immutable_leaves(rebuild, recipe):
    m = build(recipe)
    before = snapshot(m)
    twin = rebuild(m)
    assert differences(m, twin, values=True) == []
    assert not mutable_objects(m) & mutable_objects(twin)
    for leaf in twin.mutable_state_dict().values():
        leaf.value = jax.tree.map(lambda x: x + 1000, leaf.value)
    for module in list(twin.modules()):
        if isinstance(module, A | B):
            module.new = nnx.Param(0.0)
    assert_same(before, snapshot(m))
    assert twin.get_state() != m.get_state() or len(m.get_state()) == 0


@given(recipes(), st.data())
def test_equal_structure_and_equal_same_hash_moduledef_go_together(recipe, data):
    index = data.draw(st.integers(0, len(recipe.slots) - 1))
    owner, name, old = recipe.slots[index]
    new = data.draw(st.one_of(st.just(old), specs(len(recipe.classes), len(recipe.refs))))
    slots = [*recipe.slots[:index], (owner, name, new), *recipe.slots[index + 1 :]]
    left, right = build(recipe), build(Recipe(recipe.classes, recipe.refs, tuple(slots)))
    a, b = left.get_module_def(), right.get_module_def()
    found = differences(left, right, values=False)
    assume(not any(text.endswith("pytree") for text in found))
    same = found == []
    assert (a == b) == same
    assert (b == a) == same
    assert (hash(a) == hash(b)) == same
    assert bool(a.diff(b)) != same


def canonical_paths(root: nnx.Module) -> dict[int, str]:
    """The canonical path of every Module, found level by level."""
    paths = {id(root): ""}
    level = [((), root)]
    while level:
        following = []
        for segments, module in sorted(level, key=lambda entry: entry[0]):
            for name, value in members(module):
                if isinstance(value, nnx.Module):
                    following.append(((*segments, (int(name), "") if name.isdigit() else (-1, name)), value))
        level = []
        for segments, module in sorted(following, key=lambda entry: entry[0]):
            if id(module) not in paths:
                paths[id(module)] = "/".join(name or str(number) for number, name in segments)
                level.append((segments, module))
    return paths


@given(recipes())
def test_paths_are_canonical(recipe):
    m = build(recipe)
    expected = canonical_paths(m)
    assert {id(module): path for path, module in m.named_modules()} == expected
    for path in m.get_state():
        parent, _, _ = path.rpartition("/")
        assert expected[id(m.get_path(parent))] == parent
    for path, module in m.named_modules():
        assert m.get_path(path) is module


@given(recipes())
def test_a_shared_cell_is_written_through_every_alias(recipe):
    m = build(recipe).clone()
    groups: dict[int, list[tuple[nnx.Module, str]]] = {}
    for module in m.modules():
        for name, value in members(module):
            if container_of(module, name) is not None:
                groups.setdefault(id(value), []).append((module, name))
    for n, aliases in enumerate(groups.values()):
        for module, name in aliases:
            module.set_path(name, array(2, 1000.0 + n))
            for other, other_name in aliases:
                assert float(other.get_path(other_name)[0]) == 1000.0 + n


@given(recipes(), st.sampled_from(["missing parent", "wrong type", "below a variable"]))
def test_a_failed_update_changes_nothing(recipe, kind):
    m = build(recipe)
    m.last = nnx.Param(jnp.zeros(2))
    before = snapshot(m)
    good = m.get_state().map(lambda _, leaf: jax.tree.map(lambda x: x + 1, leaf))
    extra = {"brand_new": nnx.Param(jnp.zeros(1))}
    bad = {
        "missing parent": {"nowhere/at/all": nnx.Param(1.0)},
        "wrong type": {"last": nnx.Intermediate(1.0)},
        "below a variable": {"last/below": nnx.Param(1.0)},
    }[kind]
    with pytest.raises((ValueError, KeyError)):
        m.update_state(good | nnx.State(extra | bad))
    assert_same(before, snapshot(m))
    with pytest.raises((ValueError, KeyError)):
        m.update_state((good, nnx.State(extra), nnx.State(bad)))
    assert_same(before, snapshot(m))
    assert not hasattr(m, "brand_new")


@given(recipes())
def test_popped_state_can_be_restored(recipe):
    m = build(recipe)
    before = snapshot(m)
    popped = m.pop_state(nnx.Variable)
    assert not any(isinstance(leaf, nnx.Variable) for leaf in m.get_state().values())
    m.update_state(popped)
    after = snapshot(m)
    assert [entry[0] for entry in after[0]] == [entry[0] for entry in before[0]]


@given(recipes())
def test_update_with_its_own_state_changes_nothing(recipe):
    m = build(recipe)
    before = snapshot(m)
    m.update_state(m.get_state())
    assert_same(before, snapshot(m))


# Caches: after any sequence of changes, a Module says the same as a copy that has none.


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(
            (
                *("set", "delete", "share", "static", "mutate static", "value"),
                *("append", "pop item", "update", "pop", "look"),
            )
        ),
        st.integers(0, 7),
        st.sampled_from(NAMES),
        st.integers(0, 9),
    ),
    max_size=12,
)


def change(m: nnx.Module, what: str, which: int, name: str, n: int) -> None:
    """Does one thing to one Module of the graph; what cannot be done there is left undone."""
    modules = list(m.modules())
    module = modules[which % len(modules)]
    plain = isinstance(module, A | B)
    match what:
        case "set" if plain:
            if hasattr(module, name):
                delattr(module, name)
            setattr(module, name, [nnx.Param(array(2, float(n))), array(2, float(n)), A()][n % 3])
        case "delete" if plain and hasattr(module, name):
            delattr(module, name)
        case "share" if plain:
            if hasattr(module, name):
                delattr(module, name)
            setattr(module, name, modules[n % len(modules)])
        case "static" if plain:
            if hasattr(module, name):
                delattr(module, name)
            setattr(module, name, copy.deepcopy(STATICS[n % len(STATICS)]))
        case "mutate static":
            for _, value in members(module):
                if isinstance(value, list) and not is_data(value):
                    value.append(n)
                elif isinstance(value, dict) and not is_data(value):
                    value["n"] = n
                elif isinstance(value, dict):
                    value["n"] = array(1, float(n))
        case "value":
            for leaf in m.mutable_state_dict().values():
                leaf.value = jax.tree.map(lambda x: x + n, leaf.value)
        case "append" if isinstance(module, nnx.Sequence):
            module.append([A(), nnx.Param(jnp.zeros(2)), n][n % 3])
        case "pop item" if isinstance(module, nnx.Sequence) and len(module):
            module.pop(n % len(module))
        case "update":
            m.update_state(nnx.State({f"new_{n}": nnx.Cache(array(1, float(n)))}))
        case "pop":
            m.pop_state([nnx.Param, nnx.Cache, "batch_stats"][n % 3])
        case "look":
            module.partition()


@given(recipes(), CHANGES)
@settings(max_examples=100)
def test_after_any_changes_a_module_agrees_with_a_copy_that_has_no_caches(recipe, changes):
    m = build(recipe)
    m.partition()
    for what, which, name, n in changes:
        change(m, what, which, name, n)
        state, moduledef = m.partition()
        fresh = copy.deepcopy(m)
        fresh_state, fresh_def = fresh.partition()
        assert moduledef == fresh_def
        assert hash(moduledef) == hash(fresh_def)
        assert list(state) == list(fresh_state)
        assert state == fresh_state
        assert [path for path, _ in m.named_modules()] == [path for path, _ in fresh.named_modules()]
