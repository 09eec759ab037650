"""What the tests of identity share: small values, and transforms as ways to run a function of a Module."""

import jax.numpy as jnp
import pytest

import nnx


def value(x):
    return jnp.asarray(x, jnp.float32)


def ref(x=1.0):
    return nnx.Ref(nnx.Param(value(x)))


def jit(f):
    return nnx.jit(f)


def grad(f):
    return lambda m: nnx.grad(lambda m: (f(m), value(0.0))[1])(m)


def remat(f):
    return nnx.remat(f)


def nested(f):
    return nnx.jit(lambda m: nnx.remat(lambda m: grad(f)(m))(m))


LIFTED = [pytest.param(t, id=t.__name__) for t in (jit, grad, remat, nested)]
"""Transforms whose bodies run once, and may change any structure."""

REPEATING = {
    "scan": lambda f: lambda m: nnx.scan(lambda m, c, x: (f(m), (c, x))[1], length=2)(m, 0.0, None),
    "vmap": lambda f: lambda m: nnx.vmap(lambda m, x: (f(m), x)[1])(m, jnp.ones(2)),
    "cond": lambda f: lambda m: nnx.cond(True, lambda m: f(m), lambda m: None, m),
    "fori_loop": lambda f: lambda m: nnx.fori_loop(0, 2, lambda i, m: (f(m), m)[1], m),
}
"""Transforms whose bodies run many times, or maybe never, and may not change what is tied to what."""


def two_attributes_of_one_dict():
    m = nnx.Dict(w=nnx.Param(value(1.0)))
    m.p = m.q = {"k": value(1.0)}
    m.other = {"k": value(7.0)}
    return m
