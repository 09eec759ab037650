"""The statements that programs are made of.

An *operation* draws one statement. Statements look up what they need by path and do nothing where it is missing, so
that a program is valid however the graph has changed by then. Three classes of operations: reads, writes that keep
every shape and dtype (allowed in bodies that run many times), and structural changes (allowed in bodies that run once).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.fuzz.graphs import KINDS, Features, Graph

READ, WRITE, STRUCTURE = "read", "write", "structure"
STACKED, EDIT = "stacked", "edit"  # new variables where the transform stacks them; what only a caller does


@dataclass
class Scope:
    """Where an operation is drawn: which Modules it can name, and what it may do there."""

    rng: random.Random
    features: Features
    graph: Graph
    roots: tuple[str, ...]
    inside: bool  # in the function, rather than between calls
    mapped: bool = False  # by vmap: what is not stacked must not depend on the member
    read_only: tuple[str, ...] = ()  # kinds that the body must not change
    sliced: bool = False  # parameters are slices
    many: bool = False  # in a body that runs many times, where every dtype stays as it is

    def module(self, name: str = "p", roots: tuple[str, ...] | None = None) -> str:
        """A guard that finds a Module."""
        root = self.rng.choice(roots or self.roots)
        return f"({name} := at({root}, {self.rng.choice(self.graph.paths[root])!r}))"

    def amount(self) -> str:
        """A number to add."""
        if not self.inside or self.mapped:
            return self.rng.choice(["1", "0.5", "2"])
        return self.rng.choice(["1", "0.5", "fold(x)", "total"])

    def k(self) -> int:
        return self.rng.randrange(4)

    def static(self) -> tuple[str, Any]:
        name = self.rng.choice(list(self.graph.sorts))
        return name, self.graph.sorts[name]

    def new_value(self, kind: str) -> str:
        """The value of a new Variable."""
        number = f"num({self.k()})" if not self.inside or self.rng.random() < 0.3 else "num(1) * fold(x)"
        if self.graph.stacked and kind == "nnx.Param" and not self.sliced:
            return f"{number} + vec(0)"
        return number


class Operation(NamedTuple):
    name: str
    sort: str
    weight: int
    draw: Callable[[Scope], str]


OPERATIONS: list[Operation] = []


def operation(name: str, sort: str, weight: int = 10) -> Callable[[Any], Any]:
    def register(draw: Callable[[Scope], str]) -> Callable[[Scope], str]:
        OPERATIONS.append(Operation(name, sort, weight, draw))
        return draw

    return register


def when(scope: Scope, names: str, statement: str, other: str = "", roots: tuple[str, ...] | None = None) -> str:
    """`if` the Modules and attributes are there: the statement. `names` are those of `p`, `other` those of `q`."""
    guard = scope.module("p", roots)
    if names:
        guard += f" and has(p, {', '.join(map(repr, names.split()))})"
    if other or " q" in statement or statement.startswith("q"):
        guard += f" and {scope.module('q', roots)}"
    if other:
        guard += f" and has(q, {', '.join(map(repr, other.split()))})"
    if "\n" in statement or statement.startswith("if "):
        inner = "\n".join(f"    {line}" for line in statement.split("\n"))
        return f"if {guard}:\n{inner}"
    return f"if {guard}: {statement}"


# Reads


@operation("read data", READ, 30)
def read_data(scope: Scope) -> str:
    name = scope.rng.choice(["v0", "v0", "v1", "v2", "r0", "r1", "n0", "a0", "i0", "p0", "d0", "t0", "v3", "v5"])
    return when(scope, name, f"total += fold(p.{name})")


@operation("read static", READ, 25)
def read_static(scope: Scope) -> str:
    name = scope.rng.choice(list(scope.graph.sorts))
    return when(scope, name, f"total += digest(p.{name})")


@operation("read flag", READ, 5)
def read_flag(scope: Scope) -> str:
    return "total += digest(ctx.get_flag('mode'))"


@operation("draw key", READ, 4)
def draw_key(scope: Scope) -> str:
    return "keys(ctx)"


@operation("call", READ, 8)
def call_static(scope: Scope) -> str:
    name = scope.rng.choice(["f0", "b0"])
    argument = "1.0" if name == "f0" else ""
    return when(scope, name, f"total += p.{name}({argument})")


@operation("call method", READ, 6)
def call_method(scope: Scope) -> str:
    return f"if {scope.module()} and not isinstance(p, (nnx.Dict, nnx.Sequence)): total += p.scale()"


@operation("read identity", READ, 8)
def read_identity(scope: Scope) -> str:
    if scope.rng.random() < 0.5:
        one, two = scope.rng.choice(list(scope.graph.sorts)), scope.rng.choice(list(scope.graph.sorts))
        return when(scope, one, f"total += digest([p.{one}, q.{two}])", two)  # says what the two have in common
    name = scope.rng.choice(["c0", "c1", "t0"])
    return when(scope, name, f"total += 4.0 * (p.{name} is q.{name})", name)


@operation("read order", READ, 12)
def read_order(scope: Scope) -> str:
    name = scope.rng.choice(["d0", "t0"])
    if scope.rng.random() < 0.5:
        return when(scope, name, f"total += digest([*p.{name}])")
    return when(scope, "", "total += digest([*(p if isinstance(p, nnx.Dict) else vars(p))])")


# Writes that keep the structure


@operation("write variable", WRITE, 25)
def write_variable(scope: Scope) -> str:
    name = scope.rng.choice(["v0", "v0", "v1", "v5", "a0", "p0"])
    amount = "1" if name == "p0" and scope.many else scope.amount()
    return when(scope, name, guarded(scope, name, f"p.{name} = p.{name} + {amount}"))


@operation("write ref", WRITE, 20)
def write_ref(scope: Scope) -> str:
    name = scope.rng.choice(["r0", "r1"])
    add = f"p.{name} = jax.tree.map(lambda v: v + {scope.amount()}, p.{name})"
    return when(scope, name, guarded(scope, name, add))


@operation("write numpy", WRITE, 12)
def write_numpy(scope: Scope) -> str:
    return when(scope, "n0", guarded(scope, "n0", f"p.n0 += {scope.k()}"))


@operation("write integer", WRITE, 6)
def write_integer(scope: Scope) -> str:
    return when(scope, "i0", "p.i0 += 1")


@operation("write dict value", WRITE, 12)
def write_dict(scope: Scope) -> str:
    target = scope.rng.choice(["p.d0['a']", "p.d0['b'][0]", "p.t0['a']", "p.t0['b'][0]"])
    name = target[2:4]
    return when(scope, name, guarded(scope, name, f"{target} = {target} + {scope.amount()}"))


@operation("set again", WRITE, 8)
def set_again(scope: Scope) -> str:
    """Moves an attribute behind the others, except in bodies that run many times."""
    name = scope.rng.choice(["v0", "v1", "a0", "d0", "t0", "i0"])
    change = " + 1" if name in ("v0", "v1", "i0") else ""
    again = f"held = p.variable({name!r})\ndel p.{name}\np.{name} = held.replace(held.value{change})"
    if name in ("a0", "t0"):
        again = f"held = p.{name}\ndel p.{name}\np.{name} = held"
    return when(scope, name, guarded(scope, name, again))


@operation("reorder dict", WRITE, 8)
def reorder_dict(scope: Scope) -> str:
    name = scope.rng.choice(["d0", "t0"])
    # Attributes can share a dict, but not a list inside two dicts: every rebuild makes two lists of it.
    in_place, anew = f"p.{name}['a'] = p.{name}.pop('a')", f"p.{name} = dict(reversed(own(p.{name}).items()))"
    # A body that runs many times must not give one of two attributes with one dict a dict of its own.
    return when(scope, name, guarded(scope, name, in_place if scope.many else scope.rng.choice([in_place, anew])))


@operation("renew static", WRITE, 8)
def renew_static(scope: Scope) -> str:
    """Puts an equal value in the place of a static one, or of those in it."""
    name, sort = scope.static()
    if not sort.changes:
        return read_static(scope)
    is_shared = scope.features.on("shared static") or scope.features.on("share static")
    return when(scope, name, f"renew(p.{name})" if is_shared else f"p.{name} = copy.deepcopy(p.{name})")


def guarded(scope: Scope, name: str, statement: str) -> str:
    """A write that leaves alone what the body must not change."""
    if scope.read_only:
        kinds = ", ".join(scope.read_only)
        inner = statement.replace("\n", "\n    ")
        return f"if not isinstance(p.variable({name!r}), ({kinds},)):\n    {inner}"
    return statement


# Structural changes


@operation("new variable", STRUCTURE, 12)
def new_variable(scope: Scope) -> str:
    kind = scope.rng.choice(KINDS)
    name = scope.rng.choice(["v3", "v3", "v4"])
    return f"if {scope.module()} and not has(p, {name!r}): p.{name} = {kind}({scope.new_value(kind)})"


@operation("new stacked variable", STACKED, 8)
def new_stacked_variable(scope: Scope) -> str:
    return f"if {scope.module()} and not has(p, 'v3'): p.v3 = nnx.Param({scope.new_value('nnx.Param')})"


@operation("delete variable", STRUCTURE, 8)
def delete_variable(scope: Scope) -> str:
    name = scope.rng.choice(["v0", "v1", "v3", "n0", "d0", "t0", "p0", "a0"])
    return when(scope, name, f"del p.{name}")


@operation("change kind", STRUCTURE, 6)
def change_kind(scope: Scope) -> str:
    kind = scope.rng.choice(KINDS)
    return when(scope, "v1", f"del p.v1\np.v1 = {kind}({scope.new_value(kind)})")


@operation("change shape", STRUCTURE, 4)
def change_shape(scope: Scope) -> str:
    if scope.graph.stacked:
        return write_variable(scope)
    value = scope.rng.choice(["num(1)", "vec(1)", "jnp.asarray(np.zeros((1, 2), np.float32))"])
    return when(scope, "v0", f"p.v0 = {value}")


@operation("replace pytree", STRUCTURE, 6)
def replace_pytree(scope: Scope) -> str:
    value = scope.new_value("nnx.Cache")
    new = [f"p.t0 = {{'b': [{value}, 1], 'a': {value}}}", f"p.t0['z'] = {value}", f"p.t0['A'] = {value}"]
    return when(scope, "t0", scope.rng.choice(new))


@operation("replace dict value", STRUCTURE, 6)
def replace_dict(scope: Scope) -> str:
    value = scope.new_value("nnx.Param")
    items = scope.rng.choice([f"'a': {value}, 'b': [{value}]", f"'b': [{value}], 'a': {value}"])
    return when(scope, "d0", f"p.d0 = {{{items}}}")


@operation("share pytree", STRUCTURE, 5)
def share_pytree(scope: Scope) -> str:
    return when(scope, "t0", "q.t0 = p.t0", "t0", roots=("m", "n"))


@operation("new submodule", STRUCTURE, 8)
def new_submodule(scope: Scope) -> str:
    value = scope.new_value("nnx.Param")
    return when(scope, "", f"p.c{scope.rng.randrange(2)} = leaf({value}, {scope.k()})")


@operation("link", STRUCTURE, 8)
def link(scope: Scope) -> str:
    return when(scope, "", f"p.c{scope.rng.randrange(2)} = q")


@operation("unlink", STRUCTURE, 6)
def unlink(scope: Scope) -> str:
    name = scope.rng.choice(["c0", "c1", "q", "k"])
    return when(scope, name, f"del p.{name}")


@operation("swap", STRUCTURE, 6)
def swap(scope: Scope) -> str:
    return when(scope, "c0 c1", "p.c0, p.c1 = p.c1, p.c0")


@operation("append", STRUCTURE, 5)
def append(scope: Scope) -> str:
    value = scope.new_value("nnx.Param")
    return when(scope, "q", scope.rng.choice([f"p.q.append(leaf({value}))", "if len(p.q): p.q.pop()"]))


@operation("put into dict", STRUCTURE, 5)
def put(scope: Scope) -> str:
    return when(scope, "k", f"p.k[{scope.rng.choice('ab')!r}] = leaf({scope.new_value('nnx.Param')})")


@operation("change class", STRUCTURE, 6)
def change_class(scope: Scope) -> str:
    return f"if {scope.module()} and type(p) in (Plain, Other): p.__class__ = {scope.rng.choice(['Plain', 'Other'])}"


@operation("set static", STRUCTURE, 20)
def set_static(scope: Scope) -> str:
    name, sort = scope.static()
    return when(scope, "", f"p.{name} = {sort.source.format(k=scope.k())}")


@operation("delete static", STRUCTURE, 5)
def delete_static(scope: Scope) -> str:
    name, _ = scope.static()
    return when(scope, name, f"del p.{name}")


@operation("change static in place", STRUCTURE, 25)
def change_static(scope: Scope) -> str:
    changing = [(name, sort) for name, sort in scope.graph.sorts.items() if sort.changes]
    if not changing:
        return set_static(scope)
    name, sort = scope.rng.choice(changing)
    change = scope.rng.choice(sort.changes).format(t=f"p.{name}", k=scope.k())
    return when(scope, name, change)


@operation("share static", STRUCTURE, 6)
def share_static(scope: Scope) -> str:
    name, _ = scope.static()
    return when(scope, name, f"q.{name} = p.{name}", roots=("m", "n"))


@operation("new ref", STRUCTURE, 12)
def new_ref(scope: Scope) -> str:
    kind = scope.rng.choice(["nnx.Param", "nnx.BatchStat"])
    one, two = scope.rng.choice(["r0", "r1"]), scope.rng.choice(["r0", "r1"])
    return when(scope, "", f"p.{one} = q.{two} = nnx.Ref({kind}({scope.new_value(kind)}))")


@operation("untie", STRUCTURE, 8)
def untie(scope: Scope) -> str:
    name = scope.rng.choice(["r0", "r1"])
    again = f"\np.{name} = nnx.Param({scope.new_value('nnx.Param')})"
    return when(scope, name, f"del p.{name}{scope.rng.choice(['', again])}")


@operation("sow", STRUCTURE, 4)
def sow(scope: Scope) -> str:
    return when(scope, "", f"p.sow(nnx.Intermediate, 'sown', {scope.new_value('nnx.Cache')})")


@operation("pop", STRUCTURE, 4)
def pop(scope: Scope) -> str:
    kind = scope.rng.choice(["nnx.Intermediate", "nnx.Intermediate", "nnx.Cache", "Count"])
    return f"{scope.rng.choice(scope.roots)}.pop_state({kind})"


@operation("change flag in place", EDIT, 10)
def change_flag(scope: Scope) -> str:
    return f"change_flag(ctx, {scope.k()})"


@operation("metadata", EDIT, 2)
def metadata(scope: Scope) -> str:
    return f"metadata_is_private({scope.k()})"


def draw_lines(scope: Scope, sorts: set[str], count: int) -> list[str]:
    """Some statements of these sorts."""
    chosen = [op for op in OPERATIONS if op.sort in sorts and scope.features.on(op.name)]
    weights = [op.weight for op in chosen]
    return [op.draw(scope) for op in scope.rng.choices(chosen, weights, k=count)]
