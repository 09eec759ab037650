"""Published models with the layers of BERT: bert, roberta, xlm-roberta, as the `Architecture` `BERT`.

Those of roberta begin at the position after the number of their padding token. In their heads, the layer in front of a
classifier has the name of the head; it is the one that a plain model calls its pooler.
"""

from typing import Any

from nnx.models.architecture import Architecture
from nnx.models.architectures.bert import TASKS, Bert, BertConfig, BertWithHead
from nnx.models.family import Family
from nnx.models.files.config_entries import ENCODER, Labels
from nnx.models.files.table import Table, TableEntry, attention, linear, norm

_NAMES = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_LAYER = "encoder.layer.{}"
_BODY = (
    TableEntry("embeddings.word_embeddings.weight", ("embed/embedding",)),
    TableEntry("embeddings.position_embeddings.weight", ("positions/embedding",)),
    TableEntry("embeddings.token_type_embeddings.weight", ("segments/embedding",)),
    *norm("embeddings.LayerNorm", "norm"),
    *attention(f"{_LAYER}.attention", ("self.query", "self.key", "self.value", "output.dense"), "layers/{}/attention"),
    *norm(f"{_LAYER}.attention.output.LayerNorm", "layers/{}/attention_norm"),
    *linear(f"{_LAYER}.intermediate.dense", "layers/{}/mlp/layers/0"),
    *linear(f"{_LAYER}.output.dense", "layers/{}/mlp/layers/1"),
    *norm(f"{_LAYER}.output.LayerNorm", "layers/{}/mlp_norm"),
    *linear("pooler.dense", "pooler"),
)
_HEADS = {
    None: (),
    "masked_lm": (
        *linear("cls.predictions.transform.dense", "head/dense"),
        *norm("cls.predictions.transform.LayerNorm", "head/norm"),
        TableEntry("cls.predictions.bias", ("head/bias",)),
    ),
    "sequence_classification": linear("classifier", "head"),
    "token_classification": linear("classifier", "head"),
    "question_answering": linear("qa_outputs", "head"),
}
_ROBERTA_HEADS = {
    **_HEADS,
    "masked_lm": (
        *linear("lm_head.dense", "head/dense"),
        *norm("lm_head.layer_norm", "head/norm"),
        TableEntry("lm_head.bias", ("head/bias",)),
    ),
    "sequence_classification": (
        *linear("classifier.dense", "encoder/pooler"),
        *linear("classifier.out_proj", "head"),
    ),
}
# Published masked models keep the head of their other training task, and second copies of the tied parameters.
_UNUSED = (r"(bert|roberta)\.pooler\..*", r"cls\.seq_relationship\..*", r"(cls\.predictions|lm_head)\.decoder\..*")
_OLDER = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def _family(
    model_type: str, stem: str, scope: str, heads: dict[str | None, tuple[TableEntry, ...]], **more: Any
) -> Family:
    """Returns a family, given the start of the names of its classes, and of its tensors in a model with a head."""
    tables = {}
    for task, head in heads.items():
        in_head = any(path.startswith("encoder/") for entry in head for path in entry.paths)
        body = tuple(entry for entry in _BODY if not (in_head and entry.name.startswith("pooler.")))
        unused = _UNUSED if task == "masked_lm" else _UNUSED[:1] if in_head else ()
        ignored = (rf"({scope}\.)?embeddings\.position_ids", *unused)
        tables[task] = Table(body, head, f"{scope}.", "encoder/", ignored, _OLDER)
    keys = {"vocab_size": "vocab_size", "max_position_embeddings": "max_length", "type_vocab_size": "num_segments"}
    only = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}
    return Family(
        model_type,
        {None: f"{stem}Model", **{task: stem + name for task, name in zip(TASKS, _NAMES, strict=True)}},
        lambda config: tables[config.task],
        {**keys, **ENCODER, **more.pop("keys", {})},
        only={**only, "tie_word_embeddings": True},
        parts=(Labels(),),
        config=BertConfig,
        **more,
    )


_ROBERTA: dict[str, Any] = {"keys": {"pad_token_id": "padding_token"}, "constants": {"head_activation": "gelu"}}

BERT = Architecture(
    families=(
        _family("bert", "Bert", "bert", _HEADS),
        _family(
            "roberta",
            "Roberta",
            "roberta",
            _ROBERTA_HEADS,
            **_ROBERTA,
            defaults={"vocab_size": 50265, "padding_token": 1},
        ),
        _family("xlm-roberta", "XLMRoberta", "roberta", _ROBERTA_HEADS, **_ROBERTA, defaults={"padding_token": 1}),
    ),
    modules=(Bert, BertWithHead),
    build=lambda config, **options: (Bert if config.task is None else BertWithHead)(config, **options),
    dtype_paths=("embed/embedding", "encoder/embed/embedding"),
)
"""How models with the layers of BERT are opened and written."""
