"""Matching: which tensor belongs to which path of the target, and what does not fit."""

from collections.abc import Mapping

from nnx.core.repr import short
from nnx.storage.fitting import describe_value, misfit
from nnx.storage.leaves import Leaves, resolve_alias
from nnx.storage.load_report import LoadReport
from nnx.storage.safetensors.source import Source

TWO_VALUES = "two different values, {path!r} and {alias!r}, for an entry that is shared in the target"


def match(source: Source, leaves: Leaves, aliases: Mapping[str, str], cast: bool) -> tuple[dict[str, str], LoadReport]:
    """Finds the tensor for each path of the target, and reports everything that does not fit.

    Returns:
        The names of the tensors by path, and the report.
    """
    report = LoadReport()
    found: dict[str, str] = {}
    by_path: dict[str, list[str]] = {}
    for name in source.names:
        by_path.setdefault(resolve_alias(name, aliases), []).append(name)
    known: set[str] = set()
    present = set(source.names)
    for path, leaf in leaves.by_path.items():
        names = by_path.get(path) or [n for n in (resolve_alias(path, source.notes.aliases),) if n in present]
        if not names:
            report.missing.append(path)
            continue
        known.update(names)
        name = path if path in names else names[0]
        other = next((other for other in names if not _is_same(source, other, name)), None)
        have, want = source.describe(name), describe_value(leaf.value)
        if other is not None:
            report.mismatched[path] = (TWO_VALUES.format(path=name, alias=other), str(want))
        elif want is None:
            report.mismatched[path] = (str(have), short(leaf.value))
        else:
            dtypes = "any" if cast else "same"
            reason = misfit(have, want, dtypes, on_host=want.on_host or want.kind == "number", type_name=leaf.type)
            if reason is None:
                found[path] = name
            else:
                report.mismatched[path] = (f"{have}{reason}", str(want))
    report.unexpected = [name for name in source.names if name not in known]
    return found, report


def _is_same(source: Source, a: str, b: str) -> bool:
    if a == b:
        return True
    if source.tensor(a)[:2] != source.tensor(b)[:2]:  # dtype and shape
        return False
    # Compared as bytes, so that NaN equals itself.
    return source.read(a, verify=False).tobytes() == source.read(b, verify=False).tobytes()
