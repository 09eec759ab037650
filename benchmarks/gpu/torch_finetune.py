"""The same in PyTorch: a Llama of transformers with gradient checkpointing, its layers compiled, and fused AdamW."""

# PyTorch is not among the project's dependencies.
# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.llamas import published_config


class LowRank(nn.Module):
    """A linear layer whose weights stay fixed, and a product of two thin matrices that is trained."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, **like)
        self.up = nn.Linear(rank, base.out_features, bias=False, **like)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def make(run: Any, rate: float, rank: int | None) -> tuple[Callable[[], Any], Callable[[Any], Any], Callable[[], int]]:
    """Returns a training step, a function that waits for it, and one that returns the peak of memory in bytes.

    Args:
        run: the `Run` of the benchmark.
        rate: the learning rate.
        rank: that of the adapters; None trains all weights.
    """
    config = LlamaConfig(**published_config(run.sizes), use_cache=False)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if rank is not None:
        model.requires_grad_(False)
        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, child in list(part.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(part, name, LowRank(child, rank))
        model.enable_input_require_grads()
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.model.layers:
        layer.compile()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, fused=device == "cuda")
    tokens = torch.randint(0, run.sizes.vocab, (run.rows, run.length), device=device)

    def step() -> Any:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def wait(loss: Any) -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    return step, wait, lambda: torch.cuda.max_memory_allocated() if device == "cuda" else 0
