"""Optimizer: any optax transformation, with its state in Variables, that updates a model in place.

optax keeps its state in nested tuples and dicts. Here every array of it is a Variable of its own, and the nesting is
static structure, so that a compiled step takes a flat list and walks no tree.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from nnx.core.filters import Filter, describe
from nnx.core.info import ModuleBase
from nnx.core.module import Module
from nnx.core.repr import short
from nnx.core.state import State
from nnx.core.variables import Node, Param, Variable
from nnx.training.variable_tree import leaf_paths, variable_tree

T = TypeVar("T")

NOT_A_MODEL = "nnx.Optimizer(model, tx) takes a Module and an optax transformation; got {model} as the model."
NOT_A_TRANSFORMATION = (
    "nnx.Optimizer(model, tx) takes an optax transformation such as optax.adam(1e-3); got {tx} as tx."
)
NOTHING_TO_TRAIN = """nnx.Optimizer: wrt={wrt} matches nothing in this {model}. Its collections are: {collections}; \
its paths are those of `model.get_state()`."""
NOT_GRADIENTS = """Optimizer.update takes the gradients as a State, as nnx.grad(f)(model) returns them for one Module; \
got {got}. Of several arguments, pass the State of the model this Optimizer was made for."""
MISSING_GRADIENTS = """Optimizer.update got no gradient for {paths}, which wrt={wrt} selects. Take the gradient with \
the same filter, nnx.grad(f, wrt=...), and with respect to the Module that was given to nnx.Optimizer."""
UNKNOWN_GRADIENTS = """Optimizer.update got gradients for {paths}, and the model has no such path. Take the gradient \
with respect to the Module that was given to nnx.Optimizer (not one that contains it)."""
OTHER_SHAPE = "Optimizer.update: the gradient of {path!r} is {got}, but the parameter is {expected}."
MODEL_CHANGED = """The parameters of the model are no longer those the Optimizer was made for: {changes}. Make a new \
nnx.Optimizer after changing the structure of a model."""


class OptState(Variable[T]):
    """State of an optimizer, kept by `nnx.Optimizer`. The collection "opt_state"."""

    __slots__ = ()
    collection = "opt_state"


class Optimizer(Module):
    """Updates the parameters of a model in place, by an optax transformation.

    Several optimizers may share a model: each takes from the gradients what its `wrt` selects.

    Args:
        model: the Module to train; it is held as the attribute `model`.
        tx: the transformation; chains, schedules, clipping, accumulation (`optax.MultiSteps`), masks are optax's.
        wrt: a filter for what to train.

    >>> import optax
    >>> model = nnx.Linear(2, 3, ctx=nnx.context(0))
    >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3))
    >>> params = model.filter(nnx.Param)
    >>> optimizer.update(jax.tree.map(jnp.ones_like, params))
    >>> int(optimizer.step), list(optimizer.filter("opt_state"))[:2]
    (1, ['opt_state/0/count', 'opt_state/0/mu/bias'])
    """

    def __init__(self, model: Module, tx: optax.GradientTransformation, wrt: Filter = Param):
        if not isinstance(model, ModuleBase):
            raise TypeError(NOT_A_MODEL.format(model=short(model)))
        if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
            raise TypeError(NOT_A_TRANSFORMATION.format(tx=short(tx)))
        self.model = model
        self.tx = tx
        self.wrt = tuple(wrt) if isinstance(wrt, list) else wrt
        params = self._params()
        if not params:
            collections = ", ".join(sorted(model.collections())) or "none"
            text = NOTHING_TO_TRAIN.format(wrt=describe(wrt), model=type(model).__name__, collections=collections)
            raise ValueError(text)
        self.trains = tuple(params)
        self.step = OptState(jnp.zeros((), jnp.int32))
        self._store(tx.init(_tree(params)), params)

    def update(self, grads: State, **extra: Any) -> None:
        """One update of the model and of the optimizer's own state.

        Args:
            grads: the gradients, as `nnx.grad` returns them; paths that `wrt` does not select are left alone.
            **extra: what the transformation wants beside them, e.g. `value`, `grad` and `value_fn` for `optax.lbfgs`.

        Raises:
            TypeError: `grads` is no State.
            ValueError: the gradients do not fit the parameters.
        """
        params = self._params()
        if tuple(params) != self.trains:
            raise ValueError(MODEL_CHANGED.format(changes=_changes(self.trains, tuple(params))))
        grads = self._select(grads, params)
        if isinstance(extra.get("grad"), State):
            extra["grad"] = self._select(extra["grad"], params)
        tx = optax.with_extra_args_support(self.tx)
        updates, opt_state = tx.update(_tree(grads), self.optax_state, _tree(params), **extra)
        self.model.update_state(optax.apply_updates(_tree(params), updates))
        self._store(opt_state, params)
        self.step += 1

    @property
    def optax_state(self) -> Any:
        """The optimizer state as optax has it; assign to it to replace it."""
        treedef, paths = self.opt_structure
        state = self.opt_state.get_state()
        return treedef.unflatten([state[path].value for path in paths])

    @optax_state.setter
    def optax_state(self, opt_state: Any) -> None:
        self._store(opt_state, self._params())

    def _params(self) -> State:
        return self.model.filter(self.wrt)

    def _store(self, opt_state: Any, params: State) -> None:
        leaves, treedef = jax.tree.flatten(opt_state)
        structure = self.__dict__.get("opt_structure")
        if structure is not None and structure[0] == treedef:
            self.opt_state.update_state(State(zip(structure[1], leaves, strict=True)))
            return
        variables = _variables(opt_state, params)
        self.opt_structure = (treedef, tuple([path for path, _ in variables]))
        self.opt_state = variable_tree(variables)

    def _select(self, grads: Any, params: State) -> State:
        """The gradients of the parameters, in the order and the containers of the parameters."""
        if not isinstance(grads, State):
            raise TypeError(NOT_GRADIENTS.format(got=short(grads)))
        missing = [path for path in params if path not in grads]
        if missing:
            raise ValueError(MISSING_GRADIENTS.format(paths=_listing(missing), wrt=describe(self.wrt)))
        if len(grads) > len(params):
            known = self.model.get_state()
            unknown = [path for path in grads if path not in known]
            if unknown:
                raise ValueError(UNKNOWN_GRADIENTS.format(paths=_listing(unknown)))
        return params.map(lambda path, param: _as(param, grads[path], path))


def _as(param: Any, grad: Any, path: str) -> Any:
    raw = grad.value if isinstance(grad, Node) else grad
    value = param.value if isinstance(param, Node) else param
    if _shapes(raw) != _shapes(value):
        raise ValueError(OTHER_SHAPE.format(path=path, got=short(raw), expected=short(value)))
    return param.replace(value=raw) if isinstance(param, Node) else raw


def _shapes(value: Any) -> Any:
    return jax.tree.structure(value), [jnp.shape(leaf) for leaf in jax.tree.leaves(value)]


def _variables(opt_state: Any, params: State) -> list[tuple[str, Any]]:
    """A Variable for each leaf of the optimizer state, with its path.

    What has the type, metadata and shape of a parameter (a momentum) gets the parameter's metadata, its sharding above
    all.
    """
    like_params = {
        (p._spec, p.value.shape) for p in params.values() if isinstance(p, Node) and hasattr(p.value, "shape")
    }
    variables: list[tuple[str, Any]] = []
    for path, found in leaf_paths(opt_state, is_leaf=lambda x: isinstance(x, Node)):
        boxed = isinstance(found, Node)
        for inner, leaf in leaf_paths(found.value if boxed else found):
            metadata = found.metadata if boxed and (found._spec, jnp.shape(leaf)) in like_params else {}
            variables.append(("/".join(filter(None, (path, inner))) or "state", OptState(leaf, **metadata)))
    paths = {path for path, _ in variables}
    if len(paths) < len(variables) or any("/" in p and _is_inside(p, paths) for p in paths):
        return [(str(i), variable) for i, (_, variable) in enumerate(variables)]  # paths that do not tell leaves apart
    return variables


def _is_inside(path: str, paths: set[str]) -> bool:
    segments = path.split("/")
    return any("/".join(segments[:i]) in paths for i in range(1, len(segments)))


def _tree(state: State) -> Any:
    """A State as what optax takes it for: any tree."""
    return state


def _changes(before: tuple[str, ...], after: tuple[str, ...]) -> str:
    new, gone = [path for path in after if path not in before], [path for path in before if path not in after]
    parts = [f"new are {_listing(new)}"] if new else []
    return "; ".join([*parts, f"gone are {_listing(gone)}"] if gone else parts)


def _listing(paths: list[str]) -> str:
    return ", ".join(map(repr, paths[:10])) + (f" and {len(paths) - 10} more" if len(paths) > 10 else "")
