"""How values appear in reprs and error messages: arrays as dtype and shape, everything else in one short line."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from nnx.core.variables.trees import contains_itself, items_of

MAX_WIDTH = 80


def short(value: Any) -> str:
    """Returns one line for any value; arrays never print their numbers."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"ShapeDtypeStruct({_array(value)})"
    if isinstance(value, (jax.Array, np.ndarray)):
        prefix = "np." if isinstance(value, np.ndarray) else ("traced " if isinstance(value, jax.core.Tracer) else "")
        return f"{prefix}{_array(value)}"
    if isinstance(value, (list, tuple)) and _holds_arrays(value):
        return _sequence(value, short)
    if isinstance(value, dict) and _holds_arrays(value):
        return "{" + ", ".join(f"{k!r}: {short(v)}" for k, v in value.items()) + "}"
    if callable(value) and hasattr(value, "__qualname__"):
        home = getattr(value, "__module__", None) or "?"
        is_private = "._" in home  # then the name of the module would not help the reader
        return value.__qualname__ if is_private else f"{home}.{value.__qualname__}"
    text = repr(value)
    return text if len(text) <= MAX_WIDTH else f"{text[: MAX_WIDTH - 3]}..."


def _array(value: Any) -> str:
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def _holds_arrays(container: Any) -> bool:
    if contains_itself(container):
        return False
    try:
        return any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(list(items_of(container))))
    except (TypeError, ValueError):  # a dict whose keys cannot be sorted is not a pytree
        return False


def _sequence(value: Any, item: Any) -> str:
    inner = ", ".join(item(x) for x in value)
    if isinstance(value, list):
        return f"[{inner}]"
    if hasattr(value, "_fields"):
        fields = ", ".join(f"{name}={item(x)}" for name, x in zip(value._fields, value, strict=True))
        return f"{type(value).__name__}({fields})"
    return f"({inner},)" if len(value) == 1 else f"({inner})"


def type_text(value: Any) -> str:
    """Returns the dtype and shape of an array, or the structure of a pytree with those of its leaves.

    Values with the same text can take each other's place in a loop or a branch.
    """
    leaves, treedef = jax.tree.flatten(value)
    types = [f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for leaf in leaves]
    return types[0] if len(leaves) == 1 and leaves[0] is value else f"{treedef} of {', '.join(types)}"


def article(word: str) -> str:
    """Returns the word with "a" or "an" in front."""
    return f"an {word}" if word[:1].lower() in "aeiou" else f"a {word}"
