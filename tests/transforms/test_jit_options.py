"""`nnx.jit`: what can be the function, the options of `jax.jit`, donation, shardings."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import nnx
from tests.models import Count, Linear, linear
from tests.transforms.jit_models import Counter, Pair, increment

# Modules and bound methods as the function; decorators


def test_a_module_can_be_the_function():
    model, x = linear(), jnp.ones((1, 2))
    forward = nnx.jit(model)
    y = forward(x)
    np.testing.assert_allclose(y, x @ model.kernel + model.bias, rtol=1e-6)
    forward(x)
    assert model.count == 2 and forward.trace_count == 1


def test_a_bound_method_can_be_the_function():
    model, x = linear(), jnp.ones((1, 2))
    shifted = nnx.jit(model.shifted, static_argnums=1)
    y = shifted(x, 2)
    np.testing.assert_allclose(y, x @ model.kernel + model.bias + 2, rtol=1e-6)
    assert model.count == 11


def test_a_lifted_module_sees_later_changes_of_the_module():
    model, x = linear(), jnp.ones((1, 2))
    forward = nnx.jit(model)
    forward(x)
    model.bias = model.bias + 5
    np.testing.assert_allclose(forward(x), x @ model.kernel + 5, rtol=1e-6)
    assert forward.trace_count == 1


def test_a_bound_method_of_a_submodule_lifts_that_submodule():
    pair = Pair()
    pair.left.inner = linear()
    nnx.jit(pair.left.inner.shifted)(jnp.ones((1, 2)), 1.0)
    assert pair.left.inner.count == 11


def test_jit_decorates_methods():
    counter = Counter()
    assert counter.bump(2) == 2
    assert counter.bump(by=3) == 5
    assert counter(2.0, scale=3) == 6.0
    assert counter.count == 6


def test_jit_decorates_methods_with_options():
    counter = Counter()
    counter.repeat(3)
    assert counter.count == 3


def test_a_decorated_method_is_reached_through_class_and_super():
    class Child(Counter):
        @nnx.jit
        def bump(self, by):
            return super().bump(by * 2)

    child = Child()
    assert child.bump(1) == 2
    assert Counter.bump(child, 1) == 3


def test_decorated_methods_share_one_trace_between_equal_instances():
    class Local(nnx.Module):
        def __init__(self):
            self.count = Count(jnp.zeros(()))

        @nnx.jit
        def bump(self):
            self.count += 1

    for _ in range(3):
        Local().bump()
    assert Local.bump.trace_count == 1


def test_jit_keeps_name_docstring_and_signature():
    def forward(model: Linear, x, *, scale: float = 1.0) -> jax.Array:
        """Runs the model."""
        return model(x) * scale

    for wrapped in (nnx.jit(forward), nnx.jit(static_argnames="scale")(forward)):
        assert wrapped.__name__ == "forward" and wrapped.__doc__ == "Runs the model."
        assert wrapped.__module__ == __name__ and wrapped.__wrapped__ is forward
        assert inspect.signature(wrapped) == inspect.signature(forward)


def test_jit_works_through_functools_partial():
    model = linear()
    step = functools.partial(nnx.jit, static_argnames="n")(lambda m, n: [increment(m) for _ in range(n)] and None)
    step(model, n=2)
    assert model.count == 2
    nnx.jit(functools.partial(Linear.shifted, by=2.0))(model, jnp.ones((1, 2)))
    assert model.count == 13


# Options


def test_every_option_of_jax_jit_is_an_option():
    ours = set(inspect.signature(nnx.jit).parameters)
    theirs = set(inspect.signature(jax.jit).parameters) - {"device", "backend"}
    assert theirs <= ours


def test_static_argnums_count_module_arguments():
    @nnx.jit(static_argnums=(1, 2))
    def f(m, n, flag, x):
        assert isinstance(n, int) and flag is True
        m.count += n
        return x * n

    model = linear()
    assert f(model, 3, True, 2.0) == 6.0
    assert model.count == 3 and f.trace_count == 1
    f(model, 4, True, 2.0)
    assert model.count == 7 and f.trace_count == 2


def test_static_module_raises_with_advice():
    with pytest.raises(ValueError, match="Modules are never static"):
        nnx.jit(lambda m: m.count, static_argnums=0)(linear())


def test_negative_static_argnums_count_from_the_end():
    f = nnx.jit(lambda m, n: jnp.zeros(n), static_argnums=-1)
    assert f(linear(), 3).shape == (3,)


def test_static_argnames_work_by_keyword_and_by_position():
    @nnx.jit(static_argnames=("mode",))
    def f(m, mode="add"):
        m.count = m.count + 1 if mode == "add" else m.count - 1

    model = linear()
    f(model)
    f(model, mode="add")
    f(model, "sub")
    f(model, mode="sub")
    assert model.count == 0


def test_keep_unused_inline_and_compiler_options_are_accepted():
    f = nnx.jit(lambda m, x: increment(m), keep_unused=True, inline=True, compiler_options={})
    model = linear()
    f(model, jnp.ones(3))
    assert model.count == 1


def test_keep_unused_keeps_unused_arguments():
    def f(m, x):
        return m.bias

    model, x = linear(), jnp.ones((64,))
    kept = nnx.jit(f, keep_unused=True).lower(model, x).compile().memory_analysis().argument_size_in_bytes
    dropped = nnx.jit(f).lower(model, x).compile().memory_analysis().argument_size_in_bytes
    assert kept - dropped >= x.nbytes


# Shardings, on a mesh of one device


def one_device_mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))


def test_in_shardings_accept_one_sharding_per_module():
    mesh = one_device_mesh()
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    model = linear()
    y = nnx.jit(lambda m, x: m(x), in_shardings=(whole, rows))(model, jnp.ones((4, 2)))
    assert y.shape == (4, 3) and model.count == 1
    assert set(y.sharding.device_set) == {jax.devices()[0]}


def test_in_shardings_accept_one_sharding_per_filter():
    mesh = one_device_mesh()
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    model = linear()
    f = nnx.jit(lambda m, x: m(x), in_shardings=({nnx.Param: rows, ...: whole}, whole))
    assert f(model, jnp.ones((4, 2))).shape == (4, 3) and model.count == 1


def test_in_shardings_reach_modules_inside_pytrees_and_pass_contexts_by():
    mesh = one_device_mesh()
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    model, x = linear(), jnp.ones((4, 2))

    def f(tree, ctx):
        return tree["m"](tree["x"]) + jax.random.uniform(ctx.make_rng("noise"))

    for sharding in (whole, {"m": whole, "x": rows}, {"m": {nnx.Param: rows, ...: whole}, "x": None}):
        y = nnx.jit(f, in_shardings=(sharding, None))({"m": model, "x": x}, nnx.context(noise=0))
        assert y.shape == (4, 3)
    assert model.count == 3


def test_in_shardings_count_no_static_arguments_and_no_bound_module():
    rows = NamedSharding(one_device_mesh(), PartitionSpec("data"))
    model, x = linear(), jnp.ones((4, 2))
    y = nnx.jit(lambda m, n, x: m(x) * n, static_argnums=1, in_shardings=(None, rows))(model, 2, x)
    np.testing.assert_allclose(y, 2 * (x @ model.kernel), rtol=1e-6)
    assert nnx.jit(model.__call__, in_shardings=(rows,))(x).shape == (4, 3)
    assert model.count == 2


def test_in_shardings_of_the_wrong_length_raise_with_both_lengths():
    rows = NamedSharding(one_device_mesh(), PartitionSpec("data"))
    with pytest.raises(ValueError, match="in_shardings has 1 entries for a call with 2 arguments"):
        nnx.jit(lambda m, x: m(x), in_shardings=(rows,))(linear(), jnp.ones((4, 2)))


def test_out_shardings_place_plain_results():
    rows = NamedSharding(one_device_mesh(), PartitionSpec("data"))
    y = nnx.jit(lambda m, x: m(x), out_shardings=rows)(linear(), jnp.ones((4, 2)))
    assert y.sharding.is_equivalent_to(rows, y.ndim)


def test_out_shardings_accept_one_sharding_per_returned_module():
    rows = NamedSharding(one_device_mesh(), PartitionSpec("data"))
    model = nnx.jit(lambda ctx: Counter(jnp.ones((4,))), out_shardings=rows)(nnx.context(0))
    assert isinstance(model.count.sharding, NamedSharding) and model.count.sharding.is_equivalent_to(rows, 1)


def test_out_shardings_accept_one_sharding_per_filter():
    mesh = one_device_mesh()
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    make = nnx.jit(lambda ctx: Linear(2, 3, ctx=ctx), out_shardings={nnx.Param: rows, ...: whole})
    model = make(nnx.context(0))
    for value, expected in ((model.kernel, rows), (model.bias, rows), (model.count, whole)):
        assert isinstance(value.sharding, NamedSharding) and value.sharding.is_equivalent_to(expected, value.ndim)


def test_a_donated_function_is_traced_once_per_shape():
    traces = []

    @nnx.jit(donate_argnums=0)
    def step(model, x):
        traces.append(x.shape)
        model.w = model.w + x.sum()

    model = nnx.Dict(w=nnx.Param(jnp.ones(3)))
    for length in (1, 1, 2, 2, 1):
        step(model, jnp.ones(length))
    assert traces == [(1,), (2,)] and step.trace_count == 2
    assert model.w[0] == 8.0


def test_a_function_compiled_for_too_many_structures_forgets_the_oldest_and_says_why(monkeypatch):
    from nnx.transforms.jit import jit as module

    monkeypatch.setattr(module, "MAX_COMPILED", 3)
    f = nnx.jit(lambda model: model.w * model.n)
    model = nnx.Dict(w=nnx.Param(jnp.ones(())))
    with pytest.warns(UserWarning, match="compiled for 3 different structures.*'n' of model: 2 -> 3"):
        for n in range(5):
            model.n = n
            assert f(model) == n
    assert f.trace_count == 5
    model.n = 0
    assert f(model) == 0 and f.trace_count == 6
    model.n = 4
    assert f(model) == 4 and f.trace_count == 6


def test_shardings_of_a_module_are_taken_by_path_and_unknown_paths_are_an_error():
    rows = NamedSharding(one_device_mesh(), PartitionSpec("data"))
    by_path = nnx.State({"bias": rows})
    f = nnx.jit(lambda m, x: m(x), in_shardings=(by_path, None))
    assert f(linear(), jnp.ones((4, 2))).shape == (4, 3)
    model = nnx.jit(lambda ctx: Linear(2, 3, ctx=ctx), out_shardings=by_path)(nnx.context(0))
    assert model.bias.sharding.is_equivalent_to(rows, 1)
    for options in ({"in_shardings": (nnx.State({"bais": rows}), None)}, {"out_shardings": nnx.State({"bais": rows})}):
        with pytest.raises(ValueError, match="shardings has shardings for 'bais', and the Module has no such path"):
            nnx.jit(lambda m, x: m, **options)(linear(), jnp.ones((4, 2)))


def test_in_shardings_with_other_keys_than_the_argument_are_an_error():
    rows = NamedSharding(one_device_mesh(), PartitionSpec("data"))
    with pytest.raises(ValueError, match="is not a prefix of the argument"):
        nnx.jit(lambda tree: tree, in_shardings=({"y": rows},))({"x": jnp.ones(4)})
