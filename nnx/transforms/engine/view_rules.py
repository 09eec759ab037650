"""What a lifted function may do with views (see core/views): use them freely inside, but neither return nor split them.

Inside a transform, a view is an ordinary Module. If the Module it is a view of is passed as well, the two are *twins*:
separate Modules whose variables are tied, as if by Refs. Setting values works as it does outside. But one twin does not
see an attribute that is added to the other before the function ends, so changing the structure of twins is an error.
"""

from typing import Any

from nnx.core.module.info import is_view
from nnx.core.state.paths import join
from nnx.core.structure.structure import Attribute, DataAttribute, StaticAttribute
from nnx.core.structure.walk import Traversal
from nnx.transforms.engine.enter import Entered

VIEW_RETURNED = """{name} returns a view of a Module ({owner}, at {path!r}), or has attached one to a Module: a view \
cannot leave the transform it was made in. Make it outside, with view(...), and pass it as an argument."""

TWIN_CHANGED = """{name} was given a Module together with a view of it, or two views, and changed the structure of one \
of them: the attribute {path!r} of {owner} was {what}. Inside the function they are separate Modules, so the other one \
would not see the change until the function has ended. Pass only one of them (its changes are seen by both), or make \
the view inside the function."""


def check_views(entered: Entered, walk: Traversal, name: str) -> None:
    """Raises ValueError if views are about to leave a transform, or the structure of twins has changed.

    Args:
        entered: the Modules of the call.
        walk: the walk over them, after the function.
        name: the function, for errors.
    """
    for number, module in enumerate(walk.modules):
        if is_view(module):
            raise ValueError(VIEW_RETURNED.format(name=name, owner=type(module).__name__, path=walk.path(number)))
    for number in [module for group in entered.ties.twins for module in group]:
        changed = _change(entered, walk, number)
        if changed is not None:
            attribute, what = changed
            assert entered.key is not None, "only a graph has Modules"
            owner, path = type(walk.modules[number]).__name__, join(entered.key.module_paths()[number], attribute)
            raise ValueError(TWIN_CHANGED.format(name=name, path=path, owner=owner, what=what))


def _change(entered: Entered, walk: Traversal, number: int) -> tuple[str, str] | None:
    """Returns an attribute of a Module that has changed, and what happened to it."""
    assert entered.key is not None, "only a graph has Modules"
    before = {attribute.name: attribute for attribute in entered.key.attributes(number)}
    after = {attribute.name: attribute for attribute in walk.key.attributes(number)}
    for name in [*before, *after]:
        if name not in before:
            return name, "added"
        if name not in after:
            return name, "deleted"
        old, new = before[name], after[name]
        if _compared(old) != _compared(new):
            return name, "replaced"
        if type(old) is DataAttribute and type(new) is DataAttribute:
            if walk.refs[new.cell] is not entered.refs.get(old.cell):
                return name, "untied"
    return None


def _compared(attribute: Attribute) -> Any:
    """Returns an attribute without the numbers that changes elsewhere in the graph can change."""
    if type(attribute) is DataAttribute:
        return attribute.name, attribute.kind
    if type(attribute) is StaticAttribute:
        return attribute.name, attribute.kind, attribute.key
    return attribute
