"""Context: random streams and run-time flags, passed explicitly."""

import copy
import pickle
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


def data(key):
    """The numbers of a key, typed or legacy, as a tuple."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    return tuple(np.asarray(key).ravel().tolist())


def draw(ctx, name="params", n=1):
    return [data(ctx.make_rng(name)) for _ in range(n)]


# making one


def test_the_first_argument_is_the_params_stream():
    ctx = nnx.context(0)
    assert ctx.has_rng("params")
    assert draw(ctx) == draw(nnx.context(params=0))


def test_context_is_an_instance_of_context():
    assert isinstance(nnx.context(0), nnx.Context)


def test_streams_and_flags_by_name():
    ctx = nnx.context(0, dropout=1, flags={"deterministic": True})
    assert ctx.has_rng("params") and ctx.has_rng("dropout")
    assert not ctx.has_rng("noise")
    assert ctx.has_flag("deterministic")
    assert not ctx.has_flag("other")
    assert ctx.get_flag("deterministic") is True
    assert ctx.get_flag("other") is None
    assert ctx.get_flag("other", 3) == 3
    assert ctx.get_flag("other", default=4) == 4


def test_a_false_flag_is_there():
    ctx = nnx.context(flags={"deterministic": False})
    assert ctx.has_flag("deterministic")
    assert ctx.get_flag("deterministic", True) is False


def test_a_flag_may_hold_an_array():
    ctx = nnx.context(0, flags={"mask": jnp.ones(2)})
    again = ctx.partition().merge()
    assert again.get_flag("mask") is ctx.get_flag("mask")


def test_a_flag_that_holds_a_module_is_refused_by_name():
    with pytest.raises(ValueError, match=r"The static value flags\['model'\] is a Module \(Dict\)"):
        nnx.context(0, flags={"model": nnx.Dict()}).partition()


def test_streams_of_equal_int_seeds_are_independent():
    ctx = nnx.context(0, dropout=0, noise=np.int32(0), more=jnp.asarray(0))
    keys = [key for name in ("params", "dropout", "noise", "more") for key in draw(ctx, name, n=3)]
    assert len(set(keys)) == 12
    assert draw(nnx.context(0, dropout=0), "dropout", n=3) == keys[3:6]


def test_key_is_used_unchanged():
    key = jax.random.key(0)
    assert draw(nnx.context(key)) == draw(nnx.context(dropout=key), "dropout") == [data(jax.random.fold_in(key, 0))]


def test_an_empty_context():
    ctx = nnx.context()
    assert not ctx.has_rng("params")


@pytest.mark.parametrize(
    "seed",
    [
        3,
        np.int64(3),
        np.int32(3),
        np.uint32(3),
        np.uint8(3),
        jax.random.key(3),
    ],
    ids=["int", "int64", "int32", "uint32", "uint8", "typed key"],
)
def test_a_stream_is_given_as_a_seed_or_a_key(seed):
    assert draw(nnx.context(seed), n=2) == draw(nnx.context(3), n=2)


def test_a_legacy_key_works():
    first, second = draw(nnx.context(jax.random.PRNGKey(3)), n=2)
    assert first != second
    assert draw(nnx.context(jax.random.PRNGKey(3)), n=2) == [first, second]
    assert draw(nnx.context(np.asarray(jax.random.PRNGKey(3))), n=1) == [first]


def test_int_seeds_make_typed_keys():
    key = nnx.context(0).make_rng("params")
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    assert key.shape == ()
    jax.random.normal(key, (2,))


def test_keys_of_a_legacy_stream_can_be_used():
    jax.random.normal(nnx.context(jax.random.PRNGKey(0)).make_rng("params"), (2,))


@pytest.mark.parametrize(
    "bad",
    [1.5, "seed", [0], None, object(), jnp.ones(2), jnp.ones(3, jnp.uint32), jax.random.split(jax.random.key(0), 2)],
    ids=["float", "str", "list", "None", "object", "float array", "short key", "stacked keys"],
)
def test_other_seeds_raise_a_type_error_with_the_stream(bad):
    with pytest.raises(TypeError, match="dropout"):
        nnx.context(0, dropout=bad)


def test_a_bad_params_stream_is_named():
    with pytest.raises(TypeError, match="params"):
        nnx.context("seed")


@pytest.mark.parametrize("seed", [1.5, "zero", [0]], ids=str)
def test_a_wrong_seed_names_the_stream_and_what_to_write(seed):
    with pytest.raises(TypeError, match="'dropout'") as error:
        nnx.context(0, dropout=seed)
    assert "jax.random.key(0)" in str(error.value)
    assert str(seed) in str(error.value)


# drawing keys


def test_make_rng_returns_a_new_key_every_time_deterministically():
    keys = draw(nnx.context(0), n=20)
    assert len(set(keys)) == 20
    assert draw(nnx.context(0), n=20) == keys
    assert draw(nnx.context(1), n=1)[0] not in keys


def test_streams_are_independent_of_each_other():
    ctx = nnx.context(0, dropout=1)
    draw(ctx, "dropout", 5)
    assert draw(ctx, "params") == draw(nnx.context(0))


def test_an_unknown_stream_is_an_error_listing_those_there_are_and_what_to_write():
    ctx = nnx.context(0, dropout=1)
    with pytest.raises(ValueError, match="Unknown Rng Stream: noise") as error:
        ctx.make_rng("noise")
    for fragment in ("'params'", "'dropout'", "noise=0"):
        assert fragment in str(error.value)
    assert draw(ctx) == draw(nnx.context(0))


def test_copy_shares_the_streams():
    ctx = nnx.context(0, flags={"a": 1})
    twin = ctx.copy()
    assert twin is not ctx
    assert twin.get_flag("a") == 1
    keys = draw(ctx) + draw(twin) + draw(ctx) + draw(twin)
    assert keys == draw(nnx.context(0), n=4)


# forks


def test_partition_gives_keys_and_contextdef():
    pure = nnx.context(0, dropout=1, flags={"deterministic": True}).partition()
    assert isinstance(pure, nnx.PureContext)
    keys, ctxdef = pure
    again = ctxdef.merge(keys)
    assert isinstance(again, nnx.Context)
    assert again.has_rng("params") and again.has_rng("dropout")
    assert again.get_flag("deterministic") is True
    assert isinstance(nnx.context(0).partition().merge(), nnx.Context)


def test_a_pure_context_is_a_pytree_whose_leaves_are_data():
    pure = nnx.context(0, dropout=1).partition()
    leaves, treedef = jax.tree.flatten(pure)
    assert leaves
    assert all(isinstance(leaf, jax.Array | np.ndarray | np.generic | int) for leaf in leaves)
    again = jax.tree.unflatten(treedef, leaves)
    assert isinstance(again, nnx.PureContext)
    assert draw(again.merge()) == draw(pure.merge())


def test_parent_and_forks_never_produce_the_same_key():
    ctx = nnx.context(0)
    keys = []
    forks = []
    for _ in range(4):
        keys += draw(ctx, n=2)
        forks.append(ctx.partition().merge())
        forks.append(ctx.fork())
        keys += draw(ctx, n=2)
    for fork in forks:
        keys += draw(fork, n=5)
        inner = fork.fork()
        keys += draw(inner, n=3) + draw(fork, n=3)
    assert len(set(keys)) == len(keys)


def test_forking_is_deterministic():
    def run():
        ctx = nnx.context(0)
        fork = ctx.fork()
        return draw(fork, n=2) + draw(ctx, n=2) + draw(ctx.partition().merge(), n=2)

    assert run() == run()


def test_a_fork_is_independent_at_this_level():
    ctx = nnx.context(0, flags={"a": 1})
    fork = ctx.fork()
    assert fork.get_flag("a") == 1
    reference = nnx.context(0)
    reference.fork()
    draw(fork, n=5)
    assert draw(ctx, n=3) == draw(reference, n=3)


def test_a_new_fork_never_recompiles():
    traces = []

    @jax.jit
    def run(pure):
        traces.append(1)
        return jax.random.key_data(pure.merge().make_rng("params"))

    ctx = nnx.context(0)
    seen = set()
    for i in range(5):
        draw(ctx, n=i)
        seen.add(data(run(ctx.partition())))
    seen.add(data(run(nnx.context(17).partition())))
    assert len(traces) == 1
    assert len(seen) == 6


def test_contextdefs_are_hashable_and_comparable():
    def make(**kwargs):
        return nnx.context(0, **kwargs).partition()[1]

    assert make() == make()
    assert hash(make()) == hash(make())
    assert make(flags={"a": 1}) != make(flags={"a": 2})
    assert make(flags={"a": 1}) != make(flags={"a": True})
    assert jax.tree.leaves(make()) == []
    assert jax.tree.structure(nnx.context(0, dropout=1).partition()) != jax.tree.structure(nnx.context(0).partition())


def test_keys_drawn_inside_a_transform_equal_keys_drawn_outside():
    pure = nnx.context(0).partition()
    inside = jax.jit(lambda p: jax.random.key_data(p.merge().make_rng("params")))(pure)
    assert data(inside) == draw(pure.merge())[0]


# split


def three_streams(**kwargs):
    return nnx.context(0, dropout=1, noise=2, **kwargs)


def split_streams(rng_filter):
    """The names of the streams that a filter selects to be split."""
    keys, _ = three_streams().split(4, filter=rng_filter)
    assert all(key.shape in ((), (4,)) for key in keys.values())
    return {name for name, key in keys.items() if key.shape == (4,)}


ALL_STREAMS = {"params", "dropout", "noise"}


@pytest.mark.parametrize(
    "rng_filter, selected",
    [
        (None, set()),
        (..., ALL_STREAMS),
        ("params", {"params"}),
        ("unknown", set()),
        (lambda name: name.startswith("d"), {"dropout"}),
        (["params", "noise"], {"params", "noise"}),
        (("params",), {"params"}),
        ([], set()),
        ([None, lambda name: name == "noise"], {"noise"}),
        ({"params": True, "dropout": False}, {"params"}),
        ({"dropout": False, ...: True}, {"params", "noise"}),
        ({("params", "noise"): True}, {"params", "noise"}),
        ({}, set()),
    ],
)
def test_rng_filters_select_streams(rng_filter, selected):
    assert split_streams(rng_filter) == selected


@pytest.mark.parametrize("bad", [1, 1.5, object()], ids=["int", "float", "object"])
def test_other_rng_filters_raise_a_type_error_that_shows_them(bad):
    with pytest.raises(TypeError) as error:
        three_streams().split(2, filter=bad)
    assert str(bad) in str(error.value) or type(bad).__name__ in str(error.value)


def test_split_selects_every_stream_by_default():
    keys, _ = three_streams().split(3)
    assert {name: key.shape for name, key in keys.items()} == dict.fromkeys(ALL_STREAMS, (3,))


def test_split_keys_can_be_mapped_by_hand():
    ctx = nnx.context(0, dropout=1, flags={"deterministic": True})
    keys, ctxdef = ctx.split(3, filter="params")

    def draw_both(keys):
        inner = ctxdef.merge(keys)
        assert inner.get_flag("deterministic") is True
        return jax.random.key_data(inner.make_rng("params")), jax.random.key_data(inner.make_rng("dropout"))

    params, dropout = jax.vmap(draw_both, in_axes=({"params": 0, "dropout": None},))(keys)
    assert len({data(key) for key in params}) == 3
    assert len({data(key) for key in dropout}) == 1
    _, scanned = jax.lax.scan(
        lambda carry, key: (carry, jax.random.key_data(ctxdef.merge({**keys, "params": key}).make_rng("params"))),
        0,
        keys["params"],
    )
    np.testing.assert_array_equal(scanned, params)


def test_split_of_legacy_keys():
    keys, ctxdef = nnx.context(jax.random.PRNGKey(0)).split(3)
    assert keys["params"].shape[0] == 3
    drawn = [draw(ctxdef.merge({"params": key}))[0] for key in keys["params"]]
    assert len(set(drawn)) == 3


def test_the_keys_of_a_split_are_never_produced_again():
    ctx = nnx.context(0)
    drawn = draw(ctx, n=2)
    for _ in range(2):
        keys, ctxdef = ctx.split(4)
        for key in keys["params"]:
            drawn.append(data(key))
            drawn += draw(ctxdef.merge({"params": key}), n=2)
        drawn += draw(ctx, n=2) + draw(ctx.fork(), n=2)
    assert len(set(drawn)) == len(drawn)


def test_parent_of_a_split_draws_fresh_keys():
    ctx = nnx.context(0)
    before = draw(ctx, n=2)
    ctx.split(3)
    after = draw(ctx, n=2)
    assert len(set(before + after)) == 4


@pytest.mark.parametrize("bad", [0.5, "3", -1])
def test_invalid_number_of_splits_raises(bad):
    with pytest.raises((TypeError, ValueError), match=str(bad)):
        nnx.context(0).split(bad)


# trace levels


MESSAGE = "Cannot use Context from a different trace level"


@pytest.mark.parametrize(
    "transform",
    [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum()), lambda f: lambda x: jax.lax.map(f, x)],
    ids=["jit", "vmap", "grad", "map"],
)
@pytest.mark.parametrize(
    "use", [lambda c: c.make_rng("params"), lambda c: c.partition(), lambda c: c.fork(), lambda c: c.split(2)]
)
def test_use_at_another_trace_level_raises_with_advice(transform, use):
    ctx = nnx.context(0)

    def f(x):
        use(ctx)
        return x * 1.0

    with pytest.raises(nnx.TraceContextError, match=MESSAGE) as error:
        transform(f)(jnp.ones(2))
    assert "f(m, ctx)" in str(error.value)
    assert draw(ctx) == draw(nnx.context(0))


def test_context_of_another_trace_level_raises_with_advice():
    ctx = nnx.context(0)
    with pytest.raises(nnx.TraceContextError, match="Cannot use Context from a different trace level") as error:
        jax.grad(lambda x: x * jax.random.normal(ctx.make_rng("params")))(1.0)
    for fragment in ("f(m, ctx)", "'params'", "partition()"):
        assert fragment in str(error.value)


def test_a_context_made_inside_cannot_be_used_outside():
    leaked = []

    @jax.jit
    def f(x):
        leaked.append(nnx.context(0))
        return x

    f(1.0)
    with pytest.raises(nnx.TraceContextError, match=MESSAGE):
        leaked[0].make_rng("params")


def test_flags_may_be_read_at_any_level():
    ctx = nnx.context(flags={"deterministic": True})

    @jax.jit
    def f(x):
        return x + 1 if ctx.get_flag("deterministic") else x

    assert f(1.0) == 2.0


def test_a_context_merged_inside_may_be_used_inside():
    @jax.jit
    def f(pure):
        ctx = pure.merge()
        return jax.random.normal(ctx.make_rng("params")) + jax.random.normal(ctx.fork().make_rng("params"))

    assert jnp.isfinite(f(nnx.context(0).partition()))


# Python


def test_contexts_survive_copying_and_pickling():
    ctx = nnx.context(0, flags={"a": 1})
    draw(ctx)
    expected = draw(copy.deepcopy(ctx), n=2)
    again = pickle.loads(pickle.dumps(ctx))
    assert again.get_flag("a") == 1
    assert draw(again, n=2) == expected
    assert draw(ctx, n=2) == expected


def test_a_context_prints_its_streams_and_flags():
    text = repr(nnx.context(0, dropout=1, flags={"deterministic": True}))
    for word in ("Context", "params", "dropout", "deterministic"):
        assert word in text


def test_many_draws_forks_and_splits_give_no_key_twice():
    ctx = nnx.context(0)
    keys = []
    for _ in range(5):
        keys += draw(ctx, n=3)
        keys += draw(ctx.fork(), n=3)
        keys += draw(ctx.copy(), n=2)
        keys += draw(ctx.partition().merge(), n=3)
    assert len(keys) == len(set(keys))


# Threads


@pytest.fixture
def busy_threads():
    """Threads that interrupt each other at nearly every bytecode."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    "draw_once",
    [
        lambda ctx: ctx.make_rng("params"),
        lambda ctx: ctx.partition().keys["params"],
        lambda ctx: ctx.copy().make_rng("params"),
        nnx.jit(lambda ctx: ctx.make_rng("params")),
    ],
    ids=["make_rng", "partition", "copy", "jit"],
)
def test_threads_that_share_a_context_draw_different_keys(draw_once, busy_threads):
    ctx, keys = nnx.context(0), []
    draw_once(ctx)

    def work():
        keys.extend([draw_once(ctx) for _ in range(300)])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = np.asarray(jnp.stack([jax.random.key_data(key) for key in keys]))
    assert len(np.unique(numbers, axis=0)) == 900


def test_retraced_call_never_returns_values_of_another_thread():
    ctx, drawn = nnx.context(0), []

    @nnx.jit
    def step(x, ctx):
        thread = threading.Thread(target=lambda: drawn.append(outer.make_rng("params")))
        thread.start()
        thread.join()
        return ctx.make_rng("params")

    outer = ctx
    results = [step(jnp.ones(n), ctx) for n in (1, 1, 2)]  # the third call repeats a plan, and is then traced again
    keys = [data(key) for key in (*results, *drawn, ctx.make_rng("params"))]
    assert len(drawn) == 2 and len(set(keys)) == len(keys)


# Transfers


def test_counts_are_moved_explicitly_under_a_transfer_guard():
    model, ctx = nnx.Dict(w=nnx.Param(jnp.ones(2))), nnx.context(0)

    @nnx.jit
    def step(model, ctx):
        model.w = model.w + jax.random.normal(ctx.make_rng("params"), (2,))

    body = nnx.scan(lambda m, c, x, ctx: (c, ctx.make_rng("params")), split_rngs="params", length=2)
    calls = [
        lambda: step(model, ctx),
        lambda: body(model, None, None, ctx),
        lambda: nnx.remat(lambda m, ctx: ctx.make_rng("params"))(model, ctx),
        lambda: ctx.make_rng("params"),
        lambda: ctx.fork().make_rng("params"),
    ]
    for call in calls:
        call()
    again = copy.deepcopy(ctx)
    with jax.transfer_guard("disallow"):
        for call in calls:
            call()
    assert step.trace_count == 1
    for _ in calls:
        again.make_rng("params")
    assert draw(again) == draw(ctx)
