"""The encoders of `transformers` that NNX is compared with: tiny random models, and what they compute.

A *case* is a class of `transformers` and the fields of its config that matter. Inputs and outputs are dicts of numpy
arrays with the names and layouts of NNX: images have their channels last, and the output is called `logits` if the
model has a head.
"""

import copy
import pathlib
from typing import Any, NamedTuple

import numpy as np
import reference
import torch
import transformers

assert reference.SPECIAL_TOKENS  # imported for its settings: nothing is fetched, and torch uses one thread

Arrays = dict[str, np.ndarray]
Fields = dict[str, Any]

LENGTH, BATCH = 12, 2


class Case(NamedTuple):
    """A class of `transformers`, and the fields of its config."""

    cls: str
    fields: Fields


_SMALL = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40)
_BERT = dict(**_SMALL, vocab_size=60, max_position_embeddings=16)
_STAGES = dict(embedding_size=8, hidden_sizes=[16, 24], depths=[1, 2])

GOLDENS = {
    "bert": Case("BertModel", _BERT),
    "bert_masked_lm": Case("BertForMaskedLM", dict(**_BERT, hidden_act="gelu_new")),
    "bert_classifier": Case("BertForSequenceClassification", dict(**_BERT, num_labels=3)),
    "bert_tokens": Case("BertForTokenClassification", dict(**_BERT, num_labels=5)),
    "bert_answers": Case("BertForQuestionAnswering", dict(**_BERT, type_vocab_size=3)),
    "vit": Case("ViTModel", dict(**_SMALL, image_size=12, patch_size=4, qkv_bias=False)),
    "vit_classifier": Case("ViTForImageClassification", dict(**_SMALL, image_size=12, patch_size=3, num_labels=7)),
    "clip": Case(
        "CLIPModel",
        dict(
            text_config=dict(**{**_BERT, "hidden_size": 16}, bos_token_id=57, eos_token_id=58),
            vision_config=dict(**_SMALL, image_size=12, patch_size=4),
            projection_dim=10,
        ),
    ),
    "clip_first": Case(  # as first published: the end token is the one with the highest number
        "CLIPModel",
        dict(
            text_config=dict(**_BERT, hidden_act="gelu", eos_token_id=2),
            vision_config=dict(**_SMALL, image_size=8, patch_size=4, layer_norm_eps=1e-6),
            projection_dim=6,
        ),
    ),
    "resnet": Case("ResNetModel", dict(**_STAGES, layer_type="basic", downsample_in_first_stage=True)),
    "resnet_classifier": Case("ResNetForImageClassification", dict(**_STAGES, num_labels=4)),
}


def bert(draw: np.random.Generator) -> Case:
    """Every task, any number of segments and labels."""
    heads = int(draw.choice([1, 2, 4]))
    tasks = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    task = str(draw.choice(tasks))
    fields = dict(
        vocab_size=int(draw.integers(20, 90)),
        hidden_size=heads * int(draw.choice([6, 8, 12])),
        num_hidden_layers=int(draw.integers(1, 4)),
        num_attention_heads=heads,
        intermediate_size=int(draw.integers(10, 60)),
        max_position_embeddings=int(draw.integers(LENGTH, 30)),
        type_vocab_size=int(draw.integers(1, 4)),
        hidden_act=str(draw.choice(["gelu", "gelu_new", "relu"])),
        layer_norm_eps=float(draw.choice([1e-12, 1e-5])),
        num_labels=2 if task == "ForQuestionAnswering" else int(draw.integers(1, 6)),
    )
    return Case(f"Bert{task}", fields)


def vit(draw: np.random.Generator) -> Case:
    """Images with one to four channels, patches of any size."""
    heads, patch = int(draw.choice([1, 2, 4])), int(draw.integers(2, 6))
    fields = dict(
        image_size=patch * int(draw.integers(1, 5)),
        patch_size=patch,
        num_channels=int(draw.choice([1, 3, 4])),
        hidden_size=heads * int(draw.choice([6, 8, 12])),
        num_hidden_layers=int(draw.integers(1, 4)),
        num_attention_heads=heads,
        intermediate_size=int(draw.integers(10, 60)),
        hidden_act=str(draw.choice(["gelu", "gelu_new", "relu"])),
        layer_norm_eps=float(draw.choice([1e-12, 1e-6])),
        qkv_bias=bool(draw.integers(2)),
        num_labels=int(draw.integers(1, 9)),
    )
    return Case(str(draw.choice(["ViTModel", "ViTForImageClassification"])), fields)


def clip(draw: np.random.Generator) -> Case:
    """Two encoders of different sizes, and both meanings of the end token."""
    text, vision = bert(draw).fields, vit(draw).fields
    del text["num_labels"], text["type_vocab_size"], vision["num_labels"], vision["qkv_bias"]
    text["eos_token_id"] = 2 if draw.integers(2) else text["vocab_size"] - 2
    text["bos_token_id"] = text["pad_token_id"] = 0
    fields = dict(text_config=text, vision_config=vision, projection_dim=int(draw.integers(4, 20)))
    return Case("CLIPModel", fields)


def resnet(draw: np.random.Generator) -> Case:
    """Both kinds of blocks, and every way to shrink the image."""
    stages = int(draw.integers(1, 4))
    fields = dict(
        num_channels=int(draw.choice([1, 3])),
        embedding_size=int(draw.choice([4, 8])),
        hidden_sizes=[int(draw.choice([8, 12, 16])) for _ in range(stages)],
        depths=[int(draw.integers(1, 4)) for _ in range(stages)],
        layer_type=str(draw.choice(["basic", "bottleneck"])),
        hidden_act=str(draw.choice(["relu", "gelu"])),
        downsample_in_first_stage=bool(draw.integers(2)),
        downsample_in_bottleneck=bool(draw.integers(2)),
        num_labels=int(draw.integers(1, 9)),
    )
    return Case(str(draw.choice(["ResNetModel", "ResNetForImageClassification"])), fields)


RANDOM = {"bert": bert, "vit": vit, "clip": clip, "resnet": resnet}


def make(case: Case, seed: int) -> Any:
    """Returns a model with random weights that make every one of its parts matter, norms and statistics included."""
    cls = getattr(transformers, case.cls)
    model = cls._from_config(cls.config_class(**copy.deepcopy(case.fields)), attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("running_var"):
                tensor.copy_(torch.exp(0.5 * noise))
            elif not tensor.is_floating_point():
                continue
            elif tensor.ndim < 2:
                tensor.add_(0.3 * noise)
            else:
                tensor.copy_(1.5 * noise / max(1, tensor[0].numel()) ** 0.5)
    return model.float().eval()


def load(directory: pathlib.Path, cls: str) -> Any:
    """Returns the model that `transformers` reads from a directory; every tensor must be given and used."""
    model, report = getattr(transformers, cls).from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    problems = {name: found for name, found in report.items() if found}
    assert not problems, f"{directory}: {problems}"
    assert model.config.architectures == [cls], model.config.architectures
    return model.eval()


def inputs(config: Any, seed: int) -> Arrays:
    """Returns random inputs for a model of `transformers` with this config."""
    draw = np.random.default_rng(seed)
    if config.model_type == "clip":
        given = {"images": images(config.vision_config, draw, BATCH + 1), "tokens": texts(config.text_config, draw)}
        return {**given, "mask": given["tokens"] != 0}
    if config.model_type != "bert":
        return {"images": images(config, draw, BATCH)}
    lengths = np.array([LENGTH, LENGTH - 4])
    tokens = draw.integers(1, config.vocab_size, (BATCH, LENGTH), np.int32)
    segments = np.sort(draw.integers(0, config.type_vocab_size, (BATCH, LENGTH), np.int32))
    return {"tokens": tokens, "segments": segments, "mask": np.arange(LENGTH) < lengths[:, None]}


def images(config: Any, draw: np.random.Generator, number: int) -> np.ndarray:
    """Returns random images, `[number, height, width, channels]`."""
    height, width = (37, 30) if config.model_type == "resnet" else (config.image_size, config.image_size)
    return draw.standard_normal((number, height, width, config.num_channels), np.float32)


def texts(config: Any, draw: np.random.Generator) -> np.ndarray:
    """Returns random texts for a CLIP, with an end token and padding after it."""
    end = config.vocab_size - 1 if config.eos_token_id == 2 else config.eos_token_id
    tokens = draw.integers(3, config.vocab_size - 2, (BATCH, LENGTH), np.int32)
    tokens[0, 7:], tokens[1, 4:] = 0, 0
    tokens[0, 6] = tokens[1, 3] = end
    return tokens


def outputs(model: Any, given: Arrays) -> Arrays:
    """Returns what a model of `transformers` computes."""
    names = {"tokens": "input_ids", "segments": "token_type_ids", "mask": "attention_mask"}
    arguments = {names[name]: torch.from_numpy(array).long() for name, array in given.items() if name in names}
    if "images" in given:
        arguments["pixel_values"] = torch.from_numpy(given["images"].transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        out = model(**arguments)
    if "start_logits" in out:
        return {"logits": torch.stack([out.start_logits, out.end_logits], dim=-1).numpy()}
    names = [*("logits", "last_hidden_state", "pooler_output")]
    if model.config.model_type == "clip":
        names = ["logits_per_image", "logits_per_text", "text_embeds", "image_embeds"]
    found = {name: out[name].numpy() for name in names if name in out}
    if model.config.model_type == "resnet" and "pooler_output" in found:
        found["last_hidden_state"] = found["last_hidden_state"].transpose(0, 2, 3, 1)  # channels last
        found["pooler_output"] = found["pooler_output"][:, :, 0, 0]
    return found
