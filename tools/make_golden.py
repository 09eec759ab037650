"""Writes the goldens: tiny random models of every family, with what `transformers` computes with them.

    make goldens

`tests/models/golden/NAME.json` then holds a model as `tests/models/golden_files.py` describes it: weights are computed
from the names of the tensors, so a file holds only shapes, inputs, and a summary of the outputs. Decoders have `tokens`
`[2, 24]`, the sums of their logits, and `greedy` `[2, 32]`, the most likely text after it. Encoders have all inputs and
outputs; encoder-decoders have `greedy` `[2, 24]` as well, the text after the first token. The tests of NNX compare with
these files and need neither `torch` nor `transformers`.
"""

import argparse
import json
import pathlib
import tempfile
from typing import Any

import audio_goldens
import encoders
import image_goldens
import numpy as np
import reference
import safetensors
import safetensors.numpy
import variants

from tests.models import golden_files

LENGTH, NEW_TOKENS, BATCH = 24, 32, 2
SIZE_LIMIT = 6_000  # bytes of one file
SMALLEST_LEAD = 5e-3  # a chosen token leads by at least this, so that rounding never changes a continuation

SMALL = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=64)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
LATENT = dict(
    **dict(num_attention_heads=4, num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=16),
    **dict(qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6),
)
DELTA = dict(
    **dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=6),
    full_attention_interval=2,
)

# What a case shows is written behind it. The text is 24 tokens long, so windows of 8 or less cut off most of it.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "llama": ("llama", dict(**SMALL, **HEADS, tie_word_embeddings=False)),  # grouped heads, untied
    "llama3": (  # rope scaling with frequencies below, between and above both limits; tied; all heads have keys
        "llama",
        dict(
            **SMALL,
            num_attention_heads=4,
            num_key_value_heads=4,
            tie_word_embeddings=True,
            rope_theta=10_000.0,
            rope_scaling=dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=56,
            ),
        ),
    ),
    "mistral": ("mistral", dict(**SMALL, **HEADS, head_dim=12, sliding_window=7)),  # heads wider than hidden / heads
    "qwen2": ("qwen2", dict(**SMALL, **HEADS, tie_word_embeddings=True)),  # biases of queries, keys and values
    "qwen3": ("qwen3", dict(**SMALL, **HEADS, head_dim=16)),  # norms of queries and keys
    "gemma2": (  # alternating windows, caps low enough to matter
        "gemma2",
        dict(
            **{**SMALL, "num_hidden_layers": 4},
            **HEADS,
            head_dim=12,
            query_pre_attn_scalar=10,
            sliding_window=6,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=4.0,
        ),
    ),
    "gemma3_text": (  # one full layer after every two with windows, two rope bases
        "gemma3_text",
        dict(
            **{**SMALL, "num_hidden_layers": 4},
            **HEADS,
            head_dim=12,
            query_pre_attn_scalar=10,
            sliding_window=6,
            rope_theta=1_000_000.0,
            rope_local_base_freq=10_000.0,
            sliding_window_pattern=3,
        ),
    ),
    "phi3": ("phi3", dict(**SMALL, **HEADS, sliding_window=None, tie_word_embeddings=False)),  # fused projections
    "phi3_long": (  # the frequencies of texts longer than those trained on, in a part of each head
        "phi3",
        dict(
            **SMALL,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=False,
            partial_rotary_factor=0.75,
            original_max_position_embeddings=20,
            rope_scaling=dict(
                type="longrope",
                short_factor=[1.0, 1.1, 1.2, 1.5, 2.0, 2.5],
                long_factor=[1.1, 2.0, 4.5, 9.0, 20.0, 40.0],
            ),
        ),
    ),
    "mixtral": ("mixtral", dict(**SMALL, **HEADS, num_local_experts=5, sliding_window=7)),  # normalized weights
    "qwen3_moe": (  # weights that are not normalized, norms of queries and keys
        "qwen3_moe",
        dict(**SMALL, **HEADS, head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20),
    ),
    "gpt_oss": (  # sinks, alternating windows, biases, experts in one tensor, a clamp that matters, a ramp of rope
        "gpt_oss",
        dict(
            **{**SMALL, "num_hidden_layers": 3, "intermediate_size": 32},
            **HEADS,
            head_dim=16,
            sliding_window=6,
            num_local_experts=4,
            num_experts_per_tok=2,
            swiglu_limit=1.5,
            rope_theta=500.0,
            rope_scaling=dict(
                rope_type="yarn",
                factor=4.0,
                beta_fast=4.0,
                beta_slow=1.0,
                original_max_position_embeddings=16,
                truncate=False,
            ),
        ),
    ),
    "deepseek_v2": (  # latent attention with queries from the input, groups scored by their best expert, a dense layer
        "deepseek_v2",
        dict(
            **{**SMALL, **LATENT, "q_lora_rank": None, "num_hidden_layers": 3},
            **dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, n_shared_experts=2),
            **dict(topk_method="group_limited_greedy", n_group=2, topk_group=1, first_k_dense_replace=1),
            routed_scaling_factor=1.5,
        ),
    ),
    "deepseek_v3": (  # latents of queries as well, a correction of the choice, both scales of a ramp of rope
        "deepseek_v3",
        dict(
            **{**SMALL, **LATENT},
            **dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, n_shared_experts=1),
            **dict(n_group=4, topk_group=2, first_k_dense_replace=1, attention_bias=True),
            rope_scaling=dict(
                **dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0),
                **dict(beta_slow=1.0, mscale=0.7, mscale_all_dim=1.0),
            ),
        ),
    ),
    "glm4_moe_lite": (  # rotation of halves, the kinds of MLPs as a list
        "glm4_moe_lite",
        dict(
            **{**SMALL, **LATENT},
            **dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, n_shared_experts=1),
            **dict(n_group=1, topk_group=1, rope_interleave=False, mlp_layer_types=["sparse", "dense"]),
        ),
    ),
    "qwen3_next": (  # projections in groups, gates of attention and of shared experts
        "qwen3_next",
        dict(
            **{**SMALL, **HEADS, **DELTA, "head_dim": 16},
            **dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=20),
        ),
    ),
    "qwen3_5_text": (  # separate projections
        "qwen3_5_text",
        dict(**{**SMALL, **HEADS, **DELTA, "head_dim": 16, "num_hidden_layers": 4}, tie_word_embeddings=True),
    ),
}
# Families that add an option or two to others: the first value of each entry, and no text.
BRIEF = {
    family: {**SMALL, **HEADS, **{k: v[0] for k, v in found.items()}} for family, found in variants.VARIANTS.items()
}
# Larger weights make the states of a recurrence so sensitive that rounding alone exceeds what the tests allow.
GAINS = {"qwen3_next": 1.4, "qwen3_5_text": 1.4}
SHARDED = {"mistral": 3}  # cases saved in several files, and how many
AS_PUBLISHED = (
    "llama3",
    "gemma3_text",
    "phi3_long",
    "gpt_oss",
)  # cases with the config.json of published checkpoints (`publish_config`)


def write(name: str) -> str:
    """Writes the golden of a decoder and returns a line about it."""
    family, fields = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder)
        reference.make(family, fields, 0).save_pretrained(directory)
        if name in AS_PUBLISHED:
            reference.publish_config(directory, fields)
        for seed in range(100):
            golden = filled(directory, seed, gain=GAINS.get(family, 2.0))
            model = reference.load(directory)  # what a reader of the files must compute
            tokens = np.random.default_rng(seed).integers(3, 96, (BATCH, LENGTH), np.int32)
            greedy, lead = reference.greedy(model, tokens, NEW_TOKENS)
            if lead > SMALLEST_LEAD and all(len(set(row)) > 4 for row in greedy.tolist()):
                break
        else:
            raise RuntimeError(f"{name}: no seed gives a continuation that is varied and safe from rounding")
    logits = reference.logits(model, tokens)
    golden |= {"inputs": {"tokens": tokens.tolist()}, "outputs": {"logits": golden_files.sums(logits)}}
    if name in SHARDED:
        golden["shards"] = SHARDED[name]
    return f"{saved(name, golden, greedy)}   logits ±{logits.std(axis=-1).mean():.2f}   smallest lead {lead:.3f}"


def write_brief(family: str) -> str:
    """Writes the golden of a decoder without a text, and returns a line about it."""
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder)
        reference.make(family, BRIEF[family], 0).save_pretrained(directory)
        golden = filled(directory, 0, gain=2.0)
        model = reference.load(directory)
        tokens = np.random.default_rng(0).integers(3, 96, (BATCH, LENGTH), np.int32)
    logits = reference.logits(model, tokens)
    golden |= {"inputs": {"tokens": tokens.tolist()}, "outputs": {"logits": golden_files.sums(logits)}}
    return f"{saved(family, golden, None)}   logits ±{logits.std(axis=-1).mean():.2f}"


def write_encoder(name: str) -> str:
    """Writes the golden of an encoder and returns a line about it."""
    case = encoders.GOLDENS[name]
    greedy = None
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder)
        encoders.make(case, 0).save_pretrained(directory)
        if case.cls.startswith("T5") and "tie_word_embeddings" in case.fields:
            publish_tie(directory, case.fields["tie_word_embeddings"])
        for seed in range(100):
            golden = filled(directory, seed, gain=3.0 if case.cls.startswith(("T5", "Whisper")) else 1.5)
            model = encoders.load(directory, case.cls)  # what a reader of the files must compute
            given = encoders.inputs(model.config, seed)
            floats = {key: {"shape": array.shape} for key, array in given.items() if array.dtype.kind == "f"}
            given |= {key: golden_files.random_input(key, *given[key].shape) for key in floats}
            if "decoder_tokens" not in given:
                break
            greedy, lead = encoders.greedy(model, given, NEW_TOKENS - 8)
            if lead > SMALLEST_LEAD and all(len(set(row)) > 4 for row in greedy.tolist()):
                break
        else:
            raise RuntimeError(f"{name}: no seed gives a text that is varied and safe from rounding")
    found = encoders.outputs(model, given)
    golden["inputs"] = {key: floats.get(key) or array.tolist() for key, array in given.items()}
    golden["outputs"] = {key: golden_files.sums(array) for key, array in found.items()}
    return saved(name, golden, greedy) + "   " + ", ".join(f"{key} ±{array.std():.2f}" for key, array in found.items())


def filled(directory: pathlib.Path, seed: int, gain: float) -> dict[str, Any]:
    """Replaces the tensors in a directory by those of a golden, and returns the golden, still without its outputs."""
    file = directory / "model.safetensors"
    with safetensors.safe_open(file, "np") as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in sorted(opened.keys())}
    config = json.loads((directory / "config.json").read_text())
    config.pop("transformers_version", None)
    golden = {"config": config, "seed": seed, "gain": gain, "tensors": shapes}
    safetensors.numpy.save_file(golden_files.weights(golden), file, metadata={"format": "pt"})
    return golden


def saved(name: str, golden: dict[str, Any], greedy: np.ndarray | None) -> str:
    """Writes a golden and returns the start of a line about it."""
    text = {} if greedy is None else {"greedy": greedy.tolist()}
    size = golden_files.write(name, {**golden, **text}).stat().st_size
    assert size < SIZE_LIMIT, f"{name}: {size} bytes"
    return f"{name:16} {size:6,} bytes   seed {golden['seed']}"


def publish_tie(directory: pathlib.Path, tied: bool) -> None:
    """Rewrites a config.json the way published T5s have it, which say whether the output layer is the embedding."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    del config["scale_decoder_outputs"]
    file.write_text(json.dumps({**config, "tie_word_embeddings": tied}, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    known = [*CASES, *BRIEF, *encoders.GOLDENS, "images", "audio"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(known)}; all by default")
    for case in parser.parse_args().names or known:
        if case == "images":
            print(*(image_goldens.write(name, golden_files.FOLDER) for name in image_goldens.CASES), sep="\n")
        elif case == "audio":
            print(audio_goldens.write(golden_files.FOLDER))
        else:
            way = write if case in CASES else write_brief if case in BRIEF else write_encoder
            print(way(case), flush=True)
