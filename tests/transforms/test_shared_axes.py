"""A cell that is reached on several paths has one axis, whichever Modules of a call the paths start from."""

import jax.numpy as jnp
import pytest

import nnx


def leaf():
    return nnx.Dict(w=nnx.Param(jnp.ones((2, 2))))


def ref_in_one_module():
    ref = nnx.Ref(nnx.Param(jnp.ones((2, 2))))
    return (nnx.Dict(a=nnx.Dict(left=ref), b=nnx.Dict(right=ref)),), "a/left", "b/right"


def ref_between_modules():
    ref = nnx.Ref(nnx.Param(jnp.ones((2, 2))))
    return (nnx.Dict(left=ref), nnx.Dict(right=ref)), "left", "right"


def submodule_twice_in_one_module():
    shared = leaf()
    return (nnx.Dict(a=shared, b=nnx.Dict(c=shared)),), "a/w", "b/c/w"


def child_and_parent():
    child = leaf()
    return (child, nnx.Dict(child=child)), "w", "child/w"


def parent_and_child():
    child = leaf()
    return (nnx.Dict(child=child), child), "child/w", "w"


def child_of_two_parents():
    child = leaf()
    return (nnx.Dict(a=child), nnx.Dict(b=child)), "a/w", "b/w"


def three_generations():
    child = leaf()
    middle = nnx.Dict(child=child)
    return (child, middle, nnx.Dict(middle=middle)), "w", "middle/child/w"


def two_shared_modules_in_a_row():
    low = leaf()
    high = nnx.Dict(low=low)
    return (nnx.Dict(a=low, b=high, c=high),), "a/w", "c/low/w"


GRAPHS = [
    ref_in_one_module,
    ref_between_modules,
    submodule_twice_in_one_module,
    child_and_parent,
    parent_and_child,
    child_of_two_parents,
    three_generations,
    two_shared_modules_in_a_row,
]


def run_vmap(modules, axes):
    nnx.vmap(lambda *modules: 0.0, variable_axes=axes, axis_size=2)(*modules)


def run_scan(modules, axes):
    nnx.scan(lambda modules, carry, _: (carry, None), variable_axes=axes, length=2)(list(modules), 0.0, None)


@pytest.mark.parametrize("run", [run_vmap, run_scan])
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_cell_under_two_axes_is_an_error_naming_both_paths(graph, run):
    modules, first, second = graph()
    for axes in (
        {nnx.PathMatches(first): 0, nnx.PathMatches(second): 1, ...: 0},
        {nnx.PathMatches(second): 1, nnx.Param: 0},
    ):
        with pytest.raises(ValueError, match="under two axes") as error:
            run(modules, axes)
        assert first in str(error.value) and second in str(error.value)


@pytest.mark.parametrize("run", [run_vmap, run_scan])
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_cell_under_one_axis_on_all_paths_is_fine(graph, run):
    modules, _, _ = graph()
    for axes in ({nnx.Param: 0}, {nnx.PathMatches("**"): 0}, {nnx.PathMatches("**/w"): 0, nnx.PathMatches("**"): 0}):
        run(modules, axes)


def test_one_axis_and_a_broadcast_are_two_groups():
    child = leaf()
    with pytest.raises(ValueError, match=r"'\(Module 0\)/w' \(0\) and '\(Module 1\)/child/w' \(broadcast\)"):
        run_vmap((child, nnx.Dict(child=child)), {nnx.PathMatches("w"): 0})


def test_reference_to_a_parent_adds_no_path():
    model = nnx.Dict(child=leaf(), w=nnx.Param(jnp.ones((2, 2))))
    model.child.parent = model
    run_vmap((model,), {nnx.PathMatches("w"): 0, nnx.PathMatches("child/w"): 1})


def test_many_shared_modules_do_not_take_forever():
    module = leaf()
    for _ in range(40):  # 2 ** 40 paths
        module = nnx.Dict(a=module, b=module)
    run_vmap((module,), {nnx.PathMatches("**"): 0})
