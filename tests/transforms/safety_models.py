"""The Modules that the tests of safety share, and ways to harm and to compare them."""

import jax
import jax.numpy as jnp

import nnx


class Count(nnx.Variable):
    pass


class Linear(nnx.Module):
    def __init__(self, din=2, dout=3, *, ctx):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (din, dout)))
        self.count = Count(jnp.zeros((), jnp.int32))
        self.mode = "train"

    def __call__(self, x, *, ctx=None):
        self.count += 1
        if ctx is not None:
            x = x + jax.random.normal(ctx.make_rng("noise"), x.shape)
        return x @ self.kernel


class Net(nnx.Module):
    def __init__(self, *, ctx):
        self.encoder = Linear(2, 2, ctx=ctx)
        self.decoder = Linear(2, 3, ctx=ctx)
        self.tags = ["a"]

    def __call__(self, x):
        return self.decoder(self.encoder(x))


def linear(seed=0):
    return Linear(ctx=nnx.context(seed))


def net(seed=0):
    return Net(ctx=nnx.context(seed))


def photograph(module):
    """Everything that can be seen of a Module: its objects, leaves, and structure."""
    pure = module.partition()
    return [m for _, m in module.named_modules()], jax.tree.leaves(pure), pure.moduledef


def assert_unchanged(module, before):
    modules, leaves, moduledef = photograph(module)
    assert all(a is b for a, b in zip(modules, before[0], strict=True))
    assert all(a is b for a, b in zip(leaves, before[1], strict=True))
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    assert moduledef == before[2]


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
