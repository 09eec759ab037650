"""Metrics on disk: one JSON object per line, `{"step": 3, "time": 1700000000.0, "loss": 0.5}`.

A line is written whole, by one call, and never changed. A run can therefore be killed at any moment and resumed by
appending, and several programs can append to one file. Numbers that JSON cannot express are the strings "nan", "inf"
and "-inf".
"""

import json
import math
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from nnx.storage.errors import CheckpointError
from nnx.storage.files import local_path

NO_RECORDS = '{path} holds no metrics. Each line should be a JSON object with a "step", as nnx.TrainLog writes them.'
NOT_READABLE = "The metrics file {path} cannot be read: {reason}."
MALFORMED_LINE = "Skipped line {number} of {path}, which is not a record of metrics: {text}."

Record = dict[str, Any]
"""The fields of one step: `step`, `time` (seconds since the epoch), and the metrics by name."""

_WORDS = ("nan", "inf", "-inf")


# Writing


class MetricsWriter:
    """Appends records to a metrics file."""

    def __init__(self, path: pathlib.Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered and in append mode, so a record is one system call, which no other writer can interrupt.
        self._file = open(path, "ab+", buffering=0)
        self._is_cut = _ends_within_a_line(self._file)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record.

        Raises:
            OSError: the record could not be written. Writing later ones is still possible.
        """
        line = to_line(record).encode()
        if self._is_cut:  # by a crash or a full disk; the new record must not be appended to the partial line
            line = b"\n" + line
        self._is_cut = True
        if self._file.write(line) != len(line):
            raise OSError("only a part of the line was written")
        self._is_cut = False

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _ends_within_a_line(file: Any) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def to_line(record: Mapping[str, Any]) -> str:
    """Returns the line of a record, including the line break."""
    plain = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(plain) + "\n"


# Reading


def read_metrics(path: str | os.PathLike[str]) -> list[Record]:
    """Returns the records of a metrics file, sorted by step.

    Lines for the same step become one record. When a resumed run logs a metric again, starting at the same step or an
    earlier one, the new values replace the old ones from that step on. A line that was cut short by a crash is skipped;
    any other line that is not a record is skipped with a warning.

    Args:
        path: the file, or the folder a TrainLog wrote it to.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file cannot be read or contains no record. It is both a ValueError and an OSError.
    """
    file = local_path(path)
    if file.is_dir():
        file = file / "metrics.jsonl"
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(NOT_READABLE.format(path=file, reason=f"{type(error).__name__}: {error}")) from error
    records, malformed = _parse(lines)
    if not records:
        raise CheckpointError(NO_RECORDS.format(path=file))
    for number, text in malformed:
        warnings.warn(MALFORMED_LINE.format(path=file, number=number, text=text), stacklevel=2)
    return _merge(records)


def _parse(lines: list[bytes]) -> tuple[list[Record], list[tuple[int, str]]]:
    """Returns the records, and the numbers and texts of the lines that are not records."""
    records: list[Record] = []
    malformed: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line.decode("utf-8"))
            if type(fields["step"]) is not int or abs(fields["step"]) >= 2**63:
                raise ValueError("its step is not an integer")
            records.append({k: float(v) if isinstance(v, str) and v in _WORDS else v for k, v in fields.items()})
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            is_cut = line.startswith(b'{"step": ') and not line.rstrip().endswith(b"}")  # by a crash
            if line.strip() and not is_cut:
                malformed.append((number, repr(line[:60])[1:] + ("..." if len(line) > 60 else "")))
    return records, malformed


def _merge(lines: list[Record]) -> list[Record]:
    """Returns one record per step, without the values that a later line made obsolete."""
    records: dict[int, Record] = {}
    steps_of: dict[str, list[int]] = {}  # the steps at which each metric has a value, in order
    for line in lines:
        step = line["step"]
        for name in line:
            if name in ("step", "time"):
                continue
            steps = steps_of.setdefault(name, [])
            while steps and steps[-1] > step:  # the run went back to an earlier step
                abandoned = records[steps.pop()]
                del abandoned[name]
                if abandoned.keys() <= {"step", "time"}:
                    del records[abandoned["step"]]
            if not steps or steps[-1] < step:
                steps.append(step)
        records.setdefault(step, {}).update(line)
    return [records[step] for step in sorted(records)]
