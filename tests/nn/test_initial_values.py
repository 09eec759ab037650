"""Initial values have the same bits as in version 0.2."""

import json
import os
import subprocess
import sys

import jax
import pytest

import nnx
from tests.nn.initial_values import STORED


def test_initial_values_are_those_of_version_0_2():
    # In a process of its own: the tests are compiled without optimizations, which changes the last bits of draws.
    unlike_users = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    environment = {name: value for name, value in os.environ.items() if name not in unlike_users}
    command = [sys.executable, "-m", "tests.nn.initial_values"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found, stored = json.loads(done.stdout), json.loads(STORED.read_text())
    if found["generator"] != stored["generator"]:
        pytest.skip(f"JAX {jax.__version__} itself draws other bits here than where the checksums were made")
    assert found["values"] == stored["values"]


def test_initializers_are_those_of_jax():
    theirs = {name: value for name, value in vars(jax.nn.initializers).items() if callable(value)}
    assert len(theirs) > 15
    assert [name for name, value in theirs.items() if getattr(nnx.initializers, name) is not value] == ["ones", "zeros"]
