"""What a type checker makes of transformed functions: each form, with what it takes and returns. Never run."""

from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax
from jax.experimental import checkify
from jax.sharding import PartitionSpec

import nnx


class Model(nnx.Module):
    def __init__(self, features: int, *, ctx: nnx.Context):
        self.linear = nnx.Linear(features, features, ctx=ctx)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)

    @nnx.jit
    def step(self, x: jax.Array, *, rate: float = 0.1) -> jax.Array:
        return rate * self(x)

    @nnx.jit(static_argnames="training")
    def predict(self, x: jax.Array, *, training: bool) -> jax.Array:
        return self(x)

    @nnx.remat
    def block(self, x: jax.Array) -> jax.Array:
        return self(x)

    @nnx.remat(policy=jax.checkpoint_policies.dots_saveable)
    def cheap_block(self, x: jax.Array) -> jax.Array:
        return self(x)

    @nnx.value_and_grad
    def fit(self, x: jax.Array) -> jax.Array:
        return self(x).sum()


class Layers(nnx.Module):
    @nnx.scan(variable_axes={nnx.Param: 0}, split_rngs="params", length=3)
    def __init__(self, features: int, *, ctx: nnx.Context):
        self.linear = nnx.Linear(features, features, ctx=ctx)

    @nnx.scan(variable_axes={nnx.Param: 0}, length=3)
    def __call__(self, carry: jax.Array, x: None) -> tuple[jax.Array, None]:
        return self.linear(carry), None


def loss(model: Model, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


def loss_with_logits(model: Model, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits = model(x)
    return logits.sum(), {"logits": logits}


@nnx.jit
def plain_step(model: Model, x: jax.Array) -> float:
    return 0.0


@nnx.jit(donate_argnums=0, explain_recompiles=True)
def donated_step(model: Model, x: jax.Array) -> float:
    return 0.0


def jit_keeps_arguments_and_result(model: Model, x: jax.Array) -> None:
    assert_type(plain_step(model, x), float)
    assert_type(donated_step(model, x=x), float)
    assert_type(nnx.jit(loss, static_argnums=(1,))(model, x, y=x), jax.Array)
    assert_type(nnx.jit(model)(x), jax.Array)
    assert_type(nnx.jit(model.step)(x, rate=0.2), jax.Array)
    annotated: nnx.JitWrapped[[Model, jax.Array], float] = plain_step
    assert_type(annotated(model, x), float)


def a_jitted_function_has_the_attributes_of_one(model: Model, x: jax.Array) -> None:
    assert_type(plain_step.trace_count, int)
    assert_type(plain_step.clear_cache(), None)
    assert_type(plain_step.__name__, str)
    plain_step.lower(model, x).compile()(model, x)
    plain_step.trace(model, x).lower()
    plain_step.eval_shape(model, x)


def a_jitted_method_is_a_method(model: Model, x: jax.Array) -> None:
    assert_type(model.step(x), jax.Array)
    assert_type(model.step(x, rate=0.2), jax.Array)
    assert_type(model.predict(x, training=True), jax.Array)
    assert_type(Model.step(model, x), jax.Array)
    assert_type(model.step.trace_count, int)
    Model.step.lower(model, x)


def the_gradient_of_a_module_is_a_state(model: Model, x: jax.Array) -> None:
    assert_type(nnx.grad(loss)(model, x, x), nnx.State)
    assert_type(nnx.grad(loss, wrt="params")(model, x, y=x), nnx.State)
    assert_type(nnx.grad(lambda m: m.linear.kernel.sum())(model), nnx.State)
    assert_type(nnx.grad(loss_with_logits, has_aux=True)(model, x), tuple[nnx.State, dict[str, jax.Array]])
    assert_type(nnx.value_and_grad(loss)(model, x, x), tuple[jax.Array, nnx.State])
    value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2), wrt=nnx.Param)(model)
    assert_type(grads, nnx.State)
    (value, aux), grads = nnx.value_and_grad(loss_with_logits, has_aux=True)(model, x)
    assert_type(value, jax.Array)
    assert_type(aux, dict[str, jax.Array])
    assert_type(grads, nnx.State)
    assert_type(model.fit(x), tuple[jax.Array, nnx.State])


def a_gradient_decorator_takes_options(model: Model, x: jax.Array) -> None:
    @nnx.grad(wrt=nnx.PathMatches("linear/kernel"), stateful=False)
    def gradient(model: Model, x: jax.Array) -> jax.Array:
        return model(x).sum()

    @nnx.value_and_grad(has_aux=True)
    def both(model: Model, x: jax.Array) -> tuple[jax.Array, int]:
        return model(x).sum(), 3

    assert_type(gradient(model, x), nnx.State)
    assert_type(both(model, x), tuple[tuple[jax.Array, int], nnx.State])


def a_gradient_decorator_takes_a_filter_by_position(model: Model, x: jax.Array) -> None:
    @nnx.grad(nnx.Param)
    def gradient(model: Model, x: jax.Array) -> jax.Array:
        return model(x).sum()

    @nnx.grad("params", has_aux=True)
    def with_aux(model: Model, x: jax.Array) -> tuple[jax.Array, int]:
        return model(x).sum(), 3

    @nnx.grad(nnx.Param, argnums=1)
    def by_array(model: Model, x: jax.Array) -> jax.Array:
        return model(x).sum()

    @nnx.value_and_grad((nnx.Param, nnx.BatchStat))
    def both(model: Model, x: jax.Array) -> jax.Array:
        return model(x).sum()

    @nnx.jacrev(nnx.Param, allow_int=True)
    def jacobian(model: Model, x: jax.Array) -> jax.Array:
        return model(x)

    assert_type(gradient(model, x), nnx.State)
    assert_type(with_aux(model, x), tuple[nnx.State, int])
    assert_type(by_array(model, x), Any)
    assert_type(both(model, x), tuple[jax.Array, nnx.State])
    assert_type(jacobian(model, x), Any)


def a_gradient_of_anything_else_has_the_type_of_its_arguments(model: Model, x: jax.Array) -> None:
    assert_type(nnx.grad(lambda w: w**2)(2.0), Any)
    assert_type(nnx.grad(loss, argnums=1)(model, x, x), Any)
    assert_type(nnx.grad(loss, argnums=(0, 1))(model, x, x), Any)
    assert_type(nnx.grad(lambda tree: tree["w"] ** 2)({"w": x}), Any)
    assert_type(nnx.value_and_grad(loss, argnums=(0, 1))(model, x, x), tuple[jax.Array, Any])


def other_derivatives(model: Model, x: jax.Array) -> None:
    assert_type(nnx.jacfwd(loss)(model, x, x), nnx.State)
    assert_type(nnx.jacrev(loss, allow_int=True)(model, x, x), nnx.State)
    assert_type(nnx.hessian(loss)(model, x, x), nnx.State)
    out, pull = nnx.vjp(loss, model, x, x)
    assert_type(out, jax.Array)
    assert_type(pull, Callable[[Any], Any])
    out, push, aux = nnx.linearize(loss_with_logits, model, x, has_aux=True)
    assert_type(aux, dict[str, jax.Array])
    assert_type(nnx.jvp(loss, (model, x, x), (model.filter(nnx.Param), x, x)), tuple[jax.Array, Any])


def functions_with_their_own_derivatives(model: Model, x: jax.Array) -> None:
    @nnx.custom_vjp
    def f(model: Model, x: jax.Array) -> jax.Array:
        return model(x)

    def forward(model: Model, x: jax.Array) -> tuple[jax.Array, Model]:
        return model(x), model

    def backward(residuals: Model, g: jax.Array) -> tuple[nnx.State, jax.Array]:
        return residuals.filter(nnx.Param), g

    f.defvjp(forward, backward)
    assert_type(f(model, x), jax.Array)

    @nnx.custom_jvp(nondiff_argnums=(1,))
    def h(model: Model, scale: float) -> jax.Array:
        return model.linear.kernel * scale

    @h.defjvp
    def rule(scale: float, primals: tuple[Model], tangents: tuple[nnx.State]) -> tuple[jax.Array, jax.Array]:
        return h(*primals, scale), tangents[0]["linear/kernel"].value

    assert_type(h(model, scale=2.0), jax.Array)
    assert_type(rule(1.0, (model,), (model.get_state(),)), tuple[jax.Array, jax.Array])


def mapped_and_repeated_functions_keep_their_types(model: Model, x: jax.Array, ctx: nnx.Context) -> None:
    assert_type(nnx.vmap(loss, in_axes=(None, 0, 0))(model, x, x), jax.Array)
    assert_type(model.block(x), jax.Array)
    assert_type(model.cheap_block(x), jax.Array)
    assert_type(nnx.remat(loss, static_argnums=2)(model, x, y=x), jax.Array)
    assert_type(nnx.remat(loss, policy=("attention", "mlp_hidden"))(model, x, y=x), jax.Array)
    error, out = nnx.checkify(loss, errors=checkify.float_checks)(model, x, y=x)
    assert_type(error, checkify.Error)
    assert_type(out, jax.Array)
    assert_type(Layers(3, ctx=ctx)(x, None), tuple[jax.Array, None])
    spec = PartitionSpec()
    assert_type(nnx.shard_map(loss, in_specs=(spec, spec, spec), out_specs=spec)(model, x, x), jax.Array)

    @nnx.vmap(variable_axes={nnx.Param: 0}, axis_size=4, in_axes=(None, 0))
    def members(model: Model, x: jax.Array) -> jax.Array:
        return model(x)

    @nnx.scan(length=4, unroll=2)
    def repeat(model: Model, carry: jax.Array, x: None) -> tuple[jax.Array, None]:
        return model(carry), None

    assert_type(members(model, x), jax.Array)
    assert_type(repeat(model, x, None), tuple[jax.Array, None])


def control_flow_returns_what_its_functions_return(model: Model, x: jax.Array) -> None:
    def advance(model: Model) -> Model:
        return model

    assert_type(nnx.cond(True, loss, loss, model, x, x), jax.Array)
    assert_type(nnx.switch(0, [loss, loss], model, x, x), jax.Array)
    assert_type(nnx.while_loop(lambda m: m.linear.kernel.sum() < 5, advance, model), Model)
    assert_type(nnx.fori_loop(0, 5, lambda i, m: m, model), Model)


def constructors_keep_their_arguments(x: jax.Array, ctx: nnx.Context) -> None:
    make = nnx.Scan(Model, variable_axes={nnx.Param: 0}, split_rngs="params", length=5)
    assert_type(make(3, ctx=ctx).scan_module, Model)
    assert_type(nnx.Vmap(nnx.Linear, axis_size=6, in_axes=None)(3, 2, ctx=ctx).vmap_module.kernel, jax.Array)
    assert_type(nnx.Remat(Model, prevent_cse=False)(3, ctx=ctx).remat_module, Model)
    assert_type(nnx.Scan(nnx.Remat(Model), length=5)(3, ctx=ctx).scan_module.remat_module, Model)


class Stacked(nnx.Module):
    layers: nnx.Scan[Model]
    head: nnx.Remat[Model]
    ensemble: nnx.Vmap[nnx.Linear]

    def __init__(self, *, ctx: nnx.Context):
        self.layers = nnx.Scan(Model, variable_axes={nnx.Param: 0}, length=5)(3, ctx=ctx)
        self.head = nnx.Remat(Model, False, 1)(3, ctx=ctx)
        self.ensemble = nnx.Vmap(nnx.Linear, axis_size=6)(3, 2, ctx=ctx)


def class_forms_are_classes(stacked: Stacked, module: nnx.Module) -> None:
    assert_type(stacked.layers.scan_module, Model)
    assert_type(stacked.head.remat_module, Model)
    assert_type(stacked.ensemble.vmap_module, nnx.Linear)
    if isinstance(module, nnx.Scan):
        module.call.encode(1.0, None)


def shapes_without_values(model: Model, x: jax.Array, ctx: nnx.Context) -> None:
    assert_type(nnx.eval_shape(Model, 3, ctx=ctx), Model)
    assert_type(nnx.eval_shape(model, jax.ShapeDtypeStruct((1, 3), jnp.float32)), jax.ShapeDtypeStruct)
    assert_type(nnx.eval_shape(loss_with_logits, model, x), Any)


def a_training_step(model: Model, x: jax.Array, y: jax.Array) -> None:
    optimizer = nnx.Optimizer(model, optax.adam(1e-3))

    @nnx.jit(donate_argnames=("model", "optimizer"))
    def train_step(model: Model, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(model, x, y)
        optimizer.update(grads)
        return value

    @nnx.jit
    def short_step(optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(optimizer.model, x, y)
        optimizer.update(grads)
        return value

    assert_type(train_step(model, optimizer, x, y), jax.Array)
    assert_type(short_step(optimizer, x, y), jax.Array)


def mistakes_in_calls(model: Model, x: jax.Array, ctx: nnx.Context) -> None:
    plain_step(model)  # pyright: ignore[reportCallIssue]
    plain_step(x, model)  # pyright: ignore[reportArgumentType]
    plain_step.lower(model)  # pyright: ignore[reportCallIssue]
    plain_step.lowered(model, x)  # pyright: ignore[reportAttributeAccessIssue]
    model.step("x")  # pyright: ignore[reportArgumentType]
    model.step(x, speed=0.1)  # pyright: ignore[reportCallIssue]
    model.predict(x)  # pyright: ignore[reportCallIssue]
    model.block(x, x)  # pyright: ignore[reportCallIssue]
    nnx.grad(loss)(x, x, x)  # pyright: ignore[reportArgumentType, reportCallIssue]
    nnx.grad(loss)(model, x)  # pyright: ignore[reportCallIssue]
    print(nnx.grad(loss)(model, x, x).kernel)  # pyright: ignore[reportAttributeAccessIssue]
    nnx.vmap(loss)(model, x)  # pyright: ignore[reportCallIssue]
    nnx.Scan(Model, length=5)("3", ctx=ctx)  # pyright: ignore[reportArgumentType]
    nnx.Remat(Model)(3)  # pyright: ignore[reportCallIssue]
    Layers("3", ctx=ctx)  # pyright: ignore[reportArgumentType]


def mistakes_in_options(model: Model) -> None:
    nnx.jit(loss, donate=0)  # pyright: ignore[reportCallIssue]
    nnx.jit(static_argnum=0)  # pyright: ignore[reportCallIssue]
    nnx.jit(loss, static_argnums="model")  # pyright: ignore[reportArgumentType, reportCallIssue]
    nnx.jit(3)  # pyright: ignore[reportArgumentType, reportCallIssue]
    nnx.grad(loss, argnum=1)  # pyright: ignore[reportCallIssue]
    nnx.grad(loss, wrt=3)  # pyright: ignore[reportArgumentType]
    nnx.value_and_grad(aux=True)  # pyright: ignore[reportCallIssue]
    nnx.vmap(loss, axes=0)  # pyright: ignore[reportCallIssue]
    nnx.scan(lenght=3)  # pyright: ignore[reportCallIssue]
    nnx.remat(loss, save=True)  # pyright: ignore[reportCallIssue]
    nnx.jacrev(loss, reduce_axes=())  # pyright: ignore[reportCallIssue]
    nnx.shard_map(loss, out_specs=None)  # pyright: ignore[reportCallIssue]
    nnx.custom_vjp(loss, argnums=0)  # pyright: ignore[reportCallIssue]
    nnx.custom_vjp(loss).defvjp(loss, loss)  # pyright: ignore[reportArgumentType]
    nnx.Scan(Model, lenght=5)  # pyright: ignore[reportCallIssue]
    nnx.Vmap(Model, length=5)  # pyright: ignore[reportCallIssue]
    nnx.Remat(Model, static_argnames="x")  # pyright: ignore[reportCallIssue]
