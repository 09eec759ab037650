"""What every docstring example may use without importing it, and programs that compile quickly."""

import os

# Tests compile much and compute little. Programs that tests start inherit it.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


@pytest.fixture(autouse=True)
def _names_in_docstrings(doctest_namespace):
    doctest_namespace.update(jax=jax, jnp=jnp, np=np, nnx=nnx)
