"""Checks that tests of every room share: nothing has changed, nothing has leaked, and a refusal says why."""

import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import jax
import pytest

import nnx
from tests.models import Tree

# For tests that read a compiled program or its cost. Without the fusion emitters, which `conftest.py` switches off, XLA
# replaces each scatter by a loop.
AS_OUTSIDE_THE_TESTS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else None


def photograph(module: nnx.Module) -> Any:
    """Everything that can be seen of a Module: its objects, the types and arrays of its state, its structure."""
    state, moduledef = module.partition()
    types = [(path, type(leaf)) for path, leaf in state.items()]
    return list(module.modules()), types, jax.tree.leaves(state), moduledef


def name_of(value: object) -> str:
    """Returns the name of a parameter of a test, without addresses: processes of pytest compare the names."""
    return str(getattr(value, "__name__", value))


def assert_unchanged(module: nnx.Module, before: Any) -> None:
    """Compares a Module with its photograph; its Modules and arrays must be the same objects."""
    modules, types, leaves, moduledef = photograph(module)
    assert all(a is b for a, b in zip(modules, before[0], strict=True))
    assert types == before[1]
    assert all(a is b for a, b in zip(leaves, before[2], strict=True))
    assert moduledef == before[3]
    assert_no_tracers(module)


def assert_no_tracers(module: nnx.Module) -> None:
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(module.get_state()))


def sealed(fields: Mapping[str, Any]) -> str:
    """The text of a manifest with these fields: it begins with the checksum of everything behind its first line."""
    rest = json.dumps(fields, indent=1).removeprefix("{\n")
    return f'{{\n "crc32": "{zlib.crc32(rest.encode()):08x}",\n{rest}'


def library_functions(call: Callable[[], Any]) -> list[str]:
    """Makes a call and returns the names of the functions of NNX that Python entered: one in a repeated jitted call."""
    package, entered = os.path.dirname(nnx.__file__) + os.sep, []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            entered.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def assert_refused(does: Callable[[Tree], Any], error: Any, says: Iterable[str]) -> None:
    """Whether `does(tree)` raises an error with all these fragments and leaves the Tree unchanged and usable."""
    tree = Tree()
    before = photograph(tree)
    with pytest.raises(error) as raised:
        does(tree)
    for fragment in says:
        assert fragment in str(raised.value)
    assert_unchanged(tree, before)
    tree.pop_state(nnx.Param)
