"""Matching: which entry of a checkpoint belongs to which path of the target, and what does not fit."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from nnx.storage.checkpoints.expected import Expected
from nnx.storage.checkpoints.hyperparameters import changes
from nnx.storage.checkpoints.manifest import Manifest
from nnx.storage.entry import Entry, entry_of
from nnx.storage.fitting import described_misfit, fits, was_narrower
from nnx.storage.leaves import Leaves, resolve_alias
from nnx.storage.load_report import LoadReport
from nnx.storage.renaming import renamed

NEEDS_X64 = "{entry}, which JAX can hold only with jax_enable_x64 (or cast=True)"


def match(
    manifest: Manifest,
    leaves: Leaves,
    expected: Mapping[str, Expected],
    *,
    strict: bool,
    cast: bool,
    rename: Mapping[str, str] | None,
) -> tuple[dict[str, str], LoadReport]:
    """Finds the entry of the checkpoint for each path of the target.

    Args:
        manifest: the manifest of the checkpoint.
        leaves: the leaves of the target.
        expected: the descriptions of its values, by path.
        strict: whether everything must fit. If False, optimizer state is also found elsewhere in a chain.
        cast: whether a value of a different dtype fits.
        rename: new names for paths of the checkpoint.

    Returns:
        The paths in the checkpoint by path of the target, and a report of everything that does not fit.
    """
    report = LoadReport()
    by_name = renamed(manifest.entries, rename or {})
    candidates = _candidates(manifest, leaves, by_name)
    if not strict:
        for path, saved in _rechained(manifest, leaves, by_name).items():
            candidates.pop(path, None)
            if saved is not None:
                candidates[path] = report.moved[path] = saved
    found: dict[str, str] = {}
    for path, leaf in leaves.by_path.items():
        saved = candidates.get(path)
        if saved is None:
            report.missing.append(path)
            continue
        have, want = manifest.entries[saved], entry_of(path, leaf.value, leaf.type)
        reason = _misfit(have, want, expected[path], cast)
        if reason is None:
            found[path] = saved
        else:
            report.mismatched[path] = reason
    known = set(candidates.values())
    report.unexpected = [name for name in manifest.entries if name not in known]
    report.moved = {path: saved for path, saved in report.moved.items() if path in found and path != saved}
    report.changed = _changed_settings(manifest, leaves)
    return found, report


def _changed_settings(manifest: Manifest, leaves: Leaves) -> dict[str, tuple[str, str]]:
    """Returns the static attributes that differ from those saved, of the Modules whose class is the same."""
    same = {path for path, name in manifest.modules.items() if leaves.modules.get(path) == name}
    saved = {path: lines for path, lines in manifest.hyperparameters.items() if path in same}
    return changes(saved, leaves.hyperparameters)


def _candidates(manifest: Manifest, leaves: Leaves, by_name: Mapping[str, str]) -> dict[str, str]:
    """Returns an entry for each path of the target: the one of that name, or of another name for a shared value."""
    wanted_as = {resolve_alias(name, leaves.aliases): saved for name, saved in by_name.items()}
    found: dict[str, str] = {}
    for path in leaves.by_path:
        for name, table in ((path, by_name), (resolve_alias(path, manifest.aliases), by_name), (path, wanted_as)):
            if name in table:
                found[path] = table[name]
                break
    return found


def _misfit(have: Entry, want: Entry, expected: Expected, cast: bool) -> tuple[str, str] | None:
    """Returns both sides as text if a saved value does not fit, else None."""
    cast = cast or was_narrower(have, want, want.type)
    if not fits(have, want, cast) or not _in_range(have, want):
        return described_misfit(str(have), have, want), str(want)
    if have.kind == "array" and not cast and expected.kind in ("number", "jax"):
        dtype = have.data_dtype
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            return NEEDS_X64.format(entry=have), str(want)
    return None


def _in_range(have: Entry, want: Entry) -> bool:
    """Whether a Python integer can be stored in the array that it will become."""
    if have.kind != "number" or have.dtype != "int" or want.kind != "array":
        return True
    dtype = jnp.dtype(want.dtype)
    if not jnp.issubdtype(dtype, np.integer):
        return abs(have.value) < 2**1023 and not (jnp.issubdtype(dtype, np.bool_) and have.value not in (0, 1))
    return jnp.iinfo(dtype).min <= have.value <= jnp.iinfo(dtype).max


# Optimizer state that moved


def _chain_place(path: str, type_name: str) -> tuple[str, str] | None:
    """Splits the path of optimizer state into the optimizer and the rest, without the position in the chain.

    `optimizer/opt_state/1/0/mu/encoder/0/kernel` becomes `optimizer/opt_state` and `mu/encoder/0/kernel`: adding a
    transformation to the chain changes the numbers in between and nothing else.
    """
    segments = path.split("/")
    if type_name != "OptState" or "opt_state" not in segments:
        return None
    at = len(segments) - 1 - segments[::-1].index("opt_state")
    rest = at + 1
    while rest < len(segments) - 1 and segments[rest].isdecimal():
        rest += 1
    return "/".join(segments[: at + 1]), "/".join(segments[rest:])


def _in_chains(types: Mapping[str, str]) -> dict[str, dict[str, list[str]]]:
    """Groups paths of optimizer state, given with their Variable types, by the two parts of `_chain_place`."""
    found: dict[str, dict[str, list[str]]] = {}
    for path, type_name in types.items():
        place = _chain_place(path, type_name)
        if place is not None:
            found.setdefault(place[0], {}).setdefault(place[1], []).append(path)
    return found


def _rechained(manifest: Manifest, leaves: Leaves, by_name: Mapping[str, str]) -> dict[str, str | None]:
    """Finds the saved state of optimizers whose chain has changed, by path in the target.

    If the chains differ, the same path need not mean the same thing on both sides (the count of Adam, the count of a
    schedule). So only parts that appear equally often on both sides are paired, in order; the others are None.
    """
    saved = _in_chains({name: manifest.entries[path].type for name, path in by_name.items()})
    wanted = _in_chains({path: leaf.type for path, leaf in leaves.by_path.items()})
    found: dict[str, str | None] = {}
    for optimizer, parts in wanted.items():
        before = saved.get(optimizer, {})
        if before == parts:
            continue
        for part, paths in parts.items():
            names = before.get(part, [])
            matching = names if len(names) == len(paths) else [None] * len(paths)
            found |= {path: None if name is None else by_name[name] for path, name in zip(paths, matching, strict=True)}
    return found
