"""Hints: what names from Flax, PyTorch and earlier versions of NNX are called here, for the errors that they raise.

A table of hints is grouped by *origin*, where the names come from: `{origin: {name: what to write instead}}`. The
package's hints from an earlier version of NNX are also rows of a table in docs/migrating.md.

Nothing here costs anything until a name is not found. The package has a `__getattr__`. Classes have none, because it
would slow down every attribute read; instead, each of their hints is a *non-data descriptor* on the class that raises
AttributeError. What an instance, a subclass or a mixin defines under that name comes first, and `hasattr` is False.
"""

import re
from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

_STREAMS = "random numbers come from a Context: ctx = nnx.context(0, dropout=1), passed on as `ctx=ctx`"
_SPLIT = "state, moduledef = model.partition(); or (params, rest), moduledef = model.partition(nnx.Param, ...)"
_MERGE = "model = moduledef.merge(state)"
_STATE = "model.get_state(), or a part of it: model.filter(nnx.Param)"
_AXES = "pass variable_axes={nnx.Param: 0} to nnx.scan, nnx.vmap, nnx.Scan or nnx.Vmap"
_CONTEXTS = "Modules can appear anywhere in the arguments of nnx.jit and the other transforms, which keep them in sync"
_CONV = "nnx.Conv(3, 16, kernel_size=(3, 3), ctx=ctx); channels come last"
_LOSS = "write the loss as a function, e.g. optax.softmax_cross_entropy_with_integer_labels, and pass it to nnx.grad"
_DATA = "arrays and containers are data by themselves; nnx.Node(value) turns anything else into data"
_REF = '`nnx.var("counts", 0)` makes a Variable of that collection; to share it, `nnx.Ref(nnx.var("counts", 0))`'
_DAG = "a Module: its `model.partition()` keeps track of what is shared"
_DEREF = "`state, moduledef = model.partition()`"
_LEAVES = "a State holds `nnx.Variable`s"
_METADATA = """`nnx.ContainerMetadata(value, {"sharding": names})`; around an initializer, \
`nnx.with_partitioning(initializer, names)`"""
_COLLECTION = '`model.filter(nnx.Param)`; by name, `model.filter("params")`'
_COLLECTIONS = '`(params, rest), moduledef = model.partition("params", ...)`'
_CONSTRUCTED = "a Module has its parameters once it is constructed: `Model(ctx=nnx.context(0))`"
_MAKE_RNG = '`ctx.make_rng("params")`'
_SCOPE = 'a Context, which you pass to the call: `model(x, ctx=nnx.context(dropout=1, flags={"deterministic": False}))`'
_HOOKS = "nnx.capture(f, where=...) shows outputs, nnx.intercept(f, hook, where=...) changes them"
_GRADS = "nnx.capture(loss, where=..., grads=True)(model, x) returns the gradients of activations"

Hints: TypeAlias = Mapping[str, Mapping[str, str]]
"""What to write instead of each name, by origin."""

PACKAGE: Hints = {
    "Flax": {
        "Rngs": _STREAMS,
        "RngKey": _STREAMS,
        "RngState": _STREAMS,
        "RngCount": _STREAMS,
        "split": _SPLIT,
        "merge": _MERGE,
        "state": _STATE,
        "variables": _STATE,
        "graphdef": "model.get_module_def()",
        "GraphDef": "nnx.ModuleDef",
        "GraphState": "nnx.State",
        "update": "model.update_state(state)",
        "pop": "model.pop_state(nnx.Intermediate)",
        "call": "pure.call(x) on the result of model.partition()",
        "List": "assign a plain list of Modules; it becomes an nnx.Sequence",
        "Sequential": "nnx.Sequence([layer1, nnx.relu, layer2]), with the layers in a list",
        "Carry": "nnx.scan carries what variable_axes does not name; the carry of a function comes after the Module",
        "StateAxes": _AXES,
        "StateSharding": "pass in_shardings={nnx.Param: sharding, ...: other} to nnx.jit",
        "DiffState": "pass wrt=filter to nnx.grad",
        "split_rngs": 'pass split_rngs="dropout" to nnx.scan or nnx.vmap',
        "fork_rngs": "ctx.fork(), or ctx.split(n) for stacked keys",
        "reseed": "make a new Context: nnx.context(seed)",
        "metrics": "the metrics are in the package itself: nnx.Accuracy(), nnx.Average(), nnx.MultiMetric(...)",
        "ModelAndOptimizer": "nnx.Optimizer(model, tx); optimizer.update(grads) changes both",
        "optimizer": "nnx.Optimizer(model, tx)",
        "pmap": "nnx.jit under a mesh with nnx.data_parallel_rules(), or nnx.shard_map",
        "tabulate": "nnx.summary(model, x)",
        "iter_modules": "model.named_modules()",
        "iter_graph": "model.named_modules(), and model.get_state() for the data",
        "iter_children": "model.named_modules()",
        "PathContains": 'nnx.PathMatches("**/name/**")',
        "WithTag": "a filter function, lambda path, variable: ...; metadata are attributes of the Variable",
        "Everything": "`...` matches everything: model.filter(...)",
        "Nothing": "None matches nothing",
        "Perturbation": _GRADS,
        "VariableState": "a State holds Variables: nnx.Variable",
        "VariableMetadata": "nnx.ContainerMetadata",
        "Object": "nnx.Module",
        "Data": _DATA,
        "data": _DATA,
        "as_abstract": "nnx.eval_shape(Model, ctx=ctx)",
        "get_abstract_model": "nnx.eval_shape(Model, ctx=ctx)",
        "get_named_sharding": "nnx.logical_to_mesh_sharding(nnx.get_partition_spec(state), mesh)",
        "to_pure_dict": "state.to_nested()",
        "to_flat_state": "a State is flat already: dict(state.items()), or state.arrays()",
        "from_flat_state": "nnx.State(mapping)",
        "replace_by_pure_dict": "model.load_state(mapping)",
        "map_state": "state.map(fn)",
        "filter_state": "state.filter(nnx.Param)",
        "split_state": "state.partition(nnx.Param, ...)",
        "merge_state": "nnx.State.merge(a, b)",
        "split_context": _CONTEXTS,
        "merge_context": _CONTEXTS,
        "update_context": _CONTEXTS,
        "cached_partial": "nothing: nnx.jit caches the structure of its Modules",
        "with_rngs": _STREAMS,
        "view": "model.view(deterministic=True); or in place, model.train() and model.eval()",
        "compact": "make submodules in __init__, as attributes",
    },
    "PyTorch": {
        "Parameter": "nnx.Param(array)",
        "ModuleList": "assign a plain list of Modules; it becomes an nnx.Sequence",
        "ModuleDict": "assign a plain dict of Modules; it becomes an nnx.Dict",
        "Conv1d": "nnx.Conv(3, 16, kernel_size=(3,), ctx=ctx); channels come last",
        "Conv2d": _CONV,
        "Conv3d": "nnx.Conv(3, 16, kernel_size=(3, 3, 3), ctx=ctx); channels come last",
        "ConvTranspose2d": "nnx.ConvTranspose(3, 16, kernel_size=(3, 3), ctx=ctx); channels come last",
        "BatchNorm1d": "nnx.BatchNorm(features)",
        "BatchNorm2d": "nnx.BatchNorm(features); channels come last",
        "MaxPool2d": "nnx.MaxPool or nnx.max_pool; channels come last",
        "AvgPool2d": "nnx.AvgPool or nnx.avg_pool; channels come last",
        "AdaptiveAvgPool2d": "nnx.AdaptiveAvgPool",
        "Embedding": "nnx.Embed(num_embeddings, features, ctx=ctx)",
        "MultiheadAttention": "nnx.MultiHeadAttention(num_heads, in_features, ctx=ctx)",
        "LSTM": "nnx.RNN(nnx.OptimizedLSTMCell(in_features, hidden_features, ctx=ctx))",
        "GRU": "nnx.RNN(nnx.GRUCell(in_features, hidden_features, ctx=ctx))",
        "ReLU": "the function nnx.relu",
        "GELU": "the function nnx.gelu",
        "SiLU": "the function nnx.silu",
        "Softmax": "the function nnx.softmax",
        "Flatten": "x.reshape(x.shape[0], -1)",
        "CrossEntropyLoss": _LOSS,
        "MSELoss": _LOSS,
        "functional": "activations are functions of the package: nnx.relu, nnx.softmax, nnx.one_hot",
        "no_grad": "nothing: gradients are computed only by nnx.grad",
    },
    "NNX 0.0.4": {
        "Map": "`nnx.Dict(...)`",
    },
    "NNX 0.0.4 and 0.0.6": {
        "VarMetadata": _METADATA,
        "var_metadata": _METADATA,
    },
    "NNX 0.0.2 to 0.0.6, and from Flax": {
        "RngStream": 'a stream is a named seed of a Context: `nnx.context(0, dropout=1)`, `ctx.make_rng("dropout")`',
    },
    "NNX 0.0.2 and 0.0.3": {
        "Partition": "`nnx.State`",
        "jit_filter": "`nnx.jit(f, stateful=False)`",
        "ref": _REF,
    },
    "NNX 0.0.3, and from Flax": {
        "clone": "`model.clone()`",
    },
    "NNX 0.0.3": {
        "Dag": _DAG,
        "DagDef": _DAG,
        "deref": _DEREF,
        "reref": "`moduledef.merge(state)`",
        "DerefedMod": "`nnx.Pure`, which `model.partition()` returns",
        "Deref": _LEAVES,
        "Value": _LEAVES,
        "Index": "nothing: what is shared has one entry in a State, and `moduledef.merge(state)` shares it again",
        "NOTHING": "nothing: a State has only the paths that it has, and `moduledef.merge(*states)` takes several",
        "Referential": "`nnx.Variable`",
        "RefField": "`nnx.var_field(nnx.BatchStat)`, in an `nnx.dataclass`",
        "RefMetadata": _METADATA,
        "ref_metadata": _METADATA,
        "update_refs": "`model.update_state(state)`",
        "partition": _COLLECTIONS,
        "tree_partition": "`model.partition(nnx.Param, ...)`; of dicts, `nnx.State.from_nested(tree).partition(...)`",
        "get_partition": _COLLECTION,
        "PytreeMeta": "`type(nnx.Pytree)`; to make a record, subclass `nnx.Pytree`",
    },
    "NNX 0.0.2": {
        "init": _CONSTRUCTED,
        "apply": "`moduledef.apply(state)(x)`, or `model.apply(x)`",
        "make_rng": _MAKE_RNG,
        "get_flag": '`ctx.get_flag("deterministic")`',
        "Scope": _SCOPE,
        "scope": _SCOPE,
        "current_scope": _SCOPE,
        "fork_scope": "`ctx.fork()`",
    },
}
"""What to write instead of `nnx.<name>`."""

MODULE: Hints = {
    "PyTorch": {
        "parameters": "model.filter(nnx.Param) is the State of all parameters",
        "named_parameters": "model.filter(nnx.Param).items() are paths and Params",
        "buffers": "model.filter(nnx.Not(nnx.Param))",
        "named_buffers": "model.filter(nnx.Not(nnx.Param)).items()",
        "children": "model.modules(), or model.named_modules() for paths as well",
        "named_children": "model.named_modules()",
        "state_dict": "model.get_state(); model.get_state().arrays() for plain arrays",
        "load_state_dict": "model.load_state(mapping); nnx.load_torch_state_dict(model, mapping) for PyTorch weights",
        "to": "nnx.set_dtypes(model, dtype=jnp.bfloat16) for dtypes, nnx.shard(model, mesh, rules) for devices",
        "half": "nnx.set_dtypes(model, dtype=jnp.float16, param_dtype=jnp.float16)",
        "bfloat16": "nnx.set_dtypes(model, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)",
        "float": "nnx.set_dtypes(model, dtype=jnp.float32, param_dtype=jnp.float32)",
        "double": "nnx.set_dtypes(model, dtype=jnp.float64, param_dtype=jnp.float64)",
        "cuda": "nothing: JAX puts arrays on the default device; nnx.shard(model, mesh, rules) distributes a model",
        "cpu": "nothing: JAX puts arrays on the default device; see jax.default_device",
        "zero_grad": "nothing: nnx.grad returns new gradients every time",
        "requires_grad": "model.freeze(where) and model.unfreeze(where)",
        "requires_grad_": "model.freeze(where) and model.unfreeze(where)",
        "register_buffer": "assign an array (self.table = array), or a Variable of another type, such as nnx.BatchStat",
        "register_parameter": "assign nnx.Param(array)",
        "add_module": "assign the Module to an attribute, or use an nnx.Dict",
        "register_forward_hook": _HOOKS,
        "forward": "define and call __call__: model(x)",
        "training": "each layer has its own mode, e.g. `deterministic`; model.train() and model.eval() set them",
    },
    "Flax": {
        "split": _SPLIT,
        "merge": _MERGE,
        "iter_modules": "model.named_modules()",
        "iter_children": "model.named_modules()",
        "set_attributes": "model.train() and model.eval(); for anything else, model.for_each(nnx.Dropout, fn)",
        "perturb": _GRADS,
        "setup": "make submodules in __init__, as attributes",
        "init_with_output": _CONSTRUCTED,
        "tabulate": "nnx.summary(model, x)",
        "bind": "moduledef.merge(state)",
    },
    "NNX 0.0.3": {
        "deref": _DEREF,
        "get_partition": _COLLECTION,
        "ref_dict": "`model.mutable_state_dict()`",
    },
    "NNX 0.0.2, and from Flax": {
        "init": _CONSTRUCTED,
        "make_rng": _MAKE_RNG,
    },
}
"""What to write instead of `model.<name>`."""

STATE: Hints = {
    "Flax": {
        "flat_state": "a State is flat already: dict(state.items()), or state.arrays()",
        "to_pure_dict": "state.to_nested()",
        "replace_by_pure_dict": "model.load_state(mapping)",
        "split": "state.partition(nnx.Param, ...)",
        "raw_mapping": "state.to_nested()",
    },
    "NNX 0.0.4 and 0.0.6": {
        "get_collections": "`model.collections()`; of a State, `{type(leaf).collection for leaf in state.values()}`",
    },
}
"""What to write instead of `state.<name>`."""

CONTEXT: Hints = {
    "Flax": {stream: f'ctx.make_rng("{stream}")' for stream in ("params", "dropout", "noise", "default", "carry")},
}
"""What to write instead of `ctx.<name>()`, which draws a key in Flax."""

PURE: Hints = {
    "an earlier version of NNX": {
        "state": "`pure.states`, or as one State, `pure.get_state()`",
    },
}
"""What to write instead of `pure.<name>`."""

TRAIN_STATE: Hints = {
    "NNX 0.0.4 and 0.0.6": {
        "apply_fn": '`train_state.apply("params")(x)`',
    },
}
"""What to write instead of `train_state.<name>`."""

SCAN_MODULE: Hints = {
    "NNX 0.0.6": {
        "module": "`scan_module`",
    },
}
"""What to write instead of `stack.<name>`, where `nnx.Scan` made the stack."""

LAYER_KEYWORDS: dict[str, str] = {
    "bias": "use_bias",
    "in_channels": "in_features, the first argument",
    "out_channels": "out_features, the second argument",
    "stride": "strides",
    "dilation": "kernel_dilation",
    "groups": "feature_group_count (num_groups for nnx.GroupNorm)",
    "eps": "epsilon",
    "p": "rate",
    "embedding_dim": "features",
    "normalized_shape": "num_features",
    "affine": "use_scale and use_bias",
    "elementwise_affine": "use_scale and use_bias",
    "hidden_size": "hidden_features",
    "input_size": "in_features",
    "embed_dim": "in_features",
    "device": "nothing: JAX puts arrays on the default device",
}
"""What keyword arguments of PyTorch's layers are called here."""

NO_SUCH_NAME = "module 'nnx' has no attribute {name!r}."
CALLED = " That name is from {origin}. Here: {hint}."
NO_SUCH_ATTRIBUTE = "{owner!r} object has no attribute {name!r}."
RNGS = "NNX passes random numbers as a Context: `ctx=nnx.context(0)` instead of `rngs=`."
WRONG_CTX = "`ctx` must be a Context, got {got}: write `ctx=nnx.context({seed})`."
MISSING_CTX = "Pass a Context, which initializes the parameters: `ctx=nnx.context(0)`."
KEYWORD = "PyTorch's argument {name!r} has a different name here: {hint}."
FORWARD_ONLY = """{owner} cannot be called: it defines `forward`, as in PyTorch, but no `__call__`. Rename the method \
to `__call__`, or call model.forward(...)."""
SEQUENCE_OF_ONE = "nnx.Sequence takes its layers in one list: nnx.Sequence([layer1, nnx.relu, layer2])."
CARRY_FIRST = """ Mind the order of the arguments: the Module comes first in nnx.scan(f)(module, carry, xs), and f is \
f(module, carry, x), not f(carry, module, x) as in Flax."""
OUT_SHARDING = "The axis names of a Variable are called `sharding` here, not {name!r}: {type}(x, sharding={value!r})."


class Hint:
    """A name that is from elsewhere: reading it raises an AttributeError that says what to write instead."""

    __slots__ = ("cls", "name", "text")

    def __init__(self, cls: type, name: str, text: str):
        self.cls = cls
        self.name = name
        self.text = text

    def __get__(self, instance: Any, owner: type) -> Any:
        # In `class Flow(nnx.Module, Invertible)`, what Invertible defines comes after Module, and must still be found.
        found = getattr(super(self.cls, owner if instance is None else instance), self.name, None)
        if found is not None:
            return found
        text = NO_SUCH_ATTRIBUTE.format(owner=owner.__name__, name=self.name) + self.text
        raise AttributeError(text, name=self.name)


def called(name: str, hints: Hints) -> str:
    """Returns the sentences that say where a name comes from and what to write instead; empty if the table lacks it."""
    for origin, names in hints.items():
        if name in names:
            return CALLED.format(origin=origin, hint=names[name])
    return ""


def add_hints(cls: type, hints: Hints) -> None:
    """Puts hints on a class, except for names that it has itself."""
    for name in [name for names in hints.values() for name in names]:
        if not hasattr(cls, name):
            type.__setattr__(cls, name, Hint(cls, name, called(name, hints)))


def package_error(name: str) -> AttributeError:
    """Returns the error for a name that the package does not have."""
    return AttributeError(NO_SUCH_NAME.format(name=name) + called(name, PACKAGE), name=name)


_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


def explain_constructor(cls: type, kwargs: dict[str, Any], error: Exception) -> None:
    """Adds a hint to the message of an error that a constructor raised, if there is one."""
    text = str(error)
    unexpected = _UNEXPECTED.search(text)
    name = unexpected[1] if unexpected else None
    ctx = kwargs.get("ctx")
    hint = None
    if name == "rngs":
        hint = RNGS
    elif ctx is not None and not hasattr(type(ctx), "make_rng"):
        hint = WRONG_CTX.format(got=type(ctx).__name__, seed=ctx if isinstance(ctx, int) else 0)
    elif "required keyword-only argument: 'ctx'" in text:
        hint = MISSING_CTX
    elif cls.__name__ == "Sequence" and "positional arguments but" in text:
        hint = SEQUENCE_OF_ONE
    elif name in LAYER_KEYWORDS and cls.__module__.startswith("nnx."):
        hint = KEYWORD.format(name=name, hint=LAYER_KEYWORDS[name])
    if hint is not None and hint not in text:  # an outer constructor sees the error of an inner one
        error.args = (f"{text}. {hint}",)


def refuse_axis_names(metadata: Mapping[str, Any], owner: str) -> None:
    """Raises TypeError if metadata has axis names under the name Flax uses; `owner` names the callee."""
    for name in ("out_sharding", "sharding_names"):
        if name in metadata:
            raise TypeError(OUT_SHARDING.format(type=owner, name=name, value=metadata[name]))


def explain_order(error: Exception) -> None:
    """Adds a hint to the message of an error of a scan whose carry came before the Module."""
    if CARRY_FIRST not in str(error):  # an outer scan sees the error of an inner one
        error.args = (f"{error}{CARRY_FIRST}",)


def forward_only(module: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """The `__call__` of a Module class that defines `forward` and no `__call__`."""
    raise TypeError(FORWARD_ONLY.format(owner=type(module).__name__))
