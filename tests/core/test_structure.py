"""The structure of a graph: its records, its interned key, and the questions the key answers."""

import gc
import pickle
import weakref

import jax.numpy as jnp
import pytest

import nnx
from nnx.core.module.kinds import (
    ABSENT,
    NODE,
    STATIC,
    SUBMODULE,
    TREE,
    TREE_SPEC,
    Absent,
    box,
    is_cell,
    is_static,
    is_variable,
)
from nnx.core.structure.flat import flat_of, joint_flat_of
from nnx.core.structure.structure import (
    AbsentAttribute,
    ChildAttribute,
    DataAttribute,
    GraphKey,
    GraphStructure,
    Outline,
    StaticAttribute,
)
from nnx.core.structure.walk import traverse
from nnx.core.variables.variables import Spec


class Leaf(nnx.Module):
    def __init__(self, ref=None):
        self.w = nnx.Param(jnp.ones(2)) if ref is None else ref
        self.n = 3


class Tree(nnx.Module):
    """Every kind of attribute, a shared submodule, a tied variable and a cycle."""

    def __init__(self):
        table = nnx.Ref(nnx.Param(jnp.zeros(3)))
        self.left, self.right = Leaf(table), Leaf()
        self.again = self.right
        self.tied = table
        self.array = jnp.ones(1)
        self.trees = {"a": jnp.ones(1)}
        self.right.up = self


PARAM = Spec.of(nnx.Param, {"sharding": None})


@pytest.fixture
def key() -> GraphKey:
    return flat_of(Tree()).key


def attribute(key: GraphKey, module: int, name: str):
    return next(found for found in key.attributes(module) if found.name == name)


def test_every_attribute_has_the_record_of_its_kind(key: GraphKey):
    assert key.class_of(0) is Tree
    assert attribute(key, 0, "array") == DataAttribute("array", NODE, key.cell_at(0, "array"))
    assert attribute(key, 0, "trees").kind is TREE
    left, again = attribute(key, 0, "left"), attribute(key, 0, "again")
    assert type(left) is ChildAttribute and left.kind is SUBMODULE and key.class_of(left.module) is Leaf
    assert again.module == attribute(key, 0, "right").module != left.module
    static = attribute(key, left.module, "n")
    assert type(static) is StaticAttribute and static.kind is STATIC and static.key == (int, 3)
    assert attribute(key, again.module, "up").module == 0


def test_a_variable_without_state_has_a_record(key: GraphKey):
    state, moduledef = Tree().partition()
    absent = flat_of(moduledef.merge(state - nnx.State({"array": 0}))).key
    assert attribute(absent, 0, "array") == AbsentAttribute("array", ABSENT, NODE)
    assert absent.cell_at(0, "array") is None


def test_attributes_on_one_ref_have_one_cell_at_the_canonical_path(key: GraphKey):
    left = attribute(key, 0, "left").module
    cell = key.cell_at(0, "tied")
    assert cell is not None and key.cell_at(left, "w") == cell
    assert key.shared == (cell,)
    assert key.cells[cell] == (0, "tied", PARAM)
    assert key.cell_roots()[cell] == (0, "tied")
    assert key.find("left/w") == key.find("tied") == cell
    assert key.find("again/up/left/w") == cell


def test_a_path_that_leads_to_no_cell_is_not_found(key: GraphKey):
    assert [key.find(path) for path in ("left", "left/n", "left/w/x", "nothing", "tied/w")] == [None] * 5


def test_cells_are_in_the_order_of_their_paths(key: GraphKey):
    assert key.layout.paths == ("again/w", "array", "tied", "trees")
    assert [key.names[cell] for cell in range(4)] == ["w", "array", "tied", "trees"]
    assert key.kinds == [PARAM, NODE, PARAM, TREE]
    assert key.specs == [PARAM, None, PARAM, TREE_SPEC]


def test_a_root_that_is_given_twice_counts_once():
    first, second = Leaf(), Leaf()
    assert traverse((first, second, first)).key.roots == (0, 1)
    key = joint_flat_of([first, second]).key
    assert key.roots == (0, 1) and [root for root, _ in key.cell_roots()] == [0, 1]
    assert key.module_paths(("a", "b")) == ["a", "b"]


def test_children_and_paths_of_modules_follow_the_numbers(key: GraphKey):
    assert key.module_paths() == ["", "again", "left"]
    assert list(key.children(0)) == [1, 2, 1] and list(key.children(1)) == [0]


def test_equal_structures_have_one_key_and_plain_tuples_find_it():
    key = flat_of(Tree()).key
    assert flat_of(Tree()).key is key
    rows = tuple((cls, tuple(map(tuple, attributes))) for cls, attributes in key.structure.outlines)
    assert GraphKey.of((key.roots, rows, key.structure.orders)) is key
    assert hash((key.roots, rows)) == key.hash


def test_records_made_from_plain_tuples_have_names():
    rows = ((Leaf, (("c", SUBMODULE, 0), ("gone", ABSENT, PARAM), ("n", STATIC, (int, 1), 0), ("w", PARAM, 0))),)
    key = GraphKey.of(((0,), rows))
    assert [type(record) for record in key.attributes(0)] == [
        ChildAttribute,
        AbsentAttribute,
        StaticAttribute,
        DataAttribute,
    ]
    assert isinstance(key.structure, GraphStructure) and isinstance(key.structure.outlines[0], Outline)


def test_a_key_is_forgotten_with_the_last_module_of_its_structure():
    class Local(nnx.Module):
        def __init__(self):
            self.x = jnp.ones(1)

    model = Local()
    weak = weakref.ref(flat_of(model).key)
    assert weak() is not None
    del model
    gc.collect()
    assert weak() is None


def test_other_specs_change_every_attribute_of_a_shared_cell(key: GraphKey):
    other = Spec.of(nnx.Param, {"sharding": ("embed",)})
    changed = key.with_specs({2: other})
    assert changed is not key and changed.kinds[2] is other
    left = attribute(changed, 0, "left").module
    assert attribute(changed, left, "w").kind is other and attribute(changed, 0, "tied").kind is other
    assert changed.with_specs({2: PARAM}) is key
    assert key.with_specs({}) is key


def test_outlines_agree_when_only_the_cell_numbers_differ():
    outline = Outline(Leaf, (DataAttribute("w", PARAM, 0), StaticAttribute("n", STATIC, (int, 1), 0)))
    renumbered = Outline(Leaf, (DataAttribute("w", PARAM, 7), StaticAttribute("n", STATIC, (int, 1), 0)))
    assert outline.agrees_with(renumbered)
    others = [
        Outline(Tree, outline.attributes),
        Outline(Leaf, outline.attributes[:1]),
        Outline(Leaf, (DataAttribute("v", PARAM, 0), outline.attributes[1])),
        Outline(Leaf, (DataAttribute("w", NODE, 0), outline.attributes[1])),
        Outline(Leaf, (ChildAttribute("w", SUBMODULE, 0), outline.attributes[1])),
        Outline(Leaf, (outline.attributes[0], StaticAttribute("n", STATIC, (int, 2), 0))),
    ]
    assert not any(outline.agrees_with(other) or other.agrees_with(outline) for other in others)


def test_the_questions_about_a_kind_have_one_answer_each():
    static = Spec.of(nnx.Static, {})
    kinds = [PARAM, NODE, TREE, static, STATIC, SUBMODULE, ABSENT, Absent(PARAM)]
    assert [kind for kind in kinds if is_cell(kind)] == [PARAM, NODE, TREE]
    assert [kind for kind in kinds if is_static(kind)] == [static, STATIC]
    assert [kind for kind in kinds if is_variable(kind)] == [PARAM]


def test_boxing_makes_the_leaf_of_a_state():
    assert box(NODE, 1.0) == 1.0
    assert box(TREE, (1, 2)) == nnx.Node((1, 2))
    assert box(PARAM, 1.0) == nnx.Param(1.0)


def test_kinds_survive_pickling_as_themselves():
    assert all(pickle.loads(pickle.dumps(kind)) is kind for kind in (NODE, TREE, SUBMODULE, STATIC, ABSENT))


def test_a_difference_in_sharing_names_the_home_of_the_shared_value():
    tied, free = Tree(), Tree()
    free.left.w = nnx.Ref(nnx.Param(jnp.zeros(3)))
    [difference] = [d for d in tied.get_module_def().diff(free.get_module_def()) if d.path == "left/w"]
    assert difference.before == "Param(), shared as 'tied'" and difference.after == "Param()"


def test_a_submodule_added_before_shared_ones_is_the_only_difference():
    one, two = Tree(), Tree()
    two.aaa = nnx.Dict(w=nnx.Param(jnp.ones(1)))
    assert [d.path for d in one.get_module_def().diff(two.get_module_def())] == ["aaa", "aaa/w"]
