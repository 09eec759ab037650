"""freeze and unfreeze: Variables that are not trained, chosen by Module selectors and by filters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx
from tests.checks import name_of


class Net(nnx.Module):
    def __init__(self):
        ctx = nnx.context(0)
        self.encoder = [nnx.Linear(2, 4, ctx=ctx), nnx.BatchNorm(4, use_running_average=True, ctx=ctx)]
        self.head = nnx.Linear(4, 1, ctx=ctx)

    def __call__(self, x):
        return self.head(self.encoder(x))


def loss(model, x):
    return jnp.mean(model(x) ** 2)


X = jnp.ones((3, 2))
ENCODER = ["encoder/0/bias", "encoder/0/kernel", "encoder/1/bias", "encoder/1/scale"]
HEAD = ["head/bias", "head/kernel"]


def frozen(model: nnx.Module) -> list[str]:
    return [path for path, leaf in model.get_state().items() if getattr(leaf, "frozen", False)]


@pytest.mark.parametrize(
    ("where", "paths"),
    [
        ("encoder", ENCODER),
        ("encoder/0", ENCODER[:2]),
        ("encoder/*", ENCODER),
        ("head/kernel", HEAD[1:]),
        ("batch_stats", ["encoder/1/mean", "encoder/1/var"]),
        (nnx.Linear, [*ENCODER[:2], *HEAD]),
        (nnx.Param, [*ENCODER, *HEAD]),
        (..., [*ENCODER, *HEAD]),
        (nnx.PathMatches("**/bias"), ["encoder/0/bias", "encoder/1/bias", "head/bias"]),
        (lambda path, x: isinstance(x, nnx.BatchNorm), ENCODER[2:]),
        (lambda path, x: path.endswith("kernel"), ["encoder/0/kernel", "head/kernel"]),
        ([nnx.BatchNorm, nnx.PathMatches("head/bias")], [*ENCODER[2:], "head/bias"]),
    ],
)
def test_where_is_a_module_selector_or_a_filter(where, paths):
    model = Net()
    assert model.freeze(where) is model
    assert frozen(model) == paths
    assert frozen(model.unfreeze(where)) == []


def test_unfreeze_removes_the_mark_from_a_part_and_leaves_no_trace():
    model = Net()
    before = model.get_module_def()
    model.freeze(...).unfreeze("head")
    assert frozen(model) == ENCODER
    assert model.unfreeze().get_module_def() == before


def test_the_gradient_leaves_out_what_is_frozen():
    model = Net()
    whole = nnx.grad(loss)(model, X)
    model.freeze("encoder")
    part = nnx.grad(loss)(model, X)
    assert list(part) == HEAD
    np.testing.assert_array_equal(part["head/kernel"].value, whole["head/kernel"].value)
    assert list(nnx.value_and_grad(loss)(model, X)[1]) == HEAD


def test_a_compiled_step_notices_freezing_and_unfreezing():
    model = Net()
    paths = []

    @nnx.jit
    def gradient(model, x):
        grads = nnx.grad(loss)(model, x)
        paths.append(list(grads))
        return grads

    gradient(model, X)
    gradient(model.freeze("encoder"), X)
    gradient(model.unfreeze("encoder/0"), X)
    assert paths == [[*ENCODER, *HEAD], HEAD, [*ENCODER[:2], *HEAD]]
    assert gradient.trace_count == 3


def test_an_optimizer_trains_only_what_is_not_frozen():
    model = Net().freeze("encoder")
    optimizer = nnx.Optimizer(model, optax.adamw(0.1, weight_decay=0.1))
    assert list(optimizer.trains) == HEAD
    before = model.get_state()

    @nnx.jit
    def step(optimizer, x):
        optimizer.update(nnx.grad(loss)(optimizer.model, x))

    step(optimizer, X)
    after = model.get_state()
    assert [path for path in before if before[path] != after[path]] == HEAD
    assert not any("encoder" in path for path in optimizer.filter("opt_state"))


def test_optimizer_made_before_freezing_raises_with_advice():
    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1))
    model.freeze("encoder/0")
    with pytest.raises(ValueError, match=r"gone: 'encoder/0/bias', .* after freeze\(\) or unfreeze\(\)"):
        optimizer.update(nnx.grad(loss)(model, X))


def test_nothing_left_to_train_is_an_error_that_mentions_freezing():
    model = Net().freeze(...)
    with pytest.raises(ValueError, match="There are frozen Param: 'encoder/0/bias'"):
        nnx.grad(loss)(model, X)
    with pytest.raises(ValueError, match=r"Frozen Variables do not count: see `model.unfreeze\(\)`"):
        nnx.Optimizer(model, optax.sgd(0.1))


def test_a_summary_counts_frozen_parameters_apart():
    table = nnx.summary(Net().freeze("encoder"))
    assert table.collections["params (frozen)"].elements == 20
    assert table.collections["params"].elements == 5
    assert table.parameters == 25
    assert "params (frozen)" in str(table)


def test_the_mark_survives_copies_and_merging_and_keeps_other_metadata():
    model = nnx.Dict(w=nnx.Param(jnp.ones(2), ("embed",), name="w"))
    model.freeze(nnx.Param)
    state, moduledef = model.partition()
    for copied in (model.clone(), moduledef.merge(state), nnx.jit(lambda m: m.clone())(model)):
        assert copied.variable("w").frozen and copied.variable("w").sharding == ("embed",)
    assert "frozen" not in model.unfreeze().variable("w").metadata
    assert model.variable("w").name == "w"


def test_a_shared_variable_is_frozen_for_all_its_owners():
    table = nnx.Ref(nnx.Param(jnp.ones(2)))
    model = nnx.Dict(embed=nnx.Dict(w=table), head=nnx.Dict(w=table))
    model.freeze("head")
    assert model.embed.variable("w").frozen
    with pytest.raises(ValueError, match="nothing to differentiate"):
        nnx.grad(lambda m: m.embed.w.sum())(model)


def test_selecting_nothing_is_an_error_that_lists_the_modules():
    with pytest.raises(ValueError, match="freeze: where='decoder' matches no Variable in this Net.*'encoder/0'"):
        Net().freeze("decoder")
    with pytest.raises(TypeError, match="freeze: 3 does not select Modules"):
        Net().freeze(3)


def test_the_trace_level_is_checked():
    model = Net()
    with pytest.raises(nnx.TraceContextError):
        jax.jit(lambda: model.freeze("head") and None)()


# Module selectors


@pytest.mark.parametrize(
    ("where", "paths"),
    [
        (nnx.Linear, ["encoder/0", "head"]),
        ("encoder/*", ["encoder/0", "encoder/1"]),
        (lambda path, module: path == "head", ["head"]),
        (["head", nnx.BatchNorm], ["encoder/1", "head"]),
        (..., ["encoder/0", "encoder/1", "head"]),
    ],
    ids=name_of,
)
def test_selector_picks_modules_by_type_glob_function_or_a_list_of_these(where, paths):
    model = Net()
    nnx.set_dtypes(model, dtype=jnp.bfloat16, where=where)
    assert [path for path, module in model.named_modules() if getattr(module, "dtype", None) == jnp.bfloat16] == paths


def test_a_selector_that_picks_nothing_or_is_none_is_an_error():
    with pytest.raises(ValueError, match="nnx.set_dtypes: where='decoder' selects nothing in this Net"):
        nnx.set_dtypes(Net(), dtype=jnp.bfloat16, where="decoder")
    for wrong in (nnx.Param, None, 3, Net()):
        with pytest.raises(TypeError, match="does not select Modules"):
            nnx.set_dtypes(Net(), dtype=jnp.bfloat16, where=wrong)
