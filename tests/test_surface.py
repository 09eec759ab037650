"""The public surface as a whole: a concept has one argument name, and only public names are on offer."""

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx

ROOMS = {"core", "sharding", "transforms", "nn", "training", "inspection", "interop", "bridge", "planning"}


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function, and the constructor, call and public methods of every public class."""
    for name in [*nnx.__all__, "Any", "Sequence"]:
        value = getattr(nnx, name)
        if isinstance(value, type):
            for method, function in vars(value).items():
                public = not method.startswith("_") or method in ("__init__", "__call__")
                if public and isinstance(function, types.FunctionType):
                    yield f"{name}.{method}", function
        elif callable(value) and str(getattr(value, "__module__", "")).startswith("nnx."):
            yield name, value


PARAMETERS = [
    (name, parameter)
    for name, function in public_functions()
    for parameter in inspect.signature(function).parameters.values()
]


def named(argument: str) -> list[tuple[str, inspect.Parameter]]:
    found = [(name, parameter) for name, parameter in PARAMETERS if parameter.name == argument]
    assert found, f"no public function has an argument {argument!r}"
    return found


# Argument names


def test_a_filter_that_picks_a_part_is_called_where_and_one_that_differentiates_or_trains_wrt():
    # `filters` are the subject of the call, `filter` belongs to the lineage, `variable_filter` is Flax's name
    allowed = {"where", "wrt", "filters"}
    exceptions = {("Not.__init__", "filter"), ("WeightNorm.__init__", "variable_filter")}
    names = {(name, parameter.name) for name, parameter in PARAMETERS if parameter.annotation == nnx.Filter}
    assert {name for name in names if name[1] not in allowed} == exceptions
    assert {("add_lora", "where"), ("count_params", "where"), ("EMA.__init__", "wrt")} <= names


@pytest.mark.parametrize("argument", ["strict", "cast", "verify", "rename"])
def test_options_of_loading_are_keywords_only(argument):
    assert {name for name, parameter in named(argument) if parameter.kind is not parameter.KEYWORD_ONLY} == set()


def test_a_mesh_comes_before_its_rules():
    # `with_logical_constraint(x, names, rules, mesh)` keeps the order it has always had
    signatures = {name: list(inspect.signature(function).parameters) for name, function in public_functions()}
    both = {name: order for name, order in signatures.items() if {"mesh", "rules"} <= set(order)}
    assert {"shard", "init_sharded", "sharding_report", "logical_to_mesh_sharding"} <= both.keys()
    swapped = {name for name, order in both.items() if order.index("mesh") > order.index("rules")}
    assert swapped == {"with_logical_constraint"}


# Masks


def make_masks() -> dict[str, jax.Array | None]:
    tokens = jnp.ones(3)
    return {
        "make_attention_mask": nnx.make_attention_mask(tokens, tokens),
        "make_causal_mask": nnx.make_causal_mask(tokens),
        "make_sliding_window_mask": nnx.make_sliding_window_mask(tokens, 2),
        "make_padding_mask": nnx.make_padding_mask(jnp.array([1]), 3),
        "make_segment_mask": nnx.make_segment_mask(tokens),
        "combine_masks": nnx.combine_masks(jnp.ones((1, 3, 3), bool)),
    }


def test_every_function_that_makes_a_mask_makes_the_same_dtype():
    masks = make_masks()
    assert masks.keys() == {name for name in nnx.__all__ if name.startswith("make_") or name == "combine_masks"}
    assert {name: mask.dtype for name, mask in masks.items() if mask is not None} == dict.fromkeys(masks, jnp.float32)


X = jax.random.normal(jax.random.key(0), (2, 6, 8))
KEPT = jax.random.bernoulli(jax.random.key(1), 0.6, X.shape)
CAUSAL = nnx.make_causal_mask(X[:, :, 0], dtype=bool)


MASKED: dict[str, tuple[Callable[[jax.Array], Any], jax.Array]] = {
    "BatchNorm": (lambda mask: nnx.BatchNorm(8, use_running_average=False)(X, mask=mask), KEPT),
    "LayerNorm": (lambda mask: nnx.LayerNorm(8)(X, mask=mask), KEPT),
    "RMSNorm": (lambda mask: nnx.RMSNorm(8)(X, mask=mask), KEPT),
    "GroupNorm": (lambda mask: nnx.GroupNorm(8, num_groups=2)(X, mask=mask), KEPT),
    "InstanceNorm": (lambda mask: nnx.InstanceNorm(8)(X, mask=mask), KEPT),
    "MultiHeadAttention": (lambda mask: nnx.MultiHeadAttention(2, 8, ctx=nnx.context(0))(X, mask=mask), CAUSAL),
    "dot_product_attention": (lambda mask: nnx.dot_product_attention(*[X.reshape(2, 6, 2, 4)] * 3, mask=mask), CAUSAL),
    "Conv": (lambda mask: nnx.Conv(8, 8, (6,), mask=mask, ctx=nnx.context(0))(X), KEPT[0][..., None] & KEPT[1, 0]),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32], ids=["float32", "int32"])
@pytest.mark.parametrize("name", MASKED)
def test_every_layer_that_takes_a_mask_takes_any_dtype(name, dtype):
    call, mask = MASKED[name]
    expected = call(mask)
    np.testing.assert_array_equal(call(mask.astype(dtype)), expected)
    assert not np.array_equal(expected, call(jnp.ones_like(mask)))


def test_the_mask_of_a_metric_is_a_keyword_so_that_values_are_not_taken_for_it():
    with pytest.raises(TypeError, match="positional"):
        nnx.Average().update(jnp.ones(3))  # pyright: ignore[reportCallIssue]


# Names on offer


def test_star_import_shadows_no_common_name_and_no_subpackage():
    namespace: dict[str, object] = {}
    exec("from typing import Any\nfrom collections.abc import Sequence\nfrom nnx import *", namespace)
    assert namespace["Any"] is typing.Any
    assert namespace["Sequence"] is collections.abc.Sequence
    assert not namespace.keys() & ROOMS
    assert {"Module", "Param", "jit", "Linear", "Optimizer"} <= namespace.keys()


def test_the_names_that_a_star_import_leaves_out_are_still_public():
    assert issubclass(nnx.Sequence, nnx.Module)
    assert callable(nnx.Any(nnx.Param, nnx.BatchStat))


def test_completion_offers_the_public_names_and_no_room():
    offered = {name for name in dir(nnx) if not name.startswith("_")}
    assert offered == {*nnx.__all__, "Any", "Sequence"}
    # Python makes an imported submodule an attribute of its package, so a room can be reached, but nothing shows it.
    assert ROOMS <= vars(nnx).keys() and not offered & ROOMS
