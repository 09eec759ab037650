"""Every layer, once: what drives the suites of `test_registry.py`.

To add a layer, add one `Entry` to `LAYERS`; the suites do the rest. Four fields are required: `name`, `make`, `inputs`
and `output`. The others are for layers that differ from most: leave them out until a suite fails. `make` takes a
Context and the dtype options of the entry (`dtype=`, `param_dtype=`), if it has any.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

import nnx


@dataclass(frozen=True)
class Entry:
    """One layer.

    Required:
        name: shown as the test's id; starts with the class's name.
        make: `make(ctx, **dtypes)` builds it.
        inputs: shapes of the positional inputs; an input that is not a float32 array is `(shape, dtype)`.
        output: shape of the output.

    Good to have:
        wrong: for each wrong call, the shapes of its inputs; every one must be a ValueError naming the layer.
        wide: makes a function whose output has variance 1 if its inputs have, and the shapes of these inputs. It is a
            new layer with a fan-in initializer, or a projection in one.

    Only for layers that differ:
        call: keyword arguments of every call.
        ctx: whether the call takes a Context (given one with all streams and training flags off).
        dtypes: which of "dtype" and "param_dtype" the constructor takes.
        leading: whether extra leading axes on all inputs become leading axes of the output.
        blames: the name in those errors, where it is that of a layer inside.
        arrange: turns the inputs into the arguments of the call, where they are not the inputs themselves.
        pick: takes the array to look at out of the output.
        mask: the value of the argument `mask` that leaves the first row without any valid entry.
        empty: shapes of inputs without entries, for a layer without `leading`; by default, the suite adds an axis of 0.
        offset: whether the output is a smooth function of inputs with a large mean: neither random nor saturated.
        differentiable: whether the suite takes gradients with respect to the float inputs.
        stateless: whether a call leaves the layer's state as it was.
    """

    name: str
    make: Callable[..., Any]
    inputs: tuple[Any, ...]
    output: tuple[int, ...]
    call: dict[str, Any] = field(default_factory=dict)
    ctx: bool = False
    dtypes: tuple[str, ...] = ("dtype", "param_dtype")
    leading: bool = True
    wrong: tuple[tuple[Any, ...], ...] = ()
    blames: str | None = None
    arrange: Callable[..., tuple[Any, ...]] = lambda *inputs: inputs
    pick: Callable[[Any], Any] = lambda out: out
    wide: Callable[[nnx.Context], tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] | None = None
    mask: Any = None
    empty: tuple[Any, ...] | None = None
    offset: bool = True
    differentiable: bool = True
    stateless: bool = True

    @property
    def layer_name(self) -> str:
        return self.name.split(" ")[0]

    def build(self, seed: int = 0, **dtypes: Any) -> Any:
        return self.make(nnx.context(seed), **dtypes)

    def run(self, layer: Any, *inputs: Any, **more: Any) -> Any:
        """The layer's (picked) output."""
        options = {**self.call, **more}
        if self.ctx:
            options["ctx"] = nnx.context(dropout=3, flags={"deterministic": True, "use_running_average": True})
        return self.pick(layer(*self.arrange(*inputs), **options))

    def sample(self, *leading: int, dtype: Any = jnp.float32, seed: int = 1, shapes: Any = None) -> list[Any]:
        """Inputs with these extra leading axes; floats have `dtype`."""
        made = []
        random = np.random.default_rng(seed)
        for spec in self.inputs if shapes is None else shapes:
            shape, kind = spec if spec and isinstance(spec[0], tuple) else (spec, jnp.float32)
            shape = (*leading, *shape)
            if jnp.issubdtype(kind, jnp.integer):
                made.append(jnp.asarray(random.integers(0, 5, shape), kind))
            elif kind == jnp.bool_:
                made.append(jnp.asarray(random.random(shape) < 0.7))
            else:
                made.append(jnp.asarray(np.asarray(random.standard_normal(shape), dtype)))
        return made


def _layers() -> list[Entry]:
    e = Entry
    return [
        # linear
        e(
            "Linear",
            lambda ctx, **d: nnx.Linear(3, 4, ctx=ctx, **d),
            ((2, 3),),
            (2, 4),
            wrong=(((2, 1),), ((2, 4),), ((),)),
            wide=lambda ctx: (nnx.Linear(256, 64, ctx=ctx), ((64, 256),)),
        ),
        e("Linear no bias", lambda ctx, **d: nnx.Linear(3, 4, use_bias=False, ctx=ctx, **d), ((3,),), (4,)),
        e(
            "LinearGeneral",
            lambda ctx, **d: nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), ctx=ctx, **d),
            ((6, 2, 3),),
            (6, 4, 5),
            wrong=(((6, 3, 2),), ((6, 1, 3),), ((3,),)),
            wide=lambda ctx: (nnx.LinearGeneral((8, 32), (8, 8), axis=(-2, -1), ctx=ctx), ((64, 8, 32),)),
        ),
        e(
            "LinearGeneral batched",
            lambda ctx, **d: nnx.LinearGeneral(3, 4, batch_axis={0: 2}, ctx=ctx, **d),
            ((2, 5, 3),),
            (2, 5, 4),
            leading=False,
            wrong=(((1, 5, 3),), ((2, 5, 1),)),
            empty=((2, 0, 3),),
            wide=lambda ctx: (nnx.LinearGeneral(64, 64, batch_axis={0: 8}, ctx=ctx), ((8, 32, 64),)),
        ),
        e(
            "Einsum",
            lambda ctx, **d: nnx.Einsum("...ta,hab->...thb", (3, 2, 4), (3, 4), ctx=ctx, **d),
            ((5, 2),),
            (5, 3, 4),
            wrong=(((5, 1),), ((5, 3),), ((2,),)),
            wide=lambda ctx: (nnx.Einsum("...ta,hab->...thb", (8, 64, 32), ctx=ctx), ((64, 64),)),
        ),
        e(
            "Bilinear",
            lambda ctx, **d: nnx.Bilinear(3, 4, 5, ctx=ctx, **d),
            ((2, 3), (2, 4)),
            (2, 5),
            wrong=(((2, 4), (2, 4)), ((2, 3), (2, 1)), ((1, 3), (2, 4)), ((3,), (2, 4))),
            wide=lambda ctx: (nnx.Bilinear(16, 16, 64, ctx=ctx), ((128, 16), (128, 16))),
        ),
        e("Identity", lambda ctx: nnx.Identity(), ((2, 3),), (2, 3), dtypes=()),
        e(
            "MLP",
            lambda ctx, **d: nnx.MLP(3, (4, 4), 2, ctx=ctx, **d),
            ((2, 3),),
            (2, 2),
            ctx=True,
            wrong=(((2, 1),),),
            wide=lambda ctx: (nnx.MLP(256, (), 64, ctx=ctx), ((64, 256),)),
        ),
        e(
            "GatedMLP",
            lambda ctx, **d: nnx.GatedMLP(3, 4, ctx=ctx, **d),
            ((2, 3),),
            (2, 3),
            wrong=(((2, 1),),),
            wide=lambda ctx: (nnx.GatedMLP(256, 64, ctx=ctx).up, ((64, 256),)),
        ),
        e(
            "GatedMLP with biases",
            lambda ctx, **d: nnx.GatedMLP(3, 4, 2, activation=nnx.gelu, use_bias=True, ctx=ctx, **d),
            ((3,),),
            (2,),
        ),
        e(
            "GatedMLP with a gated activation",
            lambda ctx, **d: nnx.GatedMLP(3, 4, gated_activation=operator.mul, ctx=ctx, **d),
            ((3,),),
            (3,),
        ),
        e(
            "MoE",
            lambda ctx, **d: nnx.MoE(3, 4, 4, 2, num_shared=1, ctx=ctx, **d),
            ((5, 3),),
            (5, 3),
            stateless=False,
            wrong=(((2, 1),), ((),)),
            wide=lambda ctx: (_expert_projection(ctx), ((4, 32, 64),)),
        ),
        e(
            "MoE with biases",
            lambda ctx, **d: nnx.MoE(3, 4, 4, 2, use_bias=True, use_router_bias=True, ctx=ctx, **d),
            ((5, 3),),
            (5, 3),
            stateless=False,
        ),
        # convolution
        e(
            "Conv 1d",
            lambda ctx, **d: nnx.Conv(3, 4, (3,), padding="CAUSAL", ctx=ctx, **d),
            ((6, 3),),
            (6, 4),
            wrong=(((6, 1),), ((6, 4),), ((3,),)),
            wide=lambda ctx: (nnx.Conv(64, 64, (4,), padding="VALID", ctx=ctx), ((64, 64),)),
        ),
        e(
            "Conv 2d",
            lambda ctx, **d: nnx.Conv(4, 4, (3, 2), (2, 1), feature_group_count=2, ctx=ctx, **d),
            ((6, 5, 4),),
            (3, 5, 4),
            wrong=(((6, 5, 2),), ((6, 5, 1),)),
            wide=lambda ctx: (
                nnx.Conv(64, 64, (3, 3), padding="CIRCULAR", feature_group_count=4, ctx=ctx),
                ((8, 8, 64),),
            ),
        ),
        e(
            "Conv 3d",
            lambda ctx, **d: nnx.Conv(1, 2, (2, 2, 2), padding="VALID", ctx=ctx, **d),
            ((3, 3, 3, 1),),
            (2, 2, 2, 2),
        ),
        e(
            "ConvTranspose",
            lambda ctx, **d: nnx.ConvTranspose(3, 2, (3, 3), strides=2, ctx=ctx, **d),
            ((3, 2, 3),),
            (6, 4, 2),
            wrong=(((3, 2, 1),), ((3, 3),)),
            wide=lambda ctx: (nnx.ConvTranspose(64, 32, (4,), 2, padding="CIRCULAR", ctx=ctx), ((64, 64),)),
        ),
        e(
            "ConvTranspose transposed",
            lambda ctx, **d: nnx.ConvTranspose(3, 2, (3,), transpose_kernel=True, ctx=ctx, **d),
            ((3, 3),),
            (3, 2),
            wide=lambda ctx: (
                nnx.ConvTranspose(64, 16, (3,), padding="CIRCULAR", transpose_kernel=True, ctx=ctx),
                ((128, 64),),
            ),
        ),
        e(
            "Conv dilated",
            lambda ctx, **d: nnx.Conv(3, 4, (4,), input_dilation=2, padding="VALID", ctx=ctx, **d),
            ((4, 3),),
            (4, 4),
            wide=lambda ctx: (nnx.Conv(64, 64, (4,), input_dilation=2, padding="VALID", ctx=ctx), ((64, 64),)),
        ),
        # normalization
        e(
            "BatchNorm running",
            lambda ctx, **d: nnx.BatchNorm(4, ctx=ctx, **d),
            ((5, 4),),
            (5, 4),
            ctx=True,
            wrong=(((5, 1),), ((5, 3),), ((),)),
        ),
        e(
            "BatchNorm batch",
            lambda ctx, **d: nnx.BatchNorm(4, use_running_average=False, ctx=ctx, **d),
            ((5, 4),),
            (5, 4),
            leading=False,
            stateless=False,
            wrong=(((5, 1),), ((4,),)),
            mask=np.zeros((1, 4), bool),
            empty=((0, 4),),
        ),
        e(
            "LayerNorm",
            lambda ctx, **d: nnx.LayerNorm(4, ctx=ctx, **d),
            ((3, 4),),
            (3, 4),
            wrong=(((3, 1),), ((3, 5),), ((),)),
            mask=np.array([[False], [True], [True]]),
        ),
        e(
            "RMSNorm",
            lambda ctx, **d: nnx.RMSNorm(4, ctx=ctx, **d),
            ((3, 4),),
            (3, 4),
            wrong=(((3, 1),), ((3, 5),)),
            mask=np.array([[False], [True], [True]]),
        ),
        e("RMSNorm with an offset", lambda ctx, **d: nnx.RMSNorm(4, scale_offset=1.0, ctx=ctx, **d), ((3, 4),), (3, 4)),
        e(
            "GroupNorm",
            lambda ctx, **d: nnx.GroupNorm(6, num_groups=3, reduction_axes=(-2, -1), ctx=ctx, **d),
            ((5, 6),),
            (5, 6),
            wrong=(((5, 3),), ((5, 1),)),
            mask=np.arange(6)[None] >= 2,
        ),
        e(
            "InstanceNorm",
            lambda ctx, **d: nnx.InstanceNorm(3, ctx=ctx, **d),
            ((2, 5, 3),),
            (2, 5, 3),
            leading=False,
            wrong=(((2, 5, 1),), ((5, 3),)),
            mask=np.array([False, True])[:, None, None],
            empty=((0, 5, 3),),
        ),
        e(
            "SpectralNorm",
            lambda ctx: nnx.SpectralNorm(nnx.Linear(3, 4, ctx=ctx), n_steps=3, ctx=ctx),
            ((2, 3),),
            (2, 4),
            dtypes=(),
            stateless=False,
            wrong=(((2, 1),),),
            blames="Linear",
        ),
        e(
            "WeightNorm",
            lambda ctx: nnx.WeightNorm(nnx.Linear(3, 4, ctx=ctx), ctx=ctx),
            ((2, 3),),
            (2, 4),
            dtypes=(),
            wrong=(((2, 1),),),
            blames="Linear",
        ),
        # pooling and resizing
        e(
            "MaxPool",
            lambda ctx: nnx.MaxPool((2, 3), 2, "SAME"),
            ((5, 6, 2),),
            (3, 3, 2),
            dtypes=(),
            wrong=(((5, 6),),),
        ),
        e("MinPool", lambda ctx: nnx.MinPool((2,), 2), ((6, 2),), (3, 2), dtypes=(), wrong=(((6,),),)),
        e("AvgPool", lambda ctx: nnx.AvgPool((3,), 2, 1, False), ((6, 2),), (3, 2), dtypes=(), wrong=(((6,),),)),
        e(
            "AdaptiveAvgPool",
            lambda ctx: nnx.AdaptiveAvgPool((2, 3)),
            ((5, 6, 2),),
            (2, 3, 2),
            dtypes=(),
            wrong=(((5, 6),),),
        ),
        e("AdaptiveMaxPool", lambda ctx: nnx.AdaptiveMaxPool((2,)), ((5, 2),), (2, 2), dtypes=(), wrong=(((5,),),)),
        e("GlobalAvgPool", lambda ctx: nnx.GlobalAvgPool(2), ((4, 3, 2),), (2,), dtypes=(), wrong=(((3, 2),),)),
        e("GlobalMaxPool", lambda ctx: nnx.GlobalMaxPool(1), ((4, 2),), (2,), dtypes=(), wrong=(((2,),),)),
        e(
            "Upsample",
            lambda ctx: nnx.Upsample((2, 3), method="linear"),
            ((3, 2, 1),),
            (6, 6, 1),
            dtypes=(),
            wrong=(((3, 2),),),
        ),
        # stochastic
        e("Dropout", lambda ctx: nnx.Dropout(0.5), ((2, 3),), (2, 3), ctx=True, dtypes=()),
        e(
            "Dropout training",
            lambda ctx: nnx.Dropout(0.5, deterministic=False),
            ((2, 3),),
            (2, 3),
            ctx=True,
            dtypes=(),
            leading=False,
            offset=False,
            empty=((0, 3),),
        ),
        e(
            "DropPath",
            lambda ctx: nnx.DropPath(0.5, deterministic=False),
            ((4, 3),),
            (4, 3),
            ctx=True,
            dtypes=(),
            leading=False,
            wrong=(((),),),
            offset=False,
            empty=((0, 3),),
        ),
        e("GaussianNoise", lambda ctx: nnx.GaussianNoise(0.1), ((2, 3),), (2, 3), ctx=True, dtypes=()),
        # activations with parameters
        e("PReLU", lambda ctx, **d: nnx.PReLU(0.1, **d), ((2, 3),), (2, 3)),
        # low-rank adaptation
        e("LoRA", lambda ctx, **d: nnx.LoRA(3, 2, 4, ctx=ctx, **d), ((5, 3),), (5, 4), wrong=(((5, 1),), ((),))),
        e(
            "LoRALinear",
            lambda ctx, **d: nnx.LoRALinear(
                3, 4, lora_rank=2, ctx=ctx, **{**d, **{f"lora_{k}": v for k, v in d.items()}}
            ),
            ((5, 3),),
            (5, 4),
            wrong=(((5, 1),),),
            wide=lambda ctx: (nnx.LoRALinear(256, 64, lora_rank=2, ctx=ctx), ((64, 256),)),
        ),
        # embeddings
        e(
            "Embed",
            lambda ctx, **d: nnx.Embed(5, 4, ctx=ctx, **d),
            (((2, 3), jnp.int32),),
            (2, 3, 4),
            wrong=(((2, 3),),),
            wide=lambda ctx: (nnx.Embed(64, 256, ctx=ctx).attend, ((64, 256),)),
        ),
        e(
            "LearnedPositionEmbed",
            lambda ctx, **d: nnx.LearnedPositionEmbed(6, 4, ctx=ctx, **d),
            ((3, 4),),
            (3, 4),
            wrong=(((3, 1),), ((7, 4),), ((4,),)),
        ),
        e(
            "SinusoidalPositionEmbed",
            lambda ctx: nnx.SinusoidalPositionEmbed(4),
            ((3, 4),),
            (3, 4),
            dtypes=(),
            wrong=(((3, 1),), ((4,),)),
        ),
        e(
            "RotaryEmbedding",
            lambda ctx: nnx.RotaryEmbedding(4, scaling=nnx.NTKScaling(2.0)),
            ((3, 2, 4),),
            (3, 2, 4),
            dtypes=(),
            wrong=(((3, 2, 1),), ((3, 2, 8),), ((3, 4),)),
        ),
        # attention
        e(
            "MultiHeadAttention",
            lambda ctx, **d: nnx.MultiHeadAttention(
                4, 8, num_kv_heads=2, rotary=nnx.RotaryEmbedding(2), normalize_qk=True, ctx=ctx, **d
            ),
            ((3, 8),),
            (3, 8),
            call={"is_causal": True},
            wrong=(((3, 1),), ((8,),), ((3, 8), (3, 1)), ((3, 8), (2, 3, 8))),
            blames="MultiHeadAttention|dot_product_attention",
            offset=False,
            mask=np.array([False, True, True])[:, None],
            wide=lambda ctx: (nnx.MultiHeadAttention(4, 256, 64, num_kv_heads=2, ctx=ctx).query, ((64, 256),)),
        ),
        e(
            "MultiHeadAttention capped",
            lambda ctx, **d: nnx.MultiHeadAttention(
                2, 8, scale=0.3, logits_soft_cap=5.0, sliding_window=2, use_out_bias=False, ctx=ctx, **d
            ),
            ((3, 8),),
            (3, 8),
            call={"is_causal": True},
            offset=False,
            wide=lambda ctx: (nnx.MultiHeadAttention(4, 256, 256, 64, ctx=ctx).out, ((64, 4, 64),)),
        ),
        e(
            "MultiHeadAttention with sinks and a gate",
            lambda ctx, **d: nnx.MultiHeadAttention(4, 8, num_kv_heads=2, use_sinks=True, use_gate=True, ctx=ctx, **d),
            ((3, 8),),
            (3, 8),
            call={"is_causal": True},
            offset=False,
            mask=np.array([False, True, True])[:, None],
        ),
        e(
            "MultiHeadAttention across",
            lambda ctx, **d: nnx.MultiHeadAttention(2, 8, 4, 6, in_kv_features=5, ctx=ctx, **d),
            ((3, 8), (2, 5)),
            (3, 6),
            wrong=(((3, 8), (2, 8)), ((3, 5), (2, 5))),
            offset=False,
            mask=np.array([False, True, True])[:, None],
        ),
        e(
            "MultiHeadAttention decoding",
            _attention_with_cache,
            ((3, 8),),
            (3, 8),
            leading=False,
            stateless=False,
            wrong=(((2, 3, 8),),),
            offset=False,
            blames="KVCache",
        ),
        e(
            "LatentAttention",
            lambda ctx, **d: nnx.LatentAttention(
                2, 8, kv_rank=4, query_rank=6, head_dim=3, value_dim=2, rotary=nnx.RotaryEmbedding(2), ctx=ctx, **d
            ),
            ((3, 8),),
            (3, 8),
            call={"is_causal": True},
            wrong=(((3, 1),), ((8,),)),
            offset=False,
            mask=np.array([False, True, True])[:, None],
            wide=lambda ctx: (
                nnx.LatentAttention(4, 256, kv_rank=48, head_dim=8, rotary=nnx.RotaryEmbedding(8), ctx=ctx).kv_down,
                ((64, 256),),
            ),
        ),
        # recurrence
        e(
            "GatedDeltaNet",
            lambda ctx, **d: nnx.GatedDeltaNet(6, 4, 3, 2, 2, ctx=ctx, **d),
            ((3, 6),),
            (3, 6),
            wrong=(((3, 1),), ((6,),)),
            offset=False,
            mask=np.zeros(3, bool),
            wide=lambda ctx: (nnx.GatedDeltaNet(256, 4, 16, ctx=ctx).value, ((64, 256),)),
        ),
        *(
            e(
                cell.__name__,
                lambda ctx, cell=cell, **d: cell(3, 4, ctx=ctx, **{"dtype": None, **d}),
                ((2, 4), (2, 4), (2, 3)),
                (2, 4),
                arrange=lambda memory, hidden, x: ((memory, hidden), x),
                pick=lambda out: out[1],
                wrong=(((2, 4), (2, 4), (2, 1)), ((1, 4), (2, 4), (2, 3)), ((2, 4), (4,), (2, 3))),
                wide=lambda ctx, cell=cell: (_input_projection(cell, ctx), ((64, 256),)),
            )
            for cell in (nnx.LSTMCell, nnx.OptimizedLSTMCell)
        ),
        *(
            e(
                cell.__name__,
                lambda ctx, cell=cell, **d: cell(3, 4, ctx=ctx, **{"dtype": None, **d}),
                ((2, 4), (2, 3)),
                (2, 4),
                pick=lambda out: out[1],
                wrong=(((2, 4), (2, 1)), ((1, 4), (2, 3)), ((2, 1), (2, 3)), ((4,), (2, 3))),
                wide=lambda ctx, cell=cell: (_input_projection(cell, ctx), ((64, 256),)),
            )
            for cell in (nnx.GRUCell, nnx.SimpleCell)
        ),
        e(
            "ConvLSTMCell",
            lambda ctx, **d: nnx.ConvLSTMCell(3, 4, (3,), ctx=ctx, **d),
            ((5, 4), (5, 4), (5, 3)),
            (5, 4),
            arrange=lambda memory, hidden, x: ((memory, hidden), x),
            pick=lambda out: out[1],
            wrong=(((5, 4), (5, 4), (5, 1)), ((1, 4), (5, 4), (5, 3)), ((5, 4), (5, 1), (5, 3))),
            wide=lambda ctx: (nnx.ConvLSTMCell(64, 16, (3,), padding="VALID", ctx=ctx).ih, ((64, 64),)),
        ),
        e(
            "RNN",
            lambda ctx, **d: nnx.RNN(nnx.GRUCell(3, 4, ctx=ctx, **d)),
            ((5, 3),),
            (5, 4),
            wrong=(((5, 1),), ((3,),)),
            blames="RNN|GRUCell",
        ),
        e(
            "Bidirectional",
            lambda ctx, **d: nnx.Bidirectional(*(nnx.RNN(nnx.GRUCell(3, 2, ctx=ctx, **d)) for _ in range(2))),
            ((5, 3),),
            (5, 4),
            wrong=(((5, 1),), ((3,),)),
            blames="RNN|GRUCell",
        ),
    ]


def _attention_with_cache(ctx: nnx.Context, **dtypes: Any) -> nnx.MultiHeadAttention:
    layer = nnx.MultiHeadAttention(2, 8, decode=True, ctx=ctx, **dtypes)
    layer.init_cache((8, 8))
    return layer


def _expert_projection(ctx: nnx.Context) -> Any:
    kernels = nnx.MoE(64, 64, 4, 2, ctx=ctx).up  # (experts, in, hidden)
    return lambda x: jnp.einsum("eti,eih->eth", x, kernels)


def _input_projection(make: Any, ctx: nnx.Context) -> Any:
    cell = make(256, 64, recurrent_kernel_init=nnx.initializers.zeros(), ctx=ctx)
    return cell.ii if hasattr(cell, "ii") else cell.dense_i


LAYERS = _layers()
