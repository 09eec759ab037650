"""Mistral AI: mistral, mixtral, ministral."""

from nnx.models.families.common import ATTENTION, COMMON, LLAMA, NORMS, STANDARD, experts, table
from nnx.models.family import Family
from nnx.models.files.config_entries import SpecialTokens
from nnx.models.files.rope_entries import Rotary
from nnx.models.files.windows import Windows

_EXPERTS = experts("w1", "w3", "w2", block="block_sparse_moe")

MISTRAL = (
    Family("mistral", "MistralForCausalLM", LLAMA, COMMON, parts=(*STANDARD, Windows(4096))),
    Family(
        "ministral", "MinistralForCausalLM", LLAMA, COMMON, parts=(*STANDARD, Windows(4096, lambda i, entries: True))
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        table(*ATTENTION, *_EXPERTS, *NORMS),
        {**COMMON, "num_local_experts": "num_experts", "num_experts_per_tok": "num_selected"},
        defaults={"norm_epsilon": 1e-5, "num_experts": 8, "num_selected": 2},
        parts=(Rotary(1_000_000.0), SpecialTokens(), Windows()),
    ),
)
