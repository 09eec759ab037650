"""Which entry of a checkpoint belongs to which path of the target, also after the code has changed."""

from collections.abc import Mapping, Sequence

import jax

from nnx.core.state.paths import listing
from nnx.storage.checkpoints.hyperparameters import changes
from nnx.storage.checkpoints.manifest import Manifest
from nnx.storage.entry import IN_MANIFEST, Entry, entry_of
from nnx.storage.errors import LoadReport
from nnx.storage.expected import Expected
from nnx.storage.leaves import Leaves, resolve_alias
from nnx.storage.matching import Texts, match, misfit
from nnx.storage.renaming import renamed, selected

ONLY_NOTHING = "only={only!r} matches no path of the target; its paths are: {paths}"
OTHER_PROCESSES = "{entry} in each of {count} processes"


def match_entries(
    manifest: Manifest,
    leaves: Leaves,
    expected: Mapping[str, Expected],
    *,
    strict: bool,
    cast: bool,
    rename: Mapping[str, str] | None,
    only: str | Sequence[str] | None = None,
) -> tuple[dict[str, str], LoadReport]:
    """Finds the entry of the checkpoint for each path of the target.

    Args:
        manifest: the manifest of the checkpoint.
        leaves: the leaves of the target.
        expected: the descriptions of its values, by path.
        strict: whether everything must fit. If False, optimizer state is also found elsewhere in a chain.
        cast: whether a value of a different dtype fits.
        rename: new names for paths of the checkpoint.
        only: patterns of the paths, by their new names, to which both sides are limited; None for all.

    Returns:
        The paths in the checkpoint by path of the target, and a report of everything that does not fit.

    Raises:
        ValueError: `only` matches nothing in the target.
    """
    report = LoadReport()
    by_name = renamed(manifest.entries, rename or {})
    wanted = selected(leaves.by_path, only)
    if only is not None:
        if not wanted:
            raise ValueError(ONLY_NOTHING.format(only=only, paths=listing(list(leaves.by_path))))
        by_name = {name: by_name[name] for name in selected(by_name, only)}
    candidates = _candidates(manifest, leaves, by_name)
    if not strict:
        for path, saved in _rechained(manifest, leaves, by_name).items():
            candidates.pop(path, None)
            if saved is not None:
                candidates[path] = report.moved[path] = saved
    names = {path: [candidates[path]] if path in candidates else [] for path in leaves.by_path if path in wanted}

    def misfit_at(path: str, saved: str) -> Texts | None:
        leaf = leaves.by_path[path]
        return _misfit(manifest.entries[saved], entry_of(path, leaf.value, leaf.type), expected[path], cast)

    offered = set(by_name.values())
    found = match(names, [name for name in manifest.entries if name in offered], misfit_at, report)
    report.moved = {path: saved for path, saved in report.moved.items() if path in found and path != saved}
    report.changed = _changed_settings(manifest, leaves, selected(manifest.modules, only))
    return found, report


def _changed_settings(manifest: Manifest, leaves: Leaves, loaded: set[str]) -> dict[str, tuple[str, str]]:
    """Returns the static attributes that differ from those saved, of the Modules whose class is the same."""
    same = {path for path in loaded if leaves.modules.get(path) == manifest.modules[path]}
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


def _misfit(have: Entry, want: Entry, expected: Expected, cast: bool) -> Texts | None:
    """Returns both sides as text if a saved value does not fit, else None."""
    if have.kind != want.kind and (have.kind in IN_MANIFEST or want.kind in IN_MANIFEST):
        return str(have), str(want)
    if have.kind == "state" and len(have.value) != jax.process_count():
        return OTHER_PROCESSES.format(entry=have, count=len(have.value)), str(want)
    on_host = expected.kind not in ("number", "jax")
    reason = misfit(have, want, "any" if cast else "same", on_host=on_host)
    return None if reason is None else (f"{have}{reason}", str(want))


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
