"""The mode of a layer that behaves differently in training: from the call, else the instance, else the Context."""

from nnx.core.context import Context

MODE_NOT_SET = (
    "{layer} does not know its mode: `{name}` was given nowhere. Set it in one of three ways: "
    "in the call, `layer(x, {name}={example})`; "
    "on the instance, `{layer}(..., {name}={example})`; "
    "or as a flag of the Context passed to the call, "
    "`ctx = nnx.context(0, flags={{'{name}': {example}}})` and `layer(x, ctx=ctx)`."
)


def resolve_mode(layer: object, name: str, given: bool | None, ctx: Context | None, *, example: bool = True) -> bool:
    """The value of the mode `name` ("deterministic", "use_running_average") for one call of `layer`.

    Args:
        layer: the layer that is called; its attribute `name` is the instance's mode.
        name: of the argument, the attribute and the Context flag.
        given: what the call passed, `None` for nothing.
        ctx: the Context the call passed.
        example: the value the error message shows.

    Raises:
        ValueError: when none of the three says.
    """
    if given is not None:
        return given
    on_instance = getattr(layer, name)
    if on_instance is not None:
        return on_instance
    flag = None if ctx is None else ctx.get_flag(name)
    if flag is None:
        raise ValueError(MODE_NOT_SET.format(layer=type(layer).__name__, name=name, example=example))
    return flag
