"""Prints the last losses of programs of examples/programs on one device and on all devices, in one process.

python tests/programs_on_devices.py FOLDER PROGRAM=STEPS ...

On one device a program runs to its end. On all of them it ends with its training.
"""

import builtins
import json
import pathlib
import re
import sys
from typing import Any
from unittest import mock

import jax

from tests.scripts import run_script

LOSS = re.compile(r"the last loss is ([\d.]+)")
whole_print = print


def print_until_the_loss(*texts: Any, **options: Any) -> None:
    whole_print(*texts, **options)
    if LOSS.search(str(texts)):
        raise SystemExit


def losses(folder: str, name: str, steps: str) -> list[float]:
    """Returns the last loss of a program on one device, and on all."""
    found = []
    for devices, printing in ((1, print), (jax.device_count(), print_until_the_loss)):
        script, output = pathlib.Path(folder) / f"{name}.py", pathlib.Path(folder) / f"{name}-{devices}"
        with (
            mock.patch.object(jax, "device_count", lambda devices=devices: devices),
            mock.patch.object(builtins, "print", printing),
        ):
            printed = run_script(script, "--smoke", "--steps", steps, "--output", str(output))
        found.append(float(LOSS.findall(printed)[0]))
    return found


if __name__ == "__main__":
    folder, *programs = sys.argv[1:]
    print(json.dumps({name: losses(folder, name, steps) for name, steps in (text.split("=") for text in programs)}))
