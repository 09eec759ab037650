"""The `generation_config.json` of a published model, as options of `nnx.generate`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnx.models.files.directory import NO_DIRECTORY, read_json
from nnx.storage.files import local_path

BAD_ENTRY = "{file}: expected {key!r} to be {expected}, got {got!r}."

_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# The values with which a rule changes nothing; `nnx.generate` leaves such rules out.
_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def generation_defaults(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what a published model recommends for writing with it, as options of `nnx.generate`.

    They are read from `generation_config.json`, and the stop tokens, if it names none, from `config.json`. Chat models
    list the ends of turns there, so these are the stop tokens to use. Without `do_sample`, the temperature is 0.

    Args:
        directory: the directory of the model.

    Returns:
        `stop_tokens` and `temperature`, and `pad_token`, `top_k`, `top_p`, `min_p` and `repetition_penalty` as far as
        they are set.

    Raises:
        FileNotFoundError: there is no such directory.
        ValueError: a file is damaged, or an entry is of the wrong kind.

    >>> import json, pathlib, tempfile
    >>> directory = pathlib.Path(tempfile.mkdtemp())
    >>> entries = {"eos_token_id": [2, 7], "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0}
    >>> _ = (directory / "generation_config.json").write_text(json.dumps(entries))
    >>> nnx.models.generation_defaults(directory)
    {'stop_tokens': (2, 7), 'temperature': 0.6, 'top_p': 0.9}
    """
    path = local_path(directory)
    if not path.is_dir():
        raise FileNotFoundError(NO_DIRECTORY.format(path=path))
    file = path / "generation_config.json"
    entries = _read(file)
    options: dict[str, Any] = {"stop_tokens": _stop_tokens(entries, file) or _stop_tokens_of(path / "config.json")}
    pad = entries.get("pad_token_id")
    if pad is not None:
        options["pad_token"] = _checked(pad, int, "pad_token_id", file)
    if not entries.get("do_sample", False):
        return options | {"temperature": 0} | _rules(entries, ("repetition_penalty",), file)
    return options | {"temperature": 1.0} | _rules(entries, _NUMBERS, file)


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _stop_tokens_of(config: Path) -> tuple[int, ...]:
    """Returns the ends of texts that a `config.json` names, there or in the part that describes the text model."""
    entries = _read(config)
    inner = entries.get("text_config")
    return _stop_tokens(entries, config) or (_stop_tokens(inner, config) if isinstance(inner, Mapping) else ())


def _stop_tokens(entries: Mapping[str, Any], file: Path) -> tuple[int, ...]:
    found = entries.get("eos_token_id")
    listed = found if isinstance(found, list) else [] if found is None else [found]
    return tuple(_checked(token, int, "eos_token_id", file) for token in listed)


def _rules(entries: Mapping[str, Any], keys: tuple[str, ...], file: Path) -> dict[str, Any]:
    found = {key: entries[key] for key in keys if entries.get(key) is not None}
    checked = {key: _checked(value, int if key == "top_k" else float, key, file) for key, value in found.items()}
    return {key: value for key, value in checked.items() if value != _OFF.get(key)}


def _checked(value: Any, kind: type, key: str, file: Path) -> Any:
    fits = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not fits:
        expected = "a whole number" if kind is int else "a number"
        raise ValueError(BAD_ENTRY.format(file=file, key=key, expected=expected, got=value))
    return value
