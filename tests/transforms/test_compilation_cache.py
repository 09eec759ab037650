"""nnx.compilation_cache: the second run of a program compiles nothing."""

import os
import subprocess
import sys

import jax
import pytest

import nnx

PROGRAM = """
import sys
import jax, jax.monitoring, jax.numpy as jnp, optax
import nnx

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
assert nnx.compilation_cache(sys.argv[1]) == sys.argv[1]


class Model(nnx.Module):
    def __init__(self, *, ctx):
        self.conv = nnx.Conv(3, 4, (3, 3), ctx=ctx)
        self.norm = nnx.BatchNorm(4, ctx=ctx)
        self.cell = nnx.RNN(nnx.OptimizedLSTMCell(4, 5, ctx=ctx))
        self.head = nnx.Linear(5, 2, ctx=ctx)

    def __call__(self, x):
        x = self.norm(self.conv(x)).mean(axis=2)
        return self.head(self.cell(x)[:, -1])


@nnx.jit(donate_argnums=0)
def step(optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(optimizer.model)
    optimizer.update(grads)
    return loss


optimizer = nnx.Optimizer(Model(ctx=nnx.context(0)).train(), optax.adamw(1e-3))
print(float(step(optimizer, jnp.ones((2, 6, 6, 3)))), events.count("cache_hits"), events.count("cache_misses"))
"""


def run(folder, hash_seed):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    loss, hits, misses = done.stdout.split()
    return loss, int(hits), int(misses)


def test_a_second_process_finds_every_program(tmp_path):
    loss, hits, misses = run(tmp_path, "1")
    assert misses > 5
    assert run(tmp_path, "2") == (loss, hits + misses, 0)


@pytest.fixture
def settings():
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    yield before
    from jax.experimental.compilation_cache import compilation_cache

    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_program_that_has_compiled_before_can_still_begin(tmp_path, settings):
    jax.jit(lambda x: x + 1)(1.0)
    assert nnx.compilation_cache(tmp_path) == str(tmp_path)
    jax.jit(lambda x: x + 2)(1.0)
    assert any(tmp_path.iterdir())


def test_the_folder_is_that_of_jax_or_of_the_user(tmp_path, settings, monkeypatch):
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert nnx.compilation_cache() == str(tmp_path / "nnx")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "other"))
    assert nnx.compilation_cache() == str(tmp_path / "other")
