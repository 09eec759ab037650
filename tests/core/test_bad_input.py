"""Bad input gets an error that names the path or argument and what to do, and changes nothing."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

import nnx


class Layer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2), ("in",))
        self.stat = nnx.BatchStat(jnp.zeros(2))
        self.sizes = [1]


class Model(nnx.Module):
    def __init__(self):
        self.enc = Layer()
        self.heads = {"a": Layer()}
        self.seq = [Layer()]
        self.table = jnp.arange(2.0)


def under_jit(use: Callable) -> Callable:
    def run(m):
        def f(x):
            use(m)
            return x

        jax.jit(f)(1.0)

    return run


def setting(name: str, value) -> Callable:
    return lambda m: setattr(m.enc, name, value)


@dataclass
class Case:
    """What is done to a Model, and what the error must be and say."""

    does: Callable
    error: type[Exception] | tuple[type[Exception], ...]
    says: tuple[str, ...]


TRACE = "Cannot mutate Module from different trace level"
INCOMPATIBLE = "Cannot replace value from incompatible container"

CASES = {
    "partial filters": Case(
        lambda m: m.partition(nnx.Param),
        ValueError,
        ("Non-exhaustive filters, got a non-empty remainder", "enc/stat", "table", "`...`"),
    ),
    "ellipsis not last": Case(
        lambda m: m.filter(..., nnx.Param),
        ValueError,
        ("Ellipsis `...` can only be used as the last filter,", "Param"),
    ),
    "misspelt filter": Case(lambda m: m.filter("parms"), ValueError, ("'parms'", "'params'")),
    "no filter at all": Case(lambda m: m.pop_state(), ValueError, ("filter", "pop_state(")),
    "number as a filter": Case(lambda m: m.pop_state(3), TypeError, ("3", "nnx.Param")),
    "update of a path that does not exist": Case(
        lambda m: m.update_state(nnx.State({"enc/w": nnx.Param(jnp.zeros(2), ("in",)), "dec/w": nnx.Param(1.0)})),
        ValueError,
        ("'dec/w'", "get_state()"),
    ),
    "update with a container of the wrong type": Case(
        lambda m: m.update_state(nnx.State({"enc/stat": nnx.BatchStat(1.0), "enc/w": nnx.BatchStat(1.0)})),
        ValueError,
        (INCOMPATIBLE, "'enc/w'", "Param", "BatchStat"),
    ),
    "update that is no state": Case(lambda m: m.update_state({"w": 1}), TypeError, ("State", "Pure")),
    "assignment of the wrong type": Case(
        setting("w", nnx.BatchStat(1.0)), ValueError, (INCOMPATIBLE, "'w'", "Layer", "Param", "BatchStat", "delete")
    ),
    "assignment of other metadata": Case(
        setting("w", nnx.Param(1.0, ("out",))), ValueError, (INCOMPATIBLE, "'w'", "('in',)", "('out',)")
    ),
    "module into a variable": Case(lambda m: setattr(m.enc, "w", Layer()), ValueError, ("'w'", "Param", "Layer")),
    "module captured by a lambda": Case(
        lambda m: setattr(m, "f", lambda x: m.enc), ValueError, ("'f'", "Model", "method")
    ),
    "data that JAX cannot take": Case(
        setting("cache", {"k": jnp.ones(1), "name": "x"}), ValueError, ("'cache'", "['name']", "'x'")
    ),
    "name of the API": Case(setting("filter", 1), AttributeError, ("'filter'", "Layer", "another name")),
    "key with a slash": Case(lambda m: m.heads.__setitem__("a/b", Layer()), (ValueError, TypeError), ("'a/b'", "'/'")),
    "key that is no string": Case(lambda m: m.heads.__setitem__(3, Layer()), (ValueError, TypeError), ("3", "string")),
    "set at another trace level": Case(
        under_jit(lambda m: setattr(m.enc, "w", jnp.zeros(2))),
        nnx.TraceContextError,
        (TRACE, "'w'", "Layer", "nnx.jit"),
    ),
    "delete at another trace level": Case(
        under_jit(lambda m: delattr(m.enc, "w")), nnx.TraceContextError, (TRACE, "'w'", "Layer", "nnx.jit")
    ),
    "pop at another trace level": Case(
        under_jit(lambda m: m.pop_state(nnx.Param)), nnx.TraceContextError, (TRACE, "pop_state", "nnx.jit")
    ),
    "update at another trace level": Case(
        under_jit(lambda m: m.update_state(m.get_state())), nnx.TraceContextError, (TRACE, "update_state", "nnx.jit")
    ),
    "path to nowhere": Case(lambda m: m.get_path("enc/layers/0"), (ValueError, LookupError), ("enc/layers",)),
    "a Module passed to raw jit": Case(
        lambda m: jax.jit(lambda x: x)(m), ValueError, ("Model", "nnx.jit", "partition", "merge")
    ),
    "sow into a parameter": Case(
        lambda m: m.enc.sow(nnx.Intermediate, "w", 1), ValueError, ("to be of type", "'w'", "Intermediate", "Param")
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_named_and_changes_nothing(name):
    case = CASES[name]
    m = Model()
    state, moduledef = m.partition()
    with pytest.raises(case.error) as error:
        case.does(m)
    for fragment in case.says:
        assert fragment in str(error.value)
    after, moduledef_after = m.partition()
    assert moduledef_after == moduledef
    assert list(after) == list(state)
    assert all(a is b for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True))
    m.enc.w = jnp.zeros(2)
    m.pop_state(nnx.Param)


@pytest.mark.parametrize("late", [Layer(), jnp.ones(1), nnx.Param(1.0)], ids=["module", "array", "container"])
def test_a_module_hidden_in_a_static_container_is_named_with_the_cure(late):
    m = Model()
    m.enc.sizes.append(late)
    with pytest.raises(ValueError, match="'enc/sizes'") as error:
        m.partition()
    assert "nnx.Sequence" in str(error.value)
    assert "sizes[1]" in str(error.value)


@pytest.mark.parametrize("seed", [1.5, "zero", [0]], ids=str)
def test_a_wrong_seed_names_the_stream_and_what_to_write(seed):
    with pytest.raises(TypeError, match="'dropout'") as error:
        nnx.context(0, dropout=seed)
    assert "jax.random.key(0)" in str(error.value)
    assert str(seed) in str(error.value)


def test_an_unknown_stream_names_those_there_are_and_what_to_write():
    with pytest.raises(ValueError, match="Unknown Rng Stream: noise") as error:
        nnx.context(0, dropout=1).make_rng("noise")
    for fragment in ("'params'", "'dropout'", "noise=0"):
        assert fragment in str(error.value)


def test_a_variable_for_which_no_state_was_merged_says_so_with_the_cure():
    m = Model()
    merged = m.get_module_def().merge(m.filter(nnx.Param))
    with pytest.raises(AttributeError, match="no state was given") as error:
        merged.enc.stat  # noqa: B018
    for fragment in ("'stat'", "Layer", "BatchStat", "update_state"):
        assert fragment in str(error.value)


def test_a_context_of_another_level_shows_the_way():
    ctx = nnx.context(0)
    with pytest.raises(nnx.TraceContextError, match="Cannot use Context from a different trace level") as error:
        jax.grad(lambda x: x * jax.random.normal(ctx.make_rng("params")))(1.0)
    for fragment in ("f(m, ctx)", "'params'", "partition()"):
        assert fragment in str(error.value)


@pytest.mark.parametrize(
    "does",
    [lambda: nnx.Ref(jnp.ones(1)), lambda: nnx.Ref(nnx.Ref(nnx.Param(1))), lambda: nnx.Ref(nnx.Static(1))],
    ids=["array", "ref", "static"],
)
def test_a_ref_of_anything_but_a_variable_is_a_type_error(does):
    with pytest.raises(TypeError, match="nnx.Ref"):
        does()


def test_an_incompatible_wrap_says_how_to_change_the_type():
    with pytest.raises(ValueError, match="is not compatible with return type") as error:
        nnx.BatchStat(nnx.Param(1))
    assert ".value" in str(error.value)
