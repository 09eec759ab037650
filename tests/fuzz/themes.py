"""Themes: a few statements that belong together, added to some programs.

Random statements seldom meet: a value that is set, read inside, changed between two calls and read again takes four of
them, at one attribute. A theme makes them meet, in the middle of everything else.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from tests.fuzz.graphs import Features, Graph
from tests.fuzz.vocabulary import CALLABLES, SORTS


class Setting(NamedTuple):
    """Where a theme is added."""

    graph: Graph
    features: Features
    rng: random.Random
    many: bool  # whether the body runs many times

    def two(self) -> tuple[int, int]:
        """Two different numbers for a sort of static value."""
        first, second = self.rng.sample(range(4), 2)
        return first, second


Theme = Callable[[Any, Setting], Any]
THEMES: dict[str, Theme] = {}


def theme(function: Theme) -> Theme:
    THEMES[f"{function.__name__.replace('_', ' ')} theme"] = function
    return function


def with_theme(program: Any, graph: Graph, features: Features, rng: random.Random, many: bool) -> Any:
    """The program with a theme."""
    setting = Setting(graph, features, rng, many)
    names = [name for name in THEMES if features.on(name) and features.on("edits")]
    return THEMES[rng.choice(names)](program, setting) if names else program


def add(program: Any, build: list[str], f: list[str], edit: list[str], **changes: Any) -> Any:
    """Adds lines to the graph and the bodies; the edit happens before the second or third call, or both."""
    edits = [[*program.edits[0][:1], *edit], *program.edits[1:]] if edit else program.edits
    calls = list(program.calls)
    if edit:
        for i in (1, 2):
            if i < len(calls) and (i == 1 or calls[0].world != calls[1].world):
                calls[i] = calls[i]._replace(edit=0)
    g = [*program.g, *f]
    lines = [*program.build[:-1], *build, program.build[-1]]
    return replace(
        program, **{"build": lines, "f": [*program.f, *f], "g": g, "edits": edits, "calls": calls, **changes}
    )


@theme
def static_value(program: Any, setting: Setting) -> Any:
    """A static value that is read inside, and changed or replaced between the calls, or replaced inside."""
    name = setting.rng.choice(list(setting.graph.sorts))
    sort, (first, second) = setting.graph.sorts[name], setting.two()
    read = f"if has(m, {name!r}): total += digest(m.{name})"
    new = f"m.{name} = {sort.source.format(k=second)}"
    if sort.changes and setting.rng.random() < 0.6:
        change = setting.rng.choice(sort.changes).format(t=f"m.{name}", k=second)
        new = f"if has(m, {name!r}): {change}"
    inside = not setting.many and setting.rng.random() < 0.3
    build = [f"m0.{name} = {sort.source.format(k=first)}"]
    return add(program, build, [read, new] if inside else [read], [] if inside else [new])


@theme
def flag(program: Any, setting: Setting) -> Any:
    """A mutable flag of the Context that is changed in place."""
    if not (setting.features.on("flags") and setting.features.on("mutable flag")):
        return program
    value = setting.rng.choice(["Derived(1)", "[1]", "{'k': 1}", "types.SimpleNamespace(s=1)"])
    contexts = [line for line in program.build if line.startswith("ctx, boom")]
    build = [line for line in program.build if line not in contexts]
    contexts = [line if "mode=" in line else line.replace("dict(", f"dict(mode={value}, ") for line in contexts]
    program = replace(program, build=[*build[:-1], *contexts, build[-1]])
    edit = [f"change_flag(ctx, {setting.rng.randrange(2, 5)})"]
    return add(program, [], ["total += digest(ctx.get_flag('mode'))"], edit)


@theme
def function(program: Any, setting: Setting) -> Any:
    """A function that returns arrays, called inside, while another static value changes and changes back."""
    callables = setting.features.enabled(CALLABLES)
    if not callables:
        return program
    value = setting.rng.choice(callables).source.format(k=setting.rng.randrange(4))
    calls = [call._replace(world=0, x=program.calls[0].x, edit=e) for call, e in zip(program.calls, (None, 1, 0))]
    body = ["if has(m, 'f0'): total += m.f0(1.0)"]
    program = add(program, [f"m0.f0 = {value}", "m0.s9 = 1"], [], [])
    # nothing else happens, so that the last call is like the first
    return replace(program, f=body, g=body, edits=[["m.s9 = 1"], ["m.s9 = 2"]], calls=calls)


@theme
def numpy(program: Any, setting: Setting) -> Any:
    """A numpy array that is changed in place, before the function raises or returns."""
    kind = setting.rng.choice(["Count({})", "nnx.Cache({})", "{}"])
    program = add(
        program, [f"m0.n1 = {kind.format('np.array([k, 1], np.float32)')}"], ["if has(m, 'n1'): m.n1 += 1"], []
    )
    if setting.rng.random() < 0.5:
        return program
    stop = "if ctx.get_flag('boom'): raise Boom"
    calls = [call._replace(fails=i == 1) for i, call in enumerate(program.calls)]
    return replace(program, f=[*program.f, stop], g=[*program.g, stop], calls=calls)


@theme
def refs(program: Any, setting: Setting) -> Any:
    """A Ref with three owners, one outside of the call, that is written, rebound or untied inside."""
    if not setting.features.on("outside ref"):
        return program
    value = "vec(k)" if setting.graph.stacked else "num(k)"
    kind = "nnx.Param" if setting.many else setting.rng.choice(["nnx.Param", "nnx.BatchStat"])
    new = f"{kind}(num(7))"
    events = {
        "new ref": [f"m.r2 = nnx.Ref({new})", f"m.r2 = m.r3 = nnx.Ref({new})", f"m.r3 = nnx.Ref({new})"],
        "untie": ["if has(m, 'r2'): del m.r2", f"if has(m, 'r2'): del m.r2\nm.r2 = {new}"],
    }
    possible = [
        line for name, lines in events.items() if setting.features.on(name) and not setting.many for line in lines
    ]
    body = ["if has(m, 'r3'): m.r3 = m.r3 + 1", "if has(m, 'r2'): m.r2 = m.r2 + 2"]
    body += setting.rng.sample(possible, min(2, len(possible)))
    setting.rng.shuffle(body)
    build = [f"shared = nnx.Ref({kind}({value}))", "m0.r2 = m0.r3 = out.r2 = shared"]
    edit = [setting.rng.choice(["out.r2 = out.r2 + 1", "if has(m, 'r3'): m.r3 = m.r3 + 4"])]
    return add(program, build, body, edit)


@theme
def shared_static(program: Any, setting: Setting) -> Any:
    """One mutable value under two attributes, changed through one of them inside, read through the other."""
    sorts = [sort for sort in setting.features.enabled(SORTS) if sort.changes]
    if not sorts or not setting.features.on("shared static"):
        return program
    sort, (first, second) = setting.rng.choice(sorts), setting.two()
    change = setting.rng.choice(sort.changes).format(t="m.s7", k=second)
    body = ["if has(m, 's8'): total += digest([m.s7, m.s8])"]
    edit = [f"if has(m, 's7'): {change}"]
    inside = not setting.many and setting.rng.random() < 0.7
    build = [f"m0.s7 = m0.s8 = {sort.source.format(k=first)}"]
    return add(program, build, [*edit, *body] if inside else body, [] if inside else edit)


@theme
def shared_pytree(program: Any, setting: Setting) -> Any:
    """One pytree under two attributes, changed through one of them inside, read through the other."""
    if not setting.features.on("shared pytree"):
        return program
    body = ["m.t7['a'] = m.t7['a'] + 1", "total += fold(m.t8) + 4.0 * (m.t7 is m.t8)"]
    return add(program, ["m0.t7 = m0.t8 = {'a': num(k), 'b': [num(1), 2]}"], body, ["m.t8['b'][0] = num(5)"])


@theme
def metadata(program: Any, setting: Setting) -> Any:
    return add(program, [], [], [f"metadata_is_private({setting.rng.randrange(4)})"])
