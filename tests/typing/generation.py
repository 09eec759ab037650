"""Generation as users write it: the result depends on `return_logprobs`. pyright checks this file."""

from typing import assert_type

import jax
import numpy as np

import nnx


def results(model: nnx.models.Decoder, prompts: np.ndarray, ctx: nnx.Context) -> None:
    assert_type(nnx.generate(model, prompts, max_new_tokens=3, temperature=0), jax.Array)
    assert_type(nnx.generate(model, [[1, 2], [3, 4]], max_new_tokens=3, ctx=ctx), jax.Array)
    tokens, logprobs = nnx.generate(
        model, prompts, max_new_tokens=3, lengths=[1, 2], top_k=5, stop_tokens=[7], ctx=ctx, return_logprobs=True
    )
    assert_type(tokens, jax.Array)
    assert_type(logprobs, jax.Array)


def callbacks(model: nnx.models.Decoder, prompts: jax.Array) -> None:
    def stream(tokens: np.ndarray) -> None:
        print(tokens)

    def logits_fn(logits: jax.Array) -> jax.Array:
        return logits.at[:, 0].set(-1e9)

    nnx.generate(model, prompts, max_new_tokens=3, temperature=0, stream=stream, logits_fn=logits_fn)
