"""Names of arrays: what functions of pytrees ask of a Module, which they take for a leaf."""

_PARAMS = "a Module is not an array; model.filter(nnx.Param) is the pytree of its parameters"

MODULE = {
    "shape": f"{_PARAMS}, and jax.tree.map(jnp.shape, ...) of it has their shapes",
    "ndim": _PARAMS,
    "size": "nnx.count_params(model)",
    "real": _PARAMS,
    "imag": _PARAMS,
    "astype": "nnx.set_dtypes(model, param_dtype=jnp.bfloat16)",
}
