"""Runs the programs of `examples/programs` as their pages say, and records how long they take and what comes out.

    python -m benchmarks.programs ppo finetune grpo --out DIRECTORY
    python -m benchmarks.store DIRECTORY/*.json

Each run is one record: its command, its time from the start of Python to its end, compilation included, and the figures
that the program printed. Nothing else gets into a record. On a GPU, the names of the records end in `_gpu`.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import NamedTuple

from benchmarks import record

ROOT = pathlib.Path(__file__).parent.parent
NUMBER = r"(\d[\d.,]*\d|\d)"


class Run(NamedTuple):
    """What to run, and for each figure its unit and the line that shows it, with `{}` for the figure.

    `first` is what has to run before; its time does not count.
    """

    command: str
    figures: dict[str, tuple[str, str]]
    first: str = ""


LEARNED = {"before": ("%", "accuracy {}% before"), "after": ("%", "before, {}% after")}
TRAINED = {
    "characters": ("1", "{} characters of text"),
    "tokenizer": ("s", "tokenizer {} s"),
    "tokens": ("s", "tokens {} s"),
    "parameters": ("1", "pieces of text, {} parameters"),
    "speed": ("tokens/s", "{} tokens/s on"),
    "loss": ("1", "the last loss is {}"),
    "bits before": ("1", "held-out text: {} before"),
    "bits after": ("1", "before, {} after"),
}
RUNS = {
    "pretrain": Run("pretrain.py", TRAINED),
    "finetune": Run(
        "finetune.py", {"parameters": ("1", "of {} parameters learn"), "training": ("s", "steps in {} s"), **LEARNED}
    ),
    "grpo": Run(
        "grpo.py examples/output/early/model",
        {
            "sampling": ("ms", "sampling {} ms"),
            "scoring": ("ms", "scoring {} ms"),
            "learning": ("ms", "learning {} ms"),
            "before": ("%", "questions: {}% before"),
            "after": ("%", "before, {}% after"),
        },
        first="finetune.py --steps 240 --output examples/output/early",
    ),
    "diffusion": Run(
        "diffusion.py",
        {
            "parameters": ("1", "{} parameters, "),
            "training": ("s", "steps in {} s"),
            "speed": ("images/s", "{} images/s"),
            "distance of the training set": ("1", "training set {} "),
            "distance": ("1", "plain {} "),
            "distance of noise": ("1", "noise {} "),
            "read as asked": ("%", r"plain \S+ {}%"),
            "read as asked, guided": ("%", r"guided \S+ {}%"),
        },
    ),
    "ppo": Run(
        "ppo.py",
        {"steps": ("1", "{} steps in"), "training": ("s", "steps in {} s"), "return": ("1", "final mean return: {}")},
    ),
    "ppo_compare": Run(
        "ppo.py --compare",
        {"in JAX": ("steps/s", "in JAX: {} steps/s"), "in Python": ("steps/s", "in Python: {} steps/s")},
    ),
    "evaluate": Run(
        "evaluate.py",
        {"accuracy": ("%", "likeliest {}% of"), "chance": ("%", "by chance {}%"), "evaluation": ("s", "^{} s$")},
    ),
}


def figures_of(run: Run, printed: str) -> record.Figures:
    """Returns the figures of a run, each with the number that its line shows last."""
    found = {}
    for name, (unit, line) in run.figures.items():
        numbers = re.findall(line.replace(" ", r"\s+").replace("{}", NUMBER), printed, re.MULTILINE)
        if not numbers:
            raise ValueError(f"{run.command} printed nothing like {line!r}:\n{printed[-2000:]}")
        found[name] = record.row(unit, {"nnx": float(numbers[-1].replace(",", ""))})
    return found


def execute(command: list[str]) -> tuple[str, float]:
    """Runs a program and shows what it prints; returns that, and the seconds it took."""
    program, *options = command
    print(f"$ python examples/programs/{' '.join(command)}", flush=True)
    arguments = [sys.executable, "-u", str(ROOT / "examples" / "programs" / program), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    began, lines = time.perf_counter(), []
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise SystemExit(f"{program} ended with exit code {process.returncode}")
    return "".join(lines), time.perf_counter() - began


def measure(name: str, more: list[str], note: str, out: pathlib.Path) -> None:
    """Runs a program and writes its record."""
    run = RUNS[name]
    if run.first:
        execute(run.first.split())
    command = [*run.command.split(), *more]
    printed, seconds = execute(command)
    figures = {"time": record.row("s", {"nnx": round(seconds, 1)}), **figures_of(run, printed)}
    commands = [f"python examples/programs/{each}" for each in (run.first, " ".join(command)) if each]
    machine = record.machine()
    name = f"program_{name}{'' if 'CPU' in machine else '_gpu'}"
    notes = {"note": note} if note else {}
    record.write(out / f"{name}.json", record.make_record(name, " && ".join(commands), figures, whole=True, **notes))
    print(f"{name}: {seconds:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=RUNS)
    parser.add_argument("--out", type=pathlib.Path, default=record.RESULTS, help="the directory for the records")
    parser.add_argument("--options", default="", help="more options for each of the programs, in one string")
    parser.add_argument("--note", default="", help="what else the record should say, such as that the machine was busy")
    args = parser.parse_args()
    for name in args.names:
        measure(name, args.options.split(), args.note, args.out)


if __name__ == "__main__":
    main()
