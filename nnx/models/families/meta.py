"""Meta: llama."""

from nnx.models.families.common import BIASES, COMMON, LLAMA, MLP_BIAS, STANDARD
from nnx.models.family import Family

META = (Family("llama", "LlamaForCausalLM", LLAMA, {**COMMON, **BIASES, **MLP_BIAS}, parts=STANDARD),)
