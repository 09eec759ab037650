"""Runs the pages of docs/many-devices on eight virtual devices, each after the code of the first page; prints JSON.

Of each page: its losses, and those of one device for its model.
"""

import json
import pathlib
import re
import sys
import textwrap
import types
import warnings

FENCE = re.compile(r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = pathlib.Path(__file__).parents[2] / "docs" / "many-devices"


def run(page, namespace):
    """Runs the blocks of a page in a module that starts with these names; returns all names after it."""
    module = types.ModuleType(f"many_devices_{page.stem}")
    module.__dict__.update(namespace, __name__=module.__name__)
    sys.modules[module.__name__] = module
    text = page.read_text()
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        exec(compile("\n" * line + textwrap.dedent(match["code"]), str(page), "exec"), module.__dict__)
    return module.__dict__


def main(only):
    first = run(PAGES / "index.md", {})
    found = {}
    for page in sorted(PAGES.glob("*.md")):
        if page.stem == "index" or (only and page.stem not in only) or not FENCE.search(page.read_text()):
            continue
        names = run(page, first)
        found[page.stem] = {"losses": names["losses"], "one device": names["one_device"]}
    print(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)
    main(sys.argv[1:])
