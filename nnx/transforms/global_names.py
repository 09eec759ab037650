"""The globals that a function's code reads, each with the attributes that are read from it."""

import dis
import types
import weakref

Chain = tuple[str, ...]
"""A global name and the attributes read from it: `("config", "scale")` for `config.scale`."""

_BETWEEN = {"CACHE", "EXTENDED_ARG", "PRECALL", "PUSH_NULL"}  # can come between a name and its attributes

_chains: "weakref.WeakKeyDictionary[types.CodeType, tuple[Chain, ...]]" = weakref.WeakKeyDictionary()


def global_chains(code: types.CodeType) -> tuple[Chain, ...]:
    """Returns what a function's code reads from its globals, functions defined inside it included."""
    chains = _chains.get(code)
    if chains is None:
        found: dict[Chain, None] = {}
        codes = [code]
        while codes:
            current = codes.pop()
            codes.extend(const for const in current.co_consts if isinstance(const, types.CodeType))
            found.update(dict.fromkeys(_chains_in(current)))
        chains = _chains[code] = tuple(found)
    return chains


def _chains_in(code: types.CodeType) -> list[Chain]:
    chains: list[Chain] = []
    follows = False  # whether the last instruction was part of the last chain
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            chains.append((instruction.argval,))
            follows = True
        elif follows and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chains[-1] = (*chains[-1], instruction.argval)
        elif instruction.opname not in _BETWEEN:
            follows = False
    return chains
