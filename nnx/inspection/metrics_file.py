"""Metrics on disk: one JSON object a line, `{"step": 3, "time": 1700000000.0, "loss": 0.5}`.

A line is written whole and never changed, so a run can be killed at any moment and resumed by appending. Numbers that
JSON has no word for are the strings "nan", "inf" and "-inf".
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, TextIO

NO_RECORDS = """{path} holds no metrics. Each line should be a JSON object with a "step", as nnx.TrainLog \
writes them."""

Record = dict[str, Any]
"""One step: `step`, `time` (seconds since the epoch), and the metrics by name."""


def open_to_append(path: pathlib.Path) -> TextIO:
    """The file, opened for appending; a last line that was cut short is closed off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab+")
    if file.tell() > 0:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    file.close()
    return path.open("a", encoding="utf-8")


def to_line(record: Mapping[str, Any]) -> str:
    """The line of a record, with its end."""
    plain = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(plain) + "\n"


def read_metrics(path: Any) -> list[Record]:
    """The records of a metrics file, by step.

    Where a resumed run went over the same steps again, its records replace the earlier ones. A line cut short by a
    crash is passed over.

    Args:
      path: the file, or the folder that a TrainLog wrote it into.

    Raises:
      ValueError: there is no record in it.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / "metrics.jsonl"
    records: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = _parse(line)
        if record is not None:
            while records and records[-1]["step"] >= record["step"]:
                records.pop()
            records.append(record)
    if not records:
        raise ValueError(NO_RECORDS.format(path=path))
    return records


def _parse(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in record.items()}
