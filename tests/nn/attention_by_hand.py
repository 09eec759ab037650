"""Dot-product attention in numpy, to compare with."""

import numpy as np


def by_hand(query, key, value, mask=None, bias=None, scale=None, soft_cap=None, sinks=None) -> np.ndarray:
    """Attention in numpy, one batch row and head after the other; zeros for a query that sees no key."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    *batch, length, heads, dim = query.shape
    group = heads // key.shape[-2]
    shape = (*batch, heads, length, key.shape[-3])
    mask = np.ones(shape, bool) if mask is None else np.broadcast_to(np.asarray(mask, bool), shape)
    bias = np.zeros(shape) if bias is None else np.broadcast_to(np.asarray(bias, np.float64), shape)
    out = np.empty((*batch, length, heads, value.shape[-1]))
    for row in np.ndindex(*batch):
        for head in range(heads):
            logits = query[row][:, head] @ key[row][:, head // group].T * (dim**-0.5 if scale is None else scale)
            if soft_cap is not None:
                logits = soft_cap * np.tanh(logits / soft_cap)
            logits += bias[row][head]
            if sinks is not None:  # a key that everybody sees, and whose value is zero
                logits = np.concatenate([logits, np.full((length, 1), sinks[head])], axis=-1)
            seen = np.ones(logits.shape, bool)
            seen[:, : shape[-1]] = mask[row][head]
            weights = np.exp(logits - logits.max(-1, keepdims=True, initial=0)) * seen
            weights /= np.maximum(weights.sum(-1, keepdims=True), np.finfo(float).tiny)
            out[row][:, head] = weights[:, : shape[-1]] @ value[row][:, head // group]
    return out


def agrees(out, expected, atol=1e-5) -> None:
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=atol, rtol=1e-4)
