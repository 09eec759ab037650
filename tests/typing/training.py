"""What a type checker makes of training: an optimizer knows its model. Read by pyright, never run."""

from typing import assert_type

import jax
import jax.numpy as jnp
import optax

import nnx


class Classifier(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.head = nnx.Linear(3, 2, ctx=ctx)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(x)


def loss(model: Classifier, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


@nnx.jit
def train_step(optimizer: nnx.Optimizer[Classifier], x: jax.Array) -> jax.Array:
    value, grads = nnx.value_and_grad(loss)(optimizer.model, x)
    optimizer.update(grads)
    return value


def an_optimizer_knows_its_model(model: Classifier, x: jax.Array) -> None:
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param, skip_nonfinite=True)
    assert_type(optimizer, nnx.Optimizer[Classifier])
    assert_type(optimizer.model, Classifier)
    assert_type(optimizer.model.head.kernel, jax.Array)
    assert_type(optimizer.step, jax.Array)
    assert_type(optimizer.skipped, jax.Array)
    assert_type(train_step(optimizer, x), jax.Array)
    assert_type(optimizer.clone().model, Classifier)
    assert_type(optimizer.partition().merge().model, Classifier)
    bare: nnx.Optimizer = optimizer
    bare.update(model.filter(nnx.Param))


def a_scaled_loss_keeps_its_type(model: Classifier, x: jax.Array) -> None:
    scale = nnx.DynamicScale(growth_interval=100)
    value, grads = scale.value_and_grad(loss)(model, x)
    assert_type(value, jax.Array)
    assert_type(grads, nnx.State)
    assert_type(scale.scale, jax.Array)
    scale.value_and_grad(loss)(x)  # pyright: ignore[reportCallIssue]
    stop = nnx.EarlyStopping(patience=3, mode="max")
    assert_type(stop(value), bool)
    assert_type(stop.best, float | None)
    nnx.EarlyStopping(patience=3, mode="low")  # pyright: ignore[reportArgumentType]


def averages_have_the_type_of_the_model(model: Classifier) -> None:
    ema = nnx.EMA(model, decay=0.99)
    assert_type(ema.averaged(model), Classifier)
    assert_type(ema.averages(model), nnx.State)
    assert_type(ema.step, jax.Array)


def a_train_state_is_a_record(model: Classifier) -> None:
    params, moduledef = model.partition(nnx.Param)
    assert_type(moduledef, nnx.ModuleDef[Classifier])
    state = nnx.TrainState(moduledef, params=model.filter(nnx.Param), tx=optax.sgd(0.1), epoch=3)
    assert_type(state.params, nnx.State)
    assert_type(state.step, jax.Array)
    assert_type(state.moduledef, nnx.ModuleDef[Classifier])
    annotated: nnx.TrainState[Classifier] = state.apply_gradients(state.params, epoch=4)
    assert_type(annotated.replace(epoch=5), nnx.TrainState[Classifier])


def metrics_compute_arrays(x: jax.Array) -> None:
    average = nnx.Average("loss")
    average.update(loss=x, mask=None)
    assert_type(average.compute(), jax.Array)
    assert_type(nnx.Welford().compute(), nnx.Statistics)
    assert_type(nnx.MultiMetric(loss=average).names, tuple[str, ...])


def a_summary_has_totals(model: Classifier, x: jax.Array) -> None:
    assert_type(nnx.summary(model, x).parameters, int)
    assert_type(nnx.count_params(model), int)


def prefetched_batches_keep_their_type(batches: list[dict[str, jax.Array]]) -> None:
    for batch in nnx.prefetch(batches):
        assert_type(batch, dict[str, jax.Array])


def mistakes(model: Classifier, x: jax.Array) -> None:
    nnx.Optimizer(x, optax.adam(1e-3))  # pyright: ignore[reportArgumentType]
    nnx.Optimizer(model)  # pyright: ignore[reportCallIssue]
    nnx.Optimizer(model, optax.adam(1e-3), wrt=3)  # pyright: ignore[reportArgumentType]
    nnx.Optimizer(model, 1e-3)  # pyright: ignore[reportArgumentType]
    nnx.Optimizer(model, optax.adam(1e-3), skip=True)  # pyright: ignore[reportCallIssue]
    optimizer = nnx.Optimizer(model, optax.adam(1e-3))
    print(optimizer.model.body)  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.update(x)  # pyright: ignore[reportArgumentType]
    optimizer.update(model.get_state(), model.get_state())  # pyright: ignore[reportArgumentType]
    train_step(nnx.Optimizer(model.head, optax.adam(1e-3)), x)  # pyright: ignore[reportArgumentType]
    nnx.EMA(model, decay="slow")  # pyright: ignore[reportArgumentType]
    nnx.TrainState(model.get_module_def(), params=model.filter(nnx.Param))  # pyright: ignore[reportCallIssue]
    nnx.MultiMetric(loss=x)  # pyright: ignore[reportArgumentType]
    wrong: nnx.Optimizer[nnx.Linear] = optimizer  # pyright: ignore[reportAssignmentType]
    print(wrong)
