"""Optional dependencies: imported where they are used, with an error that names the extra to install."""

import importlib
from typing import Any

MISSING_EXTRA = """{use} needs the package {package!r}, which is not installed. Install it with the extra {extra!r}: \
pip install 'nnx[{extra}]'."""


def require(module: str, extra: str, use: str = "This") -> Any:
    """Imports an optional module.

    Args:
        module: the dotted name, e.g. `"orbax.checkpoint"`.
        extra: the extra of this package that installs it.
        use: what needs it; the subject of the error message.

    Raises:
        ImportError: the module is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # it is installed, but something it needs is not
        raise ImportError(MISSING_EXTRA.format(use=use, package=package, extra=extra), name=module) from error
