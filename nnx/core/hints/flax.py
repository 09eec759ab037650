"""Names of Flax: `flax.nnx` has much the same classes, and functions where a Module has methods here."""

_STREAMS = "random numbers come from a Context: ctx = nnx.context(0, dropout=1), passed on as `ctx=ctx`"
_SPLIT = "state, moduledef = model.partition(); or (params, rest), moduledef = model.partition(nnx.Param, ...)"
_MERGE = "model = moduledef.merge(state)"
_STATE = "model.get_state(), or a part of it: model.filter(nnx.Param)"
_AXES = "pass variable_axes={nnx.Param: 0} to nnx.scan, nnx.vmap, nnx.Scan or nnx.Vmap"
_CONTEXTS = "Modules can appear anywhere in the arguments of nnx.jit and the other transforms, which keep them in sync"
_DATA = "a plain list, dict or other pytree of arrays is data by itself; nnx.Node(value) turns anything else into data"
_CONSTRUCTED = "a Module has its parameters once it is constructed: `Model(ctx=nnx.context(0))`"
_ATTENTION = "nnx.MultiHeadAttention(num_heads, in_features, ctx=ctx)"
_GRADS = "nnx.capture(loss, where=..., grads=True)(model, x) returns the gradients of activations"
_MODES = "model.train() and model.eval() set the mode of every layer, in place; nothing is passed to the call"

PACKAGE = {
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
    "Carry": "nnx.scan carries what variable_axes does not name; the carry of a function comes after the Module",
    "StateAxes": _AXES,
    "StateSharding": "pass in_shardings={nnx.Param: sharding, ...: other} to nnx.jit",
    "DiffState": "pass wrt=filter to nnx.grad; or model.freeze(where)",
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
    "Dense": "nnx.Linear(in_features, out_features, ctx=ctx): the size of the input is written, too",
    "DenseGeneral": "nnx.LinearGeneral(in_features, out_features, ctx=ctx)",
    "SelfAttention": _ATTENTION,
    "MultiHeadDotProductAttention": _ATTENTION,
    "ToNNX": "nnx.bridge.from_linen(module, x)",
    "with_sharding_constraint": "jax.lax.with_sharding_constraint; with names of axes, nnx.with_logical_constraint",
    "set_attributes": "model.train() and model.eval(); for anything else, model.for_each(nnx.Dropout, fn)",
    "recursive_map": "model.for_each(nnx.Linear, fn), and model.named_modules()",
}

PYTORCH_TOO = {
    "Sequential": "nnx.Sequence([layer1, nnx.relu, layer2]), with the layers in a list",
}

MODULE = {
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
    "params": "model.filter(nnx.Param)",
    "variables": "model.get_state()",
}

STATE = {
    "flat_state": "a State is flat already: dict(state.items()), or state.arrays()",
    "to_pure_dict": "state.to_nested()",
    "replace_by_pure_dict": "model.load_state(mapping)",
    "split": "state.partition(nnx.Param, ...)",
    "raw_mapping": "state.to_nested()",
}

CONTEXT = {stream: f'ctx.make_rng("{stream}")' for stream in ("params", "dropout", "noise", "default", "carry")}

CONSTRUCTOR = {
    "rngs": "`ctx=nnx.context(0)` instead of `rngs=`: NNX passes random numbers as a Context",
}

CALL = {
    "train": _MODES,
    "training": _MODES,
    "is_training": _MODES,
    "rngs": "`ctx=nnx.context(dropout=1)` instead of `rngs=`, for the layers that draw random numbers",
    "mutable": "nothing: a layer writes its state into itself; model.pop_state(nnx.Intermediate) takes what was sown",
}

FILES = {
    ".msgpack": "flax",
}

MANAGER = {
    "restore": "manager.load(target, step)",
    "all_steps": "manager.steps()",
    "wait_until_finished": "manager.wait()",
}

CHECKPOINT_MANAGER = {
    "max_to_keep": "`keep_last=`; nnx.CheckpointManager takes its options itself",
    "save_interval_steps": "`every_steps=`",
    "options": "its options are arguments: nnx.CheckpointManager(directory, keep_last=2)",
    "best_fn": "`best_metric=`, the name of one of the metrics that are saved",
}
