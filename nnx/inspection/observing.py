"""One call of a function on rebuilt Modules, some of which are observed: what `capture` and its kin share.

See `nnx.transforms.engine.observed` for observed Modules, observers, observations and probes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from nnx.core.module.call_chains import Way
from nnx.core.module.info import ModuleBase, info_of
from nnx.core.repr import short
from nnx.core.state.paths import listing
from nnx.core.state.selectors import to_module_predicate
from nnx.core.structure.walk import depth_first, number_modules
from nnx.core.trace import same_level
from nnx.transforms.engine.call import Call, CallAt, Callee, callee_of, is_module
from nnx.transforms.engine.enter import enter_call
from nnx.transforms.engine.leave import leave
from nnx.transforms.engine.observed import Observer, add_probes, observations_of, observe, release
from nnx.transforms.engine.outcome import Outcome
from nnx.transforms.engine.shared_traces import run_body

NO_MODULE = """{transform}: there is no Module among the arguments of {name}. Only Modules that are passed can be \
observed, not those that the function closes over: write a function of the Module, {transform}(lambda model, x: ...)\
(model, x), or pass the Module itself, {transform}(model)(x)."""

NOTHING_SELECTED = """{transform}: where={where} selects none of the Modules that were passed. Their paths are: \
{paths}."""

NO_SUCH_METHOD = "{transform}: methods={name!r} is not a method of any selected Module. Their classes are: {kinds}."


class Recorded(NamedTuple):
    """What one call of a Module returned, and how many axes scan and vmap have put in front."""

    value: Any
    stacked: int


class ObservedCall:
    """One call of a function, split, and the Modules of it that are selected.

    When several Modules are passed, a path starts with the number of its Module. The selector sees it without.

    Args:
        transform: the transform's name, for errors.
        fun: the function, a Module, or a bound method of one.
        where: a Module selector.
        methods: the names of methods to observe as well as `__call__`.
        args, kwargs: the arguments.

    Raises:
        ValueError: no Module was passed, none is selected, or none of those has one of the methods.
    """

    def __init__(self, transform: str, fun: Any, where: Any, methods: str | Sequence[str], args: Any, kwargs: Any):
        callee = _by_name(fun, callee_of(fun, transform))
        self.fun, self.name = callee.fun, f"{transform}({callee.name})"
        self.call: Call = Call((*callee.bound, *args), kwargs)
        self.forks: Any = self.call.forks()
        flat, key = self.call.flat, self.call.signature.key
        if flat is None or key is None:
            raise ValueError(NO_MODULE.format(transform=transform, name=callee.name))
        paths = key.module_paths()
        prefixes = [str(number) for number in range(len(key.roots))] if len(key.roots) > 1 else []
        matches, full_paths = to_module_predicate(where, transform), key.module_paths(prefixes)
        # The predicate gets the caller's Modules, so that it can compare them with others by identity.
        modules = [weak() for weak in flat.modules]
        numbers = [number for number in depth_first(key.parents()) if matches(paths[number], modules[number])]
        if not numbers:
            text = {"where": short(where), "paths": listing(full_paths)}
            raise ValueError(NOTHING_SELECTED.format(transform=transform, **text))
        self.selected: dict[int, str] = {number: full_paths[number] for number in numbers}
        added = (methods,) if isinstance(methods, str) else tuple(methods)
        for name in added:
            if not any(hasattr(key.class_of(number), name) for number in numbers):
                kinds = ", ".join(sorted({self.kind(number) for number in numbers}))
                raise ValueError(NO_SUCH_METHOD.format(transform=transform, name=name, kinds=kinds))
        self.methods: tuple[str, ...] = ("__call__", *added)

    def kind(self, number: int) -> str:
        """Returns the name of the class of a Module."""
        key = self.call.signature.key
        assert key is not None, "the constructor has checked that there are Modules"
        return key.class_of(number).__name__

    def run(
        self,
        observer: Callable[[str, tuple[str, ...]], Observer],
        probes: Mapping[str, Sequence[Any]] | None = None,
        stacked: Mapping[str, Sequence[int]] | None = None,
    ) -> tuple[Outcome, dict[str, list[Recorded]]]:
        """Runs the function at the current trace level, and returns its outcome and the observations by path.

        Args:
            observer: makes the observer of the Module at a path, from the path and the names of the methods.
            probes: by path, the probes of a Module.
            stacked: by path, how many stacked axes each probe has.
        """
        call = self.call
        contexts = call.signature.contexts_from(self.forks)
        entered, args, kwargs = enter_call(call.signature, call.statics, call.cells(), call.data, contexts)
        modules = [(path, entered.graph.modules[number]) for number, path in self.selected.items()]
        observers = {path: observer(path, self.methods) for path, _ in modules}
        for path, module in modules:
            observe(module, observers[path])
            if probes and stacked:
                add_probes(module, probes[path], stacked[path])
        out = run_body(self.fun, args, kwargs)
        observations = {
            path: [Recorded(*observation) for observation in observations_of(module)] for path, module in modules
        }
        # The function may have copied observed Modules (`clone`) and returned them, or attached them to others.
        returned = [leaf for leaf in jax.tree.leaves(out) if is_module(leaf)]
        reached = number_modules([*entered.graph.modules, *returned]).modules
        release([module for module in reached if same_level(info_of(module).level)], observers.values())
        return leave(entered, out, self.name), observations


def _by_name(fun: Any, callee: Callee) -> Callee:
    """Returns a callee that finds the method on the Module it is given, whose class may be an observed one."""
    if isinstance(fun, ModuleBase):
        return callee._replace(fun=CallAt(Way(())))
    if callee.bound and getattr(type(callee.bound[0]), callee.name, None) is callee.fun:
        return callee._replace(fun=CallAt(Way(((True, callee.name),))))
    return callee
