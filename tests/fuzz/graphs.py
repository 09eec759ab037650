"""Random graphs of Modules, as the source of a function `build(k)`.

`build` returns a *world*: the two Modules a program is called with (`m` and `n`, which may be one Module, or share
some), a Module outside the call (`out`, perhaps tied to them by a Ref), and two Contexts that differ in a flag. Worlds
built with different `k` have the same structure and different values.

Attribute names say what an attribute holds, so that a program can use it without knowing the graph: `v` arrays, `r`
tied arrays, `n` numpy arrays, `a` bare arrays, `i` integers, `p` Python numbers, `d` dict-valued Variables, `t` plain
pytrees, `s` static values, `f` functions that return arrays, `b` bound methods, `c` submodules, `q` a Sequence, `k` a
Dict.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.vocabulary import CALLABLES, SORTS, Sort

CLASSES = ["Plain", "Other", "Record", "Standard", "nnx.Dict"]
KINDS = ["nnx.Param", "nnx.BatchStat", "nnx.Cache", "Count"]


@dataclass(frozen=True)
class Features:
    """Which features random programs may use: all, but those switched off by name (sorts, operations, transforms)."""

    off: frozenset[str] = frozenset()

    @staticmethod
    def without(names: Iterable[str]) -> "Features":
        return Features(frozenset(name.strip().replace(" ", "-") for name in names if name))

    def less(self, *names: str) -> "Features":
        return Features.without([*self.off, *names])

    def on(self, name: str) -> bool:
        return name.replace(" ", "-") not in self.off

    def enabled(self, things: Iterable[Any]) -> list[Any]:
        """Those things, each with a `name`, that are switched on."""
        return [thing for thing in things if self.on(thing.name)]


EVERYTHING = Features()


@dataclass
class Graph:
    """The source of `build`, and what a program needs to know about the graph."""

    lines: list[str]
    paths: dict[str, list[str]]  # of the Modules reachable from `m`, `n` and `out`
    stacked: bool
    sorts: dict[str, Sort] = field(default_factory=dict)  # of the static attributes, by name
    names: set[str] = field(default_factory=set)


class Builder:
    """Draws one graph."""

    def __init__(self, rng: random.Random, features: Features, stacked: bool, same_buffer: int = 2):
        self.same_buffer = same_buffer  # how often, in percent, one buffer is in two arrays
        self.rng, self.features, self.stacked = rng, features, stacked
        self.lines: list[str] = []
        self.links: dict[str, dict[str, str]] = {}
        self.names: set[str] = set()
        self.has_field: dict[str, bool] = {}
        # every attribute name has one sort in a program, so that what changes it in place always fits
        sorts = features.enabled(SORTS)
        self.sorts = {f"s{i}": rng.choice(sorts) for i in range(3)}

    def chance(self, percent: int, name: str = "") -> bool:
        return self.rng.random() * 100 < percent and self.features.on(name)

    def number(self) -> str:
        return f"{self.rng.randrange(16) / 4} + k"

    def array(self, kind: str) -> str:
        """A value for a Variable; parameters have an axis to be mapped over where the program maps."""
        if self.stacked:
            return f"{'vec' if kind == 'nnx.Param' else 'num'}({self.number()})"
        return f"{self.rng.choice(['num', 'num', 'num', 'vec'])}({self.number()})"

    def build(self) -> Graph:
        count = self.rng.choice([1, 2, 2, 3, 3, 4])
        modules = [f"m{i}" for i in range(count)]
        for module in modules:
            self.construct(module)
        for before, after in zip(modules, modules[1:]):
            self.connect(before, after)
        for module in modules:
            self.fill(module)
            if self.chance(30):
                self.link(module, f"c{self.rng.randrange(2)}", self.rng.choice(modules))
        self.shared_values(modules)
        self.methods(modules)
        n, out = self.others(modules)
        self.refs([*modules, *[name for name in (n, out) if name not in modules]], out)
        flags = self.flags()
        self.lines += [
            f"ctx, boom = (nnx.context(params=key(k + 8 * boom), flags=dict({flags}boom=boom)) for boom in (0, 1))"
        ]
        self.lines += [f"return types.SimpleNamespace(m=m0, n={n}, out={out}, ctx=ctx, boom=boom)"]
        paths = {"m": self.paths("m0"), "n": self.paths(n), "out": self.paths(out)}
        return Graph(self.lines, paths, self.stacked, self.sorts, self.names)

    def construct(self, module: str) -> None:
        cls = self.rng.choice([c for c in ["Plain", "Plain", *CLASSES] if self.features.on(c)])
        argument = f"nnx.Param({self.array('nnx.Param')})" if cls == "Standard" else self.array("nnx.Param")
        self.lines.append(f"{module} = {cls}({argument if cls in ('Record', 'Standard') else ''})")
        self.links[module] = {}
        self.has_field[module] = cls in ("Record", "Standard")

    def connect(self, before: str, after: str) -> None:
        form = self.rng.random()
        if form < 0.15 and self.features.on("sequence"):
            self.lines.append(f"{before}.q = [{after}]")
            self.links[before]["q/0"] = after
        elif form < 0.3 and self.features.on("dict"):
            self.lines.append(f"{before}.k = {{'a': {after}}}")
            self.links[before]["k/a"] = after
        else:
            self.link(before, self.rng.choice(["c0", "c0", "c1"]), after)

    def link(self, before: str, name: str, after: str) -> None:
        self.lines.append(f"{before}.{name} = {after}")
        self.links[before][name] = after

    def fill(self, module: str) -> None:
        rng = self.rng
        for i in range(rng.choice([1, 1, 2])):
            kind = rng.choice(KINDS)
            if i or not self.has_field[module]:
                self.attribute(module, f"v{i}", f"{kind}({self.array(kind)})")
        if self.chance(35, "numpy"):
            kind = rng.choice(["nnx.BatchStat({})", "Count({})", "{}"])
            self.attribute(module, "n0", kind.format(f"np.array([{self.number()}, 1], np.float32)"))
        if self.chance(self.same_buffer, "same buffer"):  # two arrays, one buffer
            self.lines += [
                f"if has({module}, 'v0'): {module}.v5 = nnx.Cache(jax.device_put({module}.v0, jax.devices()[0]))"
            ]
        if self.chance(15, "bare array"):
            self.attribute(module, "a0", f"num({self.number()})")
        if self.chance(15, "integer"):
            self.attribute(module, "i0", "Count(jnp.asarray(np.int32(k)))")
        if self.chance(25, "python number"):
            kind = rng.choice(["Count", "nnx.Cache"] if self.stacked else ["Count", "nnx.Cache", "nnx.Param"])
            value = rng.choice(["1.5 + k"] if kind == "nnx.Param" else ["1 + k", "1.5 + k"])
            self.attribute(module, "p0", f"{kind}({value})")
        if self.chance(25, "dict value"):
            kind = rng.choice(["nnx.Cache", "Count", "nnx.Param"])
            items = self.dict_of(f"'a': {self.array(kind)}", f"'b': [{self.array(kind)}]")
            self.attribute(module, "d0", f"{kind}({items})")
        if self.chance(25, "pytree"):
            inner = self.dict_of("'x': num(1.0)", "'y': 2")
            items = self.dict_of(f"'a': num({self.number()})", f"'b': [num(1.0), {self.rng.choice(['2', inner])}]")
            self.attribute(module, "t0", items)
        for name, sort in self.sorts.items():
            if self.chance(45):
                self.attribute(module, name, sort.source.format(k=rng.randrange(4)))
        callables = self.features.enabled(CALLABLES)
        if callables and self.chance(8):
            self.attribute(module, "f0", rng.choice(callables).source.format(k=rng.randrange(4)))

    def dict_of(self, *items: str) -> str:
        """A dict whose items are in some order, in which no transform may change them."""
        return f"{{{', '.join(self.rng.sample(items, len(items)))}}}"

    def attribute(self, module: str, name: str, source: str) -> None:
        self.lines.append(f"{module}.{name} = {source}")
        self.names.add(name)

    def shared_values(self, modules: Sequence[str]) -> None:
        """One mutable static value, or one pytree, under two attributes."""
        name = self.rng.choice(list(self.sorts))
        sort = self.sorts[name]
        if sort.changes and self.chance(30, "shared static"):
            first, second = self.rng.choice(modules), self.rng.choice(modules)
            places = f"{first}.{name} = {second}.{name}"
            if first == second or self.chance(20):
                other = self.rng.choice([s for s in self.sorts if s != name])
                self.sorts[other] = sort
                self.lines = [line for line in self.lines if f".{other} = " not in line]
                places = f"{first}.{name} = {second}.{other}"
            self.lines.append(f"{places} = {sort.source.format(k=self.rng.randrange(4))}")
        if len(modules) > 1 and self.chance(15, "shared pytree"):
            first, second = self.rng.sample(list(modules), 2)
            items = self.dict_of(f"'a': num({self.number()})", "'b': [num(1.0), 2]")
            self.lines.append(f"{first}.t0 = {second}.t0 = {items}")
            self.names.add("t0")

    def methods(self, modules: Sequence[str]) -> None:
        owners = [m for m in modules if not any(line.startswith(f"{m} = nnx.Dict") for line in self.lines)]
        if owners and self.chance(15, "bound method"):
            # its own method: a method of another Module is an error once that Module has left the graph
            owner = self.rng.choice(owners)
            self.attribute(owner, "b0", f"{owner}.read")

    def others(self, modules: Sequence[str]) -> tuple[str, str]:
        """The second argument, and the Module outside the call."""
        n = self.rng.choice(["m0", self.rng.choice(modules), "n0"])
        if n == "n0":
            self.lines += ["n0 = Plain()", f"n0.v0 = nnx.Param({self.array('nnx.Param')})"]
            self.links["n0"] = {}
            if self.chance(30):
                self.link("n0", "c0", self.rng.choice(modules))
        self.lines += ["out = Other()", f"out.v0 = nnx.Param({self.array('nnx.Param')})"]
        self.links["out"] = {}
        return n, "out"

    def refs(self, modules: Sequence[str], out: str) -> None:
        for i in range(self.rng.choice([0, 1, 1, 2]) if self.features.on("refs") else 0):
            kind = self.rng.choice(["nnx.Param", "nnx.Param", "nnx.BatchStat"])
            value = self.array(kind)
            if not self.stacked and self.chance(15, "python number"):
                value = "1.5 + k"
            elif self.chance(15, "dict value"):
                value = f"{{'a': {value}}}"
            self.lines.append(f"ref{i} = nnx.Ref({kind}({value}))")
            places = [(m, f"r{j}") for m in modules for j in range(2)]
            if not self.features.on("outside ref"):
                places = [place for place in places if place[0] != out]
            for module, name in self.rng.sample(places, min(len(places), self.rng.choice([1, 2, 2, 3]))):
                self.attribute(module, name, f"ref{i}")

    def flags(self) -> str:
        if self.chance(30, "flags"):
            flag = self.rng.choice(["mode='train', ", "mode=Derived(1), ", "mode=[1], ", "mode={'k': 1}, "])
            return flag if self.features.on("mutable flag") or "train" in flag else ""
        return ""

    def paths(self, root: str) -> list[str]:
        """The shortest path to each Module reachable from `root`, and some others."""
        found, queue = {root: [""]}, [root]
        while queue:
            module = queue.pop(0)
            for name, target in self.links[module].items():
                path = f"{found[module][0]}/{name}".lstrip("/")
                if target not in found:
                    found[target] = []
                    queue.append(target)
                if len(found[target]) < 2:
                    found[target].append(path)
        return [path for paths in found.values() for path in paths]
