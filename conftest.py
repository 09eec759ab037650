"""What every docstring example may use without importing it, and programs that compile quickly."""

import importlib.metadata
import os

# Tests compile much and compute little. Most of a test's time would go into optimizing programs that run once. The
# fusion emitters (a flag that JAX 0.11 removed) double the time of a compilation, and splitting a tiny program into
# parts to compile them in parallel costs more than it saves. Programs that tests start inherit the environment.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if "--xla_cpu_parallel_codegen_split_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_parallel_codegen_split_count=1"]
    # Asked of the package: importing JAX would read these variables before they are set.
    if importlib.metadata.version("jax").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


@pytest.fixture(autouse=True)
def _names_in_docstrings(doctest_namespace):
    doctest_namespace.update(jax=jax, jnp=jnp, np=np, nnx=nnx)


def pytest_collection_modifyitems(items):
    """Refuses names of tests that hold an address, because the processes of a run would collect different names."""
    addressed = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addressed:
        raise pytest.UsageError(f"give these parameters names, with ids=tests.checks.name_of: {addressed}")
