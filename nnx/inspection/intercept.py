"""`intercept`: a function that runs in place of the calls of submodules."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack, overload

from nnx.core.repr import short
from nnx.core.selectors import Selector
from nnx.inspection.observing import ObservedCall, method_names
from nnx.transforms.annotations import Decorator, P, R
from nnx.transforms.body_key import CanChange, body_key
from nnx.transforms.decorators import decorator
from nnx.transforms.effects import finish
from nnx.transforms.observed import Observer

NO_HOOK = """nnx.intercept takes a function and a hook, nnx.intercept(f, hook, where=...), where the hook is called as \
hook(path, module, call, *args, **kwargs); got {value}."""


class _HookKey:
    """What a hook is compared by: hooks with equal keys do the same to equal arguments.

    A hook that reaches something that can change (a list, an instance of a user's class) has a key that equals no
    other, not even that of the same hook in a later call: whatever was compiled with it may be out of date by then.
    """

    __slots__ = ("key", "kept")

    def __init__(self, hook: Any):
        self.kept: list[Any] = []  # what the key knows by identity
        try:
            self.key: Any = body_key(hook, self.kept)
        except CanChange:
            self.key = object()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HookKey) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class Interceptor(Observer):
    """Runs a hook in place of the calls of a Module.

    It refers to the hook weakly. Compiled functions keep observers, and must not keep the Modules a hook may reach; the
    hook is only needed while they are traced, and then the call of `intercept` holds it.
    """

    __slots__ = ("hook",)

    def __init__(self, path: str, methods: tuple[str, ...], key: _HookKey, hook: Callable[..., Any]):
        super().__init__("nnx.intercept", path, methods, key)
        self.hook = weakref.ref(hook)

    def run(self, module: Any, position: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hook = self.hook()
        assert hook is not None, "the call of intercept holds the hook"
        return hook(self.path, module, call, *args, **kwargs)


class InterceptOptions(TypedDict, total=False):
    """The options of `nnx.intercept`."""

    where: Selector
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
    where: Selector = ...,
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
    names = method_names(methods)

    def lifted(*args: Any, **kwargs: Any) -> Any:
        observed = ObservedCall("nnx.intercept", fun, where, args, kwargs)
        key = _HookKey(hook)
        outcome, _ = observed.run(lambda path: Interceptor(path, names, key, hook))
        return finish(observed.call, outcome, stateful)

    return lifted
