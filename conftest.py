"""What every docstring example may use without importing it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


@pytest.fixture(autouse=True)
def _names_in_docstrings(doctest_namespace):
    doctest_namespace.update(jax=jax, jnp=jnp, np=np, nnx=nnx)
