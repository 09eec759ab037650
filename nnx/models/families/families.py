"""All families of decoders, by `model_type`. To add one, write it in the file of its maker."""

from collections.abc import Mapping
from typing import Any

from nnx.models.config import DecoderConfig
from nnx.models.families.alibaba import ALIBABA
from nnx.models.families.alibaba_hybrids import ALIBABA_HYBRIDS
from nnx.models.families.allenai import ALLENAI
from nnx.models.families.answer_ai import ANSWER_AI
from nnx.models.families.baidu import BAIDU
from nnx.models.families.cohere import COHERE
from nnx.models.families.deepseek import DEEPSEEK
from nnx.models.families.google import GOOGLE
from nnx.models.families.huggingface import HUGGINGFACE
from nnx.models.families.ibm import IBM
from nnx.models.families.lg import LG
from nnx.models.families.meta import META
from nnx.models.families.microsoft import MICROSOFT
from nnx.models.families.mistral import MISTRAL
from nnx.models.families.openai import OPENAI
from nnx.models.families.others import OTHERS
from nnx.models.families.tii import TII
from nnx.models.families.zhipu import ZHIPU
from nnx.models.family import Family

UNKNOWN_MODEL = "{where}: the model_type {got!r} is not among the known ones: {known}."

_MAKERS = (
    *(ALIBABA, ALIBABA_HYBRIDS, ALLENAI, ANSWER_AI, BAIDU, COHERE, DEEPSEEK, GOOGLE, HUGGINGFACE, IBM, LG),
    *(META, MICROSOFT, MISTRAL, OPENAI, OTHERS, TII, ZHIPU),
)

FAMILIES = dict(sorted((family.model_type, family) for maker in _MAKERS for family in maker))
"""The known families of decoders by `model_type`."""


def family_of(model_type: Any, where: str) -> Family:
    """Returns a family by its name; `where` is named in the error."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(UNKNOWN_MODEL.format(where=where, got=model_type, known=", ".join(FAMILIES)))
    return FAMILIES[model_type]


def config_from_dict(entries: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """Translates the entries of a `config.json`; `where` is the name of the file, for errors.

    Raises:
        ValueError: the model type is unknown, an entry is missing or malformed, or a setting is not supported.
    """
    return family_of(entries.get("model_type"), where).read(entries, where)


def config_to_dict(config: DecoderConfig) -> dict[str, Any]:
    """Returns the entries of the `config.json` with which `transformers` loads such a model.

    Raises:
        ValueError: a field has a value that no model of the family has, so the file cannot express it.
    """
    return family_of(config.model_type, "DecoderConfig").write(config)
