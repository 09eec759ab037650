"""Whole models from built-in layers learn: a ResNet-18 and a GPT of six layers each overfit a small batch."""

import jax
import jax.numpy as jnp
import optax

import nnx


class ResidualBlock(nnx.Module):
    def __init__(self, channels_in, channels, stride, *, ctx):
        self.conv1 = nnx.Conv(channels_in, channels, (3, 3), stride, use_bias=False, ctx=ctx)
        self.norm1 = nnx.BatchNorm(channels, momentum=0.9, ctx=ctx)
        self.conv2 = nnx.Conv(channels, channels, (3, 3), use_bias=False, ctx=ctx)
        self.norm2 = nnx.BatchNorm(channels, momentum=0.9, ctx=ctx)
        same = channels_in == channels and stride == 1
        self.project = nnx.Identity() if same else nnx.Conv(channels_in, channels, (1, 1), stride, ctx=ctx)

    def __call__(self, x, *, ctx):
        y = nnx.relu(self.norm1(self.conv1(x), ctx=ctx))
        return nnx.relu(self.norm2(self.conv2(y), ctx=ctx) + self.project(x))


class ResNet18(nnx.Module):
    """Eighteen weighted layers: one convolution, eight blocks of two, one linear; narrow, for a test."""

    def __init__(self, classes, width=4, *, ctx):
        self.stem = nnx.Conv(3, width, (3, 3), ctx=ctx)
        self.blocks = []
        channels = width
        for stage in range(4):
            for block in range(2):
                stride = 2 if stage and not block else 1
                self.blocks.append(ResidualBlock(channels, width * 2**stage, stride, ctx=ctx))
                channels = width * 2**stage
        self.head = nnx.Linear(channels, classes, ctx=ctx)

    def __call__(self, x, *, ctx):
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = block(x, ctx=ctx)
        return self.head(nnx.global_avg_pool(x))


class GPTBlock(nnx.Module):
    def __init__(self, features, heads, *, ctx):
        self.norm1 = nnx.LayerNorm(features, ctx=ctx)
        self.attention = nnx.MultiHeadAttention(heads, features, ctx=ctx)
        self.norm2 = nnx.LayerNorm(features, ctx=ctx)
        self.mlp = nnx.MLP(features, 4 * features, features, ctx=ctx)

    def __call__(self, x, _):
        x = x + self.attention(self.norm1(x), is_causal=True, deterministic=True)
        return x + self.mlp(self.norm2(x)), None


class GPT(nnx.Module):
    def __init__(self, vocabulary, features, heads, layers, *, ctx):
        self.embed = nnx.Embed(vocabulary, features, ctx=ctx)
        self.positions = nnx.LearnedPositionEmbed(16, features, ctx=ctx)
        stack = nnx.Scan(GPTBlock, variable_axes={nnx.Param: 0}, split_rngs="params", length=layers)
        self.blocks = stack(features, heads, ctx=ctx)
        self.norm = nnx.LayerNorm(features, ctx=ctx)

    def __call__(self, tokens):
        x, _ = self.blocks(self.positions(self.embed(tokens)), None)
        return self.embed.attend(self.norm(x))


def overfit(model, loss, steps, rate, *batch):
    optimizer = nnx.Optimizer(model, optax.adam(rate))

    @nnx.jit
    def step(optimizer, model, *batch):
        value, grads = nnx.value_and_grad(loss)(model, *batch)
        optimizer.update(grads)
        return value

    losses = [float(step(optimizer, model, *batch)) for _ in range(steps)]
    assert step.trace_count == 1
    return losses


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def test_a_resnet_18_overfits_a_small_batch():
    ctx = nnx.context(0)
    model = ResNet18(4, ctx=ctx)
    images, labels = jax.random.normal(jax.random.key(1), (8, 16, 16, 3)), jnp.arange(8) % 4
    train = nnx.context(flags={"use_running_average": False})
    losses = overfit(model, lambda m, x, y: cross_entropy(m(x, ctx=train), y), 40, 3e-3, images, labels)
    assert losses[-1] < 0.1 < losses[0]
    before = model.blocks[0].norm1.mean
    assert float(jnp.abs(before).sum()) > 0, "the running statistics moved"


def test_a_gpt_of_six_layers_overfits_a_small_batch():
    model = GPT(32, 32, 4, 6, ctx=nnx.context(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 17), 0, 32)
    losses = overfit(model, lambda m, t: cross_entropy(m(t[:, :-1]), t[:, 1:]), 120, 3e-3, tokens)
    assert losses[-1] < 0.1 < losses[0]
