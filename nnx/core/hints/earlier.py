"""Names of earlier versions of NNX, by origin. Those of the package are also rows of a table in docs/migrating.md."""

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

PACKAGE = {
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
    "NNX 0.0.3, and from Equinox": {
        "partition": _COLLECTIONS,
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
        "tree_partition": "`model.partition(nnx.Param, ...)`; of dicts, `nnx.State.from_nested(tree).partition(...)`",
        "get_partition": _COLLECTION,
        "PytreeMeta": "`type(nnx.Pytree)`; to make a record, subclass `nnx.Pytree`",
    },
    "NNX 0.0.2, and from PyTorch": {
        "init": f"{_CONSTRUCTED}; the functions of torch.nn.init are in `nnx.initializers`",
    },
    "NNX 0.0.2": {
        "apply": "`moduledef.apply(state)(x)`, or `model.apply(x)`",
        "make_rng": _MAKE_RNG,
        "get_flag": '`ctx.get_flag("deterministic")`',
        "Scope": _SCOPE,
        "scope": _SCOPE,
        "current_scope": _SCOPE,
        "fork_scope": "`ctx.fork()`",
    },
}

MODULE = {
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

STATE = {
    "NNX 0.0.4 and 0.0.6": {
        "get_collections": "`model.collections()`; of a State, `{type(leaf).collection for leaf in state.values()}`",
    },
}

PURE = {
    "an earlier version of NNX": {
        "state": "`pure.states`, or as one State, `pure.get_state()`",
    },
}

TRAIN_STATE = {
    "NNX 0.0.4 and 0.0.6": {
        "apply_fn": '`train_state.apply("params")(x)`',
    },
}

SCAN_MODULE = {
    "NNX 0.0.6": {
        "module": "`scan_module`",
    },
}
