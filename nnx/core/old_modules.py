"""Where classes lived in version 0.2, for pickles that were made by it.

A pickle names the module of every class in it. Version 0.3 sorted the modules of each room into folders, so
`nnx.core.kinds` became `nnx.core.module.kinds`; a few files were renamed or divided as well. An import of an old name
finds the contents of the new module.
"""

import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Modules whose name is now that of the folder they are in: `nnx.core.state` became `nnx.core.state.state`.
_NAMED_LIKE_THEIR_FOLDER = (
    "nnx.core.module",
    "nnx.core.state",
    "nnx.core.statics",
    "nnx.core.structure",
    "nnx.core.variables",
    "nnx.nn.attention",
    "nnx.nn.moe",
    "nnx.nn.quantized",
    "nnx.nn.recurrent",
)
# Modules whose file has another name or is in another room now, with the modules that have its contents. Only those
# with something that a pickle can name: a class of values, or a function that a Module can hold.
_RENAMED = {
    "nnx.core.load_report": ("nnx.storage.errors",),
    "nnx.core.static_keys": ("nnx.core.statics.keys",),
    "nnx.interop.safetensors": ("nnx.storage.safetensors.safetensors",),
    "nnx.models.activations": ("nnx.models.activations_by_name",),
    "nnx.nn.resize": ("nnx.nn.adaptive_pool", "nnx.nn.upsample"),
    "nnx.training.checkpoint": ("nnx.storage.checkpoints.checkpoint",),
    "nnx.training.checkpoint_manager": ("nnx.storage.checkpoints.manager",),
    "nnx.training.manifest": ("nnx.storage.errors",),
}
# Classes with another name, by the module that they are in now.
_RENAMED_CLASSES = {
    ("nnx.core.statics.statics", "Frozen"): "Keyed",
    ("nnx.core.statics.statics", "FrozenFields"): "KeyedFields",
}


class _OldModules(MetaPathFinder, Loader):
    """Finds a module that was in a room itself in one of the folders of that room, or under its new name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        room, _, name = fullname.rpartition(".")
        if path is None or room.count(".") != 1 or not room.startswith("nnx."):
            return None
        if fullname in _RENAMED:
            return ModuleSpec(fullname, self, loader_state=_RENAMED[fullname])
        for folder in pkgutil.iter_modules(path):
            moved = f"{room}.{folder.name}.{name}"
            if folder.ispkg and importlib.util.find_spec(moved) is not None:
                return ModuleSpec(fullname, self, loader_state=(moved,))
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        for moved in module.__spec__.loader_state:
            new = vars(importlib.import_module(moved))
            vars(module).update((name, value) for name, value in new.items() if not name.startswith("__"))


def _under_old_name(main: ModuleType, name: str) -> Any:
    return getattr(main, _RENAMED_CLASSES.get((main.__name__, name), name))


def answer_for_old_modules() -> None:
    """Lets imports find the modules of version 0.2 under their old names. Called once, by the package root."""
    for name in _NAMED_LIKE_THEIR_FOLDER:
        main = sys.modules[f"{name}.{name.rpartition('.')[2]}"]
        # A module-level `__getattr__` is asked for the names that the folder itself does not have.
        vars(sys.modules[name])["__getattr__"] = functools.partial(_under_old_name, main)
    sys.meta_path.append(_OldModules())
