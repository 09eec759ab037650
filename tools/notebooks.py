"""Runs the notebooks in docs/notebooks without Jupyter, and stores what their cells show.

    python tools/notebooks.py                     run all of them and store their outputs
    python tools/notebooks.py sharding            only this one
    python tools/notebooks.py --check sharding    run it, store nothing, and fail if the stored outputs are not those

The code cells of a notebook run in order in one namespace, as in Jupyter: what a cell prints, the value of its last
expression and the pyplot figures it leaves open are its *outputs*, in the form in which notebooks store them. The tag
"varies" marks a cell whose words, and not just its numbers, can differ between machines.
"""

import argparse
import ast
import base64
import contextlib
import io
import json
import pathlib
import re
import sys
import types
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from PIL import Image

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = ROOT / "docs" / "notebooks"


def lines(text: str) -> list[str]:
    """A text in the form in which notebooks store it."""
    return text.splitlines(keepends=True)


def png(figure: Any) -> str:
    """A figure as a small picture, in base64."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=100, bbox_inches="tight")
    Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a code cell and returns its outputs."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, outputs = io.StringIO(), []
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), namespace)
        value = eval(compile(ast.Expression(last.value), name, "eval"), namespace) if last else None
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())})
    if value is not None and not source.rstrip().endswith(";"):
        data = {"text/plain": lines(repr(value))}
        outputs.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    for number in plt.get_fignums():
        data = {"image/png": png(plt.figure(number))}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    return outputs


def run(notebook: dict[str, Any], name: str) -> list[list[dict[str, Any]]]:
    """Runs the code cells of a notebook and returns the outputs of each."""
    module = types.ModuleType("notebook_" + re.sub(r"\W", "_", name))
    sys.modules[module.__name__] = module  # so that its classes can be pickled
    try:
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        return [
            run_cell("".join(cell["source"]), f"{name}, code cell {index}", module.__dict__)
            for index, cell in enumerate(code, start=1)
        ]
    finally:
        plt.close("all")
        del sys.modules[module.__name__]


def form(outputs: list[dict[str, Any]]) -> list[str]:
    """What kinds of outputs a cell has, and their text apart from numbers, which differ between machines."""
    texts = []
    for output in outputs:
        data = output.get("data", {})
        text = "".join(output.get("text") or data.get("text/plain") or [])
        words = re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", " ", text).split()
        texts.append("image" if "image/png" in data else " ".join(words))
    return texts


def check(notebook: dict[str, Any], name: str) -> None:
    """Runs a notebook and raises if its stored outputs are not those of its code."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for index, (cell, outputs) in enumerate(zip(code, run(notebook, name)), start=1):
        stored, now = form(cell["outputs"]), form(outputs)
        if len(stored) != len(now) if "varies" in cell["metadata"].get("tags", ()) else stored != now:
            raise AssertionError(
                f"{name}: code cell {index} has other outputs than the stored ones. Run `make notebooks`.\n"
                f"stored: {stored}\nnow:    {now}"
            )


def store(path: pathlib.Path) -> None:
    """Runs a notebook and writes its outputs into the file."""
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, (cell, outputs) in enumerate(zip(code, run(notebook, path.stem)), start=1):
        cell["execution_count"] = count
        cell["outputs"] = [
            {**output, "execution_count": count} if "execution_count" in output else output for output in outputs
        ]
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Runs the notebooks that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not args.names or path.stem in args.names:
            check(json.loads(path.read_text()), path.stem) if args.check else store(path)


if __name__ == "__main__":
    main()
