"""The reference that published models are compared with: tiny random models of `transformers`, on the CPU, in float32.

A *family* is a `model_type` of `transformers`. A *case* is one configuration of a family: the fields of its
`config.json` that matter here; the rest keep their defaults. This file needs the environment of `make parity` and
nothing of NNX.
"""

import copy
import json
import os
import pathlib
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is ever fetched

import numpy as np
import safetensors.torch
import torch
import transformers

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # for models this small, threads mostly wait for each other

ROUNDINGS = 10  # the error that two orders of the same operations may make, in those of `rounding`
MASKED = ("eurobert", "modernbert")  # families that fill in masked tokens

# Token ids that every vocabulary here has. Some families default to ids far beyond a tiny vocabulary.
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# Entries of a config.json that published checkpoints do not have.
NEW_ENTRIES = ("rope_parameters", "layer_types", "_sliding_window_pattern", "dtype")


def make(family: str, fields: dict[str, Any], seed: int) -> Any:
    """Returns a model of `transformers` with random weights that make every one of its parts matter.

    Freshly made models have norms of one, biases of zero and matrices near zero, so that their logits hardly depend on
    what a reader may get wrong. Here every norm and bias is random, and the layers outweigh the embedding, so that a
    model with tied embeddings does more than repeat its last token.

    Args:
        family: the `model_type`.
        fields: the fields of the config that differ from the defaults of `transformers`.
        seed: of the weights.
    """
    fields = copy.deepcopy({**SPECIAL_TOKENS, **fields})  # `transformers` adds to dicts it is given
    config = transformers.AutoConfig.for_model(family, **fields)
    torch.manual_seed(seed)  # for the sinks of gpt_oss: random at first, unlike norms and biases
    model = _class_of(config).from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight
    # Gemma normalizes what a layer adds to the residual, so only its norms can make layers outweigh the embedding.
    spread = 1.0 if family.startswith("gemma") else 0.3
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(spread * noise)
            else:
                gain = 1.0 if parameter is embedding else 2.0
                parameter.copy_(noise * gain / min(parameter.shape[-2:]) ** 0.5)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "correction" in name:  # so negative that an expert outside of the chosen groups would win with a zero
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator) - 3.0)
    return model.eval()


def _class_of(config: Any) -> Any:
    """Returns the class of `transformers` that makes models of a config."""
    masked = config.model_type in MASKED
    return transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM


def publish_config(directory: pathlib.Path, fields: dict[str, Any]) -> None:
    """Rewrites a config.json the way most published checkpoints have it.

    They have the rotary settings at the top level, a pattern in place of layer types, and `torch_dtype`. Today's
    `transformers` writes other entries, and reads both.

    Args:
        directory: a directory that `transformers` saved.
        fields: the fields the model was made with, which use the published names.
    """
    file = directory / "config.json"
    config = {name: value for name, value in json.loads(file.read_text()).items() if name not in NEW_ENTRIES}
    file.write_text(json.dumps({**config, **fields, "torch_dtype": "float32"}, indent=2, sort_keys=True) + "\n")


def pack_experts(directory: pathlib.Path, seed: int) -> None:
    """Replaces the experts of a gpt_oss in a directory by random packed numbers (`"quant_method": "mxfp4"`)."""
    file, draw = directory / "model.safetensors", np.random.default_rng(seed)
    tensors = safetensors.torch.load_file(file)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = draw.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = draw.integers(118, 126, blocks.shape[:-1], np.uint8)
        tensors |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))


def load(directory: pathlib.Path, **options: Any) -> Any:
    """Returns the model that `transformers` reads from a directory; every tensor must be given and used."""
    config = transformers.AutoConfig.from_pretrained(directory)
    model, report = _class_of(config).from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True, **options
    )
    problems = {name: found for name, found in report.items() if found}
    assert not problems, f"{directory}: {problems}"
    return model.eval()


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of a whole text, `[batch, length, vocab]`, computed without a cache."""
    for module in model.modules():
        # Rotary frequencies that grow with the text keep those of the longest one so far.
        if getattr(module, "rope_type", None) == "dynamic":
            module.max_seq_len_cached, module.inv_freq = module.original_max_seq_len, module.original_inv_freq.clone()
    with torch.no_grad():
        ids = torch.from_numpy(tokens).long()
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.numpy()


def rounding(directory: pathlib.Path, tokens: np.ndarray, expected: np.ndarray) -> float:
    """Returns the relative error that rounding makes in the logits of a directory: with random weights, the states of
    some recurrences are so sensitive that float32 leaves few digits of them, in any library.

    Measured by giving every weight another last bit, three times.
    """
    errors = []
    for seed in range(3):
        model, generator = load(directory), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 2.0**-23 * torch.randn(parameter.shape, generator=generator).sign())
        errors.append(np.abs(logits(model, tokens) - expected).max() / np.abs(expected).max())
    return float(max(errors))


def greedy(model: Any, tokens: np.ndarray, steps: int) -> tuple[np.ndarray, float]:
    """Returns the most likely continuation, `[batch, steps]`, and the smallest lead of a chosen token over the next.

    Each step reads the whole text again, so the answer does not depend on any cache.
    """
    text, lead = tokens, np.inf
    for _ in range(steps):
        last = logits(model, text)[:, -1]
        best_two = np.sort(last, axis=-1)[:, -2:]
        lead = min(lead, float((best_two[:, 1] - best_two[:, 0]).min()))
        text = np.concatenate([text, last.argmax(-1)[:, None].astype(text.dtype)], axis=1)
    return text[:, tokens.shape[1] :], lead
