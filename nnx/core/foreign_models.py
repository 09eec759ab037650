"""Models and tensors of other libraries where ours are expected: the errors say how to take them across.

No other library is imported. Whoever passes one of its models has imported it, so that `sys.modules` has its name.
"""

import sys
from collections.abc import Iterator
from typing import Any

LOST = "{where} was given {what} ({name}), whose updates would be lost: NNX does not know its state. {advice}"
FLAX_RNGS = """{where} was given Flax's Rngs, whose keys would be the same in every call. Random numbers come from a \
Context here: make ctx = nnx.context(0, dropout=1) and pass ctx."""
EQUINOX = """{where} was given an Equinox Module ({name}), which nnx.Optimizer would never train: it would be one \
opaque value. Make it a Module: {field} = nnx.bridge.from_equinox(module). To keep its arrays as data that nothing \
trains, write nnx.Node(module)."""

FLAX = ("a Flax Module", "Make it a Module first: model = nnx.bridge.from_flax(module).")
LINEN = ("a Linen module", "Make it a Module first: model = nnx.bridge.from_linen(module, x, ctx=nnx.context(0)).")
HAIKU = (
    "a Haiku module",
    "Make a Module of the function that calls it: "
    "model = nnx.bridge.from_haiku(hk.transform_with_state(f), x, ctx=nnx.context(0)).",
)
TRANSFORMED = (
    "a pair of Haiku's functions",
    "Make it a Module first: model = nnx.bridge.from_haiku(transformed, x, ctx=nnx.context(0)).",
)
KERAS = (
    "a Keras layer",
    "Make a Module of its stateless_call with nnx.bridge.from_functions; the page 'Bring your model' shows how.",
)

TORCH_TENSOR = """{where} was given a tensor of PyTorch ({name}), which JAX does not know. Convert it first: \
`jnp.asarray(tensor.detach().cpu().numpy())`."""
TORCH_MODULE = """{where} was given a Module of PyTorch ({name}), which JAX cannot run. Write it as an nnx.Module; \
`nnx.load_torch_state_dict(model, torch_module.state_dict())` takes its weights."""

_TORCH = {"Tensor": TORCH_TENSOR, "Module": TORCH_MODULE}
_BASES = {
    ("flax", "Module"): FLAX,
    ("haiku", "Module"): HAIKU,
    ("haiku", "Transformed"): TRANSFORMED,
    ("haiku", "TransformedWithState"): TRANSFORMED,
    ("haiku", "MultiTransformed"): TRANSFORMED,
    ("haiku", "MultiTransformedWithState"): TRANSFORMED,
    ("keras", "Layer"): KERAS,
}
_LIBRARIES = ("flax", "haiku", "keras", "torch")


def refuse_foreign_model(value: Any, where: str) -> None:
    """Raises TypeError if a value is a model of Flax, Linen, Haiku, Keras or PyTorch, a tensor, or Flax's Rngs.

    Args:
        value: what was passed or assigned.
        where: what it was given to, the subject of the message.
    """
    if not any(map(sys.modules.__contains__, _LIBRARIES)):
        return
    for base in type(value).__mro__:
        library = base.__module__.partition(".")[0]
        if library not in _LIBRARIES:
            continue
        if library == "flax" and base.__name__ == "Rngs":
            raise TypeError(FLAX_RNGS.format(where=where))
        if library == "torch" and base.__name__ in _TORCH:
            raise TypeError(_TORCH[base.__name__].format(where=where, name=type(value).__name__))
        found = _BASES.get((library, base.__name__))
        if found is not None:
            what, advice = LINEN if base.__module__.startswith("flax.linen") else found
            raise TypeError(LOST.format(where=where, what=what, name=type(value).__name__, advice=advice))


def refuse_equinox_module(value: Any, name: str, owner: str) -> None:
    """Raises TypeError if a value for an attribute is an Equinox Module with arrays, or a list or dict of them.

    One without arrays, such as a solver of Diffrax, is a static value like others.

    Args:
        value: a pytree that holds arrays.
        name: the name of the attribute.
        owner: the name of the class that it belongs to.
    """
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return
    for item in _items(value):
        if isinstance(item, equinox.Module):
            text = {"where": f"The attribute {name!r} of {owner}", "name": type(item).__name__}
            raise TypeError(EQUINOX.format(**text, field=f"self.{name}"))


def _items(value: Any) -> Iterator[Any]:
    """Yields a value and what is in it, as far as it consists of plain lists, tuples and dicts."""
    yield value
    if type(value) in (list, tuple):
        for item in value:
            yield from _items(item)
    elif type(value) is dict:
        for item in value.values():
            yield from _items(item)
