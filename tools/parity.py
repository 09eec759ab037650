"""Compares NNX with `transformers`, live and both ways, on random configurations of every family.

    make parity                                      ten configurations per family, tokenizers, and a fine-tuned model
    make parity ARGS="llama gemma2 --cases 3"        some families, fewer configurations

For each configuration `transformers` saves a tiny random model, and

- *read*: NNX loads it, and its logits agree. The relative error is the largest difference over the largest logit.
- *greedy*: `nnx.generate` writes the same 32 tokens, with its cache, as `transformers` without one.
- *write*: NNX saves it again, `transformers` loads that, and its logits are equal bit for bit.
- *scanned*, *bfloat16*: NNX loads it with its layers stacked, and in bfloat16, and its logits agree.
- *fresh*: NNX makes a new model from the fields of `DecoderConfig` alone and saves it; `transformers` loads that, and
  its logits agree with those of NNX.

Encoders do not write text, so *greedy* does not apply to them; the others compare all their outputs, and *write* that
every tensor is equal bit for bit. Encoder-decoders (t5, whisper) are compared like encoders, and write 24 tokens.

Runs in its own environment, which has both packages. What it finds about decoders is stored in `docs/parity.json`, from
which `family_table` writes the table of the guide.
"""

import argparse
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import encoder_parity
import family_table
import jax.numpy as jnp
import numpy as np
import reference
import tokenizer_parity
import variants

import nnx

TOLERANCE = 1e-4  # of the relative error
HALF_TOLERANCE, ROUTED_TOLERANCE = 0.2, 0.5  # of that in bfloat16; a router may choose another expert
LENGTH, NEW_TOKENS, MAX_LENGTH = 24, 32, 128
SMALLEST_LEAD = 1e-3  # a continuation whose choices are closer than this may differ by rounding, and is not compared
ROOT = pathlib.Path(__file__).parent.parent

Fields = dict[str, Any]


# The random configurations of each family


def sizes(draw: np.random.Generator) -> Fields:
    """Returns the fields that all families but gpt2 share, with grouped heads and heads of any width."""
    heads = int(draw.choice([1, 2, 4, 6]))
    groups = int(draw.choice([g for g in (1, 2, 3, 4, 6) if heads % g == 0]))
    return dict(
        vocab_size=int(draw.integers(40, 160)),
        hidden_size=heads * int(draw.choice([8, 12, 16])),
        intermediate_size=int(draw.integers(20, 90)),
        num_hidden_layers=int(draw.integers(1, 5)),
        num_attention_heads=heads,
        num_key_value_heads=heads // groups,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=float(draw.choice([1e-6, 1e-5])),
        rope_theta=float(draw.choice([10_000.0, 500_000.0])),
        tie_word_embeddings=bool(draw.integers(2)),
    )


def head_dim(draw: np.random.Generator) -> int:
    """Returns a width of heads that need not be that of the hidden state over their number."""
    return int(draw.choice([4, 6, 10, 16]))


def window(draw: np.random.Generator) -> int:
    """Returns a sliding window that is shorter than the text."""
    return int(draw.integers(1, LENGTH - 4))


def scaling(draw: np.random.Generator, *kinds: str) -> Fields:
    """Returns one of these kinds of rotary scaling, or none, for a model that was trained on shorter texts."""
    kind = str(draw.choice([*kinds, "default"]))
    factor = int(draw.choice([2, 4, 8]))
    values: Fields = {"rope_type": kind, "factor": float(factor)}
    if kind == "llama3":
        values |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
    if kind in ("llama3", "yarn"):
        values |= dict(original_max_position_embeddings=MAX_LENGTH // factor)
    if kind == "dynamic":  # it scales texts beyond the context length, which may be shorter or longer than ours
        return {"rope_scaling": values, "max_position_embeddings": int(draw.choice([LENGTH - 8, MAX_LENGTH]))}
    return {} if kind == "default" else {"rope_scaling": values}


def long_scaling(draw: np.random.Generator, rotary_dim: int) -> Fields:
    """Returns the scaling of a long phi3, whose short texts are all shorter than ours, or all longer."""
    short, long = (sorted(draw.uniform(1, most, rotary_dim // 2).tolist()) for most in (2.0, 30.0))
    return {
        "rope_scaling": {"type": "longrope", "short_factor": short, "long_factor": long},
        "original_max_position_embeddings": int(draw.choice([LENGTH - 8, LENGTH + NEW_TOKENS])),
    }


def is_compared_by_text(fields: Fields) -> bool:
    """Returns whether texts can be compared: not if the frequencies of earlier tokens change with each new one."""
    kind = fields.get("rope_scaling", {}).get("rope_type")
    return kind != "dynamic" or fields["max_position_embeddings"] >= LENGTH + NEW_TOKENS


def gpt2(draw: np.random.Generator) -> Fields:
    """Learned positions, biases everywhere, a hidden width of its MLP that need not be four times the other."""
    heads = int(draw.choice([1, 2, 4]))
    return dict(
        vocab_size=int(draw.integers(40, 160)),
        n_embd=heads * int(draw.choice([6, 8, 12])),
        n_layer=int(draw.integers(1, 5)),
        n_head=heads,
        n_positions=64,
        n_inner=None if draw.integers(2) else int(draw.integers(20, 90)),
        layer_norm_epsilon=float(draw.choice([1e-6, 1e-5])),
        activation_function=str(draw.choice(["gelu_new", "gelu", "relu"])),
    )


def llama(draw: np.random.Generator) -> Fields:
    """Every kind of rotary scaling, heads of any width, biases or none."""
    return {
        **sizes(draw),
        **scaling(draw, "llama3", "llama3", "linear", "yarn", "dynamic"),
        **({"head_dim": head_dim(draw)} if draw.integers(2) else {}),
        "attention_bias": bool(draw.integers(2)),
        "mlp_bias": bool(draw.integers(2)),
    }


def mistral(draw: np.random.Generator) -> Fields:
    """A sliding window in all layers, or none."""
    return {
        **sizes(draw),
        "head_dim": head_dim(draw),
        "sliding_window": window(draw) if draw.integers(4) else None,
    }


def qwen2(draw: np.random.Generator) -> Fields:
    """Biases of queries, keys and values; windows from some layer on."""
    return {
        **sizes(draw),
        **scaling(draw, "yarn", "dynamic"),
        "use_sliding_window": bool(draw.integers(2)),
        "max_window_layers": int(draw.integers(0, 3)),
        "sliding_window": window(draw),
    }


def qwen3(draw: np.random.Generator) -> Fields:
    """As qwen2, with norms of queries and keys."""
    return {**qwen2(draw), "head_dim": head_dim(draw), "attention_bias": bool(draw.integers(2))}


def gemma2(draw: np.random.Generator) -> Fields:
    """Windows in every second layer, soft caps or none."""
    return {
        **sizes(draw),
        "tie_word_embeddings": True,
        "head_dim": head_dim(draw),
        "query_pre_attn_scalar": int(draw.integers(4, 20)),
        "sliding_window": window(draw),
        "attn_logit_softcapping": [None, 2.0, 50.0][draw.integers(3)],
        "final_logit_softcapping": [None, 3.0, 30.0][draw.integers(3)],
    }


def gemma3_text(draw: np.random.Generator) -> Fields:
    """Windows in all layers but every n-th, with their own rotary base."""
    return {
        **gemma2(draw),
        **scaling(draw, "linear"),
        "attn_logit_softcapping": None,  # as in every published one; `transformers` ignores other values
        "num_hidden_layers": int(draw.integers(1, 7)),
        "sliding_window_pattern": int(draw.integers(2, 7)),
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": float(draw.choice([100.0, 10_000.0])),
    }


def phi3(draw: np.random.Generator) -> Fields:
    """Fused projections; heads that rotate whole or in part, with the frequencies of long texts or without."""
    fields, fraction = sizes(draw), float(draw.choice([0.5, 1.0]))
    rotary_dim = int(fields["hidden_size"] // fields["num_attention_heads"] * fraction)
    return {
        **fields,
        "sliding_window": window(draw) if draw.integers(2) else None,
        "partial_rotary_factor": fraction,
        **(long_scaling(draw, rotary_dim) if draw.integers(3) else {}),
    }


def mixtral(draw: np.random.Generator) -> Fields:
    """A few experts, whose weights are normalized; a sliding window in all layers, or none."""
    experts = int(draw.integers(1, 9))
    return {
        **mistral(draw),
        "intermediate_size": 4 * int(draw.integers(5, 20)),  # PyTorch's grouped product needs rows of 16 bytes
        "num_local_experts": experts,
        "num_experts_per_tok": int(draw.integers(1, experts + 1)),
    }


def qwen3_moe(draw: np.random.Generator) -> Fields:
    """As qwen3, with experts whose weights are normalized or not."""
    experts = int(draw.integers(1, 13))
    return {
        **sizes(draw),
        **scaling(draw, "yarn"),
        "head_dim": head_dim(draw),
        "attention_bias": bool(draw.integers(2)),
        "use_sliding_window": bool(draw.integers(2)),
        "sliding_window": window(draw),
        "num_experts": experts,
        "num_experts_per_tok": int(draw.integers(1, experts + 1)),
        "moe_intermediate_size": 4 * int(draw.integers(3, 10)),
        "norm_topk_prob": bool(draw.integers(2)),
    }


def gpt_oss(draw: np.random.Generator) -> Fields:
    """Sinks, windows in every second layer or elsewhere, experts with biases, a ramp of frequencies not rounded."""
    fields, experts, layers = sizes(draw), int(draw.integers(1, 9)), int(draw.integers(1, 5))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": MAX_LENGTH // 4}
    kinds = [f"{kind}_attention" for kind in draw.choice(["full", "sliding"], layers)]
    return {
        **fields,
        **({"layer_types": kinds} if draw.integers(2) else {}),
        **(
            [{}, {"rope_scaling": yarn}, {"rope_scaling": {**yarn, "beta_fast": 4.0, "truncate": False}}][
                draw.integers(3)
            ]
        ),
        "num_hidden_layers": layers,
        "tie_word_embeddings": False,
        "hidden_size": 4 * int(draw.integers(4, 16)),  # PyTorch's grouped product needs rows of 16 bytes
        "intermediate_size": 4 * int(draw.integers(5, 20)),
        "head_dim": head_dim(draw),
        "attention_bias": bool(draw.integers(4)),
        "sliding_window": window(draw),
        "num_local_experts": experts,
        "num_experts_per_tok": int(draw.integers(1, experts + 1)),
        "swiglu_limit": float(draw.choice([0.5, 2.0, 7.0])),
    }


def latent(draw: np.random.Generator) -> Fields:
    """Latent attention: latents of any size, experts in groups, dense layers first, both scales of yarn."""
    fields, groups = sizes(draw), int(draw.choice([1, 2, 4]))
    factor = int(draw.choice([2, 4]))
    yarn = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": MAX_LENGTH // factor}
    scales = {"mscale": float(draw.choice([0.7, 1.0])), "mscale_all_dim": 1.0} if draw.integers(2) else {}
    return {
        **fields,
        **({"rope_scaling": {**yarn, **scales}} if draw.integers(2) else {}),
        "num_key_value_heads": fields["num_attention_heads"],
        "q_lora_rank": int(draw.integers(6, 20)) if draw.integers(3) else None,
        "kv_lora_rank": 2 * int(draw.integers(3, 10)),  # the rotation of deepseek_v2 in PyTorch needs even ones
        "qk_nope_head_dim": int(draw.choice([4, 8, 12])),
        "qk_rope_head_dim": int(draw.choice([2, 4, 8])),
        "v_head_dim": int(draw.choice([4, 6, 16])),
        "attention_bias": bool(draw.integers(2)),
        # PyTorch's grouped product needs rows of 16 bytes.
        "hidden_size": 4 * fields["num_attention_heads"] * int(draw.integers(2, 5)),
        "moe_intermediate_size": 4 * int(draw.integers(3, 10)),
        "n_routed_experts": 2 * groups,
        "num_experts_per_tok": 2,
        "n_shared_experts": int(draw.integers(1, 3)),
        "n_group": groups,
        "topk_group": max(1, groups // 2),
        "norm_topk_prob": bool(draw.integers(2)),
        "routed_scaling_factor": float(draw.choice([1.0, 2.5])),
    }


def deepseek_v2(draw: np.random.Generator) -> Fields:
    """Experts that compete, chosen within groups or not."""
    method = str(draw.choice(["greedy", "group_limited_greedy"]))
    fields = {**latent(draw), "topk_method": method, "first_k_dense_replace": int(draw.integers(3))}
    return {name: value for name, value in fields.items() if name != "norm_topk_prob"}


def deepseek_v3(draw: np.random.Generator) -> Fields:
    """Experts scored one by one, with a correction; halves or neighbors that rotate together."""
    return {
        **latent(draw),
        "rope_interleave": bool(draw.integers(2)),
        "first_k_dense_replace": int(draw.integers(3)),
    }


def glm4_moe_lite(draw: np.random.Generator) -> Fields:
    """As deepseek_v3, with a list of the kinds of MLPs."""
    fields = latent(draw)
    kinds = [str(kind) for kind in draw.choice(["dense", "sparse"], fields["num_hidden_layers"])]
    return {**fields, "rope_interleave": bool(draw.integers(2)), "mlp_layer_types": kinds}


def qwen3_5_text(draw: np.random.Generator) -> Fields:
    """Gated delta networks in all layers but every n-th, whose heads are gated and rotate in part."""
    key_heads = int(draw.choice([1, 2, 4]))
    return {
        **sizes(draw),
        "num_hidden_layers": int(draw.integers(2, 7)),
        "head_dim": int(draw.choice([8, 16, 24])),
        "attention_bias": bool(draw.integers(2)),
        "full_attention_interval": int(draw.integers(2, 5)),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * int(draw.integers(1, 4)),
        "linear_key_head_dim": int(draw.choice([6, 8, 16])),
        "linear_value_head_dim": int(draw.choice([4, 8, 12])),
        "linear_conv_kernel_dim": int(draw.integers(2, 5)),
    }


def qwen3_next(draw: np.random.Generator) -> Fields:
    """As qwen3_5_text, with projections in groups and experts, one of which is shared and gated."""
    fields, experts = qwen3_5_text(draw), int(draw.integers(2, 9))
    return {
        **fields,
        # PyTorch's grouped product needs rows of 16 bytes.
        "hidden_size": 4 * fields["num_attention_heads"] * int(draw.integers(2, 5)),
        "moe_intermediate_size": 4 * int(draw.integers(3, 10)),
        "shared_expert_intermediate_size": int(draw.integers(10, 40)),
        "num_experts": experts,
        "num_experts_per_tok": int(draw.integers(1, experts + 1)),
        "norm_topk_prob": bool(draw.integers(2)),
    }


def varied(family: str, draw: np.random.Generator) -> Fields:
    """Two layers of a family in `variants`, with a random value for each of its entries."""
    entries = {entry: values[draw.integers(len(values))] for entry, values in variants.VARIANTS[family].items()}
    heads = {"num_attention_heads": 4, "num_key_value_heads": int(draw.choice([1, 2, 4]))}
    fixed = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    read = nnx.models.FAMILIES[family].known({})
    return {entry: value for entry, value in {**sizes(draw), **heads, **fixed}.items() if entry in read} | entries


FAMILIES: dict[str, Callable[[np.random.Generator], Fields]] = {
    family.__name__: family
    for family in (
        *(gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma2, gemma3_text, phi3, gpt_oss),
        *(deepseek_v2, deepseek_v3, glm4_moe_lite, qwen3_next, qwen3_5_text),
    )
}
FAMILIES |= {family: functools.partial(varied, family) for family in variants.VARIANTS}


# The comparison


class Comparison(NamedTuple):
    """What one configuration showed."""

    read: float  # relative error of the logits of NNX
    write: float  # relative error of `transformers` on what NNX saved
    fresh: float  # relative error between both on a model that NNX made
    scanned: float  # relative error of NNX with its layers stacked
    bfloat16: float  # relative error of NNX in bfloat16: the root of the mean square, as routers may choose others
    greedy: bool | None  # whether the continuations agree; None if rounding could decide
    tolerances: tuple[float, float]  # of the first four, and of the difference in bfloat16

    @property
    def agrees(self) -> bool:
        """Whether all of it is as it should be."""
        # One comparison each: `max` passes over NaN.
        wide, half = self.tolerances
        exact = self.read <= wide and self.fresh <= wide and self.scanned <= wide and self.write == 0
        return exact and self.bfloat16 <= half and self.greedy is not False


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the largest difference over the largest value."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def forward(model: nnx.Module, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of NNX; compiled as one function, which is faster than compiling each operation."""
    return np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, tokens))


def attempt(way: Callable[[], float]) -> float:
    """Returns the error that a comparison found; infinite, with the traceback printed, if it failed altogether."""
    try:
        return way()
    except Exception:
        traceback.print_exc()
        return np.inf


def compare(family: str, seed: int, folder: pathlib.Path) -> Comparison:
    """Compares one random configuration of a family, both ways."""
    draw = np.random.default_rng([seed, *family.encode()])
    fields = FAMILIES[family](draw)
    made = reference.make(family, fields, seed)
    made.save_pretrained(folder / "theirs", max_shard_size="40KB" if seed % 3 == 0 else "1GB")
    if seed % 2:
        reference.publish_config(folder / "theirs", fields)
    theirs = reference.load(folder / "theirs")
    tokens = draw.integers(3, fields["vocab_size"], (2, LENGTH), np.int32)
    expected = reference.logits(theirs, tokens)

    model = nnx.models.from_pretrained(folder / "theirs")
    read = relative_error(forward(model, tokens), expected)

    text, lead = (tokens, 0.0) if family in reference.MASKED else reference.greedy(theirs, tokens, NEW_TOKENS)
    greedy = None
    if lead > SMALLEST_LEAD and is_compared_by_text(fields):
        ours = nnx.generate(model, jnp.asarray(tokens), max_new_tokens=NEW_TOKENS, temperature=0)
        greedy = bool(np.array_equal(ours, text))

    def write() -> float:
        nnx.models.save_pretrained(model, folder / "ours", max_shard_size="30KB" if seed % 3 == 1 else "1GB")
        again = reference.load(folder / "ours")
        assert type(again) is type(theirs), f"transformers takes what NNX saved for a {type(again).__name__}"
        return relative_error(reference.logits(again, tokens), expected)

    def fresh() -> float:
        made_here = nnx.models.Decoder(model.config.replace(extra=()), ctx=nnx.context(seed))
        nnx.models.save_pretrained(made_here, folder / "fresh")
        loaded = reference.load(folder / "fresh")
        return relative_error(forward(made_here, tokens), reference.logits(loaded, tokens))

    def scanned() -> float:
        return relative_error(
            forward(nnx.models.from_pretrained(folder / "theirs", scan_layers=True), tokens), expected
        )

    def half() -> float:
        model = nnx.models.from_pretrained(folder / "theirs", dtype=jnp.bfloat16)
        difference = forward(model, tokens).astype(np.float32) - expected
        return float(np.sqrt(np.mean(difference**2) / np.mean(expected**2)))

    errors = [read, *map(attempt, (write, fresh, scanned))]
    wide = max(errors) > TOLERANCE and reference.ROUNDINGS * reference.rounding(folder / "theirs", tokens, expected)
    tolerances = max(TOLERANCE, wide), HALF_TOLERANCE if model.config.num_experts is None else ROUTED_TOLERANCE
    return Comparison(*errors, attempt(half), greedy, tolerances)


def compare_family(family: str, cases: int) -> bool:
    """Compares some random configurations of a family, prints a line, and returns whether all agree."""
    results = []
    for seed in range(cases):
        with tempfile.TemporaryDirectory() as folder:
            try:
                results.append(compare(family, seed, pathlib.Path(folder)))
            except Exception:  # the others are compared all the same
                traceback.print_exc()
                print(f"{family}, configuration {seed}: failed", flush=True)
                return False
        if not results[-1].agrees:
            print(f"{family}, configuration {seed}: {results[-1]}", flush=True)
    ways = ("read", "write", "fresh", "scanned", "bfloat16")
    worst = {way: float(np.max([getattr(result, way) for result in results])) for way in ways}
    continuations = [result.greedy for result in results if result.greedy is not None]
    same = f"{sum(continuations)} of {len(continuations)}"
    errors = "   ".join(f"{way} {error:.1e}" for way, error in worst.items())
    print(f"{family:16}  {cases} configurations   greedy {same:8}   {errors}", flush=True)
    family_table.store(family, {"configurations": cases, "greedy": same, **worst})
    return all(result.agrees for result in results)


# The other comparisons


def compare_packed(folder: pathlib.Path) -> float:
    """Packs the experts of a gpt_oss as 4-bit floats with random bits; returns the relative error of our logits."""
    fields = {**gpt_oss(np.random.default_rng(0)), "hidden_size": 64, "intermediate_size": 96}
    reference.make("gpt_oss", fields, seed=0).save_pretrained(folder)
    reference.pack_experts(folder, seed=0)
    settings = reference.transformers.Mxfp4Config(dequantize=True)
    theirs = reference.load(folder, quantization_config=settings).float()  # experts are bfloat16 before that
    tokens = np.random.default_rng(0).integers(3, fields["vocab_size"], (2, LENGTH), np.int32)
    model: nnx.models.Decoder = nnx.models.from_pretrained(folder)
    for ours, layer in zip(model.layers, theirs.model.layers, strict=True):
        gate_up, down = (x.detach().numpy() for x in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj))
        for found, wanted in (
            (ours.mlp.gate, gate_up[..., ::2]),
            (ours.mlp.up, gate_up[..., 1::2]),
            (ours.mlp.down, down),
        ):
            np.testing.assert_array_equal(found, wanted)
    return relative_error(forward(model, tokens), reference.logits(theirs, tokens))


def compare_finetuned(folder: pathlib.Path) -> float:
    """Runs examples/programs/finetune.py and returns the relative error of our logits of what it wrote."""
    fields = dict(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    before = reference.make("llama", fields, seed=0)
    before.save_pretrained(folder / "before")
    tokenizer_parity.write_tokenizer(folder / "before", tokenizer_parity.TEMPLATES["turns"])
    program = [sys.executable, str(ROOT / "examples" / "programs" / "finetune.py"), str(folder / "before"), "--smoke"]
    options = ["--output", str(folder / "after"), "--how", "lora", "--rate", "1e-2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*program, *options], check=True, env=environment, stdout=subprocess.DEVNULL)

    after = reference.load(folder / "after" / "model")
    tokenizer_parity.check_chats(folder / "after" / "model")
    tokens = np.random.default_rng(0).integers(3, 300, (2, LENGTH), np.int32)
    expected = reference.logits(after, tokens)
    assert relative_error(reference.logits(before, tokens), expected) > 0.01, "fine-tuning changed nothing"
    return relative_error(forward(nnx.models.from_pretrained(folder / "after" / "model"), tokens), expected)


def main() -> int:
    """Runs the comparisons asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*FAMILIES, *encoder_parity.FAMILIES]
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help=f"some of {', '.join(known)}, adapters, wrappers; all by default"
    )
    parser.add_argument("--cases", type=int, default=10, help="random configurations per family")
    args = parser.parse_args()
    agree = [
        (compare_family if family in FAMILIES else encoder_parity.compare_family)(family, args.cases)
        for family in args.families or known
        if family not in ("adapters", "wrappers")
    ]
    if "gpt_oss" in (args.families or known):
        with tempfile.TemporaryDirectory() as folder:
            error = compare_packed(pathlib.Path(folder))
            print(f"mxfp4         weights equal, read {error:.1e}")
            agree.append(error <= TOLERANCE)
    if "wrappers" in (args.families or ["wrappers"]):
        import wrapper_parity

        agree.append(wrapper_parity.compare_wrappers() <= TOLERANCE)
    if "adapters" in (args.families or ["adapters"]):
        import adapter_parity  # `peft` takes long to import

        error = adapter_parity.compare_adapters()
        print(f"adapters      {len(adapter_parity.CASES)} adapters of peft, read and written {error:.1e}")
        agree.append(error <= TOLERANCE)
    if not args.families:
        with tempfile.TemporaryDirectory() as folder:
            print(f"tokenizers    {tokenizer_parity.compare_tokenizers(pathlib.Path(folder))} comparisons agree")
        with tempfile.TemporaryDirectory() as folder:
            error = compare_finetuned(pathlib.Path(folder))
            print(f"fine-tuned    read {error:.1e}, loaded by transformers")
            agree.append(error <= TOLERANCE)
    print(f"{sum(agree)} passed, {len(agree) - sum(agree)} failed")
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
