"""Rules: which mesh axis a logical axis name means."""

import threading

import pytest
from jax.sharding import PartitionSpec as P

import nnx

RULES = [("batch", "data"), ("embed", "model"), ("mlp", "model"), ("vocab", ("data", "model"))]


@pytest.fixture(autouse=True)
def no_rules_are_left_behind():
    yield
    assert nnx.get_logical_axis_rules() == ()


def test_names_become_mesh_axes():
    assert nnx.logical_to_mesh_axes(("batch", None, "embed"), RULES) == P("data", None, "model")


def test_a_rule_may_give_several_mesh_axes_or_none():
    assert nnx.logical_to_mesh_axes(("vocab",), RULES) == P(("data", "model"))
    assert nnx.logical_to_mesh_axes(("embed",), [("embed", None), ("embed", "model")]) == P(None)


def test_a_dimension_may_have_several_names():
    assert nnx.logical_to_mesh_axes((("batch", "embed"), "mlp"), RULES) == P(("data", "model"), None)


def test_rules_are_tried_in_order_and_a_mesh_axis_is_used_once():
    assert nnx.logical_to_mesh_axes(("mlp", "embed"), RULES) == P(None, "model")
    assert nnx.logical_to_mesh_axes(("mlp", "embed"), [*RULES, ("mlp", "data")]) == P("data", "model")
    assert nnx.logical_to_mesh_axes(("embed", "vocab"), RULES) == P("model", None)


def test_a_name_without_a_rule_is_not_split():
    assert nnx.logical_to_mesh_axes(("unheard", "embed"), RULES) == P(None, "model")
    assert nnx.logical_to_mesh_axes(("batch", "embed")) == P(None, None)
    assert nnx.logical_to_mesh_axes(None, RULES) == P()


def test_a_name_twice_in_one_array_is_an_error():
    with pytest.raises(ValueError, match="'embed' appears twice in .'embed', 'embed'.") as error:
        nnx.logical_to_mesh_axes(("embed", "embed"), RULES)
    assert "its own name" in str(error.value)


def test_rules_hold_within_the_block_and_nest():
    with nnx.logical_axis_rules(RULES):
        assert nnx.logical_to_mesh_axes(("embed",)) == P("model")
        with nnx.logical_axis_rules({"embed": "data"}):
            assert nnx.get_logical_axis_rules() == (("embed", "data"),)
            assert nnx.logical_to_mesh_axes(("embed",)) == P("data")
        assert nnx.logical_to_mesh_axes(("embed",)) == P("model")


def test_the_block_is_left_also_by_an_exception():
    with pytest.raises(KeyError), nnx.logical_axis_rules(RULES):
        raise KeyError


def test_rules_can_be_set_for_good():
    nnx.set_logical_axis_rules(RULES)
    try:
        assert nnx.logical_to_mesh_axes(("embed",)) == P("model")
    finally:
        nnx.set_logical_axis_rules(())


def test_rules_belong_to_their_thread():
    seen = []
    with nnx.logical_axis_rules(RULES):
        thread = threading.Thread(target=lambda: seen.append(nnx.get_logical_axis_rules()))
        thread.start()
        thread.join()
    assert seen == [()]


@pytest.mark.parametrize("rules", [["embed"], [("embed",)], [("embed", 3)], [(3, "model")], "embed", 7])
def test_invalid_rule_raises_and_is_shown(rules):
    with pytest.raises(TypeError, match=r'\("embed", "model"\)') as error:
        nnx.logical_to_mesh_axes(("embed",), rules)
    assert repr(rules[0] if isinstance(rules, list) else rules) in str(error.value)


def test_rules_that_were_not_called_or_not_listed_are_errors_that_say_so():
    with pytest.raises(TypeError, match="Call the function"):
        nnx.logical_to_mesh_axes(("embed",), nnx.fsdp_rules)
    with pytest.raises(TypeError, match="Put the rule into a list"):
        nnx.logical_to_mesh_axes(("embed",), nnx.on_host(nnx.Param))


@pytest.mark.parametrize("names", ["embed", 3, ("embed", 1)])
def test_invalid_names_raise_and_are_shown(names):
    with pytest.raises(TypeError, match="names? is a|a tuple of axis names"):
        nnx.logical_to_mesh_axes(names, RULES)


# Ready rule sets

KERNELS = {
    "attention": ("embed", "heads", "head_dim"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "any": ("in", "out"),
}
EXPECTED = {
    nnx.data_parallel_rules: [P(None, None, None), P(None, None), P(None, None), P(None, None)],
    nnx.fsdp_rules: [P("data", None, None), P("data", None), P(None, "data"), P("data", None)],
    nnx.tensor_parallel_rules: [P(None, "model", None), P(None, "model"), P("model", None), P(None, "model")],
    nnx.fsdp_tensor_parallel_rules: [
        P("data", "model", None),
        P("data", "model"),
        P("model", "data"),
        P("data", "model"),
    ],
}


@pytest.mark.parametrize("rules", EXPECTED, ids=lambda rules: rules.__name__)
def test_ready_rule_sets_split_what_their_name_says(rules):
    assert [nnx.logical_to_mesh_axes(axes, rules()) for axes in KERNELS.values()] == EXPECTED[rules]


def test_the_batch_is_split_over_the_data_axis_and_activations_follow():
    activation = ("batch", "length", "embed")
    for rules in (nnx.data_parallel_rules(), nnx.fsdp_rules(), nnx.fsdp_tensor_parallel_rules()):
        assert nnx.logical_to_mesh_axes(activation, rules) == P("data", None, None)
    assert nnx.logical_to_mesh_axes(activation, nnx.tensor_parallel_rules()) == P(None, None, None)
    assert nnx.logical_to_mesh_axes(activation, nnx.tensor_parallel_rules(data="data")) == P("data", None, None)


def test_rule_sets_take_other_mesh_axes():
    rules = nnx.fsdp_tensor_parallel_rules(data=("host", "chip"), model="tensor")
    assert nnx.logical_to_mesh_axes(("embed", "mlp"), rules) == P(("host", "chip"), "tensor")
