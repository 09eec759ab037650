"""Nothing is kept alive: memory stays flat, and deleting a model frees its arrays."""

import gc
import weakref

import jax
import jax.numpy as jnp
import psutil

import nnx


class Layer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(4))
        self.n = nnx.Variable(jnp.zeros((), jnp.int32))
        self.sizes = [1, 2]

    def __call__(self, x):
        self.n = self.n + 1
        return x * self.w


class Model(nnx.Module):
    def __init__(self):
        self.layers = [Layer(), Layer()]
        self.tied = nnx.Ref(nnx.Param(jnp.ones(4)))
        self.cache = {"k": jnp.zeros(4)}


@jax.jit
def step(pure):
    m = pure.merge()
    x = jnp.ones(4)
    for layer in m.layers:
        x = layer(x)
        layer.w = layer.w * 0.999
    m.cache["k"] = x
    return m.partition()


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def rounds(model: nnx.Module, n: int) -> None:
    for _ in range(n):
        model.update_state(step(model.partition()))


def test_ten_thousand_rounds_of_partition_step_update_leave_memory_flat():
    model = Model()
    rounds(model, 500)
    gc.collect()
    objects, before = len(gc.get_objects()), resident_bytes()
    rounds(model, 10_000)
    gc.collect()
    assert resident_bytes() - before < 8 * 2**20
    assert len(gc.get_objects()) - objects < 1_000
    assert int(model.layers[0].n) == 10_500


def test_structural_changes_leave_memory_flat():
    model = Model()

    def change(n):
        for _ in range(n):
            model.extra = Layer()
            model.get_module_def()
            model.layers[0].sizes.append(1)
            model.partition().merge()
            model.layers[0].sizes.pop()
            del model.extra

    change(100)
    gc.collect()
    objects = len(gc.get_objects())
    change(500)
    gc.collect()
    assert len(gc.get_objects()) - objects < 1_000


def live_arrays(references) -> int:
    return sum(reference() is not None for reference in references)


def test_deleting_a_model_frees_its_arrays_without_the_garbage_collector(without_garbage_collector):
    model = Model()
    rounds(model, 2)
    model.clone()
    model.mutable_state_dict()
    list(model.named_modules())
    repr(model)
    references = [weakref.ref(leaf) for leaf in jax.tree.leaves(model.get_state()) if isinstance(leaf, jax.Array)]
    owner = weakref.ref(model)
    assert live_arrays(references) == 6
    del model
    assert owner() is None
    assert live_arrays(references) == 0


def test_deleting_tied_modules_frees_their_arrays_without_the_garbage_collector(without_garbage_collector):
    ref = nnx.Ref(nnx.Param(jnp.ones(3)))
    a, b = nnx.Module(), nnx.Module()
    a.w, b.w = ref, ref
    array = weakref.ref(a.w)
    a.partition()
    del ref
    del a
    assert array() is not None
    assert float(b.w.sum()) == 3.0
    del b
    assert array() is None


def test_replacing_a_value_frees_the_old_one(without_garbage_collector):
    model = Model()
    model.partition()
    old = weakref.ref(model.layers[0].w)
    model.layers[0].w = jnp.zeros(4)
    assert old() is None
    old = weakref.ref(model.layers[0].w)
    rounds(model, 1)
    assert old() is None


def test_popping_and_deleting_frees(without_garbage_collector):
    model = Model()
    old = weakref.ref(model.layers[0].w)
    model.pop_state(nnx.Param)
    assert old() is None
    old = weakref.ref(model.layers[0].n)
    del model.layers[0]
    assert old() is None


def test_a_merged_module_is_freed_when_it_goes(without_garbage_collector):
    pure = Model().partition()
    merged = weakref.ref(pure.merge())
    assert merged() is None


def test_a_moduledef_does_not_keep_its_module_alive(without_garbage_collector):
    model = Model()
    moduledef = model.get_module_def()
    owner, array = weakref.ref(model), weakref.ref(model.layers[0].w)
    del model
    assert owner() is None
    assert array() is None
    assert moduledef == Model().get_module_def()


def test_a_stored_bound_method_does_not_leak():
    class Chooses(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))
            self.run = self.forward

        def forward(self, x):
            return x * self.w

    model = Chooses()
    model.partition().merge()
    array = weakref.ref(model.w)
    del model
    gc.collect()
    assert array() is None


def test_a_cycle_is_collected_by_the_garbage_collector():
    model = Model()
    model.me = model
    model.partition()
    owner = weakref.ref(model)
    del model
    gc.collect()
    assert owner() is None


def test_error_leaves_no_memory_in_use():
    model = Model()
    owner = weakref.ref(model)
    try:
        model.update_state(nnx.State({"nowhere/w": nnx.Param(1.0)}))
    except (ValueError, KeyError):
        pass
    del model
    gc.collect()
    assert owner() is None


def test_calling_a_sequence_keeps_no_item_alive(without_garbage_collector):
    def run():
        def scaled(x, ctx):
            return x * captured

        layer, captured = Layer(), jnp.full(4, 2.0)
        nnx.Sequence([layer, scaled])(jnp.ones(4), ctx=nnx.context(0))
        return weakref.ref(layer), weakref.ref(captured)

    layer, captured = run()
    assert layer() is None
    assert captured() is None
