"""Runs the examples and stores what docs/examples.md shows of them: a small picture and the last line of the output.

    python tools/example_pictures.py              all of them, about ten minutes on two cores
    python tools/example_pictures.py 05 12        only these

Pictures go to docs/assets/examples, reduced to a palette of colors; last lines go to results.json there.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from PIL import Image

ROOT = pathlib.Path(__file__).parent.parent
STORED = ROOT / "docs" / "assets" / "examples"
RESULTS = STORED / "results.json"
COLORS, WIDTH = 48, 840


def picture(example: pathlib.Path) -> pathlib.Path:
    """Where an example leaves its picture, if it draws one."""
    output = example.parent / "output"
    return output / "demo-small" / "loss.png" if example.stem == "demo" else output / f"{example.stem}.png"


def store(example: pathlib.Path, last_line: str) -> None:
    """Stores the picture and the last line of an example that has run."""
    STORED.mkdir(exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[example.stem] = last_line
    RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    if picture(example).exists():
        image = Image.open(picture(example)).convert("RGB")
        image.thumbnail((WIDTH, WIDTH))
        image.quantize(COLORS, dither=Image.Dither.NONE).save(STORED / f"{example.stem}.png", optimize=True)


def main() -> None:
    """Runs and stores the examples that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="prefixes of the examples to run, such as 05")
    only = tuple(parser.parse_args().only) or ("",)
    for example in [*sorted((ROOT / "examples").glob("[0-9]*.py")), ROOT / "examples" / "demo.py"]:
        if example.name.startswith(only):
            result = subprocess.run([sys.executable, str(example)], check=True, stdout=subprocess.PIPE, text=True)
            store(example, result.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
