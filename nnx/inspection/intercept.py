"""`intercept`: a function that runs in place of the calls of submodules."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack, overload

from nnx.core.repr import short
from nnx.core.state.selectors import ModuleSelector
from nnx.inspection.observing import ObservedCall
from nnx.transforms.engine.annotations import Decorator, P, R
from nnx.transforms.engine.commit import finish
from nnx.transforms.engine.decorators import decorator
from nnx.transforms.engine.function_keys import CanChange, function_key
from nnx.transforms.engine.observed import Observer

NO_HOOK = """nnx.intercept takes a function and a hook, nnx.intercept(f, hook, where=...), where the hook is called as \
hook(path, module, call, *args, **kwargs); got {value}."""


def _hook_key(hook: Any) -> Any:
    """Returns what a hook is compared by: the same function, while its names mean the same.

    A hook that names something that can change (a list, an instance of a user's class) has a key that equals no other,
    not even that of the same hook in a later call: what was compiled with it may be out of date by then.
    """
    try:
        return function_key(hook)
    except CanChange:
        return object()


class _Hook:
    """A hook, as an object that can be referred to weakly, which not every callable can."""

    __slots__ = ("hook", "__weakref__")

    def __init__(self, hook: Callable[..., Any]):
        self.hook = hook


class Interceptor(Observer):
    """Runs a hook in place of the calls of a Module.

    It refers to the hook weakly. Compiled functions keep observers, and must not keep the Modules a hook may reach; the
    hook is only needed while they are traced, and then the call of `intercept` holds it.
    """

    __slots__ = ("held",)

    def __init__(self, path: str, methods: tuple[str, ...], key: Any, held: "_Hook"):
        super().__init__("nnx.intercept", path, methods, key)
        self.held = weakref.ref(held)

    def run(self, module: Any, position: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        held = self.held()
        assert held is not None, "a hook is only called during the call of intercept, which holds it"
        return held.hook(self.path, module, call, *args, **kwargs)


class InterceptOptions(TypedDict, total=False):
    """The options of `nnx.intercept`."""

    where: ModuleSelector
    methods: str | Sequence[str]
    stateful: bool


@overload
def intercept(fun: Callable[P, R], hook: Callable[..., Any], **options: Unpack[InterceptOptions]) -> Callable[P, R]: ...
@overload
def intercept(*, hook: Callable[..., Any], **options: Unpack[InterceptOptions]) -> Decorator: ...
@decorator
def intercept(
    fun: Any,
    hook: Any = None,
    *,
    where: ModuleSelector = ...,
    methods: str | Sequence[str] = (),
    stateful: bool = True,
) -> Callable[..., Any]:
    """Returns a function that runs a hook in place of the calls of submodules, and uses what the hook returns.

    This is how to patch activations, ablate heads or add noise. The hook also runs inside `nnx.jit`, loops and all
    other transforms. Like the Modules' own code, it then runs while they are traced, and not in later calls. A hook
    that reads a list, a dict or an instance of your own class is traced again in every call, since these can change.

    Args:
        fun: a function of Modules, a Module, or a bound method of one. Only Modules among the arguments are seen.
        hook: a function that is called as `hook(path, module, call, *args, **kwargs)`. `call(*args, **kwargs)` runs the
            original; the hook can call it with other arguments, several times, or not at all.
        where: the submodules to intercept: a Module type, a path glob such as `"blocks/*/attention"`, a function
            `f(path, module) -> bool`, a sequence of these, or `...` for all.
        methods: names of methods that are intercepted as well as `__call__`.
        stateful: whether changes to Modules are written back.

    Returns:
        A function with the arguments and the result of `fun`.

    Raises:
        ValueError: no Module was passed or selected.

    >>> model = nnx.Sequence([nnx.Linear(2, 2, ctx=nnx.context(0)), nnx.relu])
    >>> ablate = lambda path, module, call, x: jnp.zeros_like(call(x))
    >>> nnx.intercept(model, ablate, where="0")(jnp.ones(2)).tolist()
    [0.0, 0.0]
    """
    if not callable(hook):
        raise TypeError(NO_HOOK.format(value=short(hook)))

    def lifted(*args: Any, **kwargs: Any) -> Any:
        observed = ObservedCall("nnx.intercept", fun, where, methods, args, kwargs)
        key, held = _hook_key(hook), _Hook(hook)
        outcome, _ = observed.run(lambda path, names: Interceptor(path, names, key, held))
        return finish(observed.call, outcome, stateful)

    return lifted
