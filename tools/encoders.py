"""The encoders of `transformers` that NNX is compared with: tiny random models, and what they compute.

A *case* is a class of `transformers` and the fields of its config that matter. Inputs and outputs are dicts of numpy
arrays with the names and layouts of NNX: images have their channels last, and the output is called `logits` if the
model has a head.
"""

import copy
import functools
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
_T5 = dict(vocab_size=60, d_model=24, d_kv=8, d_ff=40, num_layers=2, num_heads=4)
_WHISPER = dict(
    **dict(vocab_size=60, d_model=24, num_mel_bins=10, max_source_positions=16, max_target_positions=40),
    **dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3),
)
_STAGES = dict(embedding_size=8, hidden_sizes=[16, 24], depths=[1, 2])

GOLDENS = {
    "bert": Case("BertModel", _BERT),
    "bert_masked_lm": Case("BertForMaskedLM", dict(**_BERT, hidden_act="gelu_new")),
    "bert_classifier": Case("BertForSequenceClassification", dict(**_BERT, num_labels=3)),
    "bert_tokens": Case("BertForTokenClassification", dict(**_BERT, num_labels=5)),
    "bert_answers": Case("BertForQuestionAnswering", dict(**_BERT, type_vocab_size=3)),
    "roberta": Case("RobertaForMaskedLM", dict(**_BERT, hidden_act="relu")),
    "roberta_classifier": Case("RobertaForSequenceClassification", dict(**_BERT, num_labels=3)),
    "xlm_roberta": Case("XLMRobertaModel", dict(**_BERT, type_vocab_size=1, pad_token_id=3)),
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
    "t5": Case("T5ForConditionalGeneration", dict(**_T5, relative_attention_num_buckets=8)),
    "t5_v1_1": Case(  # gated, untied, decoder and encoder of different depths
        "T5ForConditionalGeneration",
        dict(
            **_T5,
            num_decoder_layers=1,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            relative_attention_num_buckets=6,
            relative_attention_max_distance=9,
        ),
    ),
    "whisper": Case(
        "WhisperForConditionalGeneration",
        dict(
            **_WHISPER,
            **dict(encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=40),
            **dict(decoder_layers=1, decoder_attention_heads=3, decoder_ffn_dim=32),
        ),
    ),
    "t5_encoder": Case("T5EncoderModel", dict(**_T5, relative_attention_max_distance=20)),
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


def roberta(draw: np.random.Generator, stem: str = "Roberta") -> Case:
    """As bert, with any padding token, and positions that begin after its number."""
    cls, fields = bert(draw)
    padding = int(draw.integers(0, 5))
    length = fields["max_position_embeddings"] + padding + 1
    return Case(cls.replace("Bert", stem), {**fields, "max_position_embeddings": length, "pad_token_id": padding})


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


def t5(draw: np.random.Generator) -> Case:
    """Every activation, gated or not, tied or not, distances in few and in many buckets."""
    buckets = int(draw.choice([4, 7, 12, 32]))
    fields = dict(
        vocab_size=int(draw.integers(20, 90)),
        d_model=int(draw.choice([12, 16, 30])),
        d_kv=int(draw.choice([4, 6, 8])),
        d_ff=int(draw.integers(10, 60)),
        num_layers=int(draw.integers(1, 4)),
        num_decoder_layers=int(draw.integers(1, 4)),
        num_heads=int(draw.choice([1, 2, 4])),
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=buckets // 2 + int(draw.integers(1, 20)),
        feed_forward_proj=str(draw.choice(["relu", "gated-gelu", "gated-silu", "gelu"])),
        layer_norm_epsilon=float(draw.choice([1e-6, 1e-5])),
        tie_word_embeddings=bool(draw.integers(2)),
    )
    return Case("T5EncoderModel" if draw.integers(4) == 0 else "T5ForConditionalGeneration", fields)


def whisper(draw: np.random.Generator) -> Case:
    """An encoder and a decoder of different sizes, sound with any number of bands and frames."""
    sizes = dict(
        vocab_size=int(draw.integers(20, 90)),
        d_model=int(draw.choice([12, 24, 36])),
        num_mel_bins=int(draw.integers(4, 20)),
        max_source_positions=int(draw.integers(6, 30)),
        activation_function=str(draw.choice(["gelu", "gelu_new", "relu"])),
    )
    for part in ("encoder", "decoder"):
        sizes |= {
            f"{part}_layers": int(draw.integers(1, 4)),
            f"{part}_attention_heads": int(draw.choice([1, 2, 3, 4, 6])),
            f"{part}_ffn_dim": int(draw.integers(10, 60)),
        }
    return Case("WhisperForConditionalGeneration", {**_WHISPER, **sizes})


RANDOM = {"bert": bert, "roberta": roberta, "xlm-roberta": functools.partial(roberta, stem="XLMRoberta")}
RANDOM |= {"vit": vit, "clip": clip, "resnet": resnet, "t5": t5, "whisper": whisper}


def make(case: Case, seed: int, gain: float = 1.5) -> Any:
    """Returns a model with random weights that make every one of its parts matter, norms and statistics included.

    Args:
        case: the class and its config.
        seed: the seed of the weights.
        gain: the size of the matrices. With larger ones, layers outweigh the embedding, and a model that writes repeats
            itself less; but rounding errors grow with every layer.
    """
    cls = getattr(transformers, case.cls)
    model = cls._from_config(cls.config_class(**copy.deepcopy(case.fields)), attn_implementation="eager")
    if case.fields.get("tie_word_embeddings") is False and hasattr(model, "lm_head"):
        # Made from a config, a T5 is always tied; loaded from files with an output layer, it is not.
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
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
                tensor.copy_(spread(name, model.config, gain) * noise / max(1, tensor[0].numel()) ** 0.5)
    return model.float().eval()


def spread(name: str, config: Any, gain: float) -> float:
    """Returns the deviation of a matrix times the root of its inputs."""
    if name in ("shared.weight", "model.decoder.embed_tokens.weight"):
        return 1.5
    if config.model_type == "t5" and name.endswith(".q.weight"):
        return 2 * gain / config.d_kv**0.5  # the logits of attention are not scaled
    return gain


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
    if config.model_type == "whisper":
        sound = draw.standard_normal((BATCH, 2 * config.max_source_positions, config.num_mel_bins), np.float32)
        return {"sound": sound, "decoder_tokens": beginnings(config, draw)}
    if "bert" not in config.model_type and config.model_type != "t5":
        return {"images": images(config, draw, BATCH)}
    lengths = np.array([LENGTH, LENGTH - 4])
    tokens = draw.integers(1, config.vocab_size, (BATCH, LENGTH), np.int32)
    if "roberta" in config.model_type:
        tokens[0, [1, 5]] = config.pad_token_id  # in the middle of a text
    if config.model_type == "t5":
        given = {"tokens": tokens, "mask": np.arange(LENGTH) < lengths[:, None]}
        if config.is_encoder_decoder:
            given["decoder_tokens"] = beginnings(config, draw)
        return given
    segments = np.sort(draw.integers(0, config.type_vocab_size, (BATCH, LENGTH), np.int32))
    return {"tokens": tokens, "segments": segments, "mask": np.arange(LENGTH) < lengths[:, None]}


def start_token(config: Any) -> int:
    """Returns the token with which an encoder-decoder starts to write; those of T5 need not say it."""
    return getattr(config, "decoder_start_token_id", None) or 0


def beginnings(config: Any, draw: np.random.Generator) -> np.ndarray:
    """Returns random texts for a decoder."""
    tokens = draw.integers(1, config.vocab_size, (BATCH, LENGTH + 3), np.int32)
    tokens[:, 0] = start_token(config)
    return tokens


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
    names["decoder_tokens"] = "decoder_input_ids"
    arguments = {names[name]: torch.from_numpy(array).long() for name, array in given.items() if name in names}
    if "images" in given:
        arguments["pixel_values"] = torch.from_numpy(given["images"].transpose(0, 3, 1, 2).copy())
    if "sound" in given:
        arguments["input_features"] = torch.from_numpy(given["sound"].transpose(0, 2, 1).copy())
    with torch.no_grad():
        out = model(**arguments)
    if "start_logits" in out:
        return {"logits": torch.stack([out.start_logits, out.end_logits], dim=-1).numpy()}
    if "logits" in out:
        return {"logits": out.logits.numpy()}
    names = ["last_hidden_state", "pooler_output"]
    if model.config.model_type == "clip":
        names = ["logits_per_image", "logits_per_text", "text_embeds", "image_embeds"]
    found = {name: out[name].numpy() for name in names if name in out}
    if model.config.model_type == "resnet" and "pooler_output" in found:
        found["last_hidden_state"] = found["last_hidden_state"].transpose(0, 2, 3, 1)  # channels last
        found["pooler_output"] = found["pooler_output"][:, :, 0, 0]
    return found


def greedy(model: Any, given: Arrays, steps: int) -> tuple[np.ndarray, float]:
    """Returns the text an encoder-decoder writes, `[batch, steps]`, and the smallest lead of a token over the next.

    Each step reads the whole text again, so the answer does not depend on any cache.
    """
    text, lead = np.full((BATCH, 1), start_token(model.config), np.int32), np.inf
    for _ in range(steps):
        last = outputs(model, {**given, "decoder_tokens": text})["logits"][:, -1]
        best_two = np.sort(last, axis=-1)[:, -2:]
        lead = min(lead, float((best_two[:, 1] - best_two[:, 0]).min()))
        text = np.concatenate([text, last.argmax(-1)[:, None].astype(np.int32)], axis=1)
    return text[:, 1:], lead
