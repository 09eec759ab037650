"""The functional API: split a Module into State and ModuleDef, and use any JAX transform on them.

Fits a line through noisy points. `partition` returns the state, typed and split by filters, and `moduledef.apply` runs
the model on given states and returns the output together with the new state. Nothing is changed in place.
"""

import argparse

import jax
import jax.numpy as jnp

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

args = argparse.ArgumentParser(description=__doc__)
args.add_argument("--steps", type=int, default=1000)
args.add_argument("--smoke", action="store_true", help="a short run, for the tests")
args = args.parse_args()
steps = 200 if args.smoke else args.steps


class Count(nnx.Variable):
    """The number of calls to the model: state that is not a parameter."""


class Line(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.slope = nnx.Param(jax.random.normal(ctx.make_rng("params")))
        self.offset = nnx.Param(jnp.zeros(()))
        self.calls = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls += 1
        return self.slope * x + self.offset


key_x, key_noise = jax.random.split(jax.random.key(42))
x = jax.random.uniform(key_x, (64,), minval=-1.0, maxval=1.0)
y = 0.8 * x + 0.4 + 0.05 * jax.random.normal(key_noise, (64,))

(params, counts), moduledef = Line(ctx=nnx.context(0)).partition(nnx.Param, Count)


@jax.jit
def train_step(params: nnx.State, counts: nnx.State):
    def loss_fn(params: nnx.State):
        y_pred, (updates, _) = moduledef.apply(params, counts)(x)
        return jnp.mean((y - y_pred) ** 2), updates.filter(Count)

    (loss, counts), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    params = jax.tree.map(lambda value, grad: value - 0.1 * grad, params, grads)
    return loss, params, counts


losses = []
for step in range(steps):
    loss, params, counts = train_step(params, counts)
    losses.append(float(loss))
    if step % (steps // 10) == 0:
        print(f"step {step:4d}  loss {losses[-1]:.5f}")

model = moduledef.merge(params, counts)
assert losses[-1] < 0.1 * losses[0], "the loss did not fall"
assert model.calls == steps
print(f"y = {model.slope:.2f} x + {model.offset:.2f}, the truth is y = 0.80 x + 0.40")
print(f"final loss: {losses[-1]:.5f}")
