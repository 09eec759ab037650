"""Optimizer: a Module that updates a model in place by an optax transformation, with its state in Variables.

Every array of the optax state is a Variable (see optimizer_state), and the nesting around them is static structure, so
a compiled step takes a flat list of arrays and does not flatten a tree.
"""

import functools
import pickle
import weakref
from typing import Any, Generic, Never, TypeVar

import jax
import jax.numpy as jnp
import optax

from nnx.core.hints.hints import add_hints
from nnx.core.hints.table import OPTIMIZER as HINTS
from nnx.core.module.dict_sequence import Dict
from nnx.core.module.freezing import is_frozen
from nnx.core.module.info import ModuleBase, info_of
from nnx.core.module.module import Module
from nnx.core.module.variable_tree import variable_tree
from nnx.core.repr import short
from nnx.core.state.filters import Filter, check_wrt, describe
from nnx.core.state.paths import listing
from nnx.core.state.state import State, parts_of
from nnx.core.user_warnings import warn_user
from nnx.core.variables.untied import warn_of_untied
from nnx.core.variables.variables import Node, Param, raw_value
from nnx.sharding.defaults import AxesOf
from nnx.sharding.explicit import with_automatic_axes
from nnx.sharding.placement import whole_beside
from nnx.training.host_memory import fetch, put_back
from nnx.training.optimizer_state import OptState, Structure, as_variables, flatten_state, init_state

M = TypeVar("M", bound=Module)

NOT_A_MODEL = "nnx.Optimizer(model, tx) takes a Module and an optax transformation; got {model} as the model."
NOT_A_TRANSFORMATION = (
    "nnx.Optimizer(model, tx) takes an optax transformation such as optax.adam(1e-3); got {tx} as tx."
)
NOTHING_TO_TRAIN = """nnx.Optimizer: wrt={wrt} matches nothing in this {model}. Its collections are: {collections}; \
for its paths, see `model.get_state()`. Frozen Variables do not count: see `model.unfreeze()`."""
NOT_GRADIENTS = """Optimizer.update takes the gradients as a State, as nnx.grad(f)(model) returns them for one Module; \
got {got}. If you differentiate several arguments, pass the State of the model this Optimizer was made for."""
MODEL_GIVEN = """Optimizer.update takes the gradients alone, optimizer.update(grads): the model was given to \
nnx.Optimizer(model, tx). Further arguments of the transformation are keywords, such as value=loss."""
MISSING_GRADIENTS = """Optimizer.update got no gradient for {paths}, which wrt={wrt} selects. Take the gradient with \
the same filter, nnx.grad(f, wrt=...), and with respect to the Module that was given to nnx.Optimizer."""
UNKNOWN_GRADIENTS = """Optimizer.update got gradients for {paths}, and the model has no such path. Take the gradient \
with respect to the Module that was given to nnx.Optimizer, not one that contains it."""
OTHER_SHAPE = "Optimizer.update: the gradient of {path!r} is {got}, but the parameter is {expected}."
COMPLEX_GRADIENT = """Optimizer.update: the gradient of {path!r} is complex, {got}, but the parameter is real, \
{expected}. An update would silently drop the imaginary part. Return a real loss, or take the real part of the \
gradient yourself: grads.map(lambda path, g: g.replace(value=g.value.real))."""
NOT_PICKLABLE = """This nnx.Optimizer cannot be pickled, because its optax transformation consists of local functions \
({error}). Save its state with nnx.save(path, optimizer), and load it with nnx.load(path, nnx.Optimizer(model, tx)) in \
a program that makes the same model and the same tx. With a pickler that supports local functions, such as \
cloudpickle, pickle (optimizer.model, optimizer.tx, optimizer.get_state()), and rebuild it from these: make \
nnx.Optimizer(model, tx), then call its update_state(state)."""
OTHER_PARAMETER = """Optimizer.update: {path!r} has the shape {now}, but it had the shape {was} when the Optimizer was \
made: it, or a Module that holds it, has been replaced. Make a new nnx.Optimizer after changing the structure of a \
model."""
MODEL_CHANGED = """The parameters of the model are no longer those the Optimizer was made for ({changes}). Make a new \
nnx.Optimizer after changing the structure of a model, and after freeze() or unfreeze()."""


NO_LEARNING_RATE = """{action} Optimizer.learning_rate: the optax transformation {found}. Make it one that can be \
read and set, `tx = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)`; with several, use `optax_state`."""
SCHEDULED = """Setting Optimizer.learning_rate: it follows a schedule, which would overwrite the value in the next \
update. Give `optax.inject_hyperparams` a number instead of a schedule, or change the schedule."""
NOT_A_RATE = "Setting Optimizer.learning_rate: it is one number, got {value}."

REPLACED = """Optimizer.update: since the Optimizer was made, the Modules at these paths have been replaced by others \
of the same shapes: {paths}. They are updated with the moments of the old ones. Make a new nnx.Optimizer after \
replacing layers."""

# By the ModuleInfo of an optimizer: the Modules whose moments it has, by path. It is not part of an optimizer's state,
# so copies, such as those inside a transform, are not in it.
_owners: weakref.WeakKeyDictionary[Any, dict[str, weakref.ref[Any]]] = weakref.WeakKeyDictionary()


class Optimizer(Module, Generic[M]):
    """Updates the parameters of a model in place, by an optax transformation.

    Several optimizers can share a model: each uses the gradients that its `wrt` selects. Moments have the axis names
    and shardings of their parameters, whether the model is sharded before or after, or built together with the
    optimizer by `nnx.init_sharded`. The Optimizer of an abstract model (`nnx.eval_shape`) is abstract.

    Moments belong to paths. A layer that is replaced by one of the same shapes is updated with the moments of the old
    one: make a new Optimizer after replacing layers. An `update` outside `nnx.jit` warns of it; a compiled step, which
    sees only structure and values, does not notice.

    For complex parameters, conjugate the gradients first: `jax.grad` returns the conjugate of the direction of steepest
    ascent, and optax subtracts what it gets.

    Args:
        model: the Module to train; it becomes the attribute `model`.
        tx: the transformation; chains, schedules, clipping, accumulation (`optax.MultiSteps`) and masks come from
            optax.
        wrt: a filter that selects the parameters to train; frozen ones (`model.freeze(...)`) are left out.
        skip_nonfinite: whether to skip the whole update if a gradient contains NaN or infinity. Then neither the model
            nor the optimizer's state changes, `step` stays the same, and `skipped` is incremented.

    Raises:
        TypeError: `model` is not a Module, or `tx` is not a transformation.
        ValueError: `wrt` selects nothing.

    >>> import optax
    >>> model = nnx.Linear(2, 3, ctx=nnx.context(0))
    >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3))
    >>> params = model.filter(nnx.Param)
    >>> optimizer.update(jax.tree.map(jnp.ones_like, params))
    >>> int(optimizer.step), list(optimizer.filter("opt_state"))[:2]
    (1, ['opt_state/0/count', 'opt_state/0/mu/bias'])
    """

    model: M
    tx: optax.GradientTransformation
    wrt: Filter
    skip_nonfinite: bool
    trains: tuple[str, ...]
    step: jax.Array
    skipped: jax.Array
    opt_state: Dict
    opt_structure: Structure

    def __init__(
        self, model: M, tx: optax.GradientTransformation, wrt: Filter = Param, *, skip_nonfinite: bool = False
    ):
        if not isinstance(model, ModuleBase):
            raise TypeError(NOT_A_MODEL.format(model=short(model)))
        if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
            raise TypeError(NOT_A_TRANSFORMATION.format(tx=short(tx)))
        check_wrt(wrt, Module.get_state(model).items(), "nnx.Optimizer")
        self.model = model
        self.tx = tx
        self.wrt = tuple(wrt) if isinstance(wrt, list) else wrt
        self.skip_nonfinite = skip_nonfinite
        params = self._params()
        if not params:
            collections = ", ".join(sorted(Module.collections(model))) or "none"
            text = NOTHING_TO_TRAIN.format(wrt=describe(wrt), model=type(model).__name__, collections=collections)
            raise ValueError(text)
        warn_of_untied("nnx.Optimizer", model, params.items())
        self.trains = tuple(params)
        _owners[info_of(self)] = {path: weakref.ref(info) for path, info in self._owners().items()}
        opt_state = init_state(tx, params)
        self.step = OptState(_zero(params))
        if skip_nonfinite:
            self.skipped = OptState(_zero(params))
        self._store(opt_state, params)

    def update(self, grads: State, *misplaced: Never, **extra: Any) -> None:
        """Updates the model and the optimizer's own state once.

        Args:
            grads: the gradients, as `nnx.grad` returns them; paths that `wrt` does not select are ignored.
            **extra: further arguments of the transformation, e.g. `value`, `grad` and `value_fn` for `optax.lbfgs`.

        Raises:
            TypeError: `grads` is not a State.
            ValueError: the gradients do not fit the parameters.
        """
        if misplaced or isinstance(grads, ModuleBase):
            raise TypeError(MODEL_GIVEN)
        params = self._params()
        if tuple(params) != self.trains:
            raise ValueError(MODEL_CHANGED.format(changes=_changes(self.trains, tuple(params))))
        self._check_moments(params)
        self._warn_of_replaced()
        grads = self._select(grads, params)
        if isinstance(extra.get("grad"), State):
            extra["grad"] = self._select(extra["grad"], params)
        kept = self.optax_state
        before = fetch(kept)
        apply: Any = functools.partial(optax.with_extra_args_support(self.tx).update, **extra)
        if not extra:  # which may hold functions and arrays of any split
            # Products in optax, such as those of Muon, do not say how their results are split.
            apply = with_automatic_axes(apply, (_tree(params), before))
        updates, opt_state = apply(_tree(grads), before, _tree(params))
        new_params = optax.apply_updates(_tree(params), updates)
        counted: Any = 1
        if self.skip_nonfinite:
            finite = _all_finite(grads)
            keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
            new_params, opt_state = jax.tree.map(keep, (new_params, opt_state), (_tree(params), before))
            counted = finite.astype(jnp.int32)
            self.skipped += 1 - counted
        Module.update_state(self.model, new_params)
        self._store(put_back(opt_state, kept, before), params)
        self.step += counted

    @property
    def optax_state(self) -> Any:
        """The optimizer state in the form that optax uses; assign to it to replace the state."""
        state = Module.get_state(self.opt_state)
        return self.opt_structure.assemble([state[path].value for path in self.opt_structure.paths], self._params())

    @optax_state.setter
    def optax_state(self, opt_state: Any) -> None:
        self._store(opt_state, self._params())

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the next update, or of the last one if it follows a schedule; assign to it to set it.

        `tx` must keep it in its state: `optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)`. Setting it changes a
        value only, so a compiled step is not recompiled.
        """
        return Module.get_state(self.opt_state)[self._learning_rate_path("reading")].value

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        path = self._learning_rate_path("setting")
        state = Module.get_state(self.opt_state)
        if state.sub(path.replace("hyperparams/", "hyperparams_states/")):
            raise AttributeError(SCHEDULED)
        new = jnp.asarray(value, state[path].dtype)
        if new.shape != ():
            raise ValueError(NOT_A_RATE.format(value=short(value)))
        Module.update_state(self.opt_state, State({path: new}))

    def _learning_rate_path(self, action: str) -> str:
        paths = [path for path in Module.get_state(self.opt_state) if f"/{path}".endswith("/hyperparams/learning_rate")]
        if len(paths) != 1:
            found = f"has several: {listing(paths)}" if paths else "keeps none in its state"
            raise AttributeError(NO_LEARNING_RATE.format(action=action, found=found))
        return paths[0]

    @property
    def logical_axes(self) -> dict[str, AxesOf]:
        """The axis names of each moment, which are those of its parameter."""
        return {
            f"opt_state/{moment.path}": AxesOf(f"model/{moment.parameter}", moment.rank, moment.axes)
            for moment in self.opt_structure.moments
        }

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Which pickler is at work cannot be known here, so every one of them is held to what pickle can do.
        try:
            pickle.dumps(self.tx, protocol)
        except Exception as error:  # pickle raises AttributeError, PicklingError or TypeError
            raise TypeError(NOT_PICKLABLE.format(error=error)) from error
        return super().__reduce_ex__(protocol)

    def _check_moments(self, params: State) -> None:
        """Raises ValueError if a parameter has been replaced by one of another shape since its moments were made."""
        moments = Module.get_state(self.opt_state)
        for moment in self.opt_structure.moments:
            if moment.parameter not in params or moment.axes != tuple(range(moment.rank)):
                continue
            if getattr(params[moment.parameter], "value", params) is None:
                raise ValueError(MODEL_CHANGED.format(changes=f"{moment.parameter!r} is None"))
            was, now = moments[moment.path].shape, getattr(params[moment.parameter], "shape", None)
            if now is not None and was != now:
                raise ValueError(OTHER_PARAMETER.format(path=moment.parameter, was=list(was), now=list(now)))

    def _owners(self) -> dict[str, Any]:
        """Returns the ModuleInfo of each Module that has a trained parameter of its own."""
        paths = {path.rpartition("/")[0] for path in self.trains}
        return {path: info_of(module) for path, module in Module.named_modules(self.model) if path in paths}

    def _warn_of_replaced(self) -> None:
        """Warns once if a Module is not the one whose moments these are; not inside a transform, where all are new."""
        known = _owners.get(info_of(self))
        if known is not None:
            replaced = [path for path, info in self._owners().items() if path in known and known[path]() is not info]
            if replaced:
                del _owners[info_of(self)]
                warn_user(REPLACED.format(paths=listing(replaced)))

    def _params(self) -> State:
        params = Module.filter(self.model, self.wrt)
        return params.filter(_is_trained) if any(map(is_frozen, parts_of(params)[1])) else params

    def _store(self, opt_state: Any, params: State) -> None:
        arrays, tree, values = flatten_state(opt_state)
        structure = self.__dict__.get("opt_structure")
        if structure is not None and structure.has_form(tree, values):
            Module.update_state(self.opt_state, State(zip(structure.paths, arrays, strict=True)))
            return
        variables, self.opt_structure = as_variables(opt_state, params, self.tx)
        self.opt_state = variable_tree(variables)

    def _select(self, grads: Any, params: State) -> State:
        """Returns the gradients of the parameters, in the order and the containers of the parameters."""
        if not isinstance(grads, State):
            raise TypeError(NOT_GRADIENTS.format(got=short(grads)))
        missing = [path for path in params if path not in grads]
        if missing:
            raise ValueError(MISSING_GRADIENTS.format(paths=listing(missing), wrt=describe(self.wrt)))
        if len(grads) > len(params):
            known = Module.get_state(self.model)
            unknown = [path for path in grads if path not in known]
            if unknown:
                raise ValueError(UNKNOWN_GRADIENTS.format(paths=listing(unknown)))
        return params.map(lambda path, param: _as(param, grads[path], path))


def _is_trained(path: str, leaf: Any) -> bool:
    return not is_frozen(leaf)


add_hints(Optimizer, HINTS)


def _as(param: Any, grad: Any, path: str) -> Any:
    raw, value = raw_value(grad), raw_value(param)
    if _shapes(raw) != _shapes(value):
        raise ValueError(OTHER_SHAPE.format(path=path, got=short(raw), expected=short(value)))
    if any(map(_drops_imaginary_part, jax.tree.leaves(raw), jax.tree.leaves(value))):
        raise ValueError(COMPLEX_GRADIENT.format(path=path, got=short(raw), expected=short(value)))
    return param.replace(value=raw) if isinstance(param, Node) else raw


def _shapes(value: Any) -> Any:
    return jax.tree.structure(value), [jnp.shape(leaf) for leaf in jax.tree.leaves(value)]


def _drops_imaginary_part(grad: Any, value: Any) -> bool:
    return jnp.iscomplexobj(grad) and not jnp.iscomplexobj(value)


def _zero(params: State) -> Any:
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
    return whole_beside(jax.ShapeDtypeStruct((), jnp.int32) if abstract else jnp.zeros((), jnp.int32), params)


def _all_finite(grads: State) -> jax.Array:
    """Whether no gradient contains NaN or infinity; under a mesh, on any device."""
    inexact = [leaf for leaf in jax.tree.leaves(grads) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in inexact])) if inexact else jnp.array(True)


def _tree(state: State) -> Any:
    """Returns the State itself, typed as any tree, which is how optax declares its arguments."""
    return state


def _changes(before: tuple[str, ...], after: tuple[str, ...]) -> str:
    new, gone = [path for path in after if path not in before], [path for path in before if path not in after]
    parts = [f"new: {listing(new)}"] if new else []
    return "; ".join([*parts, f"gone: {listing(gone)}"] if gone else parts)
