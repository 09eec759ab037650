"""Random programs: a graph, what happens inside the transformed function, and what the caller does between its calls.

A program is source and can be printed as a script.
"""

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.fuzz import captures  # noqa: F401  (registers its transforms)
from tests.fuzz.graphs import EVERYTHING, Builder, Features
from tests.fuzz.operations import EDIT, READ, STACKED, STRUCTURE, WRITE, Scope, draw_lines
from tests.fuzz.themes import with_theme
from tests.fuzz.transforms import TRANSFORMS, Transform


class Call(NamedTuple):
    """One call of the transformed function."""

    world: int  # which of the two models
    x: str  # the argument, as source
    fails: bool  # whether the function raises part-way
    edit: int | None  # which edit the caller makes before it


@dataclass
class Program:
    """A graph, a function, the transforms around it, and a history of calls and edits."""

    seed: int
    features: Features
    build: list[str]
    f: list[str]
    g: list[str]
    returns: str
    edits: list[list[str]]
    calls: list[Call]
    transforms: list[str]  # outermost first
    compiled: bool  # by XLA, rather than interpreted
    illegal: str | None = None  # the attribute that the body changes though it must not

    def sources(self) -> str:
        """Definitions of `build`, `f`, `g`, the edits and `lifted`."""
        parts = [definition("build(k)", self.build)]
        bodies = {"f": self.f, "g": self.g} if self.uses_g() else {"f": self.f}
        for name, lines in bodies.items():
            body = ["total = fold(x)", *lines, f"return total, {self.returns}"]
            parts.append(definition(f"{name}(m, n, x, ctx)", body))
        for i in sorted({call.edit for call in self.calls if call.edit is not None}):
            lines = self.edits[i]
            parts.append(definition(f"edit{i}(m, n, out, ctx)", lines or ["pass"]))
        parts.append(f"lifted = {self.expression()}")
        return "\n\n\n".join(parts) + "\n"

    def expression(self, form: str = "") -> str:
        """The transformed function as source, such as `jit(scan(f))`; `form` is put after each name."""
        text = "f"
        for name in reversed(self.transforms):
            text = f"{name}{form}({text}{', g' if TRANSFORMS[name].two else ''})"
        return text

    def reties(self) -> bool:
        """Whether some statement attaches or detaches a Ref."""
        return any("nnx.Ref(" in line or "del p.r" in line for lines in (self.f, self.g, *self.edits) for line in lines)

    def draws_once(self) -> bool:
        """Whether every draw of a key runs once; `checkify` evaluates the condition of a loop twice, as plain JAX."""
        checks_condition = self.transforms == ["checkify", "while_loop_drawing"]
        return all(TRANSFORMS[name].unique_keys for name in self.transforms) and not checks_condition

    def uses_g(self) -> bool:
        return any(TRANSFORMS[name].two for name in self.transforms)

    def listing(self) -> str:
        """The whole program as a script."""
        lines = [
            "from tests.fuzz.captures import *",
            "from tests.fuzz.transforms import *",
            "from tests.fuzz.vocabulary import *",
            "",
            "",
        ]
        lines += [self.sources(), "worlds = [build(0), build(1)]"]
        for call in self.calls:
            world = f"worlds[{call.world}]"
            if call.edit is not None:
                lines.append(f"edit{call.edit}({world}.m, {world}.n, {world}.out, {world}.ctx)")
            context = "boom" if call.fails else "ctx"
            text = f"lifted({world}.m, {world}.n, {call.x}, {world}.{context})"
            lines.append(f"print({text})" if not call.fails else f"{text}  # raises")
        return "\n".join(lines)


def definition(head: str, lines: list[str]) -> str:
    body = "\n".join(f"    {part}" for line in lines for part in line.split("\n"))
    return f"def {head}:\n{body}"


RETURNS = [
    "None",
    "None",
    "m",
    "n",
    "[m, {'n': n}]",
    "at(m, 'c0')",
    "leaf(num(1) * fold(x))",
    "m.filter(nnx.Param)",
    "m.get_state()",
    "{'d': vars(m).get('d0'), 't': vars(m).get('t0')}",
    "vars(m).get('n0')",
]


SHARING = ("shared static", "share static", "shared pytree", "share pytree")
LEAVING = ("link", "unlink", "new submodule", "append", "put into dict")

# What a body that runs many times must not do to an attribute of `m`, and what makes sure that it is a change
ILLEGAL = {
    "s0": ("m0.s0 = 1", "m.s0 = 'changed'"),
    "c0": ("m0.c0 = leaf(vec(1))", "m.c0 = leaf(num(1))"),
    "v0": ("if not has(m0, 'v0'): m0.v0 = nnx.Param(vec(1))", "del m.v0"),
    "extra": ("m0.s1 = 1", "m.extra = 3"),
    "stat": ("m0.stat = nnx.BatchStat(np.ones(2, np.float32))", "m.stat += 1"),  # where batch statistics are read only
}


def draw_program(seed: int, features: Features = EVERYTHING) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    stack = draw_transforms(rng, features)
    many = any(t.many for t in stack)
    stacked = any(t.stacked for t in stack)
    drawn_from, features = features, features.less(*(name for t in stack for name in t.lacks))
    # two attributes that hold one object stay in the call, both of them: beyond it, nothing is promised about identity
    features = features.less(*(LEAVING if rng.random() < 0.5 else SHARING))
    graph = Builder(rng, features, stacked, 40 if stack[0].compiled else 2).build()
    options: dict[str, Any] = {
        "mapped": any(t.mapped for t in stack),
        "read_only": ("nnx.BatchStat",) if any(t.broadcast for t in stack) else (),
        "sliced": stacked,
        "many": many,
    }
    body = Scope(rng, features, graph, ("m", "m", "m", "n"), True, **options)
    sorts = {READ, WRITE} if many else {READ, WRITE, STRUCTURE}
    if [t.stacked for t in stack if t.many] == [True]:
        sorts.add(STACKED)
    if any(t.derivative for t in stack):
        graph.lines.insert(-1, f"m0.v2 = nnx.Param({'vec' if stacked else 'num'}(1.25 + k))")
    build, f = graph.lines, draw_lines(body, sorts, rng.choice([2, 3, 5, 7]))
    g = draw_lines(body, sorts, rng.choice([1, 3]))
    illegal = None
    if many and rng.random() < 0.12:
        possible = [name for name in ILLEGAL if name != "stat" or (body.read_only and features.on("numpy"))]
        illegal = rng.choice(possible)
        setup, change = ILLEGAL[illegal]
        build = [*build[:-1], setup, build[-1]]
        f = [*f, change]
        g = list(f)
    failing = rng.random() < 0.35 and features.on("raise")
    if failing:
        where = rng.randrange(len(f) + 1)
        f = [*f[:where], "if ctx.get_flag('boom'): raise Boom", *f[where:]]
        if any(t.two for t in stack):
            g = [*g, "if ctx.get_flag('boom'): raise Boom"]
    outside = Scope(rng, features, graph, ("m", "m", "n", "out"), False)
    edits = [draw_lines(outside, {WRITE, STRUCTURE, EDIT}, rng.choice([1, 1, 2, 3])) for _ in range(2)]
    returns = "None" if many else rng.choice(RETURNS)
    program = Program(
        seed=seed,
        features=drawn_from,
        build=build,
        f=f,
        g=g,
        returns=returns if features.on("return Modules") else "None",
        edits=edits if features.on("edits") else [[], []],
        calls=draw_calls(rng, failing, illegal is not None),
        transforms=[t.name for t in stack],
        compiled=any(t.compiled for t in stack) or rng.random() < 0.015,
        illegal=illegal,
    )
    return program if illegal or rng.random() < 0.6 else with_theme(program, graph, features, rng, many)


def draw_transforms(rng: random.Random, features: Features) -> list[Transform]:
    """One transform, or two that may be nested."""
    on = features.enabled(TRANSFORMS.values())
    inner = rng.choices(on, [t.weight for t in on])[0]
    outers = [t for t in on if t.may_contain(inner)]
    if rng.random() < 0.22 and outers and features.on("nested"):
        return [rng.choices(outers, [t.weight for t in outers])[0], inner]
    return [inner]


def draw_calls(rng: random.Random, failing: bool, illegal: bool) -> list[Call]:
    """At least three calls, alternating between the models, with edits between them."""
    if illegal:
        return [Call(0, "num(0.5)", False, None)]
    calls = []
    order = rng.choice([[0, 0, 1], [0, 1, 0], [0, 1, 1], [0, 0, 0]])
    usual = rng.choice(["num(0.5)", "num(2.5)", "vec(0.5)"])
    for i, world in enumerate(order):
        x = usual if rng.random() < 0.8 else rng.choice(["num(0.5)", "num(2.5)", "vec(0.5)"])
        edit = rng.randrange(2) if i and rng.random() < 0.5 else None
        calls.append(Call(world, x, failing and rng.random() < 0.4, edit))
    return calls
