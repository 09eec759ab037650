"""Names of Equinox, whose Modules are pytrees and whose transforms are functions with `filter_` in front."""

_VALUE_BY_PATH = 'model.out.kernel = new; by path, model.set_path("out/kernel", new)'

PACKAGE = {
    "filter_jit": "nnx.jit(f); without changes to Modules, nnx.jit(f, stateful=False)",
    "filter_grad": "nnx.grad(f): the gradient is a State, by path",
    "filter_value_and_grad": "nnx.value_and_grad(f)",
    "filter_vmap": "nnx.vmap(f, variable_axes={nnx.Param: 0})",
    "filter_pmap": "nnx.jit under a mesh with nnx.data_parallel_rules(), or nnx.shard_map",
    "filter_checkpoint": "nnx.remat(f)",
    "filter_eval_shape": "nnx.eval_shape(f)",
    "filter_jvp": "nnx.jvp",
    "filter_vjp": "nnx.vjp",
    "filter_custom_vjp": "nnx.custom_vjp",
    "combine": "moduledef.merge(params, rest)",
    "filter": "model.filter(nnx.Param): by the type of a Variable, not by dtype",
    "apply_updates": "optimizer.update(grads); of States, model.update_state(state)",
    "tree_at": _VALUE_BY_PATH,
    "tree_serialise_leaves": "nnx.save(path, model)",
    "tree_deserialise_leaves": "nnx.load(path, model)",
    "tree_pprint": "print(model), and print(nnx.summary(model, x))",
    "is_array": "nnx.Param and other Variable types are filters: model.filter(nnx.Param)",
    "is_inexact_array": "nnx.Param and other Variable types are filters: model.filter(nnx.Param)",
    "is_array_like": "nnx.Param and other Variable types are filters: model.filter(nnx.Param)",
    "StateIndex": "a Variable of the Module, such as nnx.BatchStat, or a subclass of nnx.Variable",
    "make_with_state": "nothing: a Module holds its own state, in Variables such as nnx.BatchStat",
    "inference_mode": "model.eval(), in place; a second view of the model, model.view(deterministic=True)",
    "Shared": "assign the Module twice; for arrays, nnx.Ref",
    "Lambda": "functions can be items of nnx.Sequence([layer1, nnx.relu, layer2])",
    "error_if": "nnx.checkify(f)",
}

CONSTRUCTOR = {
    "key": "`ctx=nnx.context(key)`: a Context holds the keys",
}

CALL = {
    "key": "`ctx=nnx.context(dropout=key)`, for the layers that draw random numbers",
    "inference": "model.eval() and model.train() set the mode of every layer, in place",
}

FILES = {
    ".eqx": "equinox",
}
