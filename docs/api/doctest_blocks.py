"""Shows the examples in docstrings as code: wraps every block of `>>>` lines into a fence, for mkdocstrings.

Named in mkdocs.yml under `extensions` of the Python handler. Without it Markdown reads `>>>` as a quotation.
"""

import re
from typing import Any

import griffe

FLAGS = re.compile(r"\s*# doctest: ?\+.*$", re.MULTILINE)


def with_fences(text: str) -> str:
    """The docstring with a fence around each example, from its first `>>>` to the next empty line."""
    lines: list[str] = []
    inside = False
    for line in [*text.splitlines(), ""]:
        if not inside and line.startswith(">>>"):
            lines.append("```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(FLAGS.sub("", line).replace("<BLANKLINE>", "") if inside else line)
    return "\n".join(lines[:-1])


class DoctestBlocks(griffe.Extension):
    """Runs `with_fences` over the docstring of every object."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called once for every object of the package."""
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = with_fences(obj.docstring.value)
