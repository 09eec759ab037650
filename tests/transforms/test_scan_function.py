"""`nnx.scan` over a function: Modules, Contexts and data that are carried, scanned or shared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import nnx
from tests.models import Count
from tests.transforms.scan_models import LENGTH, STACKED, Block, X, layers, stack, unrolled


def test_scan_lifts_a_plain_function():
    def f(m, carry, x):
        return m(carry)[0], carry.sum() + x

    m, xs = layers(), jnp.arange(4.0)
    expected, _ = unrolled(m, X)
    carry, ys = nnx.scan(f, variable_axes={nnx.Param: 0}, length=LENGTH)(m, X, xs)
    np.testing.assert_allclose(carry, expected, rtol=1e-5)
    assert ys.shape == (LENGTH,) and m.count == LENGTH


def test_scan_as_a_decorator_of_a_function():
    @nnx.scan(length=3)
    def f(m, carry, _):
        """Counts."""
        m.count += 1
        return carry + m.count, m.count

    m = layers()
    carry, ys = f(m, 0, None)
    assert carry == 6 and list(ys) == [1, 2, 3] and m.count == 3
    assert f.__name__ == "f" and f.__doc__ == "Counts."


def test_scan_over_inputs_needs_no_length():
    @nnx.scan
    def f(m, carry, x):
        m.count += 1
        return carry + x, x * 2

    m = layers()
    carry, ys = f(m, 0.0, jnp.arange(3.0))
    assert carry == 3.0 and list(ys) == [0.0, 2.0, 4.0] and m.count == 3


def test_further_arguments_are_broadcast():
    def f(m, carry, x, offset, *, scale):
        return carry + (x + offset.sum()) * scale, None

    carry, _ = nnx.scan(f)(layers(), 0.0, jnp.arange(3.0), jnp.ones(2), scale=2.0)
    assert carry == (0 + 1 + 2 + 3 * 2) * 2.0


def test_in_axes_and_out_axes_apply_to_plain_arrays():
    def f(m, carry, x):
        return carry, x * 2

    xs = jnp.arange(6.0).reshape(2, 3)
    _, ys = nnx.scan(f, in_axes=1, out_axes=1)(layers(), 0.0, xs)
    np.testing.assert_array_equal(ys, xs * 2)
    _, ys = nnx.scan(f, in_axes=1, out_axes=0)(layers(), 0.0, xs)
    np.testing.assert_array_equal(ys, xs.T * 2)


def test_carry_and_inputs_may_be_pytrees_that_contain_modules():
    def f(m, carry, x):
        carry["m"].count += 1
        return {"m": carry["m"], "total": carry["total"] + x["a"]}, carry["m"].count

    m, other = layers(0), layers(1)
    carry, ys = nnx.scan(f)(m, {"m": other, "total": 0.0}, {"a": jnp.ones(3)})
    assert carry["m"] is other and other.count == 3 and carry["total"] == 3.0 and list(ys) == [1, 2, 3]


def test_reverse_and_unroll_of_a_function():
    def f(m, carry, x):
        return carry * 2 + x, carry

    xs = jnp.array([1.0, 2.0, 3.0])
    expected = jax.lax.scan(lambda c, x: (c * 2 + x, c), 0.0, xs, reverse=True)
    found = nnx.scan(f, reverse=True, unroll=3)(layers(), 0.0, xs)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def test_stateful_false_discards_the_changes():
    @nnx.scan(stateful=False)
    def f(m, carry, x):
        m.count += 1
        return carry, m.count

    m = layers()
    _, ys = f(m, 0.0, jnp.ones(3))
    assert list(ys) == [1, 2, 3] and m.count == 0


def test_a_new_variable_is_allowed_under_variable_axes():
    @nnx.scan(variable_axes={nnx.Param: 0, nnx.Intermediate: 0}, length=LENGTH)
    def f(m, carry, _):
        y, _ = m(carry)
        m.activation = nnx.Intermediate(y[0])
        return y, None

    m = layers()
    y, _ = f(m, X, None)
    assert m.activation.shape == (LENGTH, 3) and isinstance(m.variable("activation"), nnx.Intermediate)
    np.testing.assert_allclose(m.activation[-1], y[0], rtol=1e-6)


def test_sown_values_under_variable_axes_are_stacked():
    @nnx.scan(variable_axes={nnx.Param: 0, nnx.Intermediate: 0}, length=LENGTH)
    def f(m, carry, _):
        y, _ = m(carry)
        m.sow(nnx.Intermediate, "activations", y[0])
        return y, None

    m = layers()
    f(m, X, None)
    (values,) = m.pop_state(nnx.Intermediate)["activations"].value
    assert values.shape == (LENGTH, 3)


def test_identity_is_kept_inside_the_body():
    seen = []

    @nnx.scan
    def f(m, carry, x, other):
        seen.append(m is other["again"])
        return carry, x

    m = layers()
    f(m, 0.0, jnp.ones(2), {"again": m})
    assert seen and all(seen)


def test_scan_closes_over_nothing_and_compiles_once_under_jit():
    f = nnx.scan(lambda m, c, x: (m(c)[0], None), variable_axes={nnx.Param: 0}, length=LENGTH)
    step = nnx.jit(lambda m, c: f(m, c, None)[0])
    m = layers()
    for _ in range(3):
        step(m, X)
    assert step.trace_count == 1 and m.count == 3 * LENGTH


# variable_broadcast and variable_carry


def test_broadcast_state_can_be_read():
    @nnx.scan(variable_broadcast=nnx.buffers)
    def f(m, carry, x):
        return carry + m.node.sum() * x, None

    assert f(layers(), 0.0, jnp.ones(3))[0] == 6.0


def test_broadcast_state_is_read_only():
    @nnx.scan(variable_broadcast=Count)
    def f(m, carry, x):
        m.count += 1
        return carry, None

    m = nnx.Dict(inner=layers())
    with pytest.raises(Exception, match="count") as error:
        f(m.inner, 0.0, jnp.ones(3))
    assert "variable_carry" in str(error.value) or "broadcast" in str(error.value)
    assert m.inner.count == 0


def test_variable_carry_chooses_what_is_carried():
    @nnx.scan(variable_carry=Count, variable_broadcast=nnx.Not(Count))
    def f(m, carry, x):
        m.count += 1
        return carry + m.kernel.sum() * 0, m.count

    m = layers()
    _, ys = f(m, 0.0, jnp.ones(3))
    assert m.count == 3 and list(ys) == [1, 2, 3]


def test_carried_pytree_nodes_may_change_in_place():
    @nnx.scan
    def f(m, carry, x):
        m.cache["total"] = m.cache["total"] + x
        return carry, None

    m = nnx.Dict()
    m.cache = {"total": jnp.zeros(())}
    f(m, 0.0, jnp.arange(4.0))
    assert m.cache["total"] == 6.0


def test_a_ref_is_one_cell_in_the_body():
    m = nnx.Dict(a=nnx.Dict(), b=nnx.Dict())
    ref = nnx.Ref(nnx.Param(jnp.arange(3.0)))
    m.a.w = ref
    m.b.w = ref

    @nnx.scan(variable_axes={nnx.Param: 0}, length=3)
    def f(m, carry, _):
        m.a.w = m.a.w * 2
        return carry + m.b.w, m.b.w

    carry, ys = f(m, 0.0, None)
    assert carry == 6.0 and list(ys) == [0.0, 2.0, 4.0]
    np.testing.assert_array_equal(m.b.w, [0.0, 2.0, 4.0])
    assert m.a.w is m.b.w


# metadata_params


NAMED = {"metadata_params": {nnx.PARTITION_NAME: "layers"}}


def test_the_stacked_axis_has_its_name_in_the_sharding_metadata():
    m = stack(**NAMED)
    assert tuple(m.scan_module.variable("kernel").sharding) == ("layers", "din", "dout")
    assert m.scan_module.variable("bias").sharding is None


def test_the_name_is_inserted_at_the_axis():
    m = stack(variable_axes={nnx.PathMatches("**/kernel"): 1, nnx.Param: 0}, **NAMED)
    assert tuple(m.scan_module.variable("kernel").sharding) == ("din", "layers", "dout")


def test_the_name_is_absent_inside_the_body():
    seen = []

    class Spy(Block):
        def __call__(self, x, _):
            seen.append(tuple(self.variable("kernel").sharding))
            return super().__call__(x)

    m = nnx.Scan(Spy, **STACKED, **NAMED)(3, ctx=nnx.context(0))
    m(X, None)
    assert set(seen) == {("din", "dout")}
    assert tuple(m.scan_module.variable("kernel").sharding) == ("layers", "din", "dout")


def test_a_partition_spec_stays_a_partition_spec():
    class Spec(nnx.Module):
        def __init__(self, *, ctx):
            self.kernel = nnx.Param(jnp.ones((2, 2)), PartitionSpec("din", None))

    m = nnx.Scan(Spec, **STACKED, **NAMED)(ctx=nnx.context(0))
    assert m.scan_module.variable("kernel").sharding == PartitionSpec("layers", "din", None)


def test_without_metadata_params_the_sharding_is_left_alone():
    assert tuple(stack().scan_module.variable("kernel").sharding) == ("din", "dout")


def test_gradients_through_a_named_scan_carry_the_stacked_metadata():
    m = stack(**NAMED)
    grads = nnx.grad(lambda m: m(X, None)[0].sum())(m)
    assert tuple(grads["scan_module/kernel"].sharding) == ("layers", "din", "dout")
