"""``nnx.Dict`` and ``nnx.Sequence``: real mutable containers that are Modules."""

import dataclasses
import functools
from collections.abc import MutableMapping, MutableSequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.checks import assert_refused
from tests.models import Scale


class NeedsContext(nnx.Module):
    def __call__(self, x, *, ctx):
        return x + ctx.get_flag("add")


class Split(nnx.Module):
    def __call__(self, x):
        return x, x + 1


class Named(nnx.Module):
    def __call__(self, x):
        return {"a": x, "b": 2 * x}


class TakesTwo(nnx.Module):
    def __call__(self, a, b):
        return a * 10 + b


# Dict


def test_a_dict_is_a_mutable_mapping_and_a_module():
    d = nnx.Dict()
    assert isinstance(d, MutableMapping)
    assert isinstance(d, nnx.Module)
    assert len(d) == 0
    assert list(d) == []


def test_a_dict_is_built_like_a_dict():
    a, b = Scale(), Scale()
    for d in (nnx.Dict({"a": a, "b": b}), nnx.Dict(a=a, b=b), nnx.Dict([("a", a), ("b", b)]), nnx.Dict({"a": a}, b=b)):
        assert len(d) == 2
        assert d["a"] is a and d["b"] is b


def test_len_of_a_dict_counts_its_items_only():
    d = nnx.Dict(a=Scale(), b=nnx.Param(1.0), c=3)
    d.get_state()
    d.clone()
    assert len(d) == 3
    assert set(d) == {"a", "b", "c"}
    assert len(nnx.Dict({})) == 0


def test_keys_are_also_attributes():
    d = nnx.Dict(a=Scale())
    assert d.a is d["a"]
    d.b = Scale()
    assert d["b"] is d.b
    del d.a
    assert "a" not in d
    d["c"] = 3
    assert d.c == 3


def test_mapping_operations():
    d = nnx.Dict(a=1, b=2)
    assert d.get("a") == 1
    assert d.get("z", 9) == 9
    assert d.pop("a") == 1
    assert "a" not in d
    d.update(c=3, d=4)
    assert dict(d) == {"b": 2, "c": 3, "d": 4}
    assert d.setdefault("b", 7) == 2
    assert sorted(d.values()) == [2, 3, 4]
    assert sorted(d.items()) == [("b", 2), ("c", 3), ("d", 4)]
    del d["b"]
    d.clear()
    assert len(d) == 0


def test_a_missing_key_is_a_key_error():
    d = nnx.Dict(a=1)
    with pytest.raises(KeyError, match="z"):
        d["z"]
    with pytest.raises(KeyError, match="z"):
        del d["z"]
    assert len(d) == 1


def test_items_have_kinds_like_attributes():
    d = nnx.Dict(w=nnx.Param(1.0), child=Scale(), layers=[Scale()], n=3, x=jnp.ones(1))
    assert d["w"] == 1.0
    d["w"] = 2.0
    assert type(d.variable("w")) is nnx.Param
    assert isinstance(d["layers"], nnx.Sequence)
    assert list(d.get_state()) == ["child/s", "layers/0/s", "w", "x"]
    with pytest.raises(ValueError, match="incompatible container|is not compatible"):
        d["w"] = nnx.BatchStat(1.0)


@pytest.mark.parametrize("name", ["filter", "apply", "partition", "items", "keys", "values", "get", "update", "pop"])
def test_names_of_the_api_are_items_reachable_by_brackets_only(name):
    child = Scale()
    d = nnx.Dict({name: child})
    assert d[name] is child
    assert callable(getattr(d, name)) and getattr(d, name) is not child
    assert list(d) == [name]
    assert len(d) == 1
    assert list(d.get_state()) == [f"{name}/s"]
    again = d.clone()
    assert isinstance(again[name], Scale)
    assert again.get_module_def() == d.get_module_def()
    del d[name]
    assert len(d) == 0


@pytest.mark.parametrize("key", [0, 1.5, None, ("a",), "a/b", "/"])
def test_key_that_is_not_a_string_or_contains_a_slash_raises(key):
    d = nnx.Dict(a=Scale())
    before = d.get_module_def()
    with pytest.raises((TypeError, ValueError)) as error:
        d[key] = Scale()
    assert repr(key) in str(error.value)
    with pytest.raises((TypeError, ValueError)):
        nnx.Dict({key: Scale()})
    assert len(d) == 1
    assert d.get_module_def() == before


@pytest.mark.parametrize(
    "does, error, says",
    [
        (lambda m: m.heads.__setitem__("a/b", Scale()), (ValueError, TypeError), ("'a/b'", "'/'")),
        (lambda m: m.heads.__setitem__(3, Scale()), (ValueError, TypeError), ("3", "string")),
    ],
    ids=["slash", "number"],
)
def test_a_refused_key_is_shown_with_the_reason_and_changes_nothing(does, error, says):
    assert_refused(does, error, says)


def test_a_dict_survives_partition_and_merge():
    d = nnx.Dict(a=Scale(2.0), n=3)
    again = d.partition().merge()
    assert isinstance(again, nnx.Dict)
    assert set(again) == {"a", "n"}
    assert float(again["a"].s) == 2.0


def test_a_dict_compares_and_hashes_by_identity():
    a, b = nnx.Dict(a=1), nnx.Dict(a=1)
    assert a != b
    assert a == a
    assert len({a, b}) == 2


# Sequence


def test_a_sequence_is_a_mutable_sequence_and_a_module():
    s = nnx.Sequence([])
    assert isinstance(s, MutableSequence)
    assert isinstance(s, nnx.Module)


def test_an_empty_sequence_has_length_zero():
    assert len(nnx.Sequence([])) == 0
    assert len(nnx.Sequence(())) == 0
    assert list(nnx.Sequence([])) == []


def test_indexing_like_a_list():
    items = [Scale(float(i)) for i in range(4)]
    s = nnx.Sequence(items)
    assert len(s) == 4
    assert [id(x) for x in s] == [id(x) for x in items]
    assert s[0] is items[0]
    assert s[-1] is items[-1]
    assert [id(x) for x in s[1:3]] == [id(x) for x in items[1:3]]
    assert [id(x) for x in s[::-1]] == [id(x) for x in items[::-1]]
    assert items[2] in s
    assert s.index(items[2]) == 2
    for bad in (4, -5):
        with pytest.raises(IndexError):
            s[bad]


def test_assignment_and_deletion_like_a_list():
    s = nnx.Sequence([1, 2, 3, 4])
    s[0] = 10
    s[-1] = 40
    assert list(s) == [10, 2, 3, 40]
    del s[1]
    assert list(s) == [10, 3, 40]
    del s[-1]
    assert list(s) == [10, 3]
    s[0:1] = [7, 8, 9]
    assert list(s) == [7, 8, 9, 3]
    del s[1:3]
    assert list(s) == [7, 3]
    with pytest.raises(IndexError):
        s[5] = 1
    with pytest.raises(IndexError):
        del s[5]
    assert list(s) == [7, 3]


def test_append_insert_pop_extend_like_a_list():
    s = nnx.Sequence([1])
    s.append(3)
    s.insert(1, 2)
    s.insert(0, 0)
    s.insert(-1, 9)
    assert list(s) == [0, 1, 2, 9, 3]
    assert s.pop() == 3
    assert s.pop(0) == 0
    assert s.pop(-1) == 9
    s.extend([5, 6])
    s += [7]
    assert list(s) == [1, 2, 5, 6, 7]
    s.remove(5)
    s.reverse()
    assert list(s) == [7, 6, 2, 1]
    s.clear()
    assert len(s) == 0
    with pytest.raises(IndexError):
        s.pop()


def test_variables_keep_their_type_when_items_move():
    s = nnx.Sequence([nnx.Param(1.0, ("a",)), nnx.BatchStat(2.0), jnp.ones(1), "static", Scale()])
    s.insert(0, nnx.Cache(0.0))
    assert list(s.get_state()) == ["0", "1", "2", "3", "5/s"]
    assert [type(s.get_state()[p]) for p in ("0", "1", "2")] == [nnx.Cache, nnx.Param, nnx.BatchStat]
    assert s.get_state()["1"].sharding == ("a",)
    del s[0]
    assert type(s.get_state()["0"]) is nnx.Param
    s.reverse()
    state = s.get_state()
    assert type(state["4"]) is nnx.Param and type(state["3"]) is nnx.BatchStat
    s.pop()
    assert "4" not in s.get_state()


def test_setting_a_raw_value_keeps_the_variable():
    s = nnx.Sequence([nnx.Param(1.0)])
    s[0] = 2.0
    assert s.get_state()["0"] == nnx.Param(2.0)


def test_paths_of_a_sequence():
    m = nnx.Module()
    m.layers = nnx.Sequence([Scale(), Scale()])
    assert list(m.get_state()) == ["layers/0/s", "layers/1/s"]


def test_twelve_layers_are_in_numeric_order():
    s = nnx.Sequence([Scale() for _ in range(12)])
    assert list(s.get_state()) == [f"{i}/s" for i in range(12)]
    again = s.clone()
    assert len(again) == 12


def test_the_values_of_twelve_layers_are_in_numeric_order():
    m = nnx.Dict(layers=[Scale(float(i)) for i in range(12)])
    state = m.get_state()
    assert list(state) == [f"layers/{i}/s" for i in range(12)]
    assert [float(leaf) for leaf in jax.tree.leaves(state)] == [float(i) for i in range(12)]
    assert [float(layer.s) for layer in m.clone().layers] == [float(i) for i in range(12)]


def test_a_sequence_survives_partition_and_merge():
    s = nnx.Sequence([Scale(1.0), Scale(2.0)])
    again = s.partition().merge()
    assert isinstance(again, nnx.Sequence)
    assert [float(x.s) for x in again] == [1.0, 2.0]
    again.append(Scale(3.0))
    assert len(s) == 2
    empty = nnx.Sequence([]).partition().merge()
    assert len(empty) == 0


# calling a Sequence


def test_calling_a_sequence_runs_its_items_in_order():
    s = nnx.Sequence([Scale(2.0), lambda x: x + 1, Scale(3.0)])
    assert float(s(1.0)) == 9.0


def test_calling_an_empty_sequence_returns_its_argument():
    assert nnx.Sequence([])(3) == 3


def test_a_tuple_output_becomes_the_next_positional_arguments():
    assert nnx.Sequence([Split(), TakesTwo()])(1) == 12


def test_a_dict_output_becomes_the_next_keyword_arguments():
    assert nnx.Sequence([Named(), TakesTwo()])(1) == 12


def test_a_tuple_or_dict_at_the_end_is_the_output():
    assert nnx.Sequence([Split()])(1) == (1, 2)
    assert nnx.Sequence([Named()])(1) == {"a": 1, "b": 2}


def test_ctx_is_passed_on_to_items_that_accept_it():
    ctx = nnx.context(flags={"add": 5})

    class TakesAnything(nnx.Module):
        def __call__(self, x, **kwargs):
            assert kwargs["ctx"] is ctx
            return x

    s = nnx.Sequence([Scale(2.0), NeedsContext(), TakesAnything(), lambda x: x, NeedsContext()])
    assert float(s(1.0, ctx=ctx)) == 12.0


def test_without_a_ctx_nothing_is_passed():
    class Optional(nnx.Module):
        def __call__(self, x, *, ctx=None):
            assert ctx is None
            return x

    assert nnx.Sequence([Optional()])(1) == 1


def test_the_first_item_receives_all_arguments():
    assert nnx.Sequence([TakesTwo()])(1, b=2) == 12


def test_a_sequence_in_a_sequence_passes_ctx_on():
    ctx = nnx.context(flags={"add": 5})
    s = nnx.Sequence([nnx.Sequence([NeedsContext()]), nnx.Sequence([Scale(2.0), NeedsContext()])])
    assert float(s(1.0, ctx=ctx)) == 17.0


@pytest.mark.parametrize("item", [3, "text", jnp.ones(1), nnx.Module()], ids=["int", "str", "array", "module"])
def test_a_non_callable_item_is_a_type_error_with_its_index(item):
    s = nnx.Sequence([Scale(), item])
    with pytest.raises(TypeError, match="1"):
        s(1.0)


def test_calling_updates_the_items():
    class Counter(nnx.Module):
        def __init__(self):
            self.n = nnx.Variable(0)

        def __call__(self, x):
            self.n += 1
            return x

    counter = Counter()
    s = nnx.Sequence([counter, counter])
    s(1)
    assert counter.n == 2
    np.testing.assert_array_equal(list(s.get_state()), ["0/n"])


def test_ctx_is_passed_on_to_callables_of_any_kind():
    @dataclasses.dataclass
    class Shift:  # with an __eq__ and so without a hash
        by: float

        def __call__(self, x, *, ctx):
            return x + self.by + ctx.get_flag("add")

    class Tool:
        def run(self, x, ctx):
            return x + ctx.get_flag("add")

    ctx = nnx.context(flags={"add": 5})
    s = nnx.Sequence([Shift(1.0), Tool().run, functools.partial(lambda x, y, ctx: x + y, y=1), jnp.sin, abs])
    assert float(s(1.0, ctx=ctx)) == abs(float(jnp.sin(13.0)))


def test_failed_change_leaves_the_sequence_unchanged():
    first, second = Scale(1.0), Scale(2.0)
    s = nnx.Sequence([first, second, nnx.Param(3.0)])
    before = s.get_module_def()

    def captures(x):
        return first(x)

    for change in (
        lambda: s.insert(0, captures),
        lambda: s.append(captures),
        lambda: s.__setitem__(0, captures),
        lambda: s.__setitem__(slice(0, 1), [Scale(), captures]),
        lambda: s.extend([captures]),
    ):
        with pytest.raises((ValueError, TypeError)):
            change()
        assert len(s) == 3
        assert s[0] is first and s[1] is second and s[2] == 3.0
        assert s.get_module_def() == before


def test_reading_an_item_whose_state_was_popped_raises():
    s = nnx.Sequence([nnx.Param(1.0), Scale()])
    popped = s.pop_state(lambda path, value: path == "0")
    for read in (lambda: s[0], lambda: s[:], lambda: list(s), lambda: s.reverse()):
        with pytest.raises(AttributeError, match=r"Item 0 of Sequence is missing: .*pop_state\(\)"):
            read()
    s.update_state(popped)
    assert s[0] == 1.0


def test_failed_change_leaves_the_dict_unchanged():
    first = Scale()
    d = nnx.Dict(a=first)
    before = d.get_module_def()
    for change in (lambda: d.__setitem__("b", lambda x: first(x)), lambda: d.__setitem__("a/b", 1)):
        with pytest.raises((ValueError, TypeError)):
            change()
        assert d.get_module_def() == before
        assert list(d) == ["a"]


# adding sequences


def test_sequences_add_up_to_a_new_one_that_shares_their_modules():
    a, b = nnx.Sequence([nnx.Dict(), nnx.Param(jnp.ones(2))]), nnx.Sequence([nnx.Dict()])
    both = a + b
    assert type(both) is nnx.Sequence and len(both) == 3 and (len(a), len(b)) == (2, 1)
    assert both[0] is a[0] and both[2] is b[0]
    assert both.variable("1") == nnx.Param(jnp.ones(2))


def test_sequences_and_lists_add_up_in_either_order():
    module, other = nnx.Dict(), nnx.Dict()
    sequence = nnx.Sequence([module])
    assert list(sequence + [other]) == [module, other]
    assert list((other,) + sequence) == [other, module]
    with pytest.raises(TypeError, match="unsupported operand"):
        sequence + 3  # pyright: ignore[reportOperatorIssue]
    sequence += [other]
    assert list(sequence) == [module, other]
