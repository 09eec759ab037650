"""`python -m nnx plan WHAT --on MACHINE ...`: does a step fit, and how fast can it be?

WHAT is `SCRIPT.py:FUNCTION`, where the function returns a step and its arguments, or a published model (a directory, or
a config.json), of which a training step or the writing of text is planned.
"""

import argparse
import importlib.util
import pathlib
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

import nnx
from nnx.commands.command import Command

NO_SCRIPT = "There is no script {script}. Paths are relative to {here}."
NO_FUNCTION = "{script} has no function {name!r}. It has: {known}."
NO_STEP = """{name}() must return a step and its arguments, e.g. `return train_step, optimizer, batch`; it returned \
{got}."""
NOT_A_MESH = "--mesh takes axes and sizes such as data=4,model=4; got {got!r}."
NOT_BOTH = "--batch and --length are for published models; a script decides about its batch itself."


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", help="SCRIPT.py:FUNCTION, the directory of a published model, or a config.json")
    parser.add_argument("--on", nargs="+", required=True, metavar="MACHINE", help='e.g. "v5e-16", "h100-8", "cpu-1"')
    parser.add_argument("--mesh", help="axes of the mesh, e.g. data=4,model=4; by default data=N")
    parser.add_argument("--train", action="store_true", help="plan a training step with AdamW, the default")
    parser.add_argument("--write", type=int, metavar="N", help="plan the writing of N tokens instead")
    parser.add_argument("--batch", type=int, help="rows of the whole batch; 8 by default")
    parser.add_argument("--length", type=int, help="tokens of a row; 2048 by default")
    parser.add_argument("--search", action="store_true", help="try other meshes and policies of remat")
    parser.add_argument("--quick", action="store_true", help="compile for TPUs with fewer optimizations")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw the plans into an image file")


def _run(arguments: argparse.Namespace) -> int:
    _make_cpus(arguments.on)
    mesh = None if arguments.mesh is None else _mesh(arguments.mesh)
    step, *args = _question(arguments)
    options: dict[str, Any] = {"mesh": mesh, "search": arguments.search, "quick": arguments.quick, "progress": True}
    start = time.perf_counter()
    if len(arguments.on) == 1:
        plans = nnx.plan(step, *args, on=arguments.on[0], **options)
    else:
        plans = nnx.plan(step, *args, on=arguments.on, **options)
    print(f"{plans}\n\n{time.perf_counter() - start:.0f} s in all")
    if arguments.plot is not None:
        print(f"drawn: {plans.plot(arguments.plot)}")
    fits = [plan.fits for plan in plans] if isinstance(plans, nnx.Plans) else [plans.fits]
    return 0 if all(fits) else 1


def _question(arguments: argparse.Namespace) -> tuple[Any, ...]:
    """Returns the step to plan, and its arguments."""
    script, colon, name = arguments.what.rpartition(":")
    if colon and script.endswith(".py"):
        if arguments.batch or arguments.length or arguments.write:
            raise ValueError(NOT_BOTH)
        return _from_script(pathlib.Path(script), name)
    from nnx.planning.published import training_step, writing_step

    path, batch, length = pathlib.Path(arguments.what), arguments.batch or 8, arguments.length or 2048
    if arguments.write:
        return writing_step(path, batch, length, arguments.write)
    return training_step(path, batch, length)


def _from_script(script: pathlib.Path, name: str) -> tuple[Any, ...]:
    """Returns what a function of a script returns: a step and its arguments, without values."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    if not script.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(NO_SCRIPT.format(script=script, here=pathlib.Path.cwd()))
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(script.parent.resolve()))
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        known = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ValueError(NO_FUNCTION.format(script=script, name=name, known=known))
    return _abstractly(function, name)


def _abstractly(function: Callable[[], Any], name: str) -> tuple[Any, ...]:
    """Calls a function that returns a step and its arguments, without computing the values of the arguments."""
    steps: list[Any] = []

    def arguments() -> Any:
        returned = function()
        if not isinstance(returned, tuple) or not returned or not callable(returned[0]):
            raise TypeError(NO_STEP.format(name=name, got=type(returned).__name__))
        steps.append(returned[0])
        return returned[1:]

    args = nnx.eval_shape(arguments)
    return steps[-1], *args


def _make_cpus(machines: list[str]) -> None:
    """Makes as many virtual CPU devices as the machines need, if JAX has not been used yet."""
    counts = [int(match[1]) for match in (re.fullmatch(r"cpu-(\d+)", name) for name in machines) if match]
    if counts and max(counts) > 1:
        try:
            jax.config.update("jax_num_cpu_devices", max(counts))
        except RuntimeError:  # it has been: nnx.plan says what to do if these are too few
            pass


def _mesh(text: str) -> dict[str, int]:
    found = re.fullmatch(r"\w+=\d+(,\w+=\d+)*", text.replace(" ", ""))
    if found is None:
        raise ValueError(NOT_A_MESH.format(got=text))
    return {name: int(size) for name, size in (pair.split("=") for pair in found[0].split(","))}


COMMAND = Command(
    help="compile a step for machines that are not here: does it fit, how fast can it be, what holds it back",
    examples={
        "plan train.py:plan --on v5e-16 h100-8": "what the function plan() returns: a step and its arguments",
        "plan Llama-3.1-8B --train --batch 64 --length 4096 --on h100-8 v5e-64": "training a published model",
        "plan config.json --write 128 --batch 32 --on h100-1": "writing text with one",
    },
    add_arguments=_add_arguments,
    run=_run,
)
