"""What a plan proposes for a step that does not fit, and which meshes a search tries."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh

import nnx
from nnx.planning import machines
from nnx.planning.advice import meshes
from nnx.planning.chips import CHIPS
from nnx.planning.compiling import Request
from nnx.planning.machines import machine_named


class Model(nnx.Module):
    """A model with a policy of `nnx.remat` as an attribute, as `nnx.models.Decoder` has it."""

    def __init__(self, *, ctx):
        self.remat = False
        self.mlp = nnx.MLP(64, 256, 64, ctx=ctx)

    def __call__(self, x):
        policy = None if self.remat is True else self.remat
        run = self.mlp if self.remat is False else nnx.remat(lambda mlp, x: mlp(x), policy=policy)
        return run(x) if self.remat is False else run(self.mlp, x)


def build():
    return nnx.Optimizer(Model(ctx=nnx.context(0)), optax.adam(1e-3))


def step(optimizer, x):
    grads = nnx.grad(lambda model, x: jnp.square(model(x)).sum())(optimizer.model, x)
    optimizer.update(grads)


X = jax.ShapeDtypeStruct((512, 64), jnp.float32)


@pytest.fixture
def small_chip(monkeypatch):
    """Gives a CPU a memory of a given size."""

    def set_memory(size):
        monkeypatch.setitem(machines.CHIPS, "cpu", CHIPS["cpu"]._replace(memory=size))

    return set_memory


def test_step_that_does_not_fit_comes_with_what_was_tried(small_chip, capsys):
    small_chip(2**17)
    optimizer = build()
    plan = nnx.plan(step, optimizer, X, on="cpu-1", progress=True)
    assert optimizer.model.remat is False  # policies are tried on copies
    assert not plan.fits and "DOES NOT FIT" in str(plan)
    changes = {remedy.change: remedy for remedy in plan.advice}
    assert all(remedy.bytes < plan.bytes for remedy in plan.advice)
    assert changes["half the batch"].plan.parts["batch"] == plan.parts["batch"] // 2
    assert "half the batch" in str(plan)
    tried = capsys.readouterr().err
    expected = ('remat=("attention_out", "mlp_hidden")', "remat=True", "donate_argnums=0", "moments in bfloat16")
    assert all(text in tried for text in expected)


def test_small_moments_are_stored_in_bfloat16_and_computed_with_in_float32(small_chip):
    from nnx.planning.advice import _small_moments, _with_small_moments
    from nnx.planning.arguments import abstract

    arguments = _small_moments(abstract((build(), X), {}))
    optimizer = arguments.args[0]
    assert optimizer.opt_state.get_path("0/mu/mlp/layers/0/kernel").dtype == jnp.bfloat16
    assert optimizer.opt_state.get_path("0/count").dtype == jnp.int32
    plan = nnx.plan(nnx.jit(_with_small_moments(step), donate_argnums=0), optimizer, X, on="cpu-1")
    assert plan.donated > 0.99 * (plan.parts["parameters"] + plan.parts["optimizer state"])  # stored as they were read


def test_what_fits_comes_first(small_chip):
    small_chip(int(0.95 * nnx.plan(step, nnx.eval_shape(build), X, on="cpu-1").bytes))
    plan = nnx.plan(step, nnx.eval_shape(build), X, on="cpu-1")
    fits = [remedy.fits for remedy in plan.advice]
    assert 0 < fits.count(True) <= 3 and fits == sorted(fits, reverse=True)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("v5e-8", {"data": 8}, [(4, 2), (2, 4), (1, 8)]),
        ("v5e-8", {"data": 2, "model": 4}, [(8, 1), (4, 2), (1, 8)]),
        ("h100-16", {"data": 16}, [(8, 2), (4, 4), (2, 8)]),  # tensor parallelism stays within a node
    ],
)
def test_search_tries_the_other_meshes_of_a_machine(name, given, expected):
    mesh = AbstractMesh(tuple(given.values()), tuple(given))
    request = Request(step, (), {}, machine_named(name), mesh, ())  # pyright: ignore[reportArgumentType]
    assert [(axes["data"], axes["model"]) for axes, _ in meshes(request)] == expected
