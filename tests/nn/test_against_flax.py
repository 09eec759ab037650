"""The same weights produce the same outputs and gradients as in flax.nnx, or in Equinox if Flax lacks the layer."""

import equinox as eqx
import flax.nnx as flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.nn.arrays import normal


def close(ours, theirs, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=tolerance, atol=tolerance)


def randomized(layer):
    """Sets every parameter to random values, so that no zero bias or unit scale hides a difference."""
    for i, (path, leaf) in enumerate(layer.filter(nnx.Variable).items()):
        values = normal(*leaf.value.shape, seed=7 + i)
        layer.set_path(path, jnp.abs(values) if path == "var" else values)
    return layer


def copy_into(theirs, layer):
    """Writes our variables into a Flax layer that has the same names."""
    for path, leaf in layer.filter(nnx.Variable).items():
        owner = theirs
        *parents, name = path.split("/")
        for parent in parents:
            owner = getattr(owner, parent)
        getattr(owner, name)[...] = leaf.value


def our_value_and_gradients(layer, call, inputs):
    (params, rest), moduledef = layer.partition((nnx.Param, nnx.LoRAParam), ...)

    def loss(params, *inputs):
        out = call(moduledef.merge(params, rest), *inputs)
        return jnp.sum(jnp.sin(out)), out

    argnums = tuple(range(len(inputs) + 1))
    (_, out), (params, *inputs) = jax.jit(jax.value_and_grad(loss, argnums, has_aux=True))(params, *inputs)
    return out, {path: leaf.value for path, leaf in params.items()}, inputs


def their_value_and_gradients(layer, call, inputs):
    graphdef, params, rest = flax.split(layer, (flax.Param, flax.LoRAParam), ...)

    def loss(params, *inputs):
        out = call(flax.merge(graphdef, params, flax.clone(rest)), *inputs)
        return jnp.sum(jnp.sin(out)), out

    argnums = tuple(range(len(inputs) + 1))
    (_, out), (params, *inputs) = jax.jit(jax.value_and_grad(loss, argnums, has_aux=True))(params, *inputs)
    grads = {"/".join(map(str, path)): leaf[...] for path, leaf in flax.to_flat_state(params)}
    return out, grads, inputs


QUICK_INITIALISERS = {
    **dict.fromkeys(["Linear", "LinearGeneral", "Einsum", "Conv", "ConvTranspose"], ["kernel_init"]),
    "LoRA": ["a_initializer"],
    "LoRALinear": ["kernel_init", "a_initializer"],
}
MASK = np.tril(np.ones((3, 3, 4), np.float32))

# name: constructor arguments, input shapes
CASES = {
    "Linear": (("Linear", (3, 4)), {}, [(5, 3)]),
    "Linear without bias": (("Linear", (3, 4)), {"use_bias": False}, [(2, 5, 3)]),
    "LinearGeneral": (("LinearGeneral", ((2, 3), (4, 5))), {"axis": (1, -1)}, [(6, 2, 3)]),
    "LinearGeneral batched": (("LinearGeneral", (3, (4, 5))), {"batch_axis": {0: 2}}, [(2, 6, 3)]),
    "Einsum": (("Einsum", ("nta,hab->nthb", (8, 2, 4), (8, 4))), {}, [(3, 5, 2)]),
    "Conv 1d": (("Conv", (3, 4, (3,))), {}, [(2, 7, 3)]),
    "Conv valid strided": (("Conv", (3, 4, (3, 2), (2, 1))), {"padding": "VALID"}, [(2, 7, 6, 3)]),
    "Conv circular": (("Conv", (3, 4, (3, 4))), {"padding": "CIRCULAR", "strides": 2}, [(2, 7, 6, 3)]),
    "Conv circular dilated": (("Conv", (3, 4, (4,))), {"padding": "CIRCULAR", "kernel_dilation": 2}, [(2, 9, 3)]),
    "Conv reflect": (("Conv", (3, 4, (4,))), {"padding": "REFLECT"}, [(2, 9, 3)]),
    "Conv causal": (("Conv", (3, 4, (4,))), {"padding": "CAUSAL", "kernel_dilation": 2}, [(2, 9, 3)]),
    "Conv pairs": (("Conv", (3, 4, (3, 3))), {"padding": ((1, 2), (0, 1))}, [(2, 7, 6, 3)]),
    "Conv int": (("Conv", (3, 4, (3, 3))), {"padding": 2}, [(2, 7, 6, 3)]),
    "Conv ints": (("Conv", (3, 4, (3, 3))), {"padding": (0, 2)}, [(2, 7, 6, 3)]),
    "Conv groups": (("Conv", (4, 6, (3,))), {"feature_group_count": 2}, [(2, 7, 4)]),
    "Conv input dilation": (("Conv", (3, 4, (3,))), {"input_dilation": 2, "padding": 1}, [(2, 7, 3)]),
    "Conv 3d unbatched": (("Conv", (2, 3, (2, 2, 2))), {}, [(3, 4, 3, 2)]),
    "Conv mask": (("Conv", (3, 4, (3,))), {"mask": MASK}, [(2, 7, 3)]),
    "ConvTranspose": (("ConvTranspose", (3, 4, (3, 3))), {"strides": (2, 2)}, [(2, 4, 5, 3)]),
    "ConvTranspose valid": (("ConvTranspose", (3, 4, (3,))), {"padding": "VALID", "strides": (2,)}, [(2, 5, 3)]),
    "ConvTranspose pairs": (("ConvTranspose", (3, 4, (3,))), {"padding": ((1, 2),)}, [(2, 5, 3)]),
    "ConvTranspose dilated": (("ConvTranspose", (3, 4, (3,))), {"kernel_dilation": (2,)}, [(2, 5, 3)]),
    "ConvTranspose transposed": (
        ("ConvTranspose", (3, 4, (3,))),
        {"transpose_kernel": True, "strides": (2,)},
        [(2, 5, 3)],
    ),
    "BatchNorm": (("BatchNorm", (4,)), {"use_running_average": False}, [(5, 3, 4)]),
    "BatchNorm slow": (("BatchNorm", (4,)), {"use_running_average": False, "use_fast_variance": False}, [(5, 4)]),
    "BatchNorm axis": (("BatchNorm", (4,)), {"use_running_average": False, "axis": 1}, [(5, 4, 3)]),
    "BatchNorm running": (("BatchNorm", (4,)), {"use_running_average": True}, [(5, 4)]),
    "LayerNorm": (("LayerNorm", (4,)), {}, [(5, 3, 4)]),
    "LayerNorm slow": (("LayerNorm", (4,)), {"use_fast_variance": False}, [(5, 4)]),
    "LayerNorm axes": (("LayerNorm", (4,)), {"reduction_axes": (1, 2), "feature_axes": 1}, [(5, 4, 3)]),
    "RMSNorm": (("RMSNorm", (4,)), {}, [(5, 3, 4)]),
    "GroupNorm": (("GroupNorm", (6,)), {"num_groups": 3}, [(5, 3, 2, 6)]),
    "GroupNorm size": (("GroupNorm", (6,)), {"num_groups": None, "group_size": 2}, [(5, 3, 6)]),
    "InstanceNorm": (("InstanceNorm", (4,)), {}, [(5, 3, 2, 4)]),
    "LoRA": (("LoRA", (3, 2, 4)), {}, [(5, 3)]),
    "LoRALinear": (("LoRALinear", (3, 4)), {"lora_rank": 2}, [(5, 3)]),
}
for k, s, n, t in [(4, 2, 5, False), (5, 1, 6, True), (5, 2, 4, False), (3, 2, 4, True)]:
    options = {"padding": "CIRCULAR", "strides": (s,), "transpose_kernel": t}
    CASES[f"ConvTranspose circular {k} {s} {n} {t}"] = (("ConvTranspose", (3, 4, (k,))), options, [(2, n, 3)])


@pytest.mark.parametrize("name", CASES)
def test_layer_agrees_with_flax(name):
    (cls, args), options, shapes = CASES[name]
    quick = {name: nnx.initializers.zeros() for name in QUICK_INITIALISERS.get(cls, ())}
    ours = randomized(getattr(nnx, cls)(*args, **options, **quick, ctx=nnx.context(0)))
    theirs = getattr(flax, cls)(*args, **options, **quick, rngs=flax.Rngs(0))
    copy_into(theirs, ours)
    inputs = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    out, grads, input_grads = our_value_and_gradients(ours, lambda layer, *x: layer(*x), inputs)
    their_out, their_grads, their_input_grads = their_value_and_gradients(theirs, lambda layer, *x: layer(*x), inputs)
    close(out, their_out)
    assert grads.keys() == their_grads.keys()
    for path in grads:
        close(grads[path], their_grads[path], 1e-4)
    for grad, their_grad in zip(input_grads, their_input_grads, strict=True):
        close(grad, their_grad, 1e-4)


@pytest.mark.parametrize("cls", ["BatchNorm", "LayerNorm", "RMSNorm", "InstanceNorm"])
def test_masked_normalization_agrees_with_flax(cls):
    options = {"use_running_average": False} if cls == "BatchNorm" else {}
    ours = randomized(getattr(nnx, cls)(4, **options, ctx=nnx.context(0)))
    theirs = getattr(flax, cls)(4, **options, rngs=flax.Rngs(0))
    copy_into(theirs, ours)
    x = normal(5, 6, 4)
    mask = jnp.arange(30).reshape(5, 6, 1) % 4 != jnp.arange(4)[None, None]  # all but one of four
    close(ours(x, mask=mask), theirs(x, mask=mask))


def test_batch_norm_keeps_the_running_averages_flax_keeps():
    ours, theirs = (
        nnx.BatchNorm(3, momentum=0.9, ctx=nnx.context(0)),
        flax.BatchNorm(3, momentum=0.9, rngs=flax.Rngs(0)),
    )
    for seed in range(3):
        x = 2 + 3 * normal(6, 3, seed=seed)
        ours(x, use_running_average=False)
        theirs(x, use_running_average=False)
    close(ours.mean, theirs.mean[...])
    close(ours.var, theirs.var[...])


def test_prelu_agrees_with_flax():
    x = jnp.linspace(-2, 2, 9)
    close(nnx.PReLU(0.3)(x), flax.PReLU(0.3)(x))


@pytest.mark.parametrize("padding, strides", [("SAME", None), ("VALID", (2, 1)), (((1, 0), (1, 1)), (2, 2))])
def test_pooling_agrees_with_flax(padding, strides):
    x = normal(2, 6, 5, 3)
    for name in ("max_pool", "min_pool", "avg_pool"):
        ours, theirs = getattr(nnx, name), getattr(flax, name)
        close(ours(x, (2, 3), strides, padding), theirs(x, (2, 3), strides, padding))
        close(
            jax.grad(lambda x, f=ours: jnp.sum(jnp.sin(f(x, (2, 3), strides, padding))))(x),
            jax.grad(lambda x, f=theirs: jnp.sum(jnp.sin(f(x, (2, 3), strides, padding))))(x),
        )
    close(
        nnx.avg_pool(x, (2, 3), strides, padding, count_include_pad=False),
        flax.avg_pool(x, (2, 3), strides, padding, count_include_pad=False),
    )


def test_spectral_norm_agrees_with_flax():
    x = normal(5, 3)
    ours = nnx.SpectralNorm(nnx.Linear(3, 4, ctx=nnx.context(0)), n_steps=2, ctx=nnx.context(1))
    theirs = flax.SpectralNorm(flax.Linear(3, 4, rngs=flax.Rngs(0)), n_steps=2, rngs=flax.Rngs(1))
    theirs.layer_instance.kernel[...] = ours.layer_instance.kernel
    stats = flax.to_flat_state(flax.state(theirs, flax.BatchStat))
    assert sorted(leaf.shape for _, leaf in stats) == [(), (1, 4)]
    for _, leaf in stats:
        if leaf.shape:
            ours.u["kernel"] = leaf[...]
    close(ours(x), theirs(x, update_stats=True), 1e-4)
    for _, leaf in flax.to_flat_state(flax.state(theirs, flax.BatchStat)):
        close(ours.u["kernel"] if leaf.shape else ours.sigma["kernel"], leaf[...], 1e-4)


@pytest.mark.parametrize("feature_axes", [-1, None, (0, 1)])
def test_weight_norm_agrees_with_flax(feature_axes):
    x = normal(5, 3)
    ours = nnx.WeightNorm(nnx.Linear(3, 4, ctx=nnx.context(0)), feature_axes=feature_axes, ctx=nnx.context(1))
    theirs = flax.WeightNorm(flax.Linear(3, 4, rngs=flax.Rngs(0)), feature_axes=feature_axes, rngs=flax.Rngs(1))
    theirs.layer_instance.kernel[...] = ours.layer_instance.kernel
    close(ours(x), theirs(x))


@pytest.mark.parametrize("size, bins", [((6, 5), (3, 2)), ((7, 4), (3, 4)), ((5, 5), (1, 4))])
def test_adaptive_pooling_agrees_with_equinox(size, bins):
    x = normal(*size, 2)
    channels_first = jnp.moveaxis(x, -1, 0)
    their_avg, their_max = eqx.nn.AdaptiveAvgPool2d(bins), eqx.nn.AdaptiveMaxPool2d(bins)
    if all(n % b == 0 for n, b in zip(size, bins, strict=True)):
        close(nnx.adaptive_avg_pool(x, bins), jnp.moveaxis(their_avg(channels_first), 0, -1))
        close(nnx.adaptive_max_pool(x, bins), jnp.moveaxis(their_max(channels_first), 0, -1))
    assert nnx.adaptive_avg_pool(x, bins).shape == (*bins, 2)


def test_mlp_agrees_with_equinox():
    theirs = eqx.nn.MLP(3, 2, 5, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    ours = nnx.MLP(3, (5, 5), 2, activation=nnx.gelu, ctx=nnx.context(0))
    for mine, yours in zip(ours.layers, theirs.layers, strict=True):
        mine.kernel, mine.bias = yours.weight.T, yours.bias
    x = normal(6, 3, seed=1)
    close(ours(x), jax.vmap(theirs)(x))
