"""Ready-made rule sets for the axis names of the built-in layers (see the table in this room's README).

Each set ends with `(name, None)` for every name of a parameter and for "batch" and "length". So an axis that does not
divide, or whose mesh axis is already taken, stays whole and is not an error; `nnx.sharding_report` lists axes that do
not divide. Put your own rules in front: the first one that fits wins.
"""

from nnx.sharding.rules import MeshAxes, Rule, Rules

PARAMETER_NAMES = ("expert", "heads", "mlp", "vocab", "embed", "in", "out", "head_dim", "norm")
"""The axis names that the built-in layers declare for their parameters."""

_SPLIT_BY_TENSOR_PARALLELISM = ("heads", "mlp", "vocab", "out")
_SPLIT_BY_FSDP = ("embed", "in", "mlp", "out", "vocab")  # in this order: one axis of each array is split
_LEFT_WHOLE: Rules = tuple((name, None) for name in (*PARAMETER_NAMES, "batch", "length"))


def data_parallel_rules(data: MeshAxes = "data") -> Rules:
    """Returns rules for data parallelism: every device has all parameters and a part of the batch.

    Args:
        data: the mesh axis, or axes, over which the batch is split.

    >>> nnx.logical_to_mesh_axes(("batch", "embed"), nnx.data_parallel_rules())
    P('data', None)
    """
    return (_batch(data), *_LEFT_WHOLE)


def fsdp_rules(data: MeshAxes = "data") -> Rules:
    """Returns rules for fully sharded data parallelism: every device has a part of the batch and of each parameter.

    Parameters are gathered when they are used.

    Args:
        data: the mesh axis, or axes, over which both are split.

    >>> nnx.logical_to_mesh_axes(("embed", "mlp"), nnx.fsdp_rules())
    P('data', None)
    """
    return (_batch(data), *((name, data) for name in _SPLIT_BY_FSDP), *_LEFT_WHOLE)


def tensor_parallel_rules(model: MeshAxes = "model", data: MeshAxes = None) -> Rules:
    """Returns rules for tensor parallelism: every device computes some heads, hidden units and vocabulary entries.

    Args:
        model: the mesh axis, or axes, over which the layers are split.
        data: the mesh axis, or axes, of the batch, if it is split as well.

    >>> nnx.logical_to_mesh_axes(("mlp", "embed"), nnx.tensor_parallel_rules())
    P('model', None)
    """
    return (_batch(data), *((name, model) for name in _SPLIT_BY_TENSOR_PARALLELISM), *_LEFT_WHOLE)


def fsdp_tensor_parallel_rules(data: MeshAxes = "data", model: MeshAxes = "model") -> Rules:
    """Returns rules that split layers over one mesh axis, the batch and the rest of each parameter over another.

    Args:
        data: the mesh axis, or axes, of the batch and of fully sharded data parallelism.
        model: the mesh axis, or axes, of tensor parallelism.

    >>> nnx.logical_to_mesh_axes(("embed", "mlp"), nnx.fsdp_tensor_parallel_rules())
    P('data', 'model')
    """
    by_model = ((name, model) for name in _SPLIT_BY_TENSOR_PARALLELISM)
    return (_batch(data), *by_model, *((name, data) for name in _SPLIT_BY_FSDP), *_LEFT_WHOLE)


def _batch(data: MeshAxes) -> Rule:
    return ("batch", data)
