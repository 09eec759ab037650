"""What a type checker makes of split and shared state. Read by pyright, never run."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np

import nnx


class Count(nnx.Variable):
    """A collection of a user's own, written the short way."""


class Tied(nnx.Module):
    def __init__(self, vocabulary: int, features: int):
        table = nnx.Ref(nnx.Param(jnp.zeros((vocabulary, features))))
        self.embed = table
        self.head = table
        self.calls = Count(0)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        self.calls += 1
        return self.embed[tokens] @ self.head.T


def a_shared_variable_has_the_type_of_its_value(model: Tied) -> None:
    assert_type(model.embed, jax.Array)
    assert_type(model.head, jax.Array)
    assert_type(nnx.Ref(nnx.Param(1.0)), float)


def a_variable_type_of_a_users_own_has_the_type_of_its_value(model: Tied) -> None:
    assert_type(model.calls, int)
    assert_type(Count(jnp.zeros(3)), jax.Array)


def the_keys_of_a_dict_are_attributes(heads: nnx.Dict) -> None:
    assert_type(heads.cat, Any)
    assert_type(heads["cat"], Any)
    assert_type(nnx.Dict(w=nnx.Param(jnp.ones(2))).w.shape, Any)


def a_pure_module_remembers_its_class(model: Tied) -> None:
    assert_type(model.partition(), nnx.Pure[Tied])
    assert_type(model.partition().merge(), Tied)
    assert_type(model.partition(nnx.Param, ...), nnx.Pure[Tied])
    assert_type(model.partition().partition(nnx.Param, ...), nnx.Pure[Tied])
    assert_type(model.partition().update_state(model), nnx.Pure[Tied])


def a_moduledef_remembers_its_class(model: Tied) -> None:
    state, moduledef = model.partition()
    assert_type(moduledef, nnx.ModuleDef[Tied])
    assert_type(moduledef.merge(state), Tied)
    assert_type(moduledef.merge(state).embed, jax.Array)


def one_filter_returns_a_state_and_several_a_tuple(model: Tied, state: nnx.State) -> None:
    assert_type(model.filter(nnx.Param), nnx.State)
    assert_type(model.filter(nnx.Param, "count"), tuple[nnx.State, ...])
    params, rest = model.filter(nnx.All(nnx.Param, nnx.PathMatches("embed/**")), ...)
    assert_type(params | rest, nnx.State)
    assert_type(model.pop_state(nnx.Intermediate), nnx.State)
    assert_type(state.filter(lambda path, value: "kernel" in path), nnx.State)
    assert_type(state.partition(nnx.Param, ...), tuple[nnx.State, ...])
    assert_type(model.partition().filter(nnx.Not(nnx.Param)), nnx.State)
    assert_type(model.partition().pop_state(nnx.Param), tuple[nnx.State, nnx.Pure[Tied]])


def loading_returns_a_report(model: Tied, weights: dict[str, np.ndarray]) -> None:
    assert_type(nnx.load_torch_state_dict(model, weights), nnx.LoadReport)
    assert_type(nnx.load_torch_state_dict(model, {"embed": jnp.ones(2)}, strict=False).missing, list[str])


def an_exported_program_is_callable(model: nnx.Linear, x: jax.Array) -> None:
    nnx.export("model", model, x, platforms=("cpu",), symbolic_batch=True)
    program = nnx.load_exported("model")
    assert_type(program, nnx.Exported)
    assert_type(program.weights, dict[str, jax.Array])
    print(program(x))


def mistakes(model: Tied, state: nnx.State) -> None:
    nnx.load_torch_state_dict({}, model)  # pyright: ignore[reportArgumentType]
    model.filter()  # pyright: ignore[reportCallIssue]
    model.filter(3)  # pyright: ignore[reportArgumentType]
    model.pop_state()  # pyright: ignore[reportCallIssue]
    model.partition(3)  # pyright: ignore[reportArgumentType]
    print(model.partition().merge().kernel)  # pyright: ignore[reportAttributeAccessIssue]
    print(model.get_module_def().merge(state).kernel)  # pyright: ignore[reportAttributeAccessIssue]
    print(model.filter(nnx.Param).kernel)  # pyright: ignore[reportAttributeAccessIssue]
    model.embed.value = jnp.ones(2)  # pyright: ignore[reportAttributeAccessIssue]
    wrong: nnx.Pure[nnx.Linear] = model.partition()  # pyright: ignore[reportAssignmentType]
    print(wrong)
