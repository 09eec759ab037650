"""What is common to all lifted transforms, said once: one body, run through each of them."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import nnx
from tests.models import Count, Scale


class Everything(nnx.Module):
    """An attribute of every kind."""

    def __init__(self):
        self.left, self.right = Scale(1.0), Scale(2.0)
        self.count = Count(jnp.zeros((), jnp.int32))
        self.spare = Count(jnp.ones(()))
        self.mode = "train"
        self.tags = ["a"]
        self.cache = {"n": jnp.zeros(())}


# Every transform as a way to run `f(*modules, **more)` once. The `with_aux` ones differentiate a constant beside it.


def through_grad(f, **options):
    lifted = nnx.grad(lambda z, *a, **k: (z, f(*a, **k)), has_aux=True, **options)
    return lambda *a, **k: lifted(1.0, *a, **k)[1]


def through_grad_of_the_module(f, **options):
    lifted = nnx.value_and_grad(lambda *a, **k: (jnp.zeros(()), f(*a, **k)), has_aux=True, **options)
    return lambda *a, **k: lifted(*a, **k)[0][1]


def through_vjp(f, **options):
    return lambda *a: nnx.vjp(lambda *a: (jnp.zeros(()), f(*a)), *a, has_aux=True, **options)[2]


def through_linearize(f, **options):
    return lambda *a: nnx.linearize(lambda *a: (jnp.zeros(()), f(*a)), *a, has_aux=True, **options)[2]


def through_jacrev(f, **options):
    lifted = nnx.jacrev(lambda z, *a, **k: (z, f(*a, **k)), has_aux=True, **options)
    return lambda *a, **k: lifted(1.0, *a, **k)[1]


def through_jacfwd(f, **options):
    lifted = nnx.jacfwd(lambda z, *a, **k: (z, f(*a, **k)), has_aux=True, **options)
    return lambda *a, **k: lifted(1.0, *a, **k)[1]


def through_checkify(f, **options):
    lifted = nnx.checkify(f, **options)
    return lambda *a, **k: lifted(*a, **k)[1]


def through_shard_map(f, **options):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    return nnx.shard_map(f, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), **options)


def through_vmap(f, **options):
    def lifted(*a, **k):
        axes = (0, *[None] * len(a))
        mapped = nnx.vmap(lambda z, *a, **k: f(*a, **k), in_axes=axes, out_axes=None, axis_size=1, **options)
        return mapped(jnp.ones(1), *a, **k)

    return lifted


def through_scan(f, **options):
    def body(carrier, carry, x, *a, **k):
        out = f(*a, **k)
        return carry, out

    return lambda *a, **k: nnx.scan(body, length=1, **options)(nnx.Dict(), 0.0, None, *a, **k)[1]


def through_cond(f, **options):
    return lambda *a: nnx.cond(True, f, f, *a, **options)


def through_switch(f, **options):
    return lambda *a: nnx.switch(1, [f, f, f], *a, **options)


def through_fori_loop(f, **options):
    return lambda *a: nnx.fori_loop(0, 1, lambda i, a: (f(*a), a)[1], a, **options)


def through_while_loop(f, **options):
    def body(carry):
        n, a = carry
        f(*a)
        return n + 1, a

    return lambda *a: nnx.while_loop(lambda carry: carry[0] < 1, body, (0, a), **options)


ONCE = {
    "jit": nnx.jit,
    "remat": nnx.remat,
    "grad": through_grad,
    "grad of the module": through_grad_of_the_module,
    "vjp": through_vjp,
    "linearize": through_linearize,
    "jacrev": through_jacrev,
    "jacfwd": through_jacfwd,
    "shard_map": through_shard_map,
    "checkify": through_checkify,
}
MANY = {
    "vmap": through_vmap,
    "scan": through_scan,
    "cond": through_cond,
    "switch": through_switch,
    "fori_loop": through_fori_loop,
    "while_loop": through_while_loop,
}
ALL = ONCE | MANY

once = pytest.mark.parametrize("lift", ONCE.values(), ids=ONCE)
every = pytest.mark.parametrize("lift", ALL.values(), ids=ALL)
keywords = pytest.mark.parametrize("lift", [ALL[n] for n in ("jit", "remat", "grad", "jacrev", "vmap", "scan")])


def assert_no_tracers(module):
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(module.get_state()))


@every
def test_changed_values_are_there_afterwards(lift):
    def f(m):
        m.count += 1
        m.left.s = m.left.s + m.right.s
        m.cache["n"] = m.cache["n"] + 1

    lifted = lift(f)
    model = Everything()
    left = model.left
    for i in (1, 2):
        lifted(model)
        assert model.count == i and model.left is left and model.left.s == 1 + 2 * i and model.cache["n"] == i
        assert_no_tracers(model)


@every
def test_modules_nested_in_arguments_are_updated(lift):
    def f(tree, pair):
        tree["a"][0].count += 1
        pair[1].count += 2

    a, b = Everything(), Everything()
    lift(f)({"a": [a, 1.0]}, (jnp.ones(1), b))
    assert a.count == 1 and b.count == 2


@keywords
def test_modules_in_keyword_arguments_are_updated(lift):
    def f(m, *, other, tree):
        m.count += 1
        other.count += 2
        tree["m"].count += 3

    a, b, c = Everything(), Everything(), Everything()
    lift(f)(a, other=b, tree={"m": c})
    assert (a.count, b.count, c.count) == (1, 2, 3)


@every
def test_one_module_passed_twice_is_one_inside(lift):
    seen = []

    def f(a, tree, inner):
        seen.append(a is tree["again"] and inner is a.left)
        a.count += 1
        tree["again"].count += 1
        inner.s = inner.s + 1

    model = Everything()
    lift(f)(model, {"again": model}, model.left)
    assert seen and all(seen) and model.count == 2 and model.left.s == 2


@once
def test_structural_changes_are_there_afterwards(lift):
    def f(m):
        m.extra = nnx.Cache(m.left.s * 3, note="x")
        del m.spare
        m.left, m.right = m.right, m.left
        m.child = Scale(5.0)
        m.child.back = m.left
        m.mode = "eval"
        m.tags.append("b")

    lifted = lift(f)
    for _ in range(2):
        model = Everything()
        left, right = model.left, model.right
        lifted(model)
        assert model.extra == 3 and isinstance(model.variable("extra"), nnx.Cache)
        assert model.variable("extra").note == "x" and not hasattr(model, "spare")
        assert model.left is right and model.right is left
        assert model.child.s == 5 and model.child.back is right
        assert model.mode == "eval" and model.tags == ["a", "b"]
        assert_no_tracers(model)


@once
def test_modules_in_the_result_keep_their_identity(lift):
    def f(m):
        fresh = Scale(7.0)
        fresh.owner = m
        return {"m": m, "left": [m.left], "fresh": fresh}

    lifted = lift(f)
    for _ in range(2):
        model = Everything()
        out = lifted(model)
        assert out["m"] is model and out["left"][0] is model.left
        assert out["fresh"].s == 7 and out["fresh"].owner is model
        assert not isinstance(out["fresh"].s, jax.core.Tracer)


@every
def test_an_exception_leaves_the_modules_as_they_were(lift):
    def f(m):
        m.count += 1
        m.mode = "eval"
        m.cache["new"] = jnp.ones(())
        del m.left
        raise KeyError("boom")

    model = Everything()
    state, moduledef = model.partition()
    with pytest.raises(KeyError, match="boom"):
        lift(f)(model)
    assert model.get_module_def() == moduledef and set(model.cache) == {"n"}
    assert all(a is b for a, b in zip(jax.tree.leaves(model.get_state()), jax.tree.leaves(state), strict=True))


@every
def test_stateful_false_discards_the_changes(lift):
    def f(m):
        m.count += 1
        m.cache["n"] = m.cache["n"] + 1

    model = Everything()
    lift(f, stateful=False)(model)
    assert model.count == 0 and model.cache["n"] == 0


@every
def test_writing_a_module_of_another_trace_level_is_an_error(lift):
    def f(m):
        m.count += 1

    model = Everything()
    count = model.count
    with pytest.raises(nnx.TraceContextError):
        jax.jit(lambda x: (lift(f)(model), x)[1])(1.0)
    assert model.count is count


@every
def test_lifted_transforms_nest_in_a_lifted_jit(lift):
    def f(m):
        m.count += 1

    model = Everything()
    step = nnx.jit(lambda m: (lift(f)(m), None)[1])
    step(model)
    step(model)
    traces = step.trace_count
    step(model)
    assert model.count == 3 and step.trace_count == traces


@every
def test_a_lifted_jit_nests_in_every_transform(lift):
    @nnx.jit
    def f(m):
        m.count += 1
        m.left.s = m.left.s * 2

    model = Everything()
    lift(f)(model)
    assert model.count == 1 and model.left.s == 2
    assert_no_tracers(model)


@every
def test_a_context_gives_keys_inside(lift):
    def f(m, ctx):
        m.left.s = jax.random.uniform(ctx.make_rng("noise"))

    model, ctx = Everything(), nnx.context(noise=0)
    values = set()
    for _ in range(2):
        lift(f)(model, ctx)
        values.add(float(model.left.s))
    assert len(values) == 2
    assert float(jax.random.uniform(ctx.make_rng("noise"))) not in values


@pytest.mark.parametrize(
    "lift", [ALL[n] for n in ALL if not n.endswith("loop")], ids=[n for n in ALL if n[-4:] != "loop"]
)
def test_a_context_in_the_result_is_an_error(lift):
    with pytest.raises((TypeError, ValueError), match="Context"):
        lift(lambda ctx: [ctx])(nnx.context(0))


@pytest.mark.parametrize(
    "transform",
    [nnx.jit, nnx.grad, nnx.value_and_grad, nnx.vmap, nnx.scan, nnx.remat, nnx.jacrev, nnx.jacfwd, nnx.hessian],
)
def test_transforms_decorate_with_and_without_options_and_keep_the_face_of_the_function(transform):
    def body(model, carry: float, x=None, *, scale=1.0):
        """The body."""
        return carry

    for wrapped in (
        transform(body),
        transform()(body),
        transform(stateful=False)(body),
        functools.partial(transform)(body),
    ):
        assert wrapped.__name__ == "body" and wrapped.__doc__ == "The body."
        assert inspect.signature(wrapped) == inspect.signature(body)


@pytest.mark.parametrize("lift", [ONCE[n] for n in ("jit", "remat")], ids=["jit", "remat"])
def test_a_module_or_its_bound_method_can_be_the_function(lift):
    class Model(Everything):
        def __call__(self, x):
            self.count += 1
            return x * 2

        def encode(self, x):
            self.count += 10
            return x * 3

    model = Model()
    assert lift(model)(2.0) == 4.0 and lift(model.encode)(2.0) == 6.0
    assert model.count == 11


def test_a_bound_method_can_be_a_branch_or_a_mapped_function():
    class Model(Everything):
        def encode(self, x):
            self.count += 1
            return x * 3

    model = Model()
    assert list(nnx.vmap(model.encode)(jnp.arange(3.0))) == [0.0, 3.0, 6.0]
    assert model.count == 1
    assert nnx.cond(True, model.encode, model.encode, 2.0) == 6.0
    assert model.count == 2
