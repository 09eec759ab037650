"""Prints the last losses of programs of examples/programs on one device and on all devices, in one process.

python tests/programs_on_devices.py FOLDER PROGRAM=STEPS ...
"""

import json
import pathlib
import re
import sys
from unittest import mock

import jax

from tests.scripts import run_script

folder, *programs = sys.argv[1:]
found = {}
for program in programs:
    name, steps = program.split("=")
    for devices in (1, jax.device_count()):
        script, output = pathlib.Path(folder) / f"{name}.py", pathlib.Path(folder) / f"{name}-{devices}"
        with mock.patch.object(jax, "device_count", lambda devices=devices: devices):
            printed = run_script(script, "--smoke", "--steps", steps, "--output", str(output))
        (loss,) = re.findall(r"the last loss is ([\d.]+)", printed)
        found.setdefault(name, []).append(float(loss))
print(json.dumps(found))
