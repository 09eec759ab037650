"""Programs in the spelling of versions 0.0.6 to 0.0.8: States and legacy keys passed by hand, and no Optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx

X = jnp.linspace(-1.0, 1.0, 32)[:, None]
Y = 0.8 * X**2 + 0.1


class Count(nnx.Variable):
    pass


class Linear(nnx.Module):
    def __init__(self, din: int, dout: int, *, ctx: nnx.Context):
        key = ctx.make_rng("params")
        self.w = nnx.Param(jax.random.uniform(key, (din, dout), minval=-1.0))
        self.b = nnx.Param(jnp.zeros((dout,)))

    def __call__(self, x):
        return x @ self.w + self.b


class MLP(nnx.Module):
    def __init__(self, din: int, dhidden: int, dout: int, *, ctx: nnx.Context):
        self.count = Count(jnp.array(0))
        self.linear1 = Linear(din, dhidden, ctx=ctx)
        self.linear2 = Linear(dhidden, dout, ctx=ctx)

    def __call__(self, x):
        self.count += 1
        return self.linear2(nnx.relu(self.linear1(x)))


def mlp() -> MLP:
    return MLP(1, 16, 1, ctx=nnx.context(jax.random.PRNGKey(0)))


def error(y_pred: Any, y: Any) -> Any:
    return jnp.mean((y - y_pred) ** 2)


def sgd(params: Any, grads: Any, lr: float = 0.1) -> Any:
    return jax.tree.map(lambda w, g: w - lr * g, params, grads)


# One model, three ways to train it


def test_functional_api():
    (params, counts), moduledef = mlp().partition(nnx.Param, Count)

    @jax.jit
    def train_step(params, counts, x, y):
        def loss_fn(params):
            y_pred, (updates, _) = moduledef.apply(params, counts)(x)
            return error(y_pred, y), updates.filter(Count)

        grads, counts = jax.grad(loss_fn, has_aux=True)(params)
        return sgd(params, grads), counts

    for _ in range(50):
        params, counts = train_step(params, counts, X, Y)
    model = moduledef.merge(params, counts)
    assert model.count == 50
    assert error(model(X), Y) < 0.3 * error(mlp()(X), Y)


def test_lifted_transforms():
    model = mlp()

    @nnx.jit
    def train_step(model, x, y):
        def loss_fn(model):
            return error(model(x), y)

        grads = nnx.grad(loss_fn, wrt=nnx.Param)(model)
        model.update_state(sgd(model.filter(nnx.Param), grads))

    for _ in range(50):
        train_step(model, X, Y)
    assert model.count == 50
    assert error(model(X), Y) < 0.3 * error(mlp()(X), Y)


def test_pure_module():
    @jax.jit
    def train_step(model: nnx.PureModule[MLP], x, y) -> nnx.PureModule[MLP]:
        def loss_fn(params):
            y_pred, updated = model.update_state(params).apply(x)
            return error(y_pred, y), updated.filter(Count)

        params = model.filter(nnx.Param)
        grads, counts = jax.grad(loss_fn, has_aux=True)(params)
        return model.update_state(counts, sgd(params, grads))

    pure = mlp().partition()
    for _ in range(50):
        pure = train_step(pure, X, Y)
    assert pure.get_state()["count"].value == 50
    assert error(pure.call(X), Y) < 0.3 * error(mlp()(X), Y)


# Batch statistics, dropout and flags


class Block(nnx.Module):
    def __init__(self, dim: int, *, ctx: nnx.Context):
        self.linear = nnx.Linear(dim, dim, ctx=ctx)
        self.bn = nnx.BatchNorm(dim, momentum=0.9, ctx=ctx)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x, *, ctx: nnx.Context):
        return nnx.gelu(self.dropout(self.bn(self.linear(x), ctx=ctx), ctx=ctx))


class Network(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.inner = Linear(1, 8, ctx=ctx)
        self.block = Block(8, ctx=ctx)
        self.outer = Linear(8, 1, ctx=ctx)

    def __call__(self, x, *, ctx: nnx.Context):
        return self.outer(self.block(self.inner(x), ctx=ctx))


TRAINING: dict[str, Any] = {"use_running_average": False, "deterministic": False}
EVALUATION: dict[str, Any] = {"use_running_average": True, "deterministic": True}


def test_train_state():
    (params, batch_stats), moduledef = Network(ctx=nnx.context(jax.random.PRNGKey(0))).partition(
        nnx.Param, nnx.BatchStat
    )
    state: Any = nnx.TrainState(moduledef, params=params, batch_stats=batch_stats, tx=optax.adam(0.02))

    @jax.jit
    def train_step(state, x, y, key):
        def loss_fn(params):
            ctx = nnx.context(dropout=key, flags=TRAINING)
            y_pred, (updates, _) = state.apply(params, "batch_stats")(x, ctx=ctx)
            return error(y_pred, y), updates.filter(nnx.BatchStat)

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    losses = []
    for step in range(40):
        state, loss = train_step(state, X, Y, jax.random.PRNGKey(step))
        losses.append(loss)
    assert state.step == 40 and losses[-1] < 0.3 * losses[0]
    assert state.batch_stats["block/bn/mean"].value.any()
    y_pred, _ = state.apply("params", "batch_stats")(X, ctx=nnx.context(flags=EVALUATION))
    assert error(y_pred, Y) < 0.3 * losses[0]


# Layers in a loop


class Stack(nnx.Module):
    """Blocks with stacked params and one set of batch statistics, made and scanned over by hand."""

    def __init__(self, dim: int, *, n_layers: int, ctx: nnx.Context):
        self.n_layers = n_layers

        def create_block(key):
            return Block(dim, ctx=nnx.context(params=key)).partition(nnx.Param, nnx.BatchStat)

        keys = jax.random.split(ctx.make_rng("params"), n_layers)
        (params, batch_stats), moduledef = jax.vmap(create_block)(keys)
        self.layers = moduledef.merge(params, jax.tree.map(lambda x: x[0], batch_stats))

    def __call__(self, x, *, ctx: nnx.Context):
        (params, batch_stats), moduledef = self.layers.partition(nnx.Param, nnx.BatchStat)
        keys, ctxdef = ctx.partition()
        dropout_keys = jax.random.split(keys["dropout"], self.n_layers)

        def scan_fn(carry, inputs):
            x, batch_stats = carry
            params, dropout_key = inputs
            x, (updates, _) = moduledef.apply(params, batch_stats)(x, ctx=ctxdef.merge({"dropout": dropout_key}))
            params, batch_stats = updates.partition(nnx.Param, nnx.BatchStat)
            return (x, batch_stats), params

        (x, batch_stats), params = jax.lax.scan(scan_fn, (x, batch_stats), (params, dropout_keys))
        self.layers.update_state((params, batch_stats))
        return x


def test_scan_over_layers_by_hand_agrees_with_a_loop():
    stack = Stack(4, n_layers=3, ctx=nnx.context(jax.random.PRNGKey(0)))
    assert stack.layers.linear.kernel.shape == (3, 4, 4) and stack.layers.bn.mean.shape == (4,)
    x = jax.random.normal(jax.random.PRNGKey(1), (8, 4))
    (params, batch_stats), moduledef = stack.layers.partition(nnx.Param, nnx.BatchStat)
    ctx = nnx.context(dropout=jax.random.PRNGKey(2), flags={"use_running_average": False, "deterministic": True})
    y, expected = nnx.jit(lambda stack, x, ctx: stack(x, ctx=ctx))(stack, x, ctx), x
    for i in range(3):
        block = moduledef.merge(jax.tree.map(lambda x, i=i: x[i], params), batch_stats)
        expected = block(expected, ctx=ctx)
        batch_stats = block.filter(nnx.BatchStat)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_allclose(stack.layers.bn.mean, batch_stats["bn/mean"].value, atol=1e-6)


def test_scan_over_layers_by_hand_trains():
    stack = Stack(4, n_layers=3, ctx=nnx.context(jax.random.PRNGKey(0)))
    x = jax.random.normal(jax.random.PRNGKey(1), (32, 4))

    @nnx.jit
    def train_step(stack, ctx):
        def loss_fn(stack, ctx):
            return error(stack(x, ctx=ctx), nnx.relu(x))

        loss, grads = nnx.value_and_grad(loss_fn, wrt=nnx.Param)(stack, ctx)
        stack.update_state(sgd(stack.filter(nnx.Param), grads, lr=1.0))
        return loss

    ctx = nnx.context(dropout=jax.random.PRNGKey(2), flags=TRAINING)
    losses = [train_step(stack, ctx) for _ in range(40)]
    assert losses[-1] < 0.6 * losses[0]


# A transformer decoder


class Attention(nnx.Module):
    def __init__(self, dim: int, heads: int, max_len: int, *, ctx: nnx.Context):
        self.heads = heads
        self.qkv = nnx.Linear(dim, 3 * dim, ctx=ctx)
        self.out = nnx.Linear(dim, dim, ctx=ctx)
        self.cached_key = nnx.Cache(jnp.zeros((max_len, heads, dim // heads)))
        self.cached_value = nnx.Cache(jnp.zeros((max_len, heads, dim // heads)))
        self.index = nnx.Cache(jnp.array(0))

    def __call__(self, x, *, ctx: nnx.Context):
        q, k, v = jnp.split(self.qkv(x).reshape(len(x), self.heads, -1), 3, axis=-1)
        visible = jnp.tril(jnp.ones((len(x), len(x)), bool))
        if ctx.get_flag("decode"):
            k = self.cached_key = jax.lax.dynamic_update_slice(self.cached_key, k, (self.index, 0, 0))
            v = self.cached_value = jax.lax.dynamic_update_slice(self.cached_value, v, (self.index, 0, 0))
            visible = (jnp.arange(len(k)) <= self.index)[None]
            self.index += 1
        scores = jnp.einsum("qhd,khd->hqk", q, k) / jnp.sqrt(q.shape[-1])
        weights = nnx.softmax(jnp.where(visible, scores, -1e9))
        return self.out(jnp.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1))


class DecoderBlock(nnx.Module):
    def __init__(self, dim: int, heads: int, max_len: int, *, ctx: nnx.Context):
        self.norm1 = nnx.LayerNorm(dim, ctx=ctx)
        self.attention = Attention(dim, heads, max_len, ctx=ctx)
        self.norm2 = nnx.LayerNorm(dim, ctx=ctx)
        self.mlp = nnx.Sequence([nnx.Linear(dim, 2 * dim, ctx=ctx), nnx.gelu, nnx.Linear(2 * dim, dim, ctx=ctx)])

    def __call__(self, x, _, *, ctx: nnx.Context):
        x = x + self.attention(self.norm1(x), ctx=ctx)
        return x + self.mlp(self.norm2(x)), None


class Decoder(nnx.Module):
    def __init__(self, vocab: int, dim: int, *, heads: int, layers: int, max_len: int, ctx: nnx.Context):
        self.embed = nnx.Embed(vocab, dim, ctx=ctx)
        self.position = nnx.Param(
            0.02 * jax.random.normal(ctx.make_rng("params"), (max_len, dim)), sharding=("length", "embed")
        )
        self.layers = nnx.Scan(
            DecoderBlock,
            variable_axes={nnx.Param: 0, nnx.Cache: 0},
            split_rngs="params",
            length=layers,
            metadata_params={nnx.PARTITION_NAME: "layers"},
        )(dim, heads, max_len, ctx=ctx)
        self.norm = nnx.LayerNorm(dim, ctx=ctx)

    def __call__(self, tokens, positions, *, ctx: nnx.Context):
        x = self.embed(tokens) + self.position[positions]
        x, _ = self.layers(x, None, ctx=ctx)
        return self.embed.attend(self.norm(x))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(5, 8, heads=2, layers=2, max_len=6, ctx=nnx.context(jax.random.PRNGKey(0)))


TOKENS = jnp.array([0, 3, 1, 4, 2, 0])


def test_transformer_decoder_trains(decoder):
    (params, cache), moduledef = decoder.partition(nnx.Param, nnx.Cache)
    kernel = params["layers/scan_module/attention/qkv/kernel"]
    assert kernel.value.shape == (2, 8, 24) and kernel.sharding[0] == "layers"
    state: Any = nnx.TrainState(moduledef, params=params, cache=cache, tx=optax.adam(0.02))

    @jax.jit
    def train_step(state):
        def loss_fn(params):
            logits, _ = state.apply(params, "cache")(TOKENS[:-1], jnp.arange(5), ctx=nnx.context())
            return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[1:]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(30):
        state, loss = train_step(state)
        losses.append(loss)
    assert losses[-1] < 0.2 * losses[0]


def test_transformer_decoder_with_a_cache_agrees_with_one_pass(decoder):
    @nnx.jit
    def decode(decoder, token, position):
        return decoder(token[None], position[None], ctx=nnx.context(flags={"decode": True}))[0]

    decoder = decoder.clone()
    expected = decoder(TOKENS, jnp.arange(6), ctx=nnx.context())
    step_by_step = [decode(decoder, token, position) for position, token in enumerate(TOKENS)]
    np.testing.assert_allclose(jnp.stack(step_by_step), expected, atol=1e-5)
    assert (decoder.layers.scan_module.attention.index == 6).all()


# Parameter surgery


class Classifier(nnx.Module):
    def __init__(self, backbone: nnx.Module, *, ctx: nnx.Context):
        self.backbone: Any = backbone
        self.head = Linear(16, 1, ctx=ctx)

    def __call__(self, x):
        return self.head(nnx.tanh(self.backbone(x)))


def test_parameter_surgery():
    pretrained = Linear(1, 16, ctx=nnx.context(jax.random.PRNGKey(0)))
    model = Classifier(Linear(1, 16, ctx=nnx.context(jax.random.PRNGKey(1))), ctx=nnx.context(jax.random.PRNGKey(2)))
    model.backbone = pretrained

    def is_trainable(path, value):
        return path.startswith("head") and isinstance(value, nnx.Param)

    (trainable, frozen), moduledef = model.partition(is_trainable, ...)
    state: Any = nnx.TrainState(moduledef, params=trainable, frozen=frozen, tx=optax.adam(0.1))

    @jax.jit
    def train_step(state, x, y):
        def loss_fn(params):
            y_pred, _ = state.apply(params, "frozen")(x)
            return error(y_pred, y)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(30):
        state, loss = train_step(state, X, jnp.sin(X))
        losses.append(loss)
    model.update_state(state.params, state.frozen)
    assert list(state.params) == ["head/b", "head/w"]
    assert losses[-1] < 0.3 * losses[0] and error(model(X), jnp.sin(X)) < 0.3 * losses[0]
    np.testing.assert_array_equal(model.backbone.w, pretrained.w)
