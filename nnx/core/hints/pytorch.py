"""Names of PyTorch, by the place where people write them."""

_CONV = "nnx.Conv(3, 16, kernel_size=(3, 3), ctx=ctx); channels come last"
_HOOKS = "nnx.capture(f, where=...) shows outputs, nnx.intercept(f, hook, where=...) changes them"
_GRADS = "nnx.capture(loss, where=..., grads=True)(model, x) returns the gradients of activations"
_SQUARED = "jnp.mean((prediction - target) ** 2), or optax.squared_error(prediction, target).mean()"
_BINARY = "optax.sigmoid_binary_cross_entropy(logits, labels).mean()"
_DROPOUT_ND = "nnx.Dropout(0.5, broadcast_dims=(1, 2)), which drops whole channels; channels come last"
_OPTIM = "nnx.Optimizer(model, optax.adam(1e-3)); transformations come from optax"
_KERNEL = "the attribute `kernel`, with the axes (in, out): layer.kernel = weight.T"
_PARALLEL = "the same program under a mesh, with nnx.data_parallel_rules() or nnx.fsdp_rules()"
_CONV_KERNEL = "the attribute `kernel`, with the axes (height, width, in, out): weight.transpose(2, 3, 1, 0)"

PACKAGE = {
    "Parameter": "nnx.Param(array)",
    "ModuleList": "assign a plain list of Modules; it becomes an nnx.Sequence",
    "ParameterList": "assign a plain list of nnx.Param(array)",
    "Buffer": "assign an array (self.table = array), or a Variable of another type, such as nnx.BatchStat",
    "ModuleDict": "assign a plain dict of Modules; it becomes an nnx.Dict",
    "Conv1d": "nnx.Conv(3, 16, kernel_size=(3,), ctx=ctx); channels come last",
    "Conv2d": _CONV,
    "Conv3d": "nnx.Conv(3, 16, kernel_size=(3, 3, 3), ctx=ctx); channels come last",
    "ConvTranspose2d": "nnx.ConvTranspose(3, 16, kernel_size=(3, 3), ctx=ctx); channels come last",
    "BatchNorm1d": "nnx.BatchNorm(features)",
    "BatchNorm2d": "nnx.BatchNorm(features); channels come last",
    "BatchNorm3d": "nnx.BatchNorm(features); channels come last",
    "InstanceNorm2d": "nnx.InstanceNorm(features); channels come last",
    "MaxPool1d": "nnx.MaxPool or nnx.max_pool; channels come last",
    "MaxPool2d": "nnx.MaxPool or nnx.max_pool; channels come last",
    "AvgPool2d": "nnx.AvgPool or nnx.avg_pool; channels come last",
    "AdaptiveAvgPool2d": "nnx.AdaptiveAvgPool",
    "Embedding": "nnx.Embed(num_embeddings, features, ctx=ctx)",
    "MultiheadAttention": "nnx.MultiHeadAttention(num_heads, in_features, ctx=ctx)",
    "LSTM": "nnx.RNN(nnx.OptimizedLSTMCell(in_features, hidden_features, ctx=ctx))",
    "GRU": "nnx.RNN(nnx.GRUCell(in_features, hidden_features, ctx=ctx))",
    "ReLU": "the function nnx.relu",
    "LeakyReLU": "the function nnx.leaky_relu",
    "Tanh": "the function nnx.tanh",
    "Sigmoid": "the function nnx.sigmoid",
    "GELU": "the function nnx.gelu",
    "SiLU": "the function nnx.silu",
    "Softmax": "the function nnx.softmax",
    "Flatten": "x.reshape(x.shape[0], -1)",
    "CrossEntropyLoss": "the function nnx.cross_entropy(logits, labels), inside the function given to nnx.grad",
    "MSELoss": _SQUARED,
    "mse_loss": _SQUARED,
    "L1Loss": "jnp.abs(prediction - target).mean()",
    "BCEWithLogitsLoss": _BINARY,
    "BCELoss": _BINARY,
    "dropout": "a layer, nnx.Dropout(0.5), called with ctx=nnx.context(dropout=0)",
    "Dropout1d": _DROPOUT_ND,
    "Dropout2d": _DROPOUT_ND,
    "Dropout3d": _DROPOUT_ND,
    "PixelShuffle": 'einops.rearrange(x, "b h w (c r s) -> b (h r) (w s) c", r=2, s=2); channels come last',
    "TransformerEncoderLayer": "nnx.models.EncoderBlock, or your own Module of nnx.MultiHeadAttention and nnx.MLP",
    "TransformerEncoder": "a list of nnx.models.EncoderBlock, or nnx.Scan of a block of your own",
    "TransformerDecoderLayer": "nnx.models.DecoderBlock, or your own Module of nnx.MultiHeadAttention and nnx.MLP",
    "Transformer": "your own Module of nnx.MultiHeadAttention and nnx.MLP; published ones are in nnx.models",
    "optim": _OPTIM,
    "Adam": _OPTIM,
    "AdamW": "nnx.Optimizer(model, optax.adamw(1e-3)); transformations come from optax",
    "SGD": "nnx.Optimizer(model, optax.sgd(1e-2)); transformations come from optax",
    "utils": "clipping is optax.clip_by_global_norm, parametrizations are nnx.WeightNorm and nnx.SpectralNorm, and "
    "batches come from any loader, with nnx.prefetch(batches)",
    "DataLoader": "any iterable of NumPy arrays, such as grain or PyTorch's own loader; nnx.prefetch(batches) feeds it",
    "DataParallel": _PARALLEL,
    "DistributedDataParallel": _PARALLEL,
    "lr_scheduler": "schedules of optax, such as optax.warmup_cosine_decay_schedule, in place of the rate",
    "clip_grad_norm_": "optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), for nnx.Optimizer",
    "scaled_dot_product_attention": "nnx.dot_product_attention(query, key, value); heads come before the last axis",
    "interpolate": "nnx.Upsample((2, 2)), or jax.image.resize",
    "checkpoint": "nnx.remat(f)",
    "cuda": "nothing: JAX puts arrays on the default device; nnx.shard(model, mesh, rules) distributes a model",
    "from_numpy": "jnp.asarray(x), of jax.numpy",
    "manual_seed": "ctx = nnx.context(0), passed on as `ctx=ctx`: there is no global seed",
    "device": "nothing: JAX puts arrays on the default device; see jax.default_device and nnx.shard",
    "compile": "nnx.jit(f), around the whole training step",
    "Tensor": "jax.Array, made by jax.numpy",
    "tensor": "jnp.asarray(x), of jax.numpy",
    "functional": "activations are functions of the package: nnx.relu, nnx.softmax, nnx.one_hot",
    "no_grad": "nothing: gradients are computed only by nnx.grad",
}

MODULE = {
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
    "register_forward_pre_hook": _HOOKS,
    "register_full_backward_hook": _GRADS,
    "get_submodule": 'model.get_path("encoder/layers/0"): paths are joined by `/`',
    "get_parameter": 'model.get_path("encoder/kernel"): paths are joined by `/`',
    "device": "arrays have one each: model.kernel.device; nnx.shard(model, mesh, rules) places a model",
    "dtype": "arrays have one each: model.kernel.dtype; nnx.set_dtypes(model, dtype=jnp.bfloat16) changes them",
    "compile": "nnx.jit(model); better, nnx.jit of the whole training step",
    "forward": "define and call __call__: model(x)",
    "training": "each layer has its own mode, e.g. `deterministic`; model.train() and model.eval() set them",
}

LAYERS = {
    "Linear": {"weight": _KERNEL},
    "LinearGeneral": {"weight": "the attribute `kernel`, with the axes of the input before those of the output"},
    "Conv": {"weight": _CONV_KERNEL},
    "ConvTranspose": {"weight": "the attribute `kernel`; nnx.load_torch_state_dict(model, mapping) converts it"},
    "NormBase": {"weight": "the attribute `scale`: layer.scale = weight"},
    "BatchNorm": {"running_mean": "the attribute `mean`", "running_var": "the attribute `var`"},
    "Embed": {"weight": "the attribute `embedding`, of shape (num_embeddings, features)"},
    "MultiHeadAttention": {
        "in_proj_weight": "three layers: attention.query.kernel, attention.key.kernel, attention.value.kernel",
        "out_proj": "attention.out",
    },
}

OPTIMIZER = {
    "zero_grad": "nothing: nnx.grad returns new gradients every time",
    "param_groups": "optimizer.learning_rate reads and sets the rate, with tx = optax.inject_hyperparams(optax.adam)"
    "(learning_rate=1e-3); for groups, optax.partition",
    "add_param_group": "optax.partition, with one transformation per label",
    "state_dict": "nnx.save(path, optimizer)",
    "load_state_dict": "nnx.load(path, optimizer)",
}

# Names that must not become attributes of a finished Module, where PyTorch's meaning would be lost without a word.
REFUSED = frozenset(
    {"requires_grad", "training", "weight", "running_mean", "running_var", "in_proj_weight", "out_proj"}
)

CONSTRUCTOR = {
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
    "mode": "method",
    "lr": "part of the transformation: nnx.Optimizer(model, optax.adam(1e-3))",
    "weight_decay": "part of the transformation: nnx.Optimizer(model, optax.adamw(1e-3, weight_decay=0.01))",
    "betas": "part of the transformation: nnx.Optimizer(model, optax.adam(1e-3, b1=0.9, b2=0.999))",
    "batch_first": "nothing: the batch comes first",
}

# Constructors that take the same two sizes in the other order, and the sign of (first - second) in PyTorch's order
# where only that order makes sense.
SWAPPED = {
    "GroupNorm": ("nnx.GroupNorm({second}, {first}): the features come first here", -1),
    "MultiHeadAttention": ("nnx.MultiHeadAttention({second}, {first}, ctx=ctx): the heads come first here", 1),
}

FILES = {
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
}
