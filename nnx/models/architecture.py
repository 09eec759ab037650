"""`Architecture`: what `from_pretrained` and `save_pretrained` need to know about one kind of model.

An *architecture* covers the families (`model_type`) that share their Modules: one class, or one class per task.
`registry` lists all of them. A *path* is that of a parameter in the Module, a *name* that of a tensor in a checkpoint.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from nnx.core.context import context
from nnx.core.module.module import Module
from nnx.core.state.filters import Not
from nnx.core.variables.variables import Loss
from nnx.models.family import Family
from nnx.models.files.table import Link, Parameter
from nnx.transforms.control.eval_shape import eval_shape


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A kind of model: its classes, and how they correspond to published directories.

    Attributes:
        families: the families that it covers.
        modules: the classes of its models, which have the attributes `config` and `param_dtype`.
        build: a function that makes a model: `build(config, param_dtype=..., ctx=..., **options)`.
        dtype_paths: parameters, one of which every model has; its dtype is that of the checkpoint.
        options: the options of `from_pretrained` that `build` takes in addition.
        options_of: a function from a model to those options that decide its structure.
        located: a function `located(config, paths)` to the parameters of a model by the paths they have if no layers
            are stacked; needed only if layers can be.
        completed: a function `completed(config, found)` from the config in the file to that of the model, for what only
            the tensors of a checkpoint decide.
        constants: a function `constants(config, links)` that returns tensors to write in addition, by name.
    """

    families: tuple[Family, ...]
    modules: tuple[type[Module], ...]
    build: Callable[..., Module]
    dtype_paths: tuple[str, ...]
    options: tuple[str, ...] = ()
    options_of: Callable[[Any], dict[str, Any]] = lambda model: {}
    located: Callable[[Any, Collection[str]], dict[str, Parameter]] = lambda config, paths: {
        path: Parameter(path) for path in paths
    }
    completed: Callable[[Any, Mapping[str, Any]], Any] = lambda config, found: config
    constants: Callable[[Any, list[Link]], Mapping[str, np.ndarray]] = lambda config, links: {}

    @property
    def model_types(self) -> tuple[str, ...]:
        """The values of `model_type` in `config.json` that it covers."""
        return tuple(family.model_type for family in self.families)

    def family_of(self, config: Any) -> Family:
        """Returns the family of a config."""
        return next(family for family in self.families if family.model_type == config.model_type)

    def read_config(self, entries: Mapping[str, Any], where: str) -> Any:
        """Translates the entries of a `config.json`; `where` is the name of the file, for errors."""
        family = next(family for family in self.families if family.model_type == entries["model_type"])
        return family.read(entries, where)

    def write_config(self, config: Any) -> dict[str, Any]:
        """Returns the entries with which `transformers` loads a model of the config."""
        return self.family_of(config).write(config)

    def links(self, config: Any, paths: Collection[str], names: Collection[str] = ()) -> list[Link]:
        """Returns which tensor holds which of these parameters.

        Args:
            config: the config of the model.
            paths: the paths of its parameters. Entries for others (an absent bias) are left out.
            names: the tensors of a checkpoint, whose names may vary; empty when one is written.
        """
        table = self.family_of(config).table_of(config)
        return table.links(self.located(config, paths), names, getattr(config, "num_experts", None))

    def is_ignored(self, config: Any, name: str) -> bool:
        """Whether a tensor is allowed although no parameter needs it: a buffer, or a copy of a tied embedding."""
        table = self.family_of(config).table_of(config)
        tied = getattr(config, "tie_embeddings", False) and name.removeprefix("language_model.") in {
            entry.name for entry in table.head
        }
        return tied or table.ignores(name)


def abstract_model(architecture: Architecture, config: Any, param_dtype: Any, **options: Any) -> Any:
    """Returns a model with shapes and dtypes in place of arrays."""
    return eval_shape(lambda: architecture.build(config, param_dtype=param_dtype, ctx=context(0), **options))


def values_by_path(model: Module) -> dict[str, Any]:
    """Returns the values that a checkpoint holds, by path: all but losses and Variables that hold None."""
    state = Module.filter(model, Not(Loss))
    values = {path: getattr(leaf, "value", leaf) for path, leaf in state.items()}
    return {path: value for path, value in values.items() if value is not None}
