"""Ways to harm a Module, for the tests of safety."""

import jax.numpy as jnp

import nnx


def vandalise(m):
    """Changes values, statics, submodules and variables of a Net."""
    m.encoder.count += 1
    m.encoder.kernel = m.encoder.kernel * 2
    m.encoder.mode = "eval"
    m.extra = nnx.Param(jnp.ones(2))
    m.decoder = m.encoder
    m.tags.append("b")
    del m.encoder.count


class Boom(Exception):
    pass


def explode(m, *args):
    vandalise(m)
    raise Boom("in the body")
