"""Names and habits from Flax, PyTorch and earlier versions of NNX: each is an error that says what to write here."""

import collections.abc
import inspect
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx
from nnx.core.hints import hints, table
from tests.lineage.names import ALL_NAMES


def linear(**options: Any) -> Any:
    return nnx.Linear(2, 3, **{"ctx": nnx.context(0), **options})


class Forward(nnx.Module):
    def forward(self, x):
        return x


class Outer(nnx.Module):
    def __init__(self, *, ctx):
        self.inner = nnx.Linear(2, 3, ctx=ctx)


class NeedsContext(nnx.Module):
    def __call__(self, x, *, ctx):
        return x


class KeepsContext(nnx.Module):
    def __init__(self, *, ctx):
        self.ctx = ctx


class HoldsFlax(nnx.Module):
    def __init__(self):
        self.layer = flax.nnx.Linear(2, 3, rngs=flax.nnx.Rngs(0))


def carry_first(carry, block):
    return carry + block.w, None


def stacked() -> Any:
    return nnx.Dict(w=nnx.Param(jnp.ones((3, 2))))


def shared() -> Any:
    return nnx.Ref(nnx.Param(jnp.ones(2)))


def two_layers() -> Any:
    return nnx.Scan(nnx.Linear, variable_axes={nnx.Param: 0}, split_rngs="params", length=2)(2, 2, ctx=nnx.context(0))


def flax_linear() -> Any:
    return flax.nnx.Linear(2, 3, rngs=flax.nnx.Rngs(0))


def adam(model: Any) -> Any:
    return nnx.Optimizer(model, optax.adam(1e-3))


def gradients(model: Any) -> Any:
    return model.filter(nnx.Param)


class Called(nnx.Module):
    def __call__(self, x):
        return jnp.sin(x)


def torch_tensor() -> Any:
    """A value whose class is called like the tensors of PyTorch, which is not installed where tests run."""
    return type("Tensor", (), {"__module__": "torch"})()


@pytest.fixture(autouse=True)
def _torch_is_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", types.ModuleType("torch")))


# Before NumPy 2.4, a class cannot answer when it is asked for its dtype.
ANSWERS = np.lib.NumpyVersion(np.__version__) >= "2.4.0"
SPLIT = "moduledef.merge(params, rest)" if ANSWERS else "Cannot determine dtype"
N: Any = nnx  # the names below do not exist, which a type checker would say

# What somebody writes, and what the message must name.
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    # Flax: the package
    "nnx.Rngs(0)": (lambda: N.Rngs(0), "nnx.context(0"),
    "nnx.split(model)": (lambda: N.split(linear()), "model.partition()"),
    "nnx.merge(graphdef, state)": (lambda: N.merge(1, 2), "moduledef.merge(state)"),
    "nnx.state(model)": (lambda: N.state(linear()), "model.get_state()"),
    "nnx.update(model, state)": (lambda: N.update(linear(), 1), "model.update_state(state)"),
    "nnx.pop(model, Intermediate)": (lambda: N.pop(linear()), "model.pop_state(nnx.Intermediate)"),
    "nnx.clone(model)": (lambda: N.clone(linear()), "model.clone()"),
    "nnx.graphdef(model)": (lambda: N.graphdef(linear()), "model.get_module_def()"),
    "nnx.List([])": (lambda: N.List([]), "nnx.Sequence"),
    "nnx.Sequential(a, b)": (lambda: N.Sequential(1, 2), "nnx.Sequence(["),
    "nnx.Carry": (lambda: N.Carry, "nnx.scan carries"),
    "nnx.StateAxes({...})": (lambda: N.StateAxes({}), "variable_axes={nnx.Param: 0}"),
    "nnx.split_rngs(splits=4)": (lambda: N.split_rngs(splits=4), "split_rngs="),
    "nnx.DiffState(0, Param)": (lambda: N.DiffState(0), "wrt=filter"),
    "nnx.metrics.Accuracy()": (lambda: N.metrics.Accuracy(), "nnx.Accuracy()"),
    "nnx.ModelAndOptimizer": (lambda: N.ModelAndOptimizer(1, 2), "nnx.Optimizer(model, tx)"),
    "nnx.tabulate(model, x)": (lambda: N.tabulate(linear()), "nnx.summary(model, x)"),
    "nnx.iter_modules(model)": (lambda: N.iter_modules(linear()), "model.named_modules()"),
    "nnx.PathContains('head')": (lambda: N.PathContains("head"), "nnx.PathMatches("),
    "nnx.to_pure_dict(state)": (lambda: N.to_pure_dict(1), "state.to_nested()"),
    "nnx.view(model, ...)": (lambda: N.view(linear()), "model.view(deterministic=True)"),
    "nnx.pmap(f)": (lambda: N.pmap(len), "nnx.shard_map"),
    "nnx.Dense(4)": (lambda: N.Dense(4), "nnx.Linear(in_features, out_features, ctx=ctx)"),
    "nnx.SelfAttention(4)": (lambda: N.SelfAttention(4), "nnx.MultiHeadAttention(num_heads, in_features, ctx=ctx)"),
    # names of nnx.models
    "nnx.Tokenizer": (lambda: N.Tokenizer, "nnx.models.Tokenizer"),
    "nnx.from_pretrained(directory)": (lambda: N.from_pretrained("qwen"), "nnx.models.from_pretrained"),
    # a Context for a layer without parameters, and none for a call that needs one
    "Dropout(0.5, ctx=ctx)": (lambda: N.Dropout(0.5, ctx=nnx.context(0)), "`layer(x, ctx=ctx)`"),
    "Dropout(0.5, rngs=rngs)": (lambda: N.Dropout(0.5, rngs=0), "takes neither `ctx` nor `rngs`"),
    "MaxPool((2, 2), ctx=ctx)": (lambda: N.MaxPool((2, 2), ctx=nnx.context(0)), "MaxPool initializes no parameters"),
    "MaxPool((2, 2), stride=2)": (lambda: N.MaxPool((2, 2), stride=2), "MaxPool.__init__() got an unexpected"),
    "model(x), without ctx": (lambda: NeedsContext()(1), "`ctx=nnx.context(dropout=1)`"),
    # Flax: arguments and objects
    "Linear(2, 3, rngs=0)": (lambda: nnx.Linear(2, 3, rngs=0), "`ctx=nnx.context(0)` instead of `rngs=`"),
    "Linear(2, 3, ctx=7)": (lambda: linear(ctx=7), "`ctx=nnx.context(7)`"),
    "Outer(ctx=0)": (lambda: Outer(ctx=0), "`ctx=nnx.context(0)`"),
    "Linear(2, 3)": (lambda: nnx.Linear(2, 3), "`ctx=nnx.context(0)`"),
    "Linear(ctx=flax Rngs)": (lambda: linear(ctx=flax.nnx.Rngs(0)), "`ctx` must be a Context, got Rngs"),
    "self.ctx = ctx": (lambda: KeepsContext(ctx=nnx.context(0)), "model(x, ctx=ctx)"),
    "ctx.dropout()": (lambda: nnx.context(dropout=0).dropout(), 'ctx.make_rng("dropout")'),
    "Param(x, out_sharding=...)": (lambda: nnx.Param(1.0, out_sharding=("a",)), "Param(x, sharding=('a',))"),
    "Param(x, sharding_names=...)": (lambda: nnx.Param(1.0, sharding_names=("a",)), "sharding=('a',)"),
    "optimizer.update(model, grads)": (
        lambda: (m := linear(), adam(m).update(m, gradients(m))),
        "optimizer.update(grads)",
    ),
    "optimizer.update(grads, params)": (
        lambda: (m := linear(), adam(m).update(gradients(m), gradients(m))),
        "optimizer.update(grads)",
    ),
    "with_metadata(init, out_sharding=...)": (
        lambda: nnx.with_metadata(nnx.initializers.zeros(), out_sharding=("a", "b")),
        "sharding=('a', 'b')",
    ),
    "kernel_metadata={'out_sharding': ...}": (
        lambda: linear(kernel_metadata={"out_sharding": ("a", "b")}),
        "Param(x, sharding=('a', 'b'))",
    ),
    "model.filter(('layers', 0, 'kernel'))": (
        lambda: linear().filter(("layers", 0, "kernel")),
        "nnx.PathMatches('layers/0/kernel')",
    ),
    "wrt=('head', 'kernel')": (
        lambda: nnx.grad(lambda m: m.kernel.sum(), wrt=("head", "kernel"))(linear()),
        "nnx.PathMatches('head/kernel')",
    ),
    "model.filter('kernel')": (lambda: linear().filter("kernel"), "nnx.PathMatches('kernel')"),
    "scan(f)(carry, module)": (
        lambda: nnx.scan(carry_first, variable_axes={nnx.Param: 0}, length=3)(jnp.ones(2), stacked()),
        "f(module, carry, x), not f(carry, module, x)",
    ),
    "scan(f, in_axes=(Carry, 0))(carry, module)": (
        lambda: nnx.scan(carry_first, in_axes=(None, 0))(jnp.ones(2), stacked()),
        "the Module comes first in nnx.scan(f)(module, carry, xs)",
    ),
    "nnx.Sequence(a, b)": (lambda: nnx.Sequence(linear(), nnx.relu), "nnx.Sequence([layer1"),  # pyright: ignore[reportCallIssue]
    "jax.jit(f)(model)": (lambda: jax.jit(lambda m: m)(linear()), "nnx.jit"),
    "jax.grad(f)(model)": (lambda: jax.grad(lambda m: m.kernel.sum())(linear()), "nnx.grad"),
    "Conv(3, 4, 3)": (lambda: nnx.Conv(3, 4, 3, ctx=nnx.context(0)), "kernel_size=(3, 3)"),  # pyright: ignore[reportArgumentType]
    "Dropout without a mode": (lambda: nnx.Dropout(0.5)(jnp.ones(2)), "model.eval()"),
    "state.to_pure_dict()": (lambda: linear().get_state().to_pure_dict(), "state.to_nested()"),
    "state.flat_state()": (lambda: linear().get_state().flat_state(), "state.arrays()"),
    "model.iter_modules()": (lambda: linear().iter_modules(), "model.named_modules()"),
    "model.set_attributes(...)": (lambda: linear().set_attributes(deterministic=True), "model.eval()"),
    "model.init(key, x)": (lambda: linear().init(0, 1), "once it is constructed"),
    "nnx.jit(f)(flax_module)": (lambda: nnx.jit(lambda m: m)(flax_linear()), "nnx.jit"),
    "nnx.jit(flax_module)": (lambda: nnx.jit(flax_linear()), "given a Flax Module (Linear)"),
    "nnx.grad(f)(flax_module)": (lambda: nnx.grad(lambda m: 0.0)(flax_linear()), "given a Flax Module (Linear)"),
    "nnx.jit(f)(model=flax_module)": (
        lambda: nnx.jit(lambda *, model: model)(model=flax_linear()),
        "given a Flax Module (Linear)",
    ),
    "nnx.jit(f)(flax Rngs)": (lambda: nnx.jit(lambda rngs: rngs)(flax.nnx.Rngs(0)), "nnx.context(0, dropout=1)"),
    "nnx.vmap(f)(flax_module)": (lambda: nnx.vmap(lambda m: m)(flax_linear()), "given a Flax Module (Linear)"),
    "flax.nnx.grad(f)(model)": (lambda: flax.nnx.grad(lambda m: 0.0)(linear()), "nnx.grad"),
    "self.layer = flax_module": (HoldsFlax, "'layer' of HoldsFlax was given a Flax Module"),
    "flax.nnx.jit(f)(model)": (lambda: flax.nnx.jit(lambda m: m)(linear()), "nnx.jit"),
    # PyTorch
    "nnx.Parameter(x)": (lambda: N.Parameter(1), "nnx.Param(array)"),
    "nnx.ModuleList([])": (lambda: N.ModuleList([]), "nnx.Sequence"),
    "nnx.Conv2d(3, 16, 3)": (lambda: N.Conv2d(3, 16, 3), "nnx.Conv(3, 16, kernel_size=(3, 3), ctx=ctx)"),
    "nnx.Embedding(10, 4)": (lambda: N.Embedding(10, 4), "nnx.Embed("),
    "nnx.LSTM(2, 3)": (lambda: N.LSTM(2, 3), "nnx.RNN(nnx.OptimizedLSTMCell("),
    "nnx.ReLU()": (lambda: N.ReLU(), "nnx.relu"),
    "nnx.no_grad()": (lambda: N.no_grad(), "nnx.grad"),
    "nnx.functional.relu": (lambda: N.functional.relu, "nnx.relu"),
    "model.parameters()": (lambda: linear().parameters(), "model.filter(nnx.Param)"),
    "model.state_dict()": (lambda: linear().state_dict(), "model.get_state()"),
    "model.load_state_dict(d)": (lambda: linear().load_state_dict({}), "nnx.load_torch_state_dict(model, mapping)"),
    "model.to(device)": (lambda: linear().to("cuda"), "nnx.set_dtypes(model"),
    "model.half()": (lambda: linear().half(), "nnx.set_dtypes(model, dtype=jnp.float16"),
    "model.cuda()": (lambda: linear().cuda(), "nnx.shard(model, mesh, rules)"),
    "model.requires_grad_(False)": (lambda: linear().requires_grad_(False), "model.freeze(where)"),
    "model.register_buffer(...)": (lambda: linear().register_buffer("a", 1), "assign an array"),
    "model.register_forward_hook(f)": (lambda: linear().register_forward_hook(1), "nnx.capture(f, where=...)"),
    "model.perturb(name, x)": (lambda: linear().perturb("x", 1), "nnx.capture(loss, where=..., grads=True)"),
    "model.children()": (lambda: linear().children(), "model.modules()"),
    "model.forward(x)": (lambda: linear().forward(1), "model(x)"),
    "def forward, model(x)": (lambda: Forward()(1), "Rename the method to `__call__`"),
    "optimizer.zero_grad()": (lambda: adam(linear()).zero_grad(), "nnx.grad returns new gradients"),
    "Linear(2, 3, bias=False)": (lambda: linear(bias=False), "use_bias"),
    "Dropout(p=0.5)": (lambda: nnx.Dropout(p=0.5), "rate"),  # pyright: ignore[reportCallIssue]
    "LayerNorm(3, eps=1e-5)": (lambda: nnx.LayerNorm(3, eps=1e-5), "epsilon"),  # pyright: ignore[reportCallIssue]
    **{
        f"nnx.{name}": (lambda name=name: getattr(N, name), here)
        for name, here in {
            "optim": "nnx.Optimizer(model, optax.adam(1e-3))",
            "Adam": "optax.adam",
            "SGD": "optax.sgd",
            "init": "nnx.initializers",
            "utils": "nnx.prefetch(batches)",
            "manual_seed": "nnx.context(0)",
            "mse_loss": "optax.squared_error",
            "CrossEntropyLoss": "nnx.cross_entropy(logits, labels)",
            "Dropout2d": "broadcast_dims=(1, 2)",
            "PixelShuffle": "einops.rearrange(x",
            "TransformerEncoderLayer": "nnx.models.EncoderBlock",
            "DataLoader": "nnx.prefetch(batches)",
            "device": "jax.default_device",
            "compile": "nnx.jit(f)",
            # Equinox
            "filter_jit": "nnx.jit(f)",
            "filter_grad": "nnx.grad(f)",
            "filter_value_and_grad": "nnx.value_and_grad(f)",
            "filter_vmap": "variable_axes={nnx.Param: 0}",
            "partition": "model.partition(",
            "combine": "moduledef.merge(params, rest)",
            "tree_at": 'model.set_path("out/kernel", new)',
            "is_array": "model.filter(nnx.Param)",
            # transformers
            "AutoModelForCausalLM": "nnx.models.from_pretrained(directory)",
        }.items()
    },
    "nnx.models.AutoModelForCausalLM": (lambda: N.models.AutoModelForCausalLM, "nnx.models.from_pretrained(directory)"),
    "model.get_submodule('a.b')": (lambda: linear().get_submodule("a.b"), "model.get_path("),
    "model.get_parameter('a.b')": (lambda: linear().get_parameter("a.b"), "model.get_path("),
    "model.register_forward_pre_hook(f)": (lambda: linear().register_forward_pre_hook(1), "nnx.intercept(f, hook"),
    "model.register_full_backward_hook(f)": (lambda: linear().register_full_backward_hook(1), "grads=True"),
    "model.device": (lambda: linear().device, "model.kernel.device"),
    "model.dtype": (lambda: Forward().dtype, "nnx.set_dtypes(model"),
    "model.compile()": (lambda: linear().compile(), "nnx.jit(model)"),
    "generate(..., do_sample=True)": (
        lambda: N.generate(linear(), [[1]], max_new_tokens=1, do_sample=True),
        "`temperature=0`",
    ),
    "LSTMCell(3, 4)(x)": (lambda: N.LSTMCell(3, 4, ctx=nnx.context(0))(jnp.ones((2, 3))), "nnx.RNN(cell)"),
    "nnx.save(model, path)": (lambda: N.save(linear(), "run"), "nnx.save(path, model)"),
    "nnx.load(model, path)": (lambda: N.load(linear(), "run"), "nnx.load(path, model)"),
    "nnx.save(path, nnx.Linear)": (lambda: N.save("run", nnx.Linear), "make one, such as Linear(..., ctx="),
    "model.train(False)": (lambda: N.Module.train(linear(), False), "model.eval() evaluation"),
    "MultiMetric(accuracy=nnx.Accuracy)": (lambda: N.MultiMetric(accuracy=nnx.Accuracy), "write `Accuracy()`"),
    "cross_entropy of one-hot targets": (
        lambda: nnx.cross_entropy(jnp.ones((2, 3)), jnp.ones((2, 3), int)),
        "`optax.softmax_cross_entropy(logits, targets)`",
    ),
    "Linear(2, 3, ctx=key)": (lambda: linear(ctx=jax.random.key(0)), "`ctx=nnx.context(key)`"),
    "nnx.dropout(x, 0.5)": (lambda: N.dropout(1.0, 0.5), "nnx.Dropout(0.5)"),
    "add_lora(model, r=8)": (lambda: N.add_lora(linear(), r=8, ctx=nnx.context(0)), "`rank`"),
    "model.generate(tokens)": (lambda: linear().generate(1), "nnx.generate(model, prompts"),
    "model.save_pretrained(d)": (lambda: linear().save_pretrained("d"), "nnx.models.save_pretrained(model, directory)"),
    "model.requires_grad = False": (lambda: setattr(linear(), "requires_grad", False), "model.freeze(where)"),
    "model.training = False": (lambda: setattr(linear(), "training", False), "model.train() and model.eval()"),
    "layer.weight": (lambda: linear().weight, "the attribute `kernel`"),
    "layer.weight = w": (lambda: setattr(linear(), "weight", jnp.ones((3, 2))), "layer.kernel = weight.T"),
    "norm.weight = w": (lambda: setattr(nnx.LayerNorm(3), "weight", jnp.ones(3)), "layer.scale = weight"),
    "conv.weight": (lambda: nnx.Conv(1, 1, (3, 3), ctx=nnx.context(0)).weight, "weight.transpose(2, 3, 1, 0)"),
    "embed.weight": (lambda: nnx.Embed(3, 2, ctx=nnx.context(0)).weight, "`embedding`"),
    "norm.running_mean = m": (lambda: setattr(nnx.BatchNorm(3), "running_mean", 0.0), "the attribute `mean`"),
    "optimizer.param_groups": (lambda: adam(linear()).param_groups, "optimizer.learning_rate"),
    "optimizer.state_dict()": (lambda: adam(linear()).state_dict(), "nnx.save(path, optimizer)"),
    "Optimizer(model, lr=1e-3)": (lambda: N.Optimizer(linear(), lr=1e-3), "optax.adam(1e-3)"),
    "Upsample(mode='bilinear')": (lambda: N.Upsample((2, 2), mode="bilinear"), "Here: method"),
    "GroupNorm(8, 64)": (lambda: nnx.GroupNorm(8, 64), "nnx.GroupNorm(64, 8)"),
    "MultiHeadAttention(64, 4)": (
        lambda: nnx.MultiHeadAttention(64, 4, ctx=nnx.context(0)),
        "nnx.MultiHeadAttention(4, 64, ctx=ctx)",
    ),
    "Linear(2, 3, key=key)": (lambda: linear(key=jax.random.key(0)), "`ctx=nnx.context(key)`"),
    "Linear(2, 3, key)": (lambda: N.Linear(2, 3, jax.random.key(0)), "`ctx=nnx.context(key)`"),
    "Linear(None, 4)": (lambda: N.Linear(None, 4, ctx=nnx.context(0)), "in_features=x.shape[-1]"),
    "model(x, train=True)": (lambda: linear()(jnp.ones(2), train=True), "model.train() and model.eval()"),
    "model(x, train=True) inside": (
        lambda: nnx.grad(lambda m: m(jnp.ones(2), train=True).sum())(linear()),
        "model.train() and model.eval()",
    ),
    "model(x, key=key)": (lambda: linear()(jnp.ones(2), key=1), "`ctx=nnx.context(dropout=key)`"),
    "model(tensor)": (lambda: Called()(torch_tensor()), "`jnp.asarray(tensor.detach()"),
    "nnx.jit(f)(model, tensor)": (
        lambda: nnx.jit(lambda m, x: x)(linear(), torch_tensor()),
        "given a tensor of PyTorch",
    ),
    "self.w = tensor": (
        lambda: setattr(Forward(), "w", torch_tensor()),
        "'w' of Forward was given a tensor of PyTorch",
    ),
    "model.load_state(torch names)": (
        lambda: linear().load_state({"weight": np.ones((3, 2)), "bias": np.ones(3)}),
        "nnx.load_torch_state_dict(model, mapping)",
    ),
    "nnx.load('x.pt')": (lambda: nnx.load("x.pt"), 'nnx.load_torch_state_dict(model, torch.load("x.pt"'),
    "nnx.load('x.safetensors', model)": (
        lambda: nnx.load("x.safetensors", linear()),
        'nnx.load_safetensors("x.safetensors", model)',
    ),
    "tokenizer(text)": (lambda: object.__new__(N.models.Tokenizer)("text"), "tokenizer.encode(text)"),
    "from_pretrained(d, load_in_4bit=True)": (
        lambda: N.models.from_pretrained("d", load_in_4bit=True),
        "nnx.quantize(model, bits=4)",
    ),
    "nnx.scan(f)(carry, xs)": (lambda: nnx.scan(lambda c, x: (c, x))(0.0, jnp.ones(3)), "jax.lax.scan(f, carry, xs)"),
    "nnx.scan(f, carry, xs)": (lambda: N.scan(lambda c, x: (c, x), 0.0, jnp.ones(3)), "jax.lax.scan(f, carry, xs)"),
    # earlier versions of NNX
    "Linear.init(key)": (lambda: N.Linear.init(0)(2, 3), "is from NNX 0.0.2, and from Flax"),
    "Context(key)": (lambda: N.Context(jax.random.PRNGKey(0)), "nnx.context(key"),
    "Context(params=key)": (lambda: N.Context(params=0), "nnx.context(params=key, dropout=1)"),
    "Context({'params': key})": (lambda: N.Context({"params": 0}, flags={}), "nnx.context(params=key, dropout=1)"),
    "Context(rngs={'params': key})": (lambda: N.Context(rngs={"params": 0}), "nnx.context(params=key, dropout=1)"),
    "context({'params': key})": (lambda: nnx.context({"params": 0}), "nnx.context(**seeds)"),
    "jit(f)(ref)": (lambda: nnx.jit(lambda ref: ref)(shared()), "pass the Modules that hold it"),
    "jit(f)([ref])": (lambda: nnx.jit(lambda refs: refs)([shared()]), "`ref.value`"),
    "grad(f)(ref)": (lambda: nnx.grad(lambda ref: 0.0)(shared()), "was given Ref(Param(float32[2]))"),
    "Variable(x, 'params')": (lambda: nnx.Variable(jnp.ones(2), "params"), "nnx.var('params', value)"),
    "Param(x, 'embed')": (lambda: nnx.Param(jnp.ones(2), "embed"), "Param(value, ('embed',))"),
    "State({('a', 'b'): x})": (lambda: N.State({("a", "b"): 1}), "Write 'a/b'."),
    "state.get_collections()": (lambda: N.State({}).get_collections(), "model.collections()"),
    "pure.state": (lambda: N.Pure(1, 2).state, "pure.states"),
    "train_state.apply_fn": (lambda: N.TrainState.apply_fn, 'train_state.apply("params")(x)'),
    "TrainState(apply_fn=...)": (lambda: N.TrainState(apply_fn=len, params=1, tx=2), "nnx.TrainState(moduledef, "),
    "mutable_state_dict(sep='.')": (lambda: N.Sequence([]).mutable_state_dict(sep="."), "always `/`"),
    "model.make_rng('params')": (lambda: N.Sequence([]).make_rng("params"), 'ctx.make_rng("params")'),
    "stack.module": (lambda: two_layers().module, "scan_module"),
    # A Module where a pytree of arrays is expected: what solvers and optimizers ask of a leaf, in this order
    "jnp.result_type(model)": (lambda: jnp.result_type(linear()), SPLIT),
    "ravel_pytree(model)": (lambda: jax.flatten_util.ravel_pytree(linear()), SPLIT),
    "tree.map(zeros_like, model)": (lambda: jax.tree.map(jnp.zeros_like, linear()), "module.partition(nnx.Param, ...)"),
    "optax.adam(1e-3).init(model)": (lambda: optax.adam(1e-3).init(linear()), "module.partition(nnx.Param, ...)"),
    "optax.lbfgs().init(model)": (lambda: optax.lbfgs().init(linear()), "model.filter(nnx.Param)"),
    "optax.apply_updates(model, grads)": (
        lambda: (m := linear(), optax.apply_updates(m, gradients(m))),
        "jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)",
    ),
    "2 * model": (lambda: 2 * linear(), "model.update_state(params)"),
    "-model": (lambda: -linear(), "model.update_state(params)"),
    "0.1 * grads": (lambda: 0.1 * gradients(linear()), "jax.tree.map(lambda x: 0.1 * x, state)"),
    "grads + grads": (lambda: gradients(linear()) + gradients(linear()), "jax.tree.map(jnp.add, state, other)"),
    "model.params": (lambda: linear().params, "model.filter(nnx.Param)"),
    "CheckpointManager(max_to_keep=2)": (lambda: N.CheckpointManager("run", max_to_keep=2), "keep_last="),
    "model.deref()": (lambda: N.Sequence([]).deref(), "state, moduledef = model.partition()"),
}


@pytest.mark.parametrize("use", WRONG)
def test_the_error_names_the_right_call(use):
    wrong, names = WRONG[use]
    with pytest.raises((AttributeError, TypeError, ValueError, FileNotFoundError)) as raised:
        wrong()
    assert names in str(raised.value)


def test_there_are_many_hints():
    assert len(WRONG) >= 40


# The tables are true


TABLES = {
    "PACKAGE": table.PACKAGE,
    "MODULE": table.MODULE,
    "STATE": table.STATE,
    "CONTEXT": table.CONTEXT,
    "PURE": table.PURE,
    "OPTIMIZER": table.OPTIMIZER,
    "MODELS": table.MODELS,
    "TRAIN_STATE": table.TRAIN_STATE,
    "SCAN_MODULE": table.SCAN_MODULE,
    "TOKENIZER": table.TOKENIZER,
    "CHECKPOINT_MANAGER": table.CHECKPOINT_MANAGER,
    "CONFIG": table.CONFIG,
}
CLASSES = {
    "MODULE": nnx.Module,
    "STATE": nnx.State,
    "CONTEXT": nnx.Context,
    "PURE": nnx.Pure,
    "OPTIMIZER": nnx.Optimizer,
    "TRAIN_STATE": nnx.TrainState,
    "SCAN_MODULE": type(two_layers()),
    "TOKENIZER": nnx.models.Tokenizer,
    "CHECKPOINT_MANAGER": nnx.CheckpointManager,
    "CONFIG": nnx.models.DecoderConfig,
}
SIZES: Any = {
    "model_type": "llama",
    "vocab_size": 8,
    "features": 4,
    "hidden_features": 8,
    "num_layers": 1,
    "num_heads": 2,
    "max_length": 8,
}
OWNERS = {
    "model": nnx.Module,
    "state": nnx.State,
    "ctx": nnx.Context,
    "moduledef": nnx.ModuleDef,
    "pure": nnx.Pure,
    "optimizer": nnx.Optimizer,
    "train_state": nnx.TrainState,
    "config": nnx.models.DecoderConfig(**SIZES),
    "manager": nnx.CheckpointManager,
}


ATTRIBUTES = {"kernel", "out", "json"}  # of the model in hints, and of config.json


def entries(table: str) -> dict[str, str]:
    """The names of a table and their hints, whatever their origin."""
    return {name: hint for names in TABLES[table].values() for name, hint in names.items()}


@pytest.mark.parametrize("table", TABLES)
def test_hints_name_only_existing_attributes(table):
    for name, hint in entries(table).items():
        for found in re.findall(r"(?<![.\w])nnx\.(\w+)", hint):
            assert hasattr(nnx, found), f"{name}: nnx.{found}"
        for found in re.findall(r"(?<![.\w])nnx\.models\.(\w+)", hint):
            assert hasattr(nnx.models, found), f"{name}: nnx.models.{found}"
        for owner, found in re.findall(rf"\b({'|'.join(OWNERS)})\.(\w+)", hint):
            assert hasattr(OWNERS[owner], found) or found in ATTRIBUTES, f"{name}: {owner}.{found}"


def test_no_hint_is_for_a_name_that_exists():
    assert [name for name in entries("PACKAGE") if hasattr(nnx, name)] == []
    for place, owner in CLASSES.items():
        assert [name for name in entries(place) if hasattr(owner, name)] == []
        assert all(type(vars(owner)[name]) is hints.Hint for name in entries(place))


@pytest.mark.parametrize("table", TABLES)
def test_a_name_has_one_origin(table):
    assert len(entries(table)) == sum(map(len, TABLES[table].values()))


def test_hints_of_earlier_versions_are_about_names_of_earlier_versions():
    earlier = {name for origin, names in table.PACKAGE.items() if origin.startswith("NNX ") for name in names}
    assert earlier <= set(ALL_NAMES)


def test_arguments_of_layers_that_have_a_hint_are_not_arguments_of_a_layer():
    layers = [
        value for value in vars(nnx).values() if isinstance(value, type) and value.__module__.startswith("nnx.nn.")
    ]
    taken = {name for layer in layers for name in inspect.signature(layer.__init__).parameters}
    harmless = {"key", "groups"}  # of a cache, and of MoE
    assert taken & {name for names in table.CONSTRUCTOR.values() for name in names} <= harmless


# They are in nobody's way


def test_module_classes_have_no_getattr_so_reads_stay_plain_lookups():
    for cls in (nnx.Module, nnx.Linear, nnx.State, nnx.Context):
        assert not hasattr(cls, "__getattr__")


def test_a_module_can_use_the_names_itself():
    class Own(nnx.Module):
        def __init__(self):
            self.state = jnp.ones(2)
            self.training = True
            self.to = nnx.Param(jnp.zeros(1))

        def parameters(self):
            return 3

    module = Own()
    assert module.training is True and module.parameters() == 3
    assert list(module.get_state()) == ["state", "to"]
    assert nnx.jit(lambda m: m.to)(module).shape == (1,)
    assert nnx.Dict(forward=1, split=2).split == 2

    @nnx.dataclass
    class Fields(nnx.Module):
        children: int
        half: bool = False

    assert Fields(2).children == 2 and Fields(2).half is False


def test_attributes_of_a_mixin_after_module_are_found():
    class Invertible:
        def forward(self):
            return "forward"

        @property
        def training(self):
            return "training"

    class Flow(nnx.Module, Invertible):
        pass

    assert Flow().forward() == "forward" and Flow().training == "training"
    mixins = (collections.abc.MutableMapping, collections.abc.MutableSequence)
    assert not any(hasattr(mixin, name) for mixin in mixins for name in entries("MODULE"))


def test_a_class_with_forward_can_define_call_later():
    class Called(Forward):
        def __call__(self, x):
            return self.forward(x)

    assert Called()(3) == 3
    assert Forward().forward(4) == 4


def test_hints_are_not_offered_for_completion():
    assert not {"parameters", "state_dict"} & set(dir(linear())) and "module" not in dir(two_layers())
    assert "parameters" in dir(type("Own", (nnx.Module,), {"parameters": 1})())
    assert not hasattr(linear(), "parameters") and not hasattr(nnx.Module, "parameters")


def test_a_module_can_have_arithmetic_of_its_own_or_of_a_mixin_or_leave_it_to_the_other_operand():
    class Adds:
        def __add__(self, other):
            return other

        __radd__ = __add__

    assert linear() + Adds() and gradients(linear()) + Adds() and Adds() + linear()
    assert type("Mixed", (nnx.Module, Adds), {})() + 1 == 1 and type("Own", (Adds, nnx.Module), {})() + 1 == 1


def test_a_module_without_all_its_state_still_explains_both():
    model = linear()
    rebuilt = model.get_module_def().merge(nnx.State({"bias": model.bias}))
    with pytest.raises(AttributeError, match="no state was given"):
        _ = rebuilt.kernel
    with pytest.raises(AttributeError, match=r"model.load_state\(mapping\)"):
        rebuilt.load_state_dict({})


def test_names_that_are_refused_in_a_finished_module_can_be_set_in_its_constructor_and_in_a_dict():
    class Own(nnx.Module):
        def __init__(self):
            self.training, self.requires_grad = False, True

    class WithWeight(nnx.Linear):
        def __init__(self, *, ctx):
            super().__init__(2, 2, ctx=ctx)
            self.weight = nnx.Param(jnp.ones(2))

    own, layer, items = Own(), WithWeight(ctx=nnx.context(0)), nnx.Dict(weight=1)
    own.training, layer.weight, items.training = True, jnp.zeros(2), 2
    assert own.training and list(items) == ["weight", "training"] and not layer.weight.any()


class Net(nnx.Module):
    def __init__(self):
        ctx = nnx.context(0)
        self.inner = [nnx.Conv(1, 2, (3, 3), ctx=ctx), nnx.Dict(head=nnx.Linear(2, 3, ctx=ctx))]

    def __call__(self, x):
        return self.inner[1].head(self.inner[0](x))


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit, nnx.value_and_grad], ids=["eager", "jit", "grad"])
def test_a_parameter_of_a_wrong_shape_is_named_with_its_path_when_the_model_is_called(wrap):
    net = Net()
    net.inner[1].head.kernel = jnp.ones((5, 3))
    with pytest.raises(TypeError) as raised:
        wrap(lambda net, x: net(x).sum())(net, jnp.ones((1, 4, 4, 1)))
    expected = (
        "'kernel' of the Linear at 'inner/1/head' is float32[5,3], "
        "and with in_features=2, out_features=3 it would be float32[2,3]"
    )
    assert str(raised.value).count("would be") == 1 and expected in str(raised.value)


def fails(x):
    raise ValueError("no")


def test_stacked_parameters_are_not_blamed_for_an_error_that_is_not_about_shapes():
    stack = nnx.Scan(nnx.Linear, variable_axes={nnx.Param: 0}, split_rngs="params", length=2)(2, 2, ctx=nnx.context(0))
    with pytest.raises(TypeError, match="must return a pair") as raised:
        nnx.Sequence([stack])(jnp.ones(2))
    assert "was assigned to it" not in str(raised.value)


def test_nested_calls_add_no_frames_of_the_library_to_a_traceback():
    model = nnx.Sequence([nnx.Sequence([nnx.Sequence([fails])])])
    with pytest.raises(ValueError, match="^no$") as raised:
        model(1)
    assert raised.traceback[-1].name == "fails"
    assert not any(frame.path.name == "scopes.py" for frame in raised.traceback)


def test_other_missing_names_are_ordinary_errors():
    with pytest.raises(AttributeError, match="^module 'nnx' has no attribute 'no_such_name'.$"):
        _ = N.no_such_name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = linear().no_such_name
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such_option'$"):
        linear(no_such_option=1)


def test_an_inner_error_is_explained_once():
    with pytest.raises(AttributeError) as raised:
        Outer(ctx=0)
    assert str(raised.value).count("`ctx` must be a Context") == 1


def test_flax_modules_may_be_closed_over():
    layer = flax_linear()
    assert nnx.jit(lambda x: layer(x))(jnp.ones(2)).shape == (3,)
    assert jax.tree.leaves(flax.nnx.state(layer))
