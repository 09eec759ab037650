"""What test_layers_on_devices looks at: run with eight virtual devices, prints one JSON object."""

import contextlib
import json
import re
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx
from benchmarks.plan_sharded import make_plan
from nnx.nn import linear_cross_entropy
from nnx.storage.checkpoints import loading
from tests.sharding.optimizer_checks import Layers
from tests.sharding.programs import ROOT
from tests.sharding.transformer import LanguageModel, collectives, mesh_of
from tests.test_readme import python_blocks

TENSOR = nnx.tensor_parallel_rules()
BOTH = nnx.fsdp_tensor_parallel_rules()
CONFIG = nnx.models.DecoderConfig(
    model_type="llama",
    vocab_size=64,
    features=32,
    hidden_features=64,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,
    max_length=8,
)
BRANCHES = {
    "MLP": lambda ctx: nnx.MLP(32, 64, 32, ctx=ctx),
    "GatedMLP": lambda ctx: nnx.GatedMLP(32, 64, ctx=ctx),
    "attention": lambda ctx: nnx.MultiHeadAttention(8, 32, ctx=ctx),
    "grouped attention": lambda ctx: nnx.MultiHeadAttention(8, 32, num_kv_heads=2, ctx=ctx),
    "DecoderBlock": lambda ctx: nnx.models.DecoderBlock(CONFIG, False, ctx=ctx),
    "Linear pair": lambda ctx: nnx.Sequence([nnx.Linear(32, 64, ctx=ctx), nnx.relu, nnx.Linear(64, 32, ctx=ctx)]),
}


def tensor_parallel_collectives() -> dict[str, Any]:
    """The collectives of one call under tensor parallelism, and what the report says."""
    mesh, found = mesh_of(("model", 8)), {}
    x = jax.device_put(jnp.ones((2, 4, 32)), NamedSharding(mesh, P()))
    for name, build in BRANCHES.items():
        model = nnx.shard(nnx.eval_shape(build, nnx.context(0)), mesh, TENSOR)  # no values are needed to compile it
        text = nnx.jit(lambda model, x: model(x)).lower(model, x).compile().as_text()
        found[name] = {"kinds": [kind for kind, _ in collectives(text)]}
        found[name]["findings"] = nnx.sharding_report(model, mesh, TENSOR).findings
    return found


EXPLICIT = {
    "attention": (lambda ctx: nnx.MultiHeadAttention(8, 32, num_kv_heads=2, use_sinks=True, ctx=ctx), (4, 6, 32)),
    "LSTM": (lambda ctx: nnx.RNN(nnx.LSTMCell(32, 16, ctx=ctx)), (4, 6, 32)),
    "ConvLSTM": (lambda ctx: nnx.RNN(nnx.ConvLSTMCell(8, 16, (3,), ctx=ctx)), (4, 3, 5, 8)),
}


def squares(model: Any, x: Any) -> Any:
    return (model(x) ** 2).mean()


def explicit_layers() -> dict[str, Any]:
    """Gradients on explicit axes next to those of one device, as the largest difference, and their types."""
    mesh, found = mesh_of(("data", 2), ("model", 4), type=AxisType.Explicit), {}
    for name, (build, shape) in EXPLICIT.items():
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        expected = nnx.jit(nnx.grad(squares))(build(nnx.context(0)), x)
        model = nnx.init_sharded(build, mesh, BOTH, nnx.context(0))
        with jax.set_mesh(mesh):
            grads = nnx.jit(nnx.grad(squares))(model, jax.device_put(x, NamedSharding(mesh, P("data"))))
        pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True)
        found[name] = {
            "difference": max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs),
            "types": all(
                jax.typeof(grads[path].value) == jax.typeof(leaf.value) for path, leaf in model.get_state().items()
            ),
        }
    return found


def split_logits() -> list[float]:
    """The loss of a decoder whose logits are split by the vocabulary: one device, automatic and explicit axes."""
    build = lambda ctx: nnx.models.Decoder(CONFIG, ctx=ctx)  # noqa: E731
    tokens = np.random.default_rng(0).integers(0, 64, (4, 8))

    @nnx.jit
    def loss(model, tokens):
        return nnx.cross_entropy(model(tokens), tokens)

    found = [float(loss(build(nnx.context(0)), tokens))]
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(("data", 2), ("model", 4), type=kind)
        with jax.set_mesh(mesh):
            model = nnx.init_sharded(build, mesh, BOTH, nnx.context(0))
            found.append(float(loss(model, jax.device_put(tokens, NamedSharding(mesh, P("data"))))))
    return found


def loss_in_blocks() -> list[float]:
    """The largest differences of `linear_cross_entropy` and its gradients from the plain form on one device."""
    random = np.random.default_rng(0)
    features, kernel = (
        random.normal(size=(4, 8, 32)).astype(np.float32),
        random.normal(size=(32, 64)).astype(np.float32),
    )
    targets = random.integers(0, 64, (4, 8))
    expected = jax.value_and_grad(lambda x, w: nnx.cross_entropy(x @ w, targets), (0, 1))(features, kernel)
    loss, found = jax.value_and_grad(nnx.linear_cross_entropy, (0, 1)), []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(("data", 2), ("model", 4), type=kind)
        with jax.set_mesh(mesh):
            rows, head = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "model"))
            given = jax.device_put((features, kernel, targets), (rows, head, rows))
            seen = jax.jit(loss, static_argnames="block_size")(*given, block_size=8)
        pairs = zip(jax.tree.leaves(seen), jax.tree.leaves(expected), strict=True)
        found.append(max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs))
    return found


def blocks_of_the_loss() -> list[int]:
    """How many blocks of positions there are on one device, on two that share the batch by type, and two by rules."""
    features, kernel, targets = jnp.zeros((4, 8, 32)), jnp.zeros((32, 64)), jnp.zeros((4, 8), jnp.int32)

    def count(*given: Any) -> int:
        (scan,) = [eqn for eqn in jax.make_jaxpr(nnx.linear_cross_entropy)(*given).eqns if "vjp" in eqn.primitive.name]
        (found,) = re.findall(r"length=(\d+)", str(scan))
        return int(found)

    with mock.patch.object(linear_cross_entropy, "BLOCK_ENTRIES", 8 * 64):
        found = [count(features, kernel, targets)]
        for kind in (AxisType.Explicit, AxisType.Auto):
            mesh = mesh_of(("data", 2), ("model", 4), type=kind)
            with jax.set_mesh(mesh), nnx.logical_axis_rules([("batch", "data")] if kind is AxisType.Auto else []):
                rows = NamedSharding(mesh, P("data"))
                found.append(count(jax.device_put(features, rows), kernel, jax.device_put(targets, rows)))
    return found


def eight_bits() -> list[float]:
    """The largest differences of an MLP with products in 8 bits and its gradients from the same on one device."""
    model, x = nnx.MLP(8, 16, 8, ctx=nnx.context(0)), np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    for layer in model.layers:
        layer.dot_general = nnx.fp8_dot_general
    expected, found = nnx.value_and_grad(squares)(model, x), []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(("data", 2), ("model", 4), type=kind)
        with jax.set_mesh(mesh):
            placed = nnx.shard(model.clone(), mesh, rules=[("in", None), ("out", "model")])
            seen = nnx.jit(nnx.value_and_grad(squares))(placed, jax.device_put(x, NamedSharding(mesh, P("data"))))
        pairs = zip(jax.tree.leaves(seen), jax.tree.leaves(expected), strict=True)
        found.append(max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs))
    return found


def muon() -> list[float]:
    """The largest difference of parameters after two steps of Muon from those on one device, by type of axis."""

    def trained(model: Any, x: Any) -> nnx.State:
        tx = optax.contrib.muon(0.05, ns_steps=2, muon_weight_dimension_numbers=nnx.muon_dimensions(model))
        optimizer = nnx.Optimizer(model, tx)
        step = nnx.jit(lambda optimizer, x: optimizer.update(nnx.grad(squares)(optimizer.model, x)))
        for _ in range(2):
            step(optimizer, x)
        return model.filter(nnx.Param)

    build = lambda ctx: nnx.MLP(8, 16, 8, ctx=ctx)  # noqa: E731
    x, found = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32), []
    expected = trained(build(nnx.context(0)), x)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(("data", 2), ("model", 4), type=kind)
        with jax.set_mesh(mesh):
            model = nnx.init_sharded(build, mesh, BOTH, nnx.context(0))
            state = trained(model, jax.device_put(x, NamedSharding(mesh, P("data"))))
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
        found.append(max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs))
    return found


def weighted_metrics() -> list[float]:
    """The relative errors of a weighted sum and of a sum of weights in a compiled step, over a split batch."""
    random = np.random.default_rng(0)
    values, weights = (random.random(128).astype(np.float32) for _ in range(2))
    step = nnx.jit(lambda metric, values, weights: metric.update(values=values, weights=weights))
    found = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh, metric = mesh_of(("data", 8), type=kind), nnx.Average()
        with jax.set_mesh(mesh):
            step(metric, *jax.device_put((values, weights), NamedSharding(mesh, P("data"))))
        pairs = [np.asarray(pair, np.float64).sum() for pair in (metric.total_pair, metric.count_pair)]
        exact = [(values.astype(np.float64) * weights).sum(), weights.sum(dtype=np.float64)]
        found += [float(abs(pair / sum - 1)) for pair, sum in zip(pairs, exact, strict=True)]
    return found


def same_numbers() -> dict[str, bool]:
    """Whether a model built in parts has exactly the numbers of the one that its constructor makes."""
    builds = {
        "layers": lambda ctx: Layers(ctx=ctx),
        "scanned": lambda ctx: LanguageModel(ctx=ctx),
        "orthogonal": lambda ctx: nnx.LSTMCell(8, 16, ctx=ctx),
    }
    found = {}
    for name, build in builds.items():
        kind = AxisType.Explicit if name == "orthogonal" else AxisType.Auto
        mesh = mesh_of(("data", 2), ("model", 4), type=kind)
        built = nnx.init_sharded(build, mesh, BOTH, nnx.context(0)).get_state()
        pairs = zip(jax.tree.leaves(built), jax.tree.leaves(build(nnx.context(0)).get_state()), strict=True)
        found[name] = all(bool((np.asarray(a) == np.asarray(b)).all()) for a, b in pairs)
    return found


def restoring() -> dict[str, int]:
    """Bytes of all arrays at the peak of a load, beyond the model itself: into an abstract and a sharded target."""
    mesh, rules, count, size = mesh_of(("data", 8)), nnx.fsdp_rules(), 32, 512

    class Stack(nnx.Module):
        def __init__(self):
            self.layers = nnx.Sequence(
                nnx.Dict(w=nnx.Param(jnp.ones((size, size)), ("embed", None))) for _ in range(count)
            )

    make, peak = jax.make_array_from_single_device_arrays, [0]

    def recording(*args: Any, **kwargs: Any) -> Any:
        array = make(*args, **kwargs)
        peak[0] = max(peak[0], sum(x.nbytes for x in jax.live_arrays() if x.shape == (size, size)) - before)
        return array

    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        nnx.save(Path(folder) / "saved", Stack())
        for name in ("abstract", "sharded"):
            before, peak[0] = sum(x.nbytes for x in jax.live_arrays() if x.shape == (size, size)), 0
            target = nnx.shard(nnx.eval_shape(Stack) if name == "abstract" else Stack(), mesh, rules)
            small = mock.patch.object(loading, "SMALL", 1 << 20)  # otherwise a gigabyte is read at once
            with small, mock.patch.object(jax, "make_array_from_single_device_arrays", recording):
                nnx.load(Path(folder) / "saved", target)
            found[name] = peak[0]
            del target
    return {**found, "model": count * size * size * 4}


class Named(nnx.Module):
    """An MLP whose activations have names of their own. It draws no numbers, which would take long to compile."""

    def __init__(self, *, ctx: nnx.Context):
        self.mlp = nnx.MLP(16, 64, 16, kernel_init=nnx.initializers.ones, ctx=ctx)

    def __call__(self, x):
        return nnx.with_logical_constraint(self.mlp(x), ("rows", None))


def warned() -> dict[str, list[list[str]]]:
    """The warnings of placing a model twice, and of calling it twice, with rules that are right or wrong."""
    one, two = mesh_of(("data", 8)), mesh_of(("data", 4), ("model", 2))
    x, found = jnp.ones((8, 16)), {}

    def record(name, mesh, rules, x=x, given=True):
        forward, seen = nnx.jit(lambda model, x: model(x)), []
        for act in (lambda: nnx.init_sharded(lambda ctx: Named(ctx=ctx), mesh, rules, nnx.context(0)), None):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(2):
                    if act is not None:
                        model = act()
                    else:
                        with jax.set_mesh(mesh), nnx.logical_axis_rules(rules if given else ()):
                            nnx.jit(lambda model: jax.tree.map(jnp.sum, model.get_state()))(model)  # runs no Module
                            forward(model, x)
            seen.append([str(warning.message) for warning in caught])
        found[name] = seen

    record("a typo", one, [("mpl", "data"), ("rows", "data")])
    record("nothing like it", one, [("hidden", "data"), ("rows", "data")])
    record("rules for placing only", one, [("width", "data"), ("embed", "data")], given=False)
    record("not on the mesh", one, [("embed", "data"), ("heads", "modle"), ("rows", "data")])
    record("an idle axis", two, [("embed", "data"), ("rows", "data")])
    record("no rule for the activation", one, [("row", "data"), ("embed", "data")])
    record("right", one, [("rows", "data"), *nnx.fsdp_rules()])
    for rules in (nnx.data_parallel_rules(("data", "model")), nnx.fsdp_rules(("data", "model")), BOTH):
        record(f"right {rules}", two, [("rows", "data"), *rules])
    mesh = mesh_of(("data", 4), ("slice", 2))  # no rule has it, but the data is split over it
    split = jax.device_put(x, NamedSharding(mesh, P(("data", "slice"))))
    record("right, with the data split by hand", mesh, [("rows", "data"), *nnx.fsdp_rules()], split)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        big = nnx.Dict(w=nnx.Param(jax.ShapeDtypeStruct((2048, 2048), jnp.float32), ("row", None)))
        nnx.shard(big, one, [("column", "data")])
        nnx.shard(big, one, [("row", None)])
    found["large"] = [[str(warning.message) for warning in caught], []]
    return found


def plans() -> list[Any]:
    """The memory of the arguments, and the collectives of one layer, of a planned step: with NNX and by hand."""
    found = [make_plan("tiny", 8, by_hand) for by_hand in (False, True)]
    return [[plan.arguments, plan.collectives] for plan in found]


def guide() -> int:
    """The number of devices that every block of the guide's page on sharding has run on; warnings are errors."""
    page = ROOT / "docs" / "guide" / "sharding.md"
    module = types.ModuleType("page_sharding")
    sys.modules[module.__name__] = module
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("error")
        for line, code in python_blocks(page.read_text()):
            exec(compile("\n" * line + code, str(page), "exec"), module.__dict__)
    return module.__dict__["mesh"].size


if __name__ == "__main__":
    checks = (
        tensor_parallel_collectives,
        explicit_layers,
        split_logits,
        loss_in_blocks,
        blocks_of_the_loss,
        eight_bits,
        muon,
        weighted_metrics,
        same_numbers,
        restoring,
    )
    checks += (warned, plans, guide)
    print(json.dumps({check.__name__: check() for check in checks}))
