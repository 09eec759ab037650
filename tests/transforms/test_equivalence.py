"""Property tests: a lifted function leaves the same state, identity and result as the function run eagerly.

A random program is a list of edits, each naming a Module by its place in the graph. It is run eagerly on one copy of a
random model and lifted on another; a *portrait* of both (values, types, statics, which object stands where) must agree.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nnx

VALUES, STATICS, CHILDREN, TREES = ["v0", "v1", "v2"], ["s0", "s1"], ["c0", "c1"], ["t0"]
KINDS = [nnx.Param, nnx.BatchStat, nnx.Cache]
QUICK = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


class Leaf(nnx.Module):
    pass


class Other(nnx.Module):
    pass


# Random models: a table of Modules, each with some variables, statics, pytrees, and links to any Module of the table


def module_plans():
    values = st.dictionaries(st.sampled_from(VALUES), st.tuples(st.sampled_from([0, 1, 2]), st.integers(0, 5)))
    statics = st.dictionaries(st.sampled_from(STATICS), st.sampled_from(["train", 3, (1, 2), ["a"]]))
    links = st.dictionaries(st.sampled_from(CHILDREN), st.integers(0, 3))
    return st.tuples(st.sampled_from([Leaf, Other]), values, statics, links, st.booleans())


plans = st.lists(module_plans(), min_size=2, max_size=4)


def build(plan):
    modules = [cls() for cls, *_ in plan]
    for i, (module, (_, values, statics, links, has_tree)) in enumerate(zip(modules, plan, strict=True)):
        for name, (kind, value) in values.items():
            setattr(module, name, KINDS[kind](jnp.full((2,), float(value + 10 * i))))
        for name, value in statics.items():
            setattr(module, name, list(value) if isinstance(value, list) else value)
        for name, target in links.items():
            setattr(module, name, modules[target % len(modules)])
        if has_tree:
            module.t0 = {"a": jnp.zeros(()), "b": [jnp.ones((2,)), 1]}
    for before, after in zip(modules, modules[1:], strict=False):
        before.spine = after  # everything is reachable from the first Module
    return modules[0]


# Random programs


def at(modules, index):
    return modules[index % len(modules)]


def add_to_value(modules, i, j, k, x):
    module, name = at(modules, i), VALUES[k % 3]
    if hasattr(module, name):
        setattr(module, name, getattr(module, name) + x.sum() + j)


def new_value(modules, i, j, k, x):
    module, name = at(modules, i), VALUES[k % 3]
    if not hasattr(module, name):
        setattr(module, name, KINDS[j % 3](jnp.ones((2,)) * x.sum()))


def reshape_value(modules, i, j, k, x):
    module, name = at(modules, i), VALUES[k % 3]
    if hasattr(module, name):
        setattr(module, name, jnp.zeros((1 + j % 3,)))


def delete_value(modules, i, j, k, x):
    module, name = at(modules, i), VALUES[k % 3]
    if hasattr(module, name):
        delattr(module, name)


def copy_value(modules, i, j, k, x):
    source, target, name = at(modules, i), at(modules, j), VALUES[k % 3]
    if hasattr(source, name) and hasattr(target, name):
        setattr(target, name, getattr(source, name))


def tie_values(modules, i, j, k, x):
    a, b = at(modules, i), at(modules, j)
    if a is not b and not hasattr(a, "ref") and not hasattr(b, "ref"):
        a.ref = b.ref = nnx.Ref(nnx.Param(jnp.ones(()) * x.sum()))


def write_tied(modules, i, j, k, x):
    if hasattr(at(modules, i), "ref"):
        at(modules, i).ref = at(modules, i).ref + 1


def set_static(modules, i, j, k, x):
    setattr(at(modules, i), STATICS[k % 2], ["eval", 4, (3,), None][j % 4])


def delete_static(modules, i, j, k, x):
    if hasattr(at(modules, i), STATICS[k % 2]):
        delattr(at(modules, i), STATICS[k % 2])


def append_static(modules, i, j, k, x):
    value = getattr(at(modules, i), STATICS[k % 2], None)
    if isinstance(value, list):
        value.append("b")


def link(modules, i, j, k, x):
    setattr(at(modules, i), CHILDREN[k % 2], at(modules, j))


def swap_children(modules, i, j, k, x):
    module = at(modules, i)
    if hasattr(module, "c0") and hasattr(module, "c1"):
        module.c0, module.c1 = module.c1, module.c0


def unlink(modules, i, j, k, x):
    if hasattr(at(modules, i), CHILDREN[k % 2]):
        delattr(at(modules, i), CHILDREN[k % 2])


def new_child(modules, i, j, k, x):
    child = Leaf()
    child.v0 = nnx.Param(x.sum() + jnp.zeros((2,)))
    child.c0 = at(modules, j)
    setattr(at(modules, i), CHILDREN[k % 2], child)


def write_tree(modules, i, j, k, x):
    module = at(modules, i)
    if hasattr(module, "t0"):
        module.t0["a"] = module.t0["a"] + x.sum()
        if k % 2:
            module.t0["b"][0] = module.t0["b"][0] * 2


def grow_tree(modules, i, j, k, x):
    if hasattr(at(modules, i), "t0"):
        at(modules, i).t0[f"k{k}"] = x.sum()


EDITS = [
    add_to_value,
    add_to_value,
    new_value,
    reshape_value,
    delete_value,
    copy_value,
    tie_values,
    write_tied,
    set_static,
    delete_static,
    append_static,
    link,
    swap_children,
    unlink,
    new_child,
    write_tree,
    grow_tree,
]
small = st.integers(0, 4)
edits = st.tuples(st.sampled_from(EDITS), small, small, st.integers(0, 2), st.sampled_from([None, 2, 3]))
programs = st.lists(edits, min_size=1, max_size=6)
results = st.sampled_from(["scalar", "root", "submodule", "twice", "new", "state"])


def run(program, result, model, x):
    """Applies the edits, each on the graph as it is by then, some only for one length of `x`; returns what is asked."""
    for edit, i, j, k, only_for in program:
        if only_for in (None, x.shape[0]):
            edit([m for _, m in model.named_modules()], i, j, k, x)
    modules = [m for _, m in model.named_modules()]
    total = sum((v.sum() for m in modules for n in VALUES if (v := getattr(m, n, None)) is not None), x.sum())
    if result == "scalar":
        return total
    if result == "root":
        return {"model": model, "total": total}
    if result == "submodule":
        return modules[-1], total
    if result == "twice":
        return [model, (model, modules[-1])]
    if result == "new":
        fresh = Other()
        fresh.v0 = nnx.Cache(total)
        fresh.c0 = model
        return fresh
    return model.filter(nnx.Param)


# Portraits


class Registry:
    """Numbers Modules in the order of first sight, so that two runs can be compared by identity."""

    def __init__(self):
        self.numbers, self.kept = {}, []

    def number(self, module):
        if id(module) not in self.numbers:
            self.numbers[id(module)] = len(self.kept)
            self.kept.append(module)
        return self.numbers[id(module)]

    def portrait(self, root):
        """Every Module reachable from the known ones and the root: its class, values, statics, and links by number."""
        self.number(root)
        for _ in range(2):
            done = 0
            while done < len(self.kept):
                self.links(self.kept[done])
                done += 1
        return [(type(m).__name__, self.links(m), self.contents(m)) for m in self.kept]

    def links(self, module):
        names = [*CHILDREN, "spine"]
        return {n: self.number(getattr(module, n)) for n in names if isinstance(getattr(module, n, None), nnx.Module)}

    def contents(self, module):
        found = {}
        for name in [*VALUES, "ref"]:
            if hasattr(module, name):
                found[name] = (type(module.variable(name)).__name__, array(getattr(module, name)))
        for name in STATICS:
            if hasattr(module, name):
                found[name] = (type(getattr(module, name)).__name__, getattr(module, name))
        if hasattr(module, "t0"):
            found["t0"] = (str(jax.tree.structure(module.t0)), [array(leaf) for leaf in jax.tree.leaves(module.t0)])
        return found

    def describe(self, result):
        if isinstance(result, nnx.State):
            return {path: (type(leaf).__name__, array(leaf.value)) for path, leaf in result.items()}
        if isinstance(result, nnx.Module):
            return ("module", self.number(result))
        if isinstance(result, (list, tuple)):
            return [self.describe(r) for r in result]
        if isinstance(result, dict):
            return {k: self.describe(v) for k, v in result.items()}
        return array(result)


def array(value):
    assert not isinstance(value, jax.core.Tracer)
    value = np.asarray(value)
    return value.shape, value.tolist()


class Run:
    """One model and everything seen of it, call after call."""

    def __init__(self, plan):
        self.model, self.registry = build(plan), Registry()
        self.registry.portrait(self.model)

    def call(self, f, x):
        result = f(self.model, x)
        described = self.registry.describe(result)
        return described, self.registry.portrait(self.model)


def lengths(values):
    return [jnp.arange(1.0, 1.0 + n) for n in values]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", [{}, {"donate_argnums": 0}], ids=["plain", "donated"])
def test_lifted_function_has_the_effects_of_the_eager_one(option):
    @QUICK
    @given(plans, programs, results, st.permutations([2, 3, 2, 3]))
    def check(plan, program, result, order):
        def f(model, x):
            return run(program, result, model, x)

        jitted = nnx.jit(f, **option)
        eager, lifted = Run(plan), Run(plan)
        for x in lengths(order):
            assert lifted.call(jitted, x) == eager.call(f, x)

        traces = jitted.trace_count
        again = Run(plan)  # a fresh model of the same structure is served by the compiled versions
        fresh_eager = Run(plan)
        for x in lengths(order):
            assert again.call(jitted, x) == fresh_eager.call(f, x)
        assert option or jitted.trace_count == traces  # donation may look again at what it saw once

    check()


@pytest.mark.filterwarnings("ignore")
def test_nested_lifted_functions_have_the_effects_of_the_eager_ones():
    @settings(QUICK, max_examples=8)
    @given(plans, programs, programs, results)
    def check(plan, first, second, result):
        def inner(model, x):
            return run(first, "scalar", model, x)

        def f(inner):
            return lambda model, x: (inner(model, x), run(second, result, model, x))

        jitted = nnx.jit(f(nnx.jit(inner)))
        eager, lifted = Run(plan), Run(plan)
        for x in lengths([2, 3, 2]):
            assert lifted.call(jitted, x) == eager.call(f(inner), x)

    check()


@pytest.mark.filterwarnings("ignore")
def test_stateful_false_never_changes_the_model():
    @settings(QUICK, max_examples=8)
    @given(plans, programs, results)
    def check(plan, program, result):
        jitted = nnx.jit(lambda model, x: run(program, result, model, x), stateful=False)
        lifted = Run(plan)
        before = lifted.registry.portrait(lifted.model)
        for x in lengths([2, 3, 2]):
            jitted(lifted.model, x)
            assert lifted.registry.portrait(lifted.model) == before

    check()


@pytest.mark.filterwarnings("ignore")
def test_a_failing_function_never_changes_the_model():
    @settings(QUICK, max_examples=8)
    @given(plans, programs)
    def check(plan, program):
        def fail(model, x):
            run(program, "scalar", model, x)
            raise KeyError("boom")

        lifted = Run(plan)
        before = lifted.registry.portrait(lifted.model)
        with pytest.raises(KeyError, match="boom"):
            nnx.jit(fail)(lifted.model, jnp.ones(2))
        assert lifted.registry.portrait(lifted.model) == before

    check()


# Bodies that run many times or maybe never: programs that change values alone


value_edits = st.tuples(
    st.sampled_from([add_to_value, copy_value, write_tied, write_tree]), small, small, small, st.none()
)
value_programs = st.lists(value_edits, max_size=4)


def change(program, model, x):
    for edit, i, j, k, _ in program:
        edit([m for _, m in model.named_modules()], i, j, k, x)
    return x * 2


def apply_cond(first, second, model, x, turn):
    return nnx.cond(turn % 2 == 0, first, second, model, x)


def apply_switch(first, second, model, x, turn):
    return nnx.switch(turn % 3, [first, second, first], model, x)


def apply_scan(first, second, model, x, turn):
    return nnx.scan(lambda m, carry, _: (first(m, carry), None), length=2)(model, x, None)[0]


def apply_fori_loop(first, second, model, x, turn):
    return nnx.fori_loop(0, turn, lambda i, carry: (carry[0], first(*carry)), (model, x))[1]


def apply_while_loop(first, second, model, x, turn):
    def body(carry):
        model, n, x = carry
        return model, n + 1, first(model, x)

    return nnx.while_loop(lambda carry: carry[1] < turn, body, (model, 0, x))[2]


def apply_nested(first, second, model, x, turn):
    inner = nnx.remat(lambda m, x: nnx.cond(turn % 2 == 0, first, second, m, x))
    return nnx.scan(lambda m, carry, _: (inner(m, carry), None), length=2)(model, x, None)[0]


def eager_branch(first, second, model, x, turn):
    return (first, second)[turn % 2](model, x)


def eager_switch(first, second, model, x, turn):
    return (first, second, first)[turn % 3](model, x)


def eager_twice(first, second, model, x, turn):
    return first(model, first(model, x))


def eager_loop(first, second, model, x, turn):
    for _ in range(turn):
        x = first(model, x)
    return x


def eager_nested(first, second, model, x, turn):
    return eager_branch(first, second, model, eager_branch(first, second, model, x, turn), turn)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "lifted_form, eager_form",
    [
        (apply_cond, eager_branch),
        (apply_switch, eager_switch),
        (apply_scan, eager_twice),
        (apply_fori_loop, eager_loop),
        (apply_while_loop, eager_loop),
        (apply_nested, eager_nested),
    ],
    ids=["cond", "switch", "scan", "fori_loop", "while_loop", "scan of remat of cond"],
)
def test_lifted_control_flow_has_the_effects_of_python_control_flow(lifted_form, eager_form):
    @settings(QUICK, max_examples=5)
    @given(plans, st.booleans(), value_programs, value_programs)
    def check(plan, tied, first, second):
        def f(model, x):
            return change(first, model, x)

        def g(model, x):
            return change(second, model, x)

        eager, lifted = Run(plan), Run(plan)
        if tied:
            for model in (eager.model, lifted.model):
                tie_values([m for _, m in model.named_modules()], 0, 1, 0, jnp.ones(2))
        for turn in range(3):
            x = jnp.arange(1.0, 3.0)
            found = lifted.call(lambda m, x, turn=turn: lifted_form(f, g, m, x, turn), x)
            assert found == eager.call(lambda m, x, turn=turn: eager_form(f, g, m, x, turn), x)

    check()


# Gradients


def energy(model, x):
    """A scalar that mixes every float value of the model."""
    total = x.sum()
    for i, (_, m) in enumerate(model.named_modules()):
        for j, name in enumerate(VALUES):
            if hasattr(m, name):
                value = getattr(m, name)
                total = total + (i + 1) * jnp.sum(jnp.sin(value * (j + 1))) + total * jnp.sum(value) * 0.01
        if hasattr(m, "t0"):
            m.t0["a"] = m.t0["a"] + 1
            total = total + jnp.sum(m.t0["b"][0])
    return total


@pytest.mark.filterwarnings("ignore")
def test_lifted_gradients_agree_with_jax_through_partition_and_merge():
    by_path = nnx.All(nnx.Variable, nnx.PathMatches("**/v0"))
    filters = st.sampled_from([nnx.Param, nnx.BatchStat, (nnx.Param, nnx.Cache), by_path, "params"])

    @settings(QUICK, max_examples=12)
    @given(plans, filters, st.booleans())
    def check(plan, wrt, jit):
        model, x = build(plan), jnp.arange(3.0)
        (selected, rest), moduledef = model.partition(wrt, ...)
        value, expected = jax.value_and_grad(lambda s: energy(moduledef.merge(s, rest), x))(selected)
        f = nnx.value_and_grad(energy, wrt=wrt)
        if not selected:
            with pytest.raises(ValueError, match="matches nothing"):
                f(model, x)
            return
        found_value, found = (nnx.jit(f) if jit else f)(model, x)
        np.testing.assert_allclose(found_value, value, rtol=1e-5)
        assert list(found) == list(expected)
        for path in expected:
            assert type(found[path]) is type(expected[path])
            np.testing.assert_allclose(found[path].value, expected[path].value, rtol=1e-4, atol=1e-5)
        eager = build(plan)
        energy(eager, x)
        assert Registry().portrait(model) == Registry().portrait(eager)

    check()
