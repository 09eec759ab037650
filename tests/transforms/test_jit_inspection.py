"""`nnx.jit`: lower, trace, eval_shape, clear_cache, trace_count, explain_recompiles; nesting and threads."""

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import Linear, linear
from tests.transforms.jit_models import Counter, Pair, increment

# Inspection: lower, trace, eval_shape, clear_cache, trace_count, explain_recompiles


def test_lower_and_compile_leave_the_module_alone():
    model, x = linear(), jnp.ones((1, 2))
    step = nnx.jit(lambda m, x: m(x))
    lowered = step.lower(model, x)
    assert "dot" in lowered.as_text()
    assert lowered.compile().memory_analysis().argument_size_in_bytes >= model.kernel.nbytes
    assert model.count == 0


def test_a_compiled_step_can_be_called_with_the_module():
    model, x = linear(), jnp.ones((1, 2))
    compiled = nnx.jit(lambda m, x: m(x)).lower(model, x).compile()
    np.testing.assert_allclose(compiled(model, x), x @ model.kernel + model.bias, rtol=1e-6)
    assert model.count == 1


def test_lower_takes_abstract_modules_and_arrays():
    abstract = nnx.eval_shape(Linear, 2, 3, ctx=nnx.context(0))
    lowered = nnx.jit(lambda m, x: m(x)).lower(abstract, jax.ShapeDtypeStruct((1, 2), jnp.float32))
    assert lowered.compile() is not None
    assert isinstance(abstract.kernel, jax.ShapeDtypeStruct)


def test_trace_gives_the_jaxpr():
    model = linear()
    traced = nnx.jit(lambda m, x: m(x)).trace(model, jnp.ones((1, 2)))
    assert "dot_general" in str(traced.jaxpr)
    assert traced.lower().compile() is not None
    assert model.count == 0


def test_eval_shape_gives_the_results_shapes():
    model = linear()
    out = nnx.jit(lambda m, x: {"y": m(x)}).eval_shape(model, jnp.ones((5, 2)))
    assert out["y"].shape == (5, 3) and out["y"].dtype == jnp.float32
    assert model.count == 0


def test_trace_count_counts_traces():
    step = nnx.jit(lambda m, x: m(x))
    assert step.trace_count == 0
    model = linear()
    step(model, jnp.ones((1, 2)))
    step(model, jnp.ones((1, 2)))
    assert step.trace_count == 1
    step(model, jnp.ones((2, 2)))
    assert step.trace_count == 2


def test_clear_cache_makes_the_next_call_trace_again():
    model, calls = linear(), []

    @nnx.jit
    def f(m):
        calls.append(1)
        m.count += 1

    f(model)
    f(model)
    f.clear_cache()
    f(model)
    assert len(calls) == 2 and model.count == 3


def test_a_changed_structure_recompiles():
    pair = Pair()
    f = nnx.jit(lambda p: p.left.count + (0 if p.mode == "train" else 100))
    assert f(pair) == 1
    pair.mode = "eval"
    assert f(pair) == 101 and f.trace_count == 2
    pair.extra = nnx.Param(jnp.ones(()))
    f(pair)
    assert f.trace_count == 3
    pair.mode = "train"
    del pair.extra
    assert f(pair) == 1 and f.trace_count == 3  # the first version is still there


def test_explain_recompiles_names_the_static_path_and_both_values():
    pair = Pair()
    pair.left.mode = "fast"
    f = nnx.jit(lambda p: p.left.count, explain_recompiles=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(pair)
        f(pair)
    pair.left.mode = "slow"
    with pytest.warns(UserWarning, match="left/mode") as record:
        f(pair)
    message = " ".join(str(w.message) for w in record)
    assert "fast" in message and "slow" in message


def test_explain_recompiles_names_a_variable_that_came_or_went():
    pair = Pair()
    f = nnx.jit(lambda p: p.left.count, explain_recompiles=True)
    f(pair)
    pair.right.extra = nnx.Param(jnp.ones(()))
    with pytest.warns(UserWarning, match="right/extra"):
        f(pair)


def test_explain_recompiles_names_the_changed_argument_shape():
    f = nnx.jit(lambda m, x: m(x), explain_recompiles=True)
    model = linear()
    f(model, jnp.ones((5, 2)))
    with pytest.warns(UserWarning) as record:
        f(model, jnp.ones((7, 2)))
    message = " ".join(str(w.message) for w in record)
    assert "5,2" in message.replace(" ", "") and "7,2" in message.replace(" ", "")


def test_explain_recompiles_names_a_changed_shape_inside_the_module():
    f = nnx.jit(lambda m: m.bias.sum(), explain_recompiles=True)
    model = linear()
    f(model)
    model.bias = jnp.zeros((9,))
    with pytest.warns(UserWarning, match="bias") as record:
        f(model)
    assert "(9,)" in " ".join(str(w.message) for w in record) or "[9]" in " ".join(str(w.message) for w in record)


# Nesting and threads


def test_lifted_jit_nests_in_lifted_jit():
    inner = nnx.jit(lambda m, x: m(x))

    @nnx.jit
    def outer(m, x):
        y = inner(m, x)
        return inner(m, x) + y

    model, x = linear(), jnp.ones((1, 2))
    np.testing.assert_allclose(outer(model, x), 2 * (x @ model.kernel), rtol=1e-6)
    outer(model, x)
    assert model.count == 4


def test_structural_changes_pass_through_nested_jits():
    @nnx.jit
    def inner(p):
        p.mode = "eval"
        p.extra = Counter(4)
        p.left = p.right

    @nnx.jit
    def outer(p):
        inner(p)
        p.extra.count += 1

    for _ in range(2):
        pair = Pair()
        right = pair.right
        outer(pair)
        assert pair.mode == "eval" and pair.extra.count == 5 and pair.left is right is pair.right
    assert outer.trace_count == 1


def test_lifted_jit_works_inside_raw_jit_on_a_merged_module():
    model, x = linear(), jnp.ones((1, 2))
    step = nnx.jit(lambda m, x: m(x))

    @jax.jit
    def raw(pure, x):
        m = pure.merge()
        y = step(m, x)
        return y, m.partition()

    y, pure = raw(model.partition(), x)
    np.testing.assert_allclose(y, x @ model.kernel + model.bias, rtol=1e-6)
    assert pure.merge().count == 1 and model.count == 0


def test_raw_transforms_work_inside_a_lifted_jit():
    @nnx.jit
    def f(m, xs):
        m.count += 1
        ys = jax.vmap(lambda x: x @ m.kernel)(xs)
        slope = jax.grad(lambda s: (s * m.kernel).sum())(1.0)
        total, _ = jax.lax.scan(lambda c, x: (c + (x @ m.kernel).sum(), None), 0.0, xs)
        return ys, slope, total

    model, xs = linear(), jnp.ones((4, 2))
    ys, slope, total = f(model, xs)
    np.testing.assert_allclose(ys, xs @ model.kernel, rtol=1e-6)
    np.testing.assert_allclose(slope, model.kernel.sum(), rtol=1e-6)
    np.testing.assert_allclose(total, (xs @ model.kernel).sum(), rtol=1e-5)
    assert model.count == 1


def test_one_jitted_function_serves_several_threads():
    step = nnx.jit(increment)
    models = [linear(seed) for seed in range(4)]

    def work(model):
        for _ in range(25):
            step(model)

    threads = [threading.Thread(target=work, args=(m,)) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [int(m.count) for m in models] == [25] * 4


def test_numpy_arrays_and_scalars_in_cells_come_and_go():
    class Buffers(nnx.Module):
        def __init__(self):
            self.table = np.arange(3)
            self.scale = nnx.Variable(2.0)

    module = Buffers()
    nnx.jit(lambda m: m.table.sum())(module)
    assert isinstance(module.table, np.ndarray) and module.scale == 2.0

    @nnx.jit
    def f(m):
        m.table = m.table + 1

    f(module)
    np.testing.assert_array_equal(module.table, [1, 2, 3])
