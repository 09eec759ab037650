"""Published BERT models: the entries of `config.json` and the names of tensors, as the `Architecture` `BERT`."""

from nnx.models.architecture import Architecture
from nnx.models.architectures.bert import Bert, BertConfig, BertWithHead
from nnx.models.family import Family
from nnx.models.files.config_entries import ENCODER, Labels
from nnx.models.files.table import Table, TableEntry, attention, linear, norm

_CLASSES = {
    None: "BertModel",
    "masked_lm": "BertForMaskedLM",
    "sequence_classification": "BertForSequenceClassification",
    "token_classification": "BertForTokenClassification",
    "question_answering": "BertForQuestionAnswering",
}
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
# Published masked models keep the head of their other training task, and second copies of the tied parameters.
_UNUSED = {"masked_lm": (r"bert\.pooler\..*", r"cls\.seq_relationship\..*", r"cls\.predictions\.decoder\..*")}
_TABLES = {
    task: Table(
        _BODY,
        head,
        "bert.",
        "encoder/",
        (r"(bert\.)?embeddings\.position_ids", *_UNUSED.get(task or "", ())),
        {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    )
    for task, head in _HEADS.items()
}

_FAMILY = Family(
    "bert",
    _CLASSES,
    lambda config: _TABLES[config.task],
    {
        **{"vocab_size": "vocab_size", "max_position_embeddings": "max_length", "type_vocab_size": "num_segments"},
        **ENCODER,
    },
    only={
        **{"is_decoder": False, "add_cross_attention": False},
        **{"position_embedding_type": "absolute", "tie_word_embeddings": True},
    },
    parts=(Labels(),),
    config=BertConfig,
)

BERT = Architecture(
    families=(_FAMILY,),
    modules=(Bert, BertWithHead),
    build=lambda config, **options: (Bert if config.task is None else BertWithHead)(config, **options),
    dtype_paths=("embed/embedding", "encoder/embed/embedding"),
)
"""How `bert` models are opened and written."""
