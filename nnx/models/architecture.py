"""`Architecture`: what `from_pretrained` and `save_pretrained` need to know about one kind of model.

An *architecture* covers the families (`model_type`) that share their Modules: one class, or one class per task. It is a
record of functions; `registry` lists all of them. A *path* is that of a parameter in the Module, a *name* that of a
tensor in the checkpoint.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from nnx.core.module.module import Module
from nnx.models.files.tables import Link


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A kind of model: its classes, and how they correspond to published directories.

    Attributes:
        model_types: the values of `model_type` in `config.json` that it covers.
        modules: the classes of its models, which have the attributes `config` and `param_dtype`.
        build: a function that makes a model: `build(config, param_dtype=..., ctx=..., **options)`.
        read_config: a function that translates the entries of a `config.json`: `read_config(entries, file)`, where
            `file` is named in errors.
        write_config: the inverse: a function from a config to the entries with which `transformers` loads the model.
        links: a function `links(config, paths, names)` that returns which tensor holds which of these parameters.
            `names` are the tensors of a checkpoint whose names may vary, and empty when one is written.
        is_ignored: a function `is_ignored(config, name)`: whether a tensor is allowed although no parameter needs it.
        dtype_paths: parameters, one of which every model has; its dtype is that of the checkpoint.
        options: the options of `from_pretrained` that `build` takes in addition.
        options_of: a function from a model to those options that decide its structure.
        completed: a function `completed(config, names)` from the config in the file to that of the model, for what only
            the tensors of a checkpoint decide.
        constants: a function `constants(config, paths)` that returns tensors to write in addition, by name.
    """

    model_types: tuple[str, ...]
    modules: tuple[type[Module], ...]
    build: Callable[..., Module]
    read_config: Callable[[Mapping[str, Any], str], Any]
    write_config: Callable[[Any], dict[str, Any]]
    links: Callable[[Any, Collection[str], Collection[str]], list[Link]]
    is_ignored: Callable[[Any, str], bool]
    dtype_paths: tuple[str, ...]
    options: tuple[str, ...] = ()
    options_of: Callable[[Any], dict[str, Any]] = lambda model: {}
    completed: Callable[[Any, Collection[str]], Any] = lambda config, names: config
    constants: Callable[[Any, Collection[str]], Mapping[str, np.ndarray]] = lambda config, paths: {}
