"""TrainState: everything a functional training step carries, as one immutable record."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import optax

from nnx.core.hints.hints import add_hints
from nnx.core.hints.table import TRAIN_STATE as HINTS
from nnx.core.module.call_chains import Access
from nnx.core.old_names import former_names
from nnx.core.state.moduledef import ModuleDef
from nnx.core.state.pytree import Pytree
from nnx.core.state.state import State
from nnx.core.variables.variables import TreeNode
from nnx.training.host_memory import fetch, put_back
from nnx.training.optimizer_state import moment_axes

T = TypeVar("T", bound="TrainState[Any]")
M = TypeVar("M")

NOT_A_FIELD = "{name!r} is not a field of this TrainState: a name in `apply` means one of {fields}."


class TrainState(Pytree, Generic[M]):
    """The params, optimizer state, step and structure of a model in training; a pytree.

    Args:
        moduledef: the static half of the model. Its class is the parameter of the annotation `nnx.TrainState[Model]`.
        params: the State that `tx` trains.
        tx: an optax transformation.
        step: the number of updates so far.
        **more: further fields, e.g. `batch_stats=`; each is a State, an array, or a static value.

    >>> import optax
    >>> (params, rest), moduledef = nnx.Linear(2, 3, ctx=nnx.context(0)).partition(nnx.Param, ...)
    >>> state = nnx.TrainState(moduledef, params=params, tx=optax.sgd(0.1), rest=rest)
    >>> def loss_fn(params):
    ...     y, _ = state.apply(params, "rest")(jnp.ones((1, 2)))
    ...     return jnp.mean(y**2)
    >>> state = state.apply_gradients(jax.grad(loss_fn)(state.params))
    >>> int(state.step)
    1
    """

    moduledef: ModuleDef[M]
    params: State
    tx: optax.GradientTransformation
    opt_state: Any
    step: jax.Array

    @former_names(apply_fn="The model itself goes first: `nnx.TrainState(moduledef, params=params, tx=tx)`.")
    def __init__(
        self, moduledef: ModuleDef[M], *, params: State, tx: optax.GradientTransformation, step: Any = 0, **more: Any
    ):
        self.moduledef = moduledef
        self.tx = tx
        # TreeNode makes them data even without arrays, as in the optimizer state of plain SGD.
        self.params = TreeNode(params)
        self.opt_state = TreeNode(more.pop("opt_state") if "opt_state" in more else tx.init(_tree(params)))
        self.step = TreeNode(jnp.asarray(step, jnp.int32) if isinstance(step, int) else step)
        for name, value in more.items():
            setattr(self, name, value)

    def moment_axes(self) -> dict[str, tuple[int | None, ...]]:
        """Returns which axes of its parameter each array of the optimizer state has, by path in `opt_state`.

        Sharding uses it: the shape of a factored moment does not tell axes of the same size apart. The result has one
        entry per axis of the array, None for an axis that the parameter lacks. Arrays that do not belong to a parameter
        are left out.
        """
        return moment_axes(self.opt_state, self.params, self.tx)

    def apply(self, *states: State | str) -> Access:
        """Returns a proxy of the Module that these States build; the name of a field means its value.

        `state.apply("params", "batch_stats")(x)` returns `(out, Pure)`, as `moduledef.apply` does.

        Raises:
            ValueError: a name is not a field.
        """
        return self.moduledef.apply(*[self._field(state) if isinstance(state, str) else state for state in states])

    def _field(self, name: str) -> Any:
        if name not in vars(self):
            raise ValueError(NOT_A_FIELD.format(name=name, fields=", ".join(sorted(vars(self)))))
        return getattr(self, name)

    def apply_gradients(self: T, grads: State, *, tx_args: Mapping[str, Any] | None = None, **replacements: Any) -> T:
        """Returns the record after one update: new `params` and `opt_state`, and one more `step`.

        Args:
            grads: the gradients, with the structure of `params`.
            tx_args: further arguments of the transformation, e.g. `dict(value=loss)`.
            **replacements: other fields to replace, e.g. `batch_stats=new_batch_stats`.
        """
        tx = optax.with_extra_args_support(self.tx)
        before = fetch(self.opt_state)
        updates, opt_state = tx.update(_tree(grads), before, _tree(self.params), **(tx_args or {}))
        params = optax.apply_updates(_tree(self.params), updates)
        opt_state = put_back(opt_state, self.opt_state, before)
        return self.replace(params=params, opt_state=opt_state, step=self.step + 1, **replacements)


add_hints(TrainState, HINTS)


def _tree(state: State) -> Any:
    """Returns the State itself, typed as any tree, which is how optax declares its arguments."""
    return state
