"""`nnx.scan` and `nnx.Scan`: stacked layers, carried state, split randomness, metadata of the axis, and the errors."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import nnx


class Count(nnx.Variable):
    pass


class Block(nnx.Module):
    """A layer with a Param (stacked), a counter and a bare array (carried or broadcast)."""

    def __init__(self, features=3, *, ctx):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (features, features)), ("din", "dout"))
        self.bias = nnx.Param(jnp.zeros((features,)))
        self.count = Count(jnp.zeros((), jnp.int32))
        self.node = jnp.ones((2,))

    def __call__(self, x, _=None):
        self.count += 1
        x = jnp.tanh(x @ self.kernel + self.bias)
        return x, x.sum()

    def shifted(self, x, shift, scale=1.0):
        return x @ self.kernel * scale + shift, shift

    def noisy(self, x, _, *, ctx):
        noise = jax.random.uniform(ctx.make_rng("noise"), ())
        return x + noise, noise

    def noisy_and_shared(self, x, _, *, ctx):
        return x, (jax.random.uniform(ctx.make_rng("noise")), jax.random.uniform(ctx.make_rng("shared")))


LENGTH = 4
X = jnp.array([[0.1, -0.2, 0.3]])
STACKED = {"variable_axes": {nnx.Param: 0}, "split_rngs": "params", "length": LENGTH}


def stack(seed=0, **options):
    return nnx.Scan(Block, **(STACKED | options))(3, ctx=nnx.context(seed))


def unrolled(m, x, axis=0, order=range(LENGTH)):
    """What scanning over the stacked block `m` should give, one layer at a time."""
    ys = [0.0] * LENGTH
    for i in order:
        x = jnp.tanh(x @ jnp.take(m.kernel, i, axis=axis) + jnp.take(m.bias, i, axis=0))
        ys[i] = x.sum()
    return x, jnp.stack(ys)


def assert_no_tracers(module):
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(module.get_state()))


# The class form


def test_scan_builds_one_module_with_stacked_variables():
    m = stack()
    assert isinstance(m.scan_module, Block)
    assert m.scan_module.kernel.shape == (LENGTH, 3, 3) and m.scan_module.bias.shape == (LENGTH, 3)
    assert m.scan_module.count.shape == () and m.scan_module.node.shape == (2,)
    assert isinstance(m.scan_module.variable("kernel"), nnx.Param)
    assert list(m.filter(nnx.Param)) == ["scan_module/bias", "scan_module/kernel"]
    assert_no_tracers(m)


def test_streams_selected_by_split_rngs_differ_per_layer():
    kernel = stack().scan_module.kernel
    assert len({float(kernel[i, 0, 0]) for i in range(LENGTH)}) == LENGTH


def test_streams_not_selected_by_split_rngs_are_shared_by_the_layers():
    kernel = stack(split_rngs=None).scan_module.kernel
    assert all(np.array_equal(kernel[0], kernel[i]) for i in range(LENGTH))


def test_calling_a_scanned_module_scans_over_its_layers():
    m = stack()
    y, ys = m(X, None)
    expected, expected_ys = unrolled(m.scan_module, X)
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_allclose(ys, expected_ys, rtol=1e-5)


def test_carried_state_passes_from_step_to_step():
    m = stack()
    m(X, None)
    m(X, None)
    assert m.scan_module.count == 2 * LENGTH and m.scan_module.count.shape == ()
    assert_no_tracers(m)


def test_call_reaches_any_method_and_passes_broadcast_arguments():
    m = stack()
    shifts = jnp.arange(4.0)
    y, ys = m.call.shifted(X, shifts, 2.0)
    x = X
    for i in range(LENGTH):
        x = x @ m.scan_module.kernel[i] * 2.0 + shifts[i]
    np.testing.assert_allclose(y, x, rtol=1e-5)
    np.testing.assert_array_equal(ys, shifts)


def test_call_itself_is_the_modules_call():
    m = stack()
    np.testing.assert_allclose(m.call(X, None)[0], m(X, None)[0], rtol=1e-6)


def test_a_context_passed_to_a_scanned_call_is_split():
    m = stack(split_rngs=("params", "noise"))
    ctx = nnx.context(noise=0)
    _, first = m.call.noisy(0.0, None, ctx=ctx)
    _, second = m.call.noisy(0.0, None, ctx=ctx)
    assert len({float(v) for v in [*first, *second]}) == 2 * LENGTH


def test_selected_streams_differ_per_step_and_the_others_are_shared():
    m = stack(split_rngs="noise")
    _, (noise, shared) = m.call.noisy_and_shared(0.0, None, ctx=nnx.context(noise=0, shared=1))
    assert len({float(v) for v in noise}) == LENGTH
    assert len({float(v) for v in shared}) == 1


@pytest.mark.parametrize(
    "split_rngs, splits",
    [
        (None, set()),
        (..., {"noise", "shared"}),
        ("noise", {"noise"}),
        (["noise", "shared"], {"noise", "shared"}),
        (lambda name: name == "shared", {"shared"}),
        ({"noise": True, ...: False}, {"noise"}),
    ],
    ids=["none", "all", "name", "sequence", "callable", "mapping"],
)
def test_split_rngs_takes_every_rng_filter(split_rngs, splits):
    m = stack(split_rngs=split_rngs)
    _, (noise, shared) = m.call.noisy_and_shared(0.0, None, ctx=nnx.context(noise=0, shared=1))
    for name, values in (("noise", noise), ("shared", shared)):
        assert len({float(v) for v in values}) == (LENGTH if name in splits else 1)


def test_the_axis_of_the_stack_can_be_chosen():
    m = stack(variable_axes={nnx.PathMatches("**/kernel"): 1, nnx.Param: 0})
    assert m.scan_module.kernel.shape == (3, LENGTH, 3) and m.scan_module.bias.shape == (LENGTH, 3)
    y, _ = m(X, None)
    np.testing.assert_allclose(y, unrolled(m.scan_module, X, axis=1)[0], rtol=1e-5)


def test_a_negative_axis_counts_from_the_end():
    m = stack(variable_axes={nnx.PathMatches("**/kernel"): -1, nnx.Param: 0})
    assert m.scan_module.kernel.shape == (3, 3, LENGTH)
    np.testing.assert_allclose(m(X, None)[0], unrolled(m.scan_module, X, axis=2)[0], rtol=1e-5)


def test_state_under_variable_axes_may_change_per_step():
    m = stack(variable_axes={nnx.Param: 0, Count: 0})
    assert m.scan_module.count.shape == (LENGTH,)
    m(X, None)
    np.testing.assert_array_equal(m.scan_module.count, np.ones(LENGTH))


def test_reverse_runs_the_layers_backwards():
    m = stack(reverse=True)
    y, ys = m(X, None)
    expected, expected_ys = unrolled(m.scan_module, X, order=reversed(range(LENGTH)))
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_allclose(ys, expected_ys, rtol=1e-5)


def test_unroll_changes_nothing_but_the_program():
    np.testing.assert_allclose(stack(unroll=2)(X, None)[0], stack()(X, None)[0], rtol=1e-6)


def test_a_scanned_module_under_jit_and_grad():
    m = stack()

    @nnx.jit
    def step(m, x):
        return nnx.grad(lambda m: (m(x, None)[0] ** 2).sum())(m)

    grads = step(m, X)
    step(m, X)

    def by_hand(kernel):
        block = nnx.Dict(kernel=nnx.Param(kernel), bias=nnx.Param(m.scan_module.bias))
        return (unrolled(block, X)[0] ** 2).sum()

    expected = jax.grad(by_hand)(m.scan_module.kernel)
    np.testing.assert_allclose(grads["scan_module/kernel"].value, expected, rtol=1e-4, atol=1e-6)
    assert m.scan_module.count == 2 * LENGTH and step.trace_count == 1


def test_a_scanned_module_can_be_partitioned_cloned_and_merged():
    m = stack()
    rebuilt = m.partition().merge()
    np.testing.assert_allclose(rebuilt(X, None)[0], m.clone()(X, None)[0], rtol=1e-6)


def test_scanned_modules_nest():
    Inner = nnx.Scan(Block, variable_axes={nnx.Param: 0}, split_rngs="params", length=2)
    m = nnx.Scan(Inner, variable_axes={nnx.Param: 0}, split_rngs="params", length=3)(3, ctx=nnx.context(0))
    kernel = m.scan_module.scan_module.kernel
    assert kernel.shape == (3, 2, 3, 3)
    y, ys = m(X, None)
    x = X
    for i in range(3):
        for j in range(2):
            x = jnp.tanh(x @ kernel[i, j])
    np.testing.assert_allclose(y, x, rtol=1e-5)
    assert m.scan_module.scan_module.count == 6


def test_scan_without_variable_axes_runs_one_layer_again_and_again():
    m = nnx.Scan(Block, length=3)(3, ctx=nnx.context(0))
    assert m.scan_module.kernel.shape == (3, 3)
    y, _ = m(X, None)
    x = X
    for _ in range(3):
        x = jnp.tanh(x @ m.scan_module.kernel)
    np.testing.assert_allclose(y, x, rtol=1e-5)


# The decorator form


class Stack(nnx.Module):
    @nnx.scan(**STACKED)
    def __init__(self, features, *, ctx):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (features, features)))
        self.bias = nnx.Param(jnp.zeros((features,)))
        self.count = Count(jnp.zeros((), jnp.int32))

    @functools.partial(nnx.scan, variable_axes={nnx.Param: 0}, length=LENGTH)
    def __call__(self, x, _):
        """One layer."""
        self.count += 1
        x = jnp.tanh(x @ self.kernel + self.bias)
        return x, x.sum()

    @nnx.scan(variable_axes={nnx.Param: 0}, split_rngs="noise", length=LENGTH)
    def noisy(self, x, _, *, ctx):
        noise = jax.random.uniform(ctx.make_rng("noise"))
        return x + noise, noise


def test_scan_decorates_init_and_methods():
    m = Stack(3, ctx=nnx.context(0))
    assert m.kernel.shape == (LENGTH, 3, 3) and m.count == 0
    assert len({float(m.kernel[i, 0, 0]) for i in range(LENGTH)}) == LENGTH
    y, ys = m(X, None)
    expected, expected_ys = unrolled(m, X)
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_allclose(ys, expected_ys, rtol=1e-5)
    assert m.count == LENGTH
    assert_no_tracers(m)


def test_a_decorated_method_takes_a_context():
    _, noise = Stack(3, ctx=nnx.context(0)).noisy(0.0, None, ctx=nnx.context(noise=1))
    assert len({float(v) for v in noise}) == LENGTH


def test_is_init_says_what_the_name_does_not():
    class Setup(nnx.Module):
        def __init__(self, *, ctx):
            self.setup(ctx=ctx)

        @nnx.scan(is_init=True, **STACKED)
        def setup(self, *, ctx):
            self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (2,)))

    assert Setup(ctx=nnx.context(0)).kernel.shape == (LENGTH, 2)


def test_a_decorated_method_keeps_name_docstring_and_signature():
    assert Stack.__call__.__name__ == "__call__" and Stack.__call__.__doc__ == "One layer."
    assert list(inspect.signature(Stack.noisy).parameters) == ["self", "x", "_", "ctx"]


# The function form


def layers(seed=0):
    return stack(seed).scan_module


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


def test_in_axes_and_out_axes_speak_of_plain_arrays():
    def f(m, carry, x):
        return carry, x * 2

    xs = jnp.arange(6.0).reshape(2, 3)
    _, ys = nnx.scan(f, in_axes=1, out_axes=1)(layers(), 0.0, xs)
    np.testing.assert_array_equal(ys, xs * 2)
    _, ys = nnx.scan(f, in_axes=1, out_axes=0)(layers(), 0.0, xs)
    np.testing.assert_array_equal(ys, xs.T * 2)


def test_carry_and_inputs_may_be_pytrees_and_modules_may_stand_among_them():
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


# Errors


def test_variable_axes_without_length_is_an_error():
    message = "Cannot use variable_axes without specifying a length"
    with pytest.raises(ValueError, match=message):
        nnx.Scan(Block, variable_axes={nnx.Param: 0})(3, ctx=nnx.context(0))
    with pytest.raises(ValueError, match=message):

        class Bad(nnx.Module):
            @nnx.scan(variable_axes={nnx.Param: 0})
            def __init__(self, *, ctx):
                self.w = nnx.Param(jnp.ones(2))

        Bad(ctx=nnx.context(0))


def test_disagreeing_lengths_list_every_length_with_its_path():
    @nnx.scan(variable_axes={nnx.Param: 0}, length=5)
    def f(m, carry, x):
        return carry, None

    m = layers()
    with pytest.raises(ValueError) as error:
        f(m, 0.0, {"tokens": jnp.ones(3)})
    message = str(error.value)
    for fragment in ("kernel", "bias", "tokens", "3", "4", "5"):
        assert fragment in message
    assert m.count == 0


def test_a_carry_that_changes_dtype_is_an_error_that_names_its_path():
    m = layers()
    with pytest.raises((TypeError, ValueError), match="total") as error:
        nnx.scan(lambda m, c, x: ({"total": c["total"] + 0.5}, None))(
            m, {"total": jnp.zeros((), jnp.int32)}, jnp.ones(2)
        )
    assert "int32" in str(error.value) and "float32" in str(error.value)


def test_a_carry_that_changes_structure_is_an_error():
    m = layers()
    with pytest.raises((TypeError, ValueError), match="carry"):
        nnx.scan(lambda m, c, x: ((c, c), None))(m, 0.0, jnp.ones(2))


@pytest.mark.parametrize(
    "change, fragments",
    [
        (lambda m: m.count + 0.5, ("int32", "float32")),
        (lambda m: jnp.zeros((3,), jnp.int32), ("(3,)", "()")),
    ],
    ids=["dtype", "shape"],
)
def test_a_carried_variable_that_changes_is_an_error_that_names_its_path(change, fragments):
    @nnx.scan
    def f(m, carry, x):
        m["inner"].count = change(m["inner"])
        return carry, None

    m = nnx.Dict(inner=layers())
    with pytest.raises((TypeError, ValueError), match="inner/count") as error:
        f(m, 0.0, jnp.ones(2))
    message = str(error.value).replace("[3]", "(3,)").replace("[]", "()")
    assert all(fragment in message for fragment in fragments)
    assert m.inner.count == 0 and m.inner.count.dtype == jnp.int32


def set_static(m):
    m.mode = "eval"


def mutate_static_list(m):
    m.tags.append("b")


def add_static(m):
    m.note = 3


def replace_submodule(m):
    m.child = nnx.Dict(w=nnx.Param(jnp.ones(2)))


def add_submodule(m):
    m.fresh = nnx.Dict()


def remove_submodule(m):
    del m.child


def add_carried_variable(m):
    m.extra = nnx.Variable(jnp.ones(()))


def delete_variable(m):
    del m.w


@pytest.mark.parametrize(
    "change, path",
    [
        (set_static, "outer/mode"),
        (mutate_static_list, "outer/tags"),
        (add_static, "outer/note"),
        (replace_submodule, "outer/child"),
        (add_submodule, "outer/fresh"),
        (remove_submodule, "outer/child"),
        (add_carried_variable, "outer/extra"),
        (delete_variable, "outer/w"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_structural_changes_in_the_body_are_errors_that_name_the_path(change, path):
    class Outer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))
            self.child = nnx.Dict(w=nnx.Param(jnp.ones(2)))
            self.mode, self.tags = "train", ["a"]

    m = nnx.Dict(outer=Outer())
    state, moduledef = m.partition()

    @nnx.scan
    def f(m, carry, x):
        change(m.outer)
        return carry, None

    with pytest.raises(Exception, match=path):
        f(m, 0.0, jnp.ones(2))
    assert m.get_module_def() == moduledef and m.get_state() == state


def test_a_cell_reached_under_two_axes_is_an_error_naming_both_paths():
    class A(nnx.Module):
        pass

    class B(nnx.Module):
        pass

    ref = nnx.Ref(nnx.Param(jnp.ones((2, 2))))
    m = nnx.Dict(a=A(), b=B())
    m.a.left = ref
    m.b.right = ref

    @nnx.scan(variable_axes={nnx.PathMatches("a/left"): 0, nnx.PathMatches("b/right"): 1}, length=2)
    def f(m, carry, x):
        return carry, None

    with pytest.raises(ValueError) as error:
        f(m, 0.0, None)
    assert "a/left" in str(error.value) and "b/right" in str(error.value)


def test_a_body_that_returns_no_pair_is_an_error():
    with pytest.raises((TypeError, ValueError)):
        nnx.scan(lambda m, c, x: c)(layers(), 0.0, jnp.ones(2))


def test_a_context_in_the_carry_result_is_an_error():
    with pytest.raises((TypeError, ValueError), match="Context"):
        nnx.scan(lambda m, c, x, ctx: (c, ctx))(layers(), 0.0, jnp.ones(2), nnx.context(0))


# Remat and Scan


def test_remat_inside_scan():
    m = nnx.Scan(nnx.Remat(Block), **STACKED)(3, ctx=nnx.context(0))
    block = m.scan_module.remat_module
    assert isinstance(block, Block) and block.kernel.shape == (LENGTH, 3, 3)
    y, _ = m(X, None)
    np.testing.assert_allclose(y, unrolled(block, X)[0], rtol=1e-5)
    z, _ = m.call.call(X, None)
    np.testing.assert_allclose(z, y, rtol=1e-6)
    assert block.count == 2 * LENGTH


def test_scan_inside_remat():
    m = nnx.Remat(nnx.Scan(Block, **STACKED))(3, ctx=nnx.context(0))
    block = m.remat_module.scan_module
    assert block.kernel.shape == (LENGTH, 3, 3)
    y, _ = m(X, None)
    np.testing.assert_allclose(y, unrolled(block, X)[0], rtol=1e-5)
    z, _ = m.call.call(X, None)
    np.testing.assert_allclose(z, y, rtol=1e-6)
    assert block.count == 2 * LENGTH


@pytest.mark.parametrize("order", ["scan of remat", "remat of scan"])
def test_gradients_agree_with_and_without_remat(order):
    make = nnx.Scan(nnx.Remat(Block), **STACKED) if order == "scan of remat" else nnx.Remat(nnx.Scan(Block, **STACKED))
    plain, m = stack(), make(3, ctx=nnx.context(0))

    def loss(m):
        return (m(X, None)[0] ** 2).sum()

    expected = nnx.grad(loss)(plain)
    m.update_state(rename(plain.get_state(), order))
    grads = nnx.grad(loss)(m)
    for found, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def rename(state, order):
    inside = ["scan_module", "remat_module"] if order == "scan of remat" else ["remat_module", "scan_module"]
    nested = state.to_nested()["scan_module"]
    return nnx.State.from_nested({inside[0]: {inside[1]: nested}})


def test_remat_and_scan_compose_as_decorators():
    @nnx.scan(variable_axes={nnx.Param: 0}, length=LENGTH)
    @nnx.remat
    def f(m, carry, _):
        return m(carry)

    @nnx.remat
    def g(m, carry):
        return nnx.scan(lambda m, c, _: m(c), variable_axes={nnx.Param: 0}, length=LENGTH)(m, carry, None)

    m = layers()
    np.testing.assert_allclose(f(m, X, None)[0], unrolled(m, X)[0], rtol=1e-5)
    np.testing.assert_allclose(g(m, X)[0], unrolled(m, X)[0], rtol=1e-5)
    assert m.count == 2 * LENGTH


def test_data_transform_sees_the_state_inside_the_body():
    seen = []

    def constrain(state):
        seen.append({path: leaf.value.shape for path, leaf in state.items() if isinstance(leaf, nnx.Param)})
        return state

    m = stack(data_transform=constrain)
    y, _ = m(X, None)
    np.testing.assert_allclose(y, unrolled(m.scan_module, X)[0], rtol=1e-5)
    assert any((3, 3) in shapes.values() for shapes in seen)
