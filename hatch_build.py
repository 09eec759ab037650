"""What the package says about itself beyond pyproject.toml: its long description and its address.

`NNX_REPOSITORY=https://... python -m build` adds the address of the repository, which makes the links of the README
work on a package index. Without it, nothing is claimed, and links to files become plain text.
"""

import os
import runpy
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class DescriptionHook(MetadataHookInterface):
    """Fills in `readme` and `urls`."""

    def update(self, metadata: dict) -> None:
        root, repository = Path(self.root), os.environ.get("NNX_REPOSITORY", "").rstrip("/")
        convert = runpy.run_path(str(root / "tools" / "long_description.py"))["long_description"]
        text = convert((root / "README.md").read_text(encoding="utf-8"), repository, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if repository:
            changes = f"{repository}/blob/v{metadata['version']}/CHANGELOG.md"
            metadata["urls"] = {"Repository": repository, "Changelog": changes}
