"""The errors of the module system, and the messages that are raised in more than one place.

A message says what was passed and where, why it fails, and what to write instead.
"""


class TraceContextError(Exception):
    """A Module, Ref or Context was used at a different trace level from the one it was made in.

    A trace level is one run of a JAX transform. The message says what to write instead: usually, to pass the object to
    the lifted transform as an argument.

    >>> counter = nnx.Dict(n=nnx.Variable(0))
    >>> try:
    ...     jax.jit(lambda: setattr(counter, "n", 1))()
    ... except nnx.TraceContextError as error:
    ...     print(str(error)[:48])
    Cannot mutate Module from different trace level:
    """


MUTATE_AT_OTHER_LEVEL = """Cannot mutate Module from different trace level: {action} of {owner}.
The Module was made outside the JAX transform that is running now (or inside one that has ended), so the change would \
be lost or would leak a tracer. Pass the Module to the function as an argument and use the lifted transform (nnx.jit, \
nnx.grad, nnx.scan, ...), which writes the change back; with a raw JAX transform, use partition() and merge()."""

REF_AT_OTHER_LEVEL = """Cannot use Ref from a different trace level: {action}.
The Ref was made outside the JAX transform that is running now. Attach it where it was made, and pass the Modules that \
hold it to the lifted transform as arguments: they stay tied inside."""

CONTEXT_AT_OTHER_LEVEL = """Cannot use Context from a different trace level: make_rng({name!r}) was called inside a \
JAX transform on a Context made outside it (or the reverse).
A function that captures the Context, as in

    nnx.grad(lambda m: loss(m(x, ctx=ctx)))(m)

would draw the same key on every call. Pass it as an argument of the lifted transform instead:

    def f(m, ctx): ...
    nnx.grad(f)(m, ctx)

Under a raw JAX transform pass `ctx.partition()` and call `.merge()` on it inside."""

MODULE_TO_RAW_JAX = """A Module ({name}) was passed to a JAX function that takes arrays and pytrees. A Module is \
neither: its updates would be lost.
Use the lifted transform (nnx.jit, nnx.grad, nnx.vmap, ...), which takes Modules anywhere in its arguments. A solver, \
an optimizer or any other function of pytrees takes the parameters, and the function that it is given merges them:

    (params, rest), moduledef = module.partition(nnx.Param, ...)
    solve(lambda params, x: moduledef.merge(params, rest)(x), params)"""

RESERVED_NAME = """Cannot assign attribute {name!r} of {owner}: it is the name of a method of nnx.Module, which it \
would hide. Choose another name (or keep the value in an nnx.Dict, where any key is an item)."""

DUNDER_NAME = """Cannot assign {value} to attribute {name!r} of {owner}: names with two underscores at both ends \
belong to Python, and the library does not look at them, so no transform would see the value. Choose another name."""

HIDES_METHOD = """Cannot assign attribute {name!r} of {owner}: it is the name of a method of nnx.Module, which it \
would hide. To call the method, write `.{name}(...)`. To have an attribute of that name, assign it in `__init__`; \
`nnx.Module.{name}(module)` then still calls the method."""

METHOD_AS_DEFAULT = """{owner} was given no value for {name!r}. The name is also that of a method of nnx.Module, which \
dataclasses.dataclass takes for the default of the field. Use @nnx.dataclass, or write `{name}: ... = \
dataclasses.field()`."""

DICT_REPLACED = """Cannot assign `__dict__` of {owner}: the library records the kind of every attribute outside \
`__dict__`, and the two would no longer match. Set the attributes one by one, or replace the state \
with update_state()."""

NOT_A_MODULE_CLASS = """Cannot assign `__class__` of {owner}: the new class must be a subclass of nnx.Module, got \
{value}."""

CLASS_OF_VIEW = """Cannot assign `__class__` of a view of {owner}. Assign it on the Module that it is a view of, and \
make a new view."""

REGISTERED_AS_PYTREE = """The Module class {name} is registered with JAX as a pytree. JAX would take its instances \
apart and rebuild copies of them, so updates made inside a transform would be lost. Remove the registration \
(jax.tree_util.register_dataclass, register_pytree_node_class, ...): the lifted transforms take Modules directly, \
and `module.partition()` turns one into pytrees. For an immutable record that is a pytree, subclass nnx.Pytree \
instead."""

HAS_SLOTS = """The Module class {name} declares __slots__ = {slots}. A Module keeps its attributes in `__dict__`, \
where partition and the transforms find them; a slot of the same name would hide what is stored there. Remove \
__slots__ (or slots=True of a dataclass)."""

CAPTURES_MODULE = """Cannot assign attribute {name!r} of {owner}: the value, {value}, holds a Module ({route}).
As part of a static value, it would be frozen into compiled functions as a constant, and partition, updates and \
gradients would not reach it. Assign the Module itself to an attribute, or pass it as an argument when you call. A \
bound method of a Module in the same graph can be stored directly."""

STORES_CONTEXT = """Cannot assign attribute {name!r} of {owner}: the value is a Context. Its random streams would \
become constants of compiled functions, and every call would draw the same keys. Use the Context in the constructor \
only, and pass one to each call that needs it: model(x, ctx=ctx)."""

STATIC_HOLDS_STATE = """The static attribute {path!r} has come to hold {what} ({route}).
A list or dict is examined when it is assigned (and when __init__ returns); partition, updates and gradients do not \
see what is put into it later. Assign the filled container again (`module.{name} = [...]`), or use nnx.Sequence / \
nnx.Dict from the start."""

FOREIGN_METHOD = """The static attribute {path!r} is a bound method ({method}) of a Module that is not part of this \
graph, so its state would not be split off or updated with the rest. Make that Module an attribute (a submodule) as \
well, or store the plain function."""

OWN_OF_VIEW = """Cannot set {name!r} of a view of {owner} to {value}: a view shares its variables and submodules with \
the Module it is a view of, and only static values (flags, numbers, strings, functions, dtypes ...) can be its own."""

NOTHING_TO_VIEW = """{owner}.view() sets static attributes of the Module and its submodules, and none of them has \
{names}. The static attributes are: {known}."""

STATIC_HOLDS_ARRAY = """Cannot assign attribute {name!r} of {owner}: the value, {value}, holds an array ({route}).
The value is static, so the array would be frozen into compiled functions as a constant, and partition, updates and \
gradients would not reach it. Make the array an attribute of its own: nnx.Param(x) or nnx.Variable(x), or the bare \
array. If no array in the value ever changes, wrap it: nnx.Static({name})."""

HOLDS_JAX_REF = """Cannot assign attribute {name!r} of {owner}: the value {holds} a jax.Ref ({route}).
A jax.Ref is a mutable array of JAX's own: it would be missing from the State, shared by clones, and lost by save. An \
attribute can be assigned to, and the lifted transforms write its changes back, so make it a variable: \
`self.{name} = nnx.Variable(ref[...])`. A jax.Ref that is not an attribute can be an argument of a transform, or be \
captured by one."""

BY_IDENTITY_LARGE = """A static value of type {type} holds more than {limit:,} values, so it is compared by identity, \
not by content: a compiled function will not notice when it is changed in place. To change it, assign a new object."""

BY_IDENTITY_FINALIZER = """A static value of type {type} is compared by identity, not by content, because its class \
defines `__del__`, which would run for the copies that transforms make: a compiled function will not notice when the \
value is changed in place. To change it, assign a new object."""

BY_IDENTITY_OMEGACONF = """A static value of type {type} is compared by identity, not by content, because comparing \
the nodes of OmegaConf in every call would be slow: a compiled function will not notice when the config is changed in \
place. Assign `OmegaConf.to_object(config)` instead, which makes plain dicts, lists and dataclasses of it."""

NOT_DATA = """Cannot assign attribute {name!r} of {owner}: the {type} holds arrays, so it is data, but the leaf at \
{route} is {leaf}, which JAX does not accept.
Keep that part in a separate attribute (as a static value), or wrap the whole in nnx.Static if no array in it ever \
changes."""

BAD_NAME = """Cannot assign attribute {name!r} of {owner}: attribute names are segments of paths such as \
'encoder/kernel', so they must not be empty or contain '/'. Choose another name, or nest nnx.Dicts."""

JAX_REF_IN_CONTAINER = """{type} cannot hold a jax.Ref, a mutable array of JAX's own: it would be missing from the \
State, shared by clones, and lost by save.
Hold its value: {type}(ref[...]). The attribute can be assigned to, and the lifted transforms write its changes back. \
A jax.Ref that is not an attribute can be an argument of a transform, or be captured by one."""

MODULE_IN_CONTAINER = """{type} cannot hold {what}: a container holds an array or a pytree of arrays, and partition, \
updates and gradients would not reach a Module in it.
Assign the Module itself to an attribute; a list or dict of Modules can be assigned directly."""

STATE_IN_STATIC_VALUE = """The static value {route} is {what}.
Metadata, flags and static fields are compared and hashed, and become constants of compiled functions; partition, \
updates and gradients would not reach a Module or Variable in them. Make it an attribute of a Module, or pass it as an \
argument."""

MUTABLE_DEFAULT = """The default of a field is the {type} {default}, which all instances would share. Make a new one \
for each: `default_factory=lambda: {default}`."""

MODULE_INTO_VARIABLE = """Cannot assign a Module ({value}) to attribute {name!r} of {owner}: it is a variable of type \
{type}. Delete the attribute first, or use another name."""

INCOMPATIBLE_CONTAINER = """Cannot replace value from incompatible container: {target} is {old}, got {new}. The type \
and the metadata must agree; pass the bare value to keep them, or delete the attribute first to change them."""

NO_STATE_GIVEN = """{owner} has no value for {name!r} ({kind}): no state was given for it when the Module was merged \
or rebuilt. Merge with a State that has the path, or add it with update_state()."""

UNKNOWN_PATH = """Cannot update {path!r}: {reason}. Nothing was changed.
The paths of this Module are those of `module.get_state()`; a new variable can be added to any existing Module."""

HOLE_IN_SEQUENCE = """Cannot set item {index} of {owner}, which has {length} items: the items in between would be \
missing. Use append() or insert()."""

MISSING_ITEM = """Item {index} of {owner} is missing: it was removed by pop_state() or deleted as an attribute. Put it \
back with update_state(), or assign to it."""

BAD_KEY = """{key!r} cannot be a key of nnx.Dict: keys are path segments, so they must be non-empty strings \
without '/'."""
