"""Filters: picking state by type, name, path or predicate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.checks import assert_refused, name_of
from tests.models import Count


class LoraParam(nnx.Param):
    pass


class Layer(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(1.0)
        self.lora = LoraParam(1.0)
        self.mean = nnx.BatchStat(1.0)


class Model(nnx.Module):
    def __init__(self):
        self.encoder = Layer()
        self.encoder.blocks = [Layer(), Layer()]
        self.head = Layer()
        self.count = Count(0)
        self.table = jnp.ones(2)
        self.host = np.ones(2)
        self.node = nnx.Node(jnp.ones(1))


KERNELS = ["encoder/blocks/0/kernel", "encoder/blocks/1/kernel", "encoder/kernel", "head/kernel"]
LORAS = [path.replace("kernel", "lora") for path in KERNELS]
MEANS = [path.replace("kernel", "mean") for path in KERNELS]
ALL = list(Model().get_state())


def matched(*filters):
    assert len(filters) == 1
    return list(Model().filter(filters[0]))


def test_model_of_the_tests_has_the_expected_paths():
    assert sorted(ALL) == sorted([*KERNELS, *LORAS, *MEANS, "count", "table", "host", "node"])


def test_a_type_matches_its_instances():
    assert matched(nnx.BatchStat) == MEANS
    assert matched(LoraParam) == LORAS
    assert sorted(matched(nnx.Param)) == sorted(KERNELS + LORAS)
    assert matched(Count) == ["count"]
    assert "node" in matched(nnx.Node) and "node" not in matched(nnx.Variable)
    assert matched(jax.Array) == ["table"]
    assert matched(np.ndarray) == ["host"]


def test_ellipsis_matches_everything():
    assert matched(...) == ALL


@pytest.mark.parametrize("call", ["partition", "filter", "pop_state"])
def test_ellipsis_is_only_allowed_last(call):
    m = Model()
    with pytest.raises(ValueError, match=r"Ellipsis `\.\.\.` can only be used as the last filter,"):
        getattr(m, call)(..., nnx.Param)
    assert list(m.get_state()) == ALL


def test_true_and_false_are_no_filters():
    for value in (True, False):
        with pytest.raises(TypeError, match=str(value)):
            matched(value)


def test_none_matches_nothing():
    assert matched(None) == []


def test_a_callable_is_asked_with_path_and_container_or_array():
    seen = {}

    def ask(path, value):
        seen[path] = value
        return path.startswith("head")

    assert matched(ask) == ["head/kernel", "head/lora", "head/mean"]
    assert set(seen) == set(ALL)
    assert type(seen["head/kernel"]) is nnx.Param
    assert isinstance(seen["table"], jax.Array)


def test_a_string_matches_the_collection_of_that_name_and_subclasses():
    assert sorted(matched("params")) == sorted(KERNELS + LORAS)
    assert matched("batch_stats") == MEANS
    assert matched("lora_param") == LORAS
    assert matched("count") == ["count"]
    assert matched("cache") == []


@pytest.mark.parametrize("call", ["partition", "filter", "pop_state"])
def test_misspelled_collection_raises_and_changes_nothing(call):
    m = Model()
    with pytest.raises(ValueError, match="'parms'") as error:
        getattr(m, call)("parms", ...)
    assert "params" in str(error.value)
    assert list(m.get_state()) == ALL


@pytest.mark.parametrize("several", [(nnx.BatchStat, Count), [nnx.BatchStat, Count], ["batch_stats", "count"]])
def test_a_tuple_or_list_matches_any_of_them(several):
    assert sorted(matched(several)) == sorted(["count", *MEANS])


def test_an_empty_tuple_matches_nothing():
    assert matched(()) == []


def test_filters_nest():
    assert matched(((None, [Count]), nnx.All("batch_stats", nnx.PathMatches("head/*")))) == ["count", "head/mean"]


def test_not_all_any_and_of_type_combine_filters():
    assert sorted(matched(nnx.Not(nnx.Variable))) == ["host", "node", "table"]
    assert matched(nnx.Not(None)) == ALL
    assert matched(nnx.Not(...)) == []
    assert matched(nnx.All(nnx.Param, nnx.Not(LoraParam))) == KERNELS
    assert matched(nnx.All()) == ALL
    assert sorted(matched(nnx.Any(Count, "batch_stats"))) == sorted(["count", *MEANS])
    assert matched(nnx.Any()) == []
    assert matched(nnx.OfType(nnx.BatchStat)) == MEANS


@pytest.mark.parametrize(
    "pattern, paths",
    [
        ("encoder/**/kernel", ["encoder/blocks/0/kernel", "encoder/blocks/1/kernel", "encoder/kernel"]),
        ("**/kernel", KERNELS),
        ("**", ALL),
        ("head/**", ["head/kernel", "head/lora", "head/mean"]),
        ("head/*", ["head/kernel", "head/lora", "head/mean"]),
        ("*/kernel", ["encoder/kernel", "head/kernel"]),
        ("*", ["count", "host", "node", "table"]),
        ("encoder/blocks/*/kernel", ["encoder/blocks/0/kernel", "encoder/blocks/1/kernel"]),
        ("encoder/blocks/[0]/kernel", ["encoder/blocks/0/kernel"]),
        ("h*", ["host"]),
        ("head/?ora", ["head/lora"]),
        ("table", ["table"]),
        ("encoder", []),
        ("ernel", []),
        ("**/blocks/**/lora", ["encoder/blocks/0/lora", "encoder/blocks/1/lora"]),
    ],
)
def test_paths_match_by_glob(pattern, paths):
    assert sorted(matched(nnx.PathMatches(pattern))) == sorted(paths)


def test_a_dot_in_a_glob_is_a_dot():
    state = nnx.State({"a.b": 1, "axb": 2})
    assert list(state.filter(nnx.PathMatches("a.b"))) == ["a.b"]


def test_buffers_are_bare_arrays():
    assert sorted(matched(nnx.buffers)) == ["host", "table"]


def test_filters_work_on_a_state_too():
    assert list(Model().get_state().filter(nnx.PathMatches("head/*"))) == ["head/kernel", "head/lora", "head/mean"]


def test_filters_are_comparable_so_that_they_may_be_static_values():
    for make in (
        lambda: nnx.Not(nnx.Param),
        lambda: nnx.All(nnx.Param, "params"),
        lambda: nnx.Any(nnx.Param, ...),
        lambda: nnx.OfType(nnx.Param),
        lambda: nnx.PathMatches("a/**"),
    ):
        assert make() == make()
        assert hash(make()) == hash(make())
    assert nnx.Not(nnx.Param) != nnx.Not(nnx.BatchStat)
    assert nnx.All(nnx.Param) != nnx.Any(nnx.Param)
    assert nnx.PathMatches("a") != nnx.PathMatches("b")

    def model():
        m = nnx.Module()
        m.axes = {nnx.All(nnx.Param, nnx.Not("batch_stats")): 0, nnx.PathMatches("a/**"): 1, nnx.OfType(nnx.Cache): 2}
        return m

    assert model().get_module_def() == model().get_module_def()


@pytest.mark.parametrize(
    "bad", [1, 1.5, {"params": 1}, jnp.ones(1), object(), b"params"], ids=lambda bad: type(bad).__name__
)
@pytest.mark.parametrize("call", ["partition", "filter", "pop_state"])
def test_other_arguments_raise_a_type_error_that_shows_them(call, bad):
    m = Model()
    with pytest.raises(TypeError) as error:
        getattr(m, call)(nnx.Param, bad)
    shown = [repr(bad), type(bad).__name__, "float32[1]"]
    assert any(text in str(error.value) for text in shown)
    assert list(m.get_state()) == ALL


@pytest.mark.parametrize(
    "bad",
    [
        lambda: (nnx.Param, 1),
        lambda: [[1]],
        lambda: nnx.Not(1),
        lambda: nnx.All(nnx.Param, 1),
        lambda: nnx.Any(1),
    ],
    ids=["tuple", "list", "Not", "All", "Any"],
)
def test_a_bad_filter_inside_another_is_a_type_error(bad):
    with pytest.raises(TypeError, match="1"):
        matched(bad())


@pytest.mark.parametrize(
    "does, error, says",
    [
        (
            lambda m: m.partition(nnx.Param),
            ValueError,
            ("Non-exhaustive filters, got a non-empty remainder", "enc/stat", "table", "`...`"),
        ),
        (
            lambda m: m.filter(..., nnx.Param),
            ValueError,
            ("Ellipsis `...` can only be used as the last filter,", "Param"),
        ),
        (lambda m: m.filter("parms"), ValueError, ("'parms'", "'params'")),
        (lambda m: m.pop_state(), ValueError, ("filter", "pop_state(")),
        (lambda m: m.pop_state(3), TypeError, ("3", "nnx.Param")),
    ],
    ids=["partial", "ellipsis not last", "misspelled", "none", "number"],
)
def test_a_refused_filter_is_shown_with_what_to_write_and_changes_nothing(does, error, says):
    assert_refused(does, error, says)


# What is trained or differentiated


@pytest.mark.parametrize(
    "wrt",
    [
        nnx.Param,
        "params",
        nnx.Variable,
        (nnx.Param, nnx.BatchStat),
        ...,
        None,
        nnx.buffers,
        nnx.OfType(nnx.Variable),
        nnx.Not(nnx.BatchStat),
        nnx.All(nnx.Param, nnx.PathMatches("head/**")),
        nnx.All((nnx.Param, nnx.BatchStat), nnx.PathMatches("head/**")),
        nnx.PathMatches("**/kernel"),
        (nnx.BatchStat, nnx.PathMatches("**/kernel")),
        nnx.PathMatches("nothing/**"),
        nnx.Any("batch_stats", lambda path, value: path == "head/kernel"),
    ],
    ids=name_of,
)
def test_a_wrt_that_names_its_types_or_selects_one_type_is_accepted(wrt):
    nnx.EMA(Model(), wrt=wrt)


@pytest.mark.parametrize(
    ("wrt", "shown"),
    [
        (nnx.PathMatches("head/**"), "PathMatches('head/**')"),
        (lambda path, value: path.startswith("head"), "<lambda>"),
        (nnx.Not(nnx.PathMatches("encoder/**")), "Not(PathMatches('encoder/**'))"),
        ([nnx.Param, nnx.PathMatches("head/**")], "PathMatches('head/**')"),
        (nnx.Any("params", nnx.PathMatches("head/**")), "PathMatches('head/**')"),
        (nnx.All(nnx.PathMatches("head/**"), nnx.PathMatches("**")), "All(PathMatches('head/**'), PathMatches('**'))"),
        (nnx.All((nnx.Param, nnx.PathMatches("**")), nnx.PathMatches("head/**")), "All((Param, PathMatches('**'))"),
    ],
    ids=name_of,
)
def test_a_wrt_that_names_no_type_and_selects_several_is_an_error_that_lists_them(wrt, shown):
    with pytest.raises(ValueError) as error:
        nnx.EMA(Model(), wrt=wrt)
    text = str(error.value)
    assert text.startswith("nnx.EMA: wrt=") and shown in text and "nnx.All(nnx.Param, " in text
    assert all(part in text for part in ("Param ('head/kernel')", "LoraParam ('head/lora')", "BatchStat ('head/mean')"))
