"""Compares low-rank adapters with `peft`, both ways; called by `parity.py`, in the environment that has both.

`peft` trains nothing here: it makes an adapter with random matrices, and

- *read*: NNX loads it into its model, scanned or not, and the logits agree.
- *write*: NNX saves it again, `peft` loads that, and its logits agree with those of the first.
- *ours*: an adapter of `nnx.add_lora` on every linear layer agrees in `peft`.
"""

import pathlib
import tempfile
import warnings
from typing import Any

import numpy as np
import peft
import reference
import torch

import nnx

SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "some layers, and the head": (
        "llama",
        SIZES,
        dict(r=4, target_modules=["q_proj", "o_proj", "down_proj", "lm_head"]),
    ),
    "patterns, rank-stabilized": (
        "llama",
        SIZES,
        dict(
            r=4,
            lora_alpha=6,
            use_rslora=True,
            target_modules="all-linear",
            rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 8},
            alpha_pattern={"q_proj": 3, "model.layers.2.self_attn.k_proj": 1},
        ),
    ),
    "fused tensors": ("phi3", SIZES, dict(r=4, target_modules=["qkv_proj", "gate_up_proj", "o_proj"])),
    "stored by input": (
        "gpt2",
        dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        dict(r=4, fan_in_fan_out=True, target_modules=["c_attn", "c_proj", "c_fc"]),
    ),
    "one layer": ("gemma2", dict(**SIZES, head_dim=8), dict(r=3, target_modules=["q_proj"], layers_to_transform=[1])),
}


def compare_adapters() -> float:
    """Returns the largest relative error of all comparisons."""
    tokens = np.random.default_rng(0).integers(3, 96, (2, 12), np.int32)
    return max(_compare(*case, tokens) for case in CASES.values())


def _compare(family: str, fields: dict[str, Any], settings: dict[str, Any], tokens: np.ndarray) -> float:
    def error(ours: Any, theirs: np.ndarray) -> float:
        return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = pathlib.Path(folder)
        reference.make(family, fields, 0).save_pretrained(path / "model")

        def logits(adapter: pathlib.Path) -> np.ndarray:
            return reference.logits(
                peft.PeftModel.from_pretrained(reference.load(path / "model"), adapter).eval(), tokens
            )

        made: Any = peft.get_peft_model(reference.load(path / "model"), peft.LoraConfig("CAUSAL_LM", **settings))
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        made.save_pretrained(path / "theirs")
        expected, errors = reference.logits(made.eval(), tokens), []
        for scanned in (False, True):
            model = nnx.models.from_pretrained(path / "model", scan_layers=scanned)
            nnx.models.load_adapter(model, path / "theirs")
            nnx.models.save_adapter(model, path / f"ours-{scanned}")
            errors += [error(model(tokens), expected), error(logits(path / f"ours-{scanned}"), expected)]
        model = nnx.models.from_pretrained(path / "model")
        nnx.add_lora(model, 2, alpha=3.0, b_initializer=nnx.initializers.normal(0.2), ctx=nnx.context(1))
        nnx.models.save_adapter(model, path / "own")
        return max(*errors, error(model(tokens), logits(path / "own")))
