"""A body made for one call sees the settings of that call, whichever way it reads them."""

import contextvars
import sys
import types

import jax.numpy as jnp
import pytest

import nnx

settings = types.ModuleType("settings_of_a_test")
setting = contextvars.ContextVar("setting")


class Settings:
    scale: float


def helper():
    return settings.scale


def by_helper():
    return lambda: helper()


def by_alias():
    alias = helper
    return lambda: alias()


def by_local_import():
    def read():
        import settings_of_a_test

        return settings_of_a_test.scale

    return read


def by_from_import():
    def read():
        from settings_of_a_test import scale

        return scale

    return read


def by_getattr():
    return lambda: getattr(settings, "scale")  # noqa: B009


def by_class_attribute():
    return lambda: Settings.scale


def by_context_variable():
    return lambda: setting.get()


WAYS = [by_helper, by_alias, by_local_import, by_from_import, by_getattr, by_class_attribute, by_context_variable]


def in_scan(m, read):
    nnx.scan(lambda m, c, _: (add(m, read()), (c, None))[1], length=1)(m, 0.0, None)


def in_fori_loop(m, read):
    nnx.fori_loop(0, 1, lambda _, m: add(m, read()), m)


def in_while_loop(m, read):
    nnx.while_loop(lambda v: v[1] < 1, lambda v: (add(v[0], read()), v[1] + 1), (m, 0))


def in_cond(m, read):
    nnx.cond(True, lambda m: (add(m, read()), None)[1], lambda m: None, m)


def in_remat(m, read):
    nnx.remat(lambda m: add(m, read()))(m)


def add(m, by):
    m.n = m.n + by
    return m


@pytest.fixture(autouse=True)
def settings_module(monkeypatch):
    monkeypatch.setitem(sys.modules, settings.__name__, settings)


def three_steps(transform, way, m):
    for value in (1.0, 20.0, 300.0):
        settings.scale = Settings.scale = value
        setting.set(value)
        transform(m, way())


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    "transform", [in_scan, in_fori_loop, in_while_loop, in_cond, in_remat], ids=lambda transform: transform.__name__
)
def test_a_body_made_in_every_call_reads_the_setting_of_that_call(transform, way, jit):
    m = nnx.Dict(n=nnx.Variable(jnp.zeros(())))
    run = nnx.jit(lambda m: three_steps(transform, way, m)) if jit else lambda m: three_steps(transform, way, m)
    run(m)
    assert m.n == 321.0
