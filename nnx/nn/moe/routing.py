"""Routing: which experts does a token use, with which weights, and how evenly are they used?

A router scores all experts for each token, and the token goes to those with the highest scores. Nothing in this makes
it use all experts; `RouterLosses` do, as a part of the training loss.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nnx.nn.support.settings import cast

Scores = Literal["softmax", "sigmoid"]


class ExpertGroups(NamedTuple):
    """Experts in groups, of which a token uses a few: experts on few devices, so that there is less to send.

    Attributes:
        count: the number of groups, a divisor of the number of experts; neighbors form a group.
        selected: the number of groups that a token uses.
        best: the number of experts of a group whose scores are added up to the group's own.
    """

    count: int
    selected: int
    best: int = 2

    def kept(self, scores: jax.Array) -> jax.Array:
        """Returns scores `[tokens, experts]` with those outside of the best groups replaced by minus infinity."""
        grouped = scores.reshape(*scores.shape[:-1], self.count, -1)
        totals = lax.top_k(grouped, min(self.best, grouped.shape[-1]))[0].sum(axis=-1)
        is_kept = jax.nn.one_hot(lax.top_k(totals, self.selected)[1], self.count).sum(axis=-2) > 0
        return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(scores.shape)


class RouterLosses(NamedTuple):
    """The losses of routers, float32 scalars.

    Attributes:
        load_balancing: 1 if all experts are chosen equally often, up to `num_experts / num_selected` if a few get
            everything. For each expert, the part of the choices it got times its mean probability, summed and
            multiplied by the number of experts.
        z: the mean of the squared logarithm of the sum of the exponentiated logits. It keeps the logits small.
    """

    load_balancing: jax.Array
    z: jax.Array


class Routing(NamedTuple):
    """The router's choice: the experts of each token, `[tokens, num_selected]`, and their weights, in float32."""

    experts: jax.Array
    weights: jax.Array


def route(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    num_selected: int,
    scores: Scores,
    normalize: bool,
    axis: str | None,
    correction: jax.Array | None = None,
    groups: ExpertGroups | None = None,
    weight_scale: float = 1.0,
) -> tuple[Routing, RouterLosses]:
    """Returns the experts that each token uses, and the losses over all devices of a mesh axis, if any."""
    # The choice is discrete, so rounding could change it: the router always uses at least float32.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.matmul(cast(x, wide), cast(kernel, wide), precision=lax.Precision.HIGHEST)
    if bias is not None:
        logits = logits + cast(bias, wide)
    scored = jax.nn.softmax(logits) if scores == "softmax" else jax.nn.sigmoid(logits)
    preferred = scored if correction is None else scored + cast(correction, wide)
    experts = lax.top_k(preferred if groups is None else groups.kept(preferred), num_selected)[1]
    weights = jnp.take_along_axis(scored, experts, axis=-1)
    if normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)  # sigmoids can all be zero
    weights = weights * weight_scale

    probabilities = scored if scores == "softmax" else scored / (scored.sum(axis=-1, keepdims=True) + 1e-20)
    chosen = jnp.zeros(kernel.shape[1], wide).at[experts.reshape(-1)].add(1) / experts.size
    means = chosen, probabilities.mean(axis=0), jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
    if axis is not None:
        means = lax.pmean(means, axis)
    chosen, probable, z = means
    return Routing(experts, weights), RouterLosses(kernel.shape[1] * jnp.sum(chosen * probable), z)
