"""Compares what a `config.json` means to NNX and to `transformers`: every causal model type, and every entry changed.

    make conformance                          all of it
    make conformance ARGS="llama qwen3_next"  the entries of some families
    make conformance ARGS="--types"           the model types only

*Types*: for every causal model type of the installed `transformers`, a tiny model with random weights. *Entries*: for
every family here, the same with one entry of the config changed, once per value that could matter. Each is

- *ok*: NNX opens the directory, and its logits agree;
- *refused*: NNX raises an error that names the reason;
- DIFFERS: NNX opens it and computes something else. Any of these fails the run.

Changes that `transformers` itself refuses are not counted. The counts of families are stored for the table of the guide
(`family_table`). Runs in the environment of `make parity`.
"""

import argparse
import collections
import inspect
import pathlib
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from typing import Any

import family_table
import numpy as np
import reference
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import nnx

TOLERANCE = 1e-4
SIZES: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    moe_num_experts=4,
    num_experts_per_tok=2,
    moe_k=2,
    moe_topk=2,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=16,
    n_group=2,
    topk_group=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=4,
    qk_nope_head_dim=8,
    v_head_dim=8,
    first_k_dense_replace=1,
    sliding_window=8,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
)
HEADS = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite"}  # latent attention has as many keys as queries
# Entries that are not settings of a model, or that only change how large it is.
SKIPPED = {
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "n_layer", "n_head", "n_embd"),
    *("transformers_version", "architectures", "model_type", "dtype", "torch_dtype", "_name_or_path", "id2label"),
    *("label2id", "problem_type", "return_dict", "output_hidden_states", "output_attentions", "is_encoder_decoder"),
    *("chunk_size_feed_forward", "pad_token_id", "use_cache"),
}
LARGE = {"phi4_multimodal", "gemma4_text", "gemma4", "kimi_linear", "gemma3n_text", "gemma3n"}  # even if tiny


def tiny(model_type: str, **changes: Any) -> Any:
    """Returns the config of a tiny model: the sizes that its class has, and some changes."""
    cls = type(transformers.AutoConfig.for_model(model_type))
    known = {*inspect.signature(cls.__init__).parameters, *getattr(cls, "__dataclass_fields__", ())}
    known |= set(getattr(cls, "attribute_map", ()))
    fields = {name: value for name, value in SIZES.items() if name in known}
    if model_type in HEADS:
        fields |= {"num_key_value_heads": 4}
        fields.pop("head_dim", None)
    return transformers.AutoConfig.for_model(model_type, **{**fields, **changes})


def made(config: Any) -> Any:
    """Returns a model in which every parameter matters, whose values depend on nothing but their names and shapes."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = np.random.default_rng(zlib.crc32(f"{name} {tuple(parameter.shape)}".encode()))
            drawn = torch.tensor(draw.standard_normal(parameter.shape), dtype=torch.float32)
            if parameter.ndim < 2:
                parameter.add_(0.3 * drawn)
            else:
                parameter.copy_(1.5 * drawn / min(parameter.shape[-2:]) ** 0.5)
    return model.eval()


def variants(name: str, value: Any) -> list[Any]:
    """Returns other values for an entry."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, max(1, value // 2)] if value > 0 else [1]
    if isinstance(value, float):
        return [value * 3 + 0.5]
    if value is None:
        return [True, 2, 0.5]
    if isinstance(value, str):
        return ["relu"] if "act" in name else []
    if isinstance(value, list) and value:
        return [value[::-1]]
    if isinstance(value, dict) and "rope_type" in value:
        scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
        return [
            {**value, "rope_theta": 500.0},
            {**value, **scaled},
            {**value, **scaled, "mscale": 0.7, "mscale_all_dim": 1.0},
        ]
    return []


class Reference:
    """A model of `transformers` in a directory, and its logits."""

    def __init__(self, config: Any, directory: pathlib.Path, tokens: np.ndarray):
        made(config).save_pretrained(directory)
        self.directory = directory
        self.logits = reference.logits(reference.load(directory), tokens)


def verdict(directory: pathlib.Path, expected: np.ndarray, tokens: np.ndarray) -> str:
    """Returns "ok", "refused: …" or "DIFFERS: …" for a directory."""
    try:
        model = nnx.models.from_pretrained(directory)
    except Exception as error:
        lines = str(error).splitlines()
        return f"refused: {type(error).__name__}: {' '.join(lines[1:2] or lines[:1])[-110:]}"
    ours = np.asarray(model(tokens))  # operation by operation: most are compiled already, whole models never are
    error = float(np.abs(ours - expected).max() / np.abs(expected).max())
    if error <= TOLERANCE or error <= reference.ROUNDINGS * reference.rounding(directory, tokens, expected):
        return "ok"
    return f"DIFFERS: relative error {error:.1e}"


def of_types(tokens: np.ndarray) -> Iterator[tuple[str, str]]:
    """Yields every causal model type and what became of it."""
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if model_type not in nnx.models.FAMILIES:
            yield model_type, "refused: not among the families"
            continue
        if model_type in LARGE:
            yield model_type, "skipped: large however small its config"
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                theirs = Reference(tiny(model_type), pathlib.Path(folder), tokens)
            except Exception as error:
                yield model_type, f"skipped: transformers raises {type(error).__name__}"
                continue
            yield model_type, verdict(theirs.directory, theirs.logits, tokens)


def of_entries(family: str, tokens: np.ndarray) -> Iterator[tuple[str, str]]:
    """Yields every change of an entry of a family's config, and what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        base = Reference(tiny(family), pathlib.Path(folder), tokens)
        found = verdict(base.directory, base.logits, tokens)
        if found != "ok":
            yield f"{family} as it is", found
            return
        before = nnx.models.from_pretrained(base.directory, abstract=True).config.replace(extra=())
    for name, value in tiny(family).to_dict().items():
        for changed in [] if name in SKIPPED else variants(name, value):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    theirs = Reference(tiny(family, **{name: changed}), pathlib.Path(folder), tokens)
                except Exception:
                    continue
                if not np.isfinite(theirs.logits).all():
                    continue
                case = f"{family}.{name}={changed!r}"
                if np.array_equal(theirs.logits, base.logits):
                    # Nothing changed there. If nothing changed here either, the models are the same.
                    try:
                        after = nnx.models.from_pretrained(theirs.directory, abstract=True).config
                    except Exception:
                        after = None
                    if after is not None and after.replace(extra=()) == before:
                        yield case, "ok"
                        continue
                yield case, verdict(theirs.directory, theirs.logits, tokens)


def main() -> int:
    """Runs what is asked for, prints what was not ok and the counts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="compare the entries of these only")
    parser.add_argument("--types", action="store_true", help="compare the model types only")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    tokens = np.random.default_rng(0).integers(3, 96, (2, 24)).astype(np.int32)
    start, differ = time.perf_counter(), 0
    causal = [family for family in nnx.models.FAMILIES if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    runs = [] if args.families else [("types", of_types(tokens))]
    runs += [] if args.types else [(family, of_entries(family, tokens)) for family in args.families or causal]
    total: collections.Counter[str] = collections.Counter()
    for title, found in runs:
        count: collections.Counter[str] = collections.Counter()
        for case, result in found:
            kind = result.split(":")[0]
            count[kind] += 1
            if kind != "ok" and not result.endswith("not among the families"):
                print(f"  {case}: {result}", flush=True)
        differ += count["DIFFERS"]
        total += count if title != "types" else collections.Counter()
        print(f"{title}: {dict(count)}", flush=True)
        if title != "types":
            family_table.store(title, {kind: count[kind] for kind in ("ok", "refused", "DIFFERS")})
    print(f"entries in all: {dict(total)}; {time.perf_counter() - start:.0f} s")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
