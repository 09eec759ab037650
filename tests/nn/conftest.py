"""What tests of layers share: machines that are not here."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from nnx.sharding.target import compiling_for


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Kernels of GPUs and TPUs are interpreted; `make gpu` compiles them."""
    with contextlib.nullcontext() if os.environ.get("NNX_GPU") else compiling_for("interpreter"):
        yield


@pytest.fixture
def pretend(monkeypatch) -> Callable[..., None]:
    """Makes the default device look like another one, whose traces are not kept: `pretend("gpu")` is one H200."""

    def change(backend: str, devices: int = 1, capability: str = "9.0") -> None:
        class Device:
            compute_capability = capability
            device_kind = "NVIDIA H200"

        jax.clear_caches()
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(jax, "device_count", lambda: devices)
        monkeypatch.setattr(jax, "devices", lambda *args: [Device()] * devices)

    # `make gpu` asks for the highest precision, with which some kernels are not chosen.
    config: Any = jax.config
    asked = config.jax_default_matmul_precision
    config.update("jax_default_matmul_precision", None)
    yield change
    config.update("jax_default_matmul_precision", asked)
    jax.clear_caches()
