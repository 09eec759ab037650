"""Weights that a jitted function reaches by any route other than its arguments are read fresh on every call."""

import contextvars
import functools
import gc
import os
import re
import subprocess
import sys
import types
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


class Scale(nnx.Module):
    def __init__(self, value=2.0):
        self.w = nnx.Param(jnp.asarray(value))
        self.offset = 0.0

    def __call__(self, x):
        return x * self.w + self.offset


MODEL = Scale()
CURRENT = contextvars.ContextVar("CURRENT")


def by_global(x):
    return MODEL(x)


def by_default(x, model=None):
    return model(x)


class Holder:
    model: Scale

    def __call__(self, x):
        return self.model(x)

    def method(self, x):
        return self.model(x)


def in_closure(model):
    return lambda x: model(x)


def in_method_of_closure(model):
    call = model.__call__
    return lambda x: call(x)


def in_default(model):
    def forward(x, model=model):
        return model(x)

    return forward


def in_keyword_default(model):
    def forward(x, *, model=model):
        return model(x)

    return forward


def in_global(model):
    globals()["MODEL"] = model
    return by_global


def in_global_of_helper(model):
    globals()["MODEL"] = model
    return lambda x: by_global(x)


def in_python_module(model):
    namespace = types.ModuleType("namespace")
    namespace.model = model
    return lambda x: namespace.model(x)


def in_imported_module(model):
    sys.modules["a_module_of_this_test"] = namespace = types.ModuleType("a_module_of_this_test")
    namespace.model = model

    def forward(x):
        import a_module_of_this_test

        return a_module_of_this_test.model(x)

    return forward


def in_object(model):
    holder = Holder()
    holder.model = model
    return lambda x: holder.model(x)


def in_bound_method(model):
    holder = Holder()
    holder.model = model
    return holder.method


def in_callable_object(model):
    holder = Holder()
    holder.model = model
    return holder


def in_class_attribute(model):
    class Settings:
        teacher = model

    return lambda x: Settings.teacher(x)


def in_dict(model):
    models = {"a": model}
    return lambda x: models["a"](x)


def in_list_of_lists(model):
    models = [[model]]
    return lambda x: models[0][0](x)


def in_partial(model):
    return functools.partial(by_default, model=model)


def in_parent_module(model):
    parent = nnx.Dict(child=nnx.Sequence([model]))
    return lambda x: parent.child[0](x)


def in_getattr(model):
    holder = types.SimpleNamespace(model=model)
    return lambda x: getattr(holder, "mod" + "el")(x)


class ReadsGlobal:
    def __call__(self, x):
        return MODEL(x)

    @property
    def model(self):
        return MODEL


class ReadsGlobalModule(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array(1.0))

    def __call__(self, x):
        return self.w * MODEL(x)


def in_call_of_object(model):
    globals()["MODEL"] = model
    return ReadsGlobal()


def in_property(model):
    globals()["MODEL"] = model
    reader = ReadsGlobal()
    return lambda x: reader.model(x)


def in_method_of_captured_module(model):
    globals()["MODEL"] = model
    reader = nnx.Dict(reader=ReadsGlobalModule())
    return lambda x: reader["reader"](x)


def in_context_variable(model):
    CURRENT.set(model)
    return lambda x: CURRENT.get()(x)


def in_lifted_function(model):
    lifted = nnx.remat(lambda x: model(x))
    return lambda x: lifted(x)


def in_scan_body(model):
    def forward(x):
        return jax.lax.scan(lambda x, _: (model(x), None), x, None, length=1)[0]

    return forward


def in_inner_jit(model):
    inner = jax.jit(lambda x: model(x))
    return lambda x: inner(x)


def in_inner_nnx_jit(model):
    inner = nnx.jit(lambda x: model(x))
    return lambda x: inner(x)


ROUTES = [value for name, value in list(globals().items()) if name.startswith("in_")]


@pytest.fixture(autouse=True)
def leave_no_model():
    yield
    globals()["MODEL"] = None
    sys.modules.pop("a_module_of_this_test", None)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_every_call_sees_the_current_weights_and_nothing_is_compiled_again(route):
    model = Scale()
    step = nnx.jit(route(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (2.0, 3.0, 5.0):
            model.w = jnp.array(value)
            assert step(jnp.array(1.0)) == value
    assert step.trace_count == 1


# jax.jit keeps the trace of its own function, here as everywhere.
@pytest.mark.parametrize("route", [r for r in ROUTES if r is not in_inner_jit], ids=lambda route: route.__name__)
def test_a_static_attribute_of_a_captured_module_is_seen(route):
    model = Scale()
    step = nnx.jit(route(model))
    assert step(jnp.array(1.0)) == 2.0
    model.offset = 10.0
    assert step(jnp.array(1.0)) == 12.0


class StaticMethod:
    def __init__(self, model):
        self.model = model

    @functools.partial(nnx.jit, static_argnums=0)
    def step(self, x):
        return x + self.model.offset


def step_with_default(model):
    def step(x, model=model):
        return x + model.offset

    return step


STATIC_READS = {
    "closure": lambda model: nnx.jit(lambda x: x + model.offset),
    "default": lambda model: nnx.jit(step_with_default(model)),
    "partial": lambda model: nnx.jit(functools.partial(lambda model, x: x + model.offset, model)),
    "object": lambda model: StaticMethod(model).step,
    "static self": lambda model: functools.partial(StaticMethod.step, StaticMethod(model)),
    "dict": lambda model: (lambda models: nnx.jit(lambda x: x + models["a"].offset))({"a": model}),
}


@pytest.mark.parametrize("make", STATIC_READS.values(), ids=STATIC_READS)
def test_a_function_that_reads_no_weight_of_a_captured_module_sees_its_static_attributes(make):
    model = Scale()
    step = make(model)
    for model.offset in (0.0, 0.0, 3.0, 5.0):
        assert step(jnp.array(1.0)) == 1.0 + model.offset


def test_a_module_that_only_other_methods_name_costs_no_trace():
    class Trainer:
        def __init__(self):
            self.model = self.best = Scale()

        def step(self, x):
            return self.model(x)

        def keep_best(self):
            self.best = self.model.clone()

    trainer = Trainer()
    step = nnx.jit(trainer.step)
    for _ in range(3):
        assert step(jnp.array(1.0)) == 2.0
        trainer.keep_best()
    assert step.trace_count == 1


def test_a_step_of_another_model_reads_captured_weights_on_its_fast_path():
    student, teacher = Scale(1.0), Scale(2.0)

    @nnx.jit
    def distill(student, x):
        loss = lambda m: (m(x) - teacher(x)) ** 2  # noqa: E731
        grads = nnx.grad(loss)(student)
        student.w -= 0.5 * grads["w"].value
        return teacher(x)

    for value in (2.0, 3.0, 7.0, 7.0):
        teacher.w = jnp.array(value)
        assert distill(student, jnp.array(1.0)) == value
        assert student.w == value
    assert distill.trace_count == 1


def test_a_donated_step_reads_captured_weights_and_donates_none_of_them():
    student, teacher = Scale(1.0), Scale(2.0)

    @functools.partial(nnx.jit, donate_argnums=0)
    def follow(student):
        student.w = student.w * 0 + teacher.w

    for value in (2.0, 3.0, 7.0):
        teacher.w = jnp.array(value)
        follow(student)
        assert student.w == value
        assert teacher.w == value


def test_a_trainer_passed_as_a_static_argument_is_searched():
    class Trainer:
        def __init__(self):
            self.model = Scale()

        @functools.partial(nnx.jit, static_argnums=0)
        def evaluate(self, x):
            return self.model(x)

    trainer = Trainer()
    for value in (2.0, 3.0):
        trainer.model.w = jnp.array(value)
        assert trainer.evaluate(jnp.array(1.0)) == value
    trainer.model = Scale(11.0)
    assert trainer.evaluate(jnp.array(1.0)) == 11.0


@pytest.mark.parametrize("name", ["closure", "global", "object", "dict"])
def test_a_name_bound_to_another_module_is_followed(name):
    a, b = Scale(2.0), Scale(30.0)
    models, holder = {"m": a}, types.SimpleNamespace(model=a)
    globals()["MODEL"] = a
    model = a
    bodies = {
        "closure": lambda x: model(x),
        "global": lambda x: by_global(x),
        "object": lambda x: holder.model(x),
        "dict": lambda x: models["m"](x),
    }
    step = nnx.jit(bodies[name])
    assert step(jnp.array(1.0)) == 2.0
    model = holder.model = models["m"] = b
    globals()["MODEL"] = b
    assert step(jnp.array(1.0)) == 30.0
    b.w = jnp.array(40.0)
    assert step(jnp.array(1.0)) == 40.0


@pytest.mark.parametrize("route", [in_call_of_object, in_property, in_method_of_captured_module])
def test_a_global_bound_to_another_module_is_followed_through_methods(route):
    a, b = Scale(2.0), Scale(30.0)
    step = nnx.jit(route(a))
    assert step(jnp.array(1.0)) == 2.0
    globals()["MODEL"] = b
    assert step(jnp.array(1.0)) == 30.0
    b.w = jnp.array(40.0)
    assert step(jnp.array(1.0)) == 40.0


def test_a_method_of_an_argument_is_searched():
    globals()["MODEL"] = a = Scale(2.0)
    student = nnx.Sequence([ReadsGlobalModule()])
    step = nnx.jit(lambda student, x: student[0](x))
    assert step(student, jnp.array(1.0)) == 2.0
    a.w = jnp.array(3.0)
    assert step(student, jnp.array(1.0)) == 3.0
    assert step.trace_count == 1
    globals()["MODEL"] = Scale(30.0)
    assert step(student, jnp.array(1.0)) == 30.0


def test_a_method_of_an_argument_reads_a_class_attribute_of_its_own():
    class Student(nnx.Module):
        teacher = Scale()

        def __init__(self):
            self.w = nnx.Param(jnp.array(1.0))

        @nnx.jit
        def loss(self, x):
            return self.teacher(x) - self.w

    student = Student()
    for value in (2.0, 3.0):
        Student.teacher.w = jnp.array(value)
        assert student.loss(jnp.array(1.0)) == value - 1.0
    assert Student.loss.trace_count == 1
    Student.teacher = Scale(5.0)
    assert student.loss(jnp.array(1.0)) == 4.0


def test_a_replaced_submodule_of_a_captured_module_is_followed():
    parent = nnx.Dict(child=Scale(2.0))
    step = nnx.jit(lambda x: parent.child(x))
    assert step(jnp.array(1.0)) == 2.0
    parent.child = Scale(3.0)
    assert step(jnp.array(1.0)) == 3.0
    parent.child.w = jnp.array(4.0)
    assert step(jnp.array(1.0)) == 4.0


def test_another_shape_of_a_captured_weight_is_traced_again():
    model = Scale()
    step = nnx.jit(lambda x: model(x))
    step(jnp.array(1.0))
    model.w = jnp.array([1.0, 2.0])
    assert step(jnp.array(1.0)).tolist() == [1.0, 2.0]
    model.w = jnp.array([3.0, 4.0])
    assert step(jnp.array(1.0)).tolist() == [3.0, 4.0]


def test_new_shapes_of_the_arguments_capture_weights_of_their_own():
    a, b = Scale(2.0), Scale(3.0)
    step = nnx.jit(lambda x: a(x) if x.ndim == 0 else b(x))
    x, xs = jnp.array(1.0), jnp.ones(2)
    assert step(x) == 2.0 and step(xs).tolist() == [3.0, 3.0]
    a.w, b.w = jnp.array(5.0), jnp.array(7.0)
    assert step(x) == 5.0 and step(xs).tolist() == [7.0, 7.0]


def test_weights_in_lists_dicts_and_numpy_are_seen():
    held = nnx.Dict()
    held.tree = {"b": [jnp.array(1.0)], "a": jnp.array(2.0)}
    held.stat = np.full(2, 3.0, np.float32)
    step = nnx.jit(lambda x: x * held.tree["b"][0] * held.tree["a"] * held.stat)
    assert step(jnp.array(1.0)).tolist() == [6.0, 6.0]
    held.tree["b"][0] = jnp.array(10.0)
    assert step(jnp.array(1.0)).tolist() == [60.0, 60.0]
    held.stat[:] = 5.0
    assert step(jnp.array(1.0)).tolist() == [100.0, 100.0]


def test_a_list_or_dict_that_gains_or_loses_modules_is_read_again():
    teachers, named = [Scale(2.0)], {"a": Scale(10.0), "steps": []}

    @nnx.jit
    def step(x):
        return sum(t(x) for t in teachers) + sum(t(x) for t in named.values() if isinstance(t, nnx.Module))

    assert step(jnp.array(1.0)) == 12.0
    teachers.append(Scale(3.0))
    named["b"] = Scale(20.0)
    assert step(jnp.array(1.0)) == 35.0
    del teachers[1], named["b"]
    assert step(jnp.array(1.0)) == 12.0
    assert step.trace_count == 3
    for number in range(3):  # what is no Module can come and go
        named[number] = number
        named["steps"].append(number)
        assert step(jnp.array(1.0)) == 12.0
    assert step.trace_count == 3


def test_any_number_of_weights_is_found():
    model = nnx.Sequence([nnx.Linear(3, 3, ctx=nnx.context(i)) for i in range(40)])
    step, x = nnx.jit(lambda x: model(x)), jnp.ones((1, 3))
    step(x)
    model.update_state(jax.tree.map(lambda w: 1.1 * w, model.get_state()))
    np.testing.assert_allclose(step(x), model(x), rtol=1e-5)
    assert step.trace_count == 1


def test_weights_that_stop_being_one_array_are_distinguished():
    online = Scale(2.0)
    target = Scale(online.w)
    step = nnx.jit(lambda x: target(x) + 0 * online.w)
    assert step(jnp.array(1.0)) == 2.0
    online.w = jnp.array(5.0)
    assert step(jnp.array(1.0)) == 2.0
    target.w = jnp.array(7.0)
    assert step(jnp.array(1.0)) == 7.0


def test_an_array_that_is_also_in_a_captured_module_keeps_its_own_value():
    zero = jnp.zeros(())
    model = Scale(zero)
    step = nnx.jit(lambda x: model(x) + zero)
    assert step(jnp.array(1.0)) == 0.0
    model.w = jnp.array(5.0)
    assert step(jnp.array(1.0)) == 5.0
    model.w = jnp.array(7.0)
    assert step(jnp.array(1.0)) == 7.0
    assert step.trace_count == 2


def test_constant_that_another_module_also_holds_is_not_its_weight():
    hidden = iter([jnp.ones(())])
    held = [next(hidden)]
    constant = type("Hidden", (), {"__slots__": (), "__call__": lambda self, get=held.__getitem__: get(0)})()
    other = Scale(held[0])
    step = nnx.jit(lambda x: x + constant())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (1.0, 2.0, 3.0):
            other.w = jnp.array(value)
            assert step(jnp.array(1.0)) == 2.0
    del other
    assert step(jnp.array(1.0)) == 2.0


def test_a_module_that_is_an_argument_and_captured_is_read_as_it_was_before_the_call():
    model = Scale(1.0)

    @nnx.jit
    def step(m):
        m.w = m.w + 1
        return model.w

    assert [float(step(model)) for _ in range(3)] == [1.0, 2.0, 3.0]


def test_captured_weight_is_not_a_constant_of_the_program():
    teacher = Scale(jnp.arange(1000.0))
    step = nnx.jit(lambda m, x: m(x) + teacher(x).sum())
    student, x = Scale(), jnp.array(1.0)
    old = weakref.ref(teacher.w)
    step(student, x)
    constants = re.findall("stablehlo.constant.*", step.lower(student, x).as_text())
    assert not [line for line in constants if "1000" in line]
    teacher.w = teacher.w + 1
    step(student, x)
    gc.collect()
    assert old() is None


def test_no_compiled_function_keeps_a_captured_module_alive():
    def make():
        teacher = Scale()
        holder = {"teacher": teacher}
        return holder, weakref.ref(teacher), weakref.ref(teacher.w)

    holder, module, array = make()
    student = Scale()
    step = nnx.jit(lambda m, x: m(x) + (holder["teacher"](x) if holder else 0.0))
    step(student, jnp.array(1.0))
    assert step(student, jnp.array(1.0)) == 4.0
    holder.clear()
    gc.collect()
    assert module() is None and array() is None
    assert step(student, jnp.array(1.0)) == 2.0


def test_a_captured_module_cannot_be_changed():
    model = Scale()

    @nnx.jit
    def step(x):
        model.w = x

    with pytest.raises(nnx.TraceContextError):
        step(jnp.array(1.0))


def test_functions_that_capture_plain_arrays_are_compiled_as_they_are():
    table = jnp.arange(3.0)
    step = nnx.jit(lambda m, x: m(x) + table)
    model = Scale()
    assert step(model, jnp.array(1.0)).tolist() == [2.0, 3.0, 4.0]
    model.w = jnp.array(0.0)
    assert step(model, jnp.array(1.0)).tolist() == [0.0, 1.0, 2.0]
    assert step.trace_count == 1


def test_a_weight_inside_a_program_that_cannot_be_opened_is_compiled_again_with_a_warning():
    model = Scale()

    @nnx.jit
    def step(x):
        inner = jax.jit(lambda x: model(x))
        return jax.lax.scan(lambda x, _: (inner(x), None), x, None, length=1)[0]

    assert step(jnp.array(1.0)) == 2.0
    model.w = jnp.array(3.0)
    with pytest.warns(UserWarning, match=r"step was compiled again, in [\d.]+ s: Scale\.w has changed"):
        assert step(jnp.array(1.0)) == 3.0


# Functions that JAX knows by identity, so that it finds their traces again
KEPT_BY_JAX = {
    "jit": lambda read: jax.jit(read),
    "jit in jit": lambda read: jax.jit(jax.jit(read)),
    "checkpoint": lambda read: jax.checkpoint(read),
    "checkpoint of jit": lambda read: jax.grad(jax.checkpoint(jax.jit(lambda x: read(x) * x / 2))),
    "scan": lambda read: functools.partial(scan_once, lambda x, _: (read(x), None)),
    "scan of jit": lambda read: functools.partial(scan_once, jit_of_a_body(read)),
    "cond": lambda read: functools.partial(if_positive, read),
    "while": lambda read: functools.partial(while_first, lambda c: (c[0] + 1, read(c[1]))),
}


def scan_once(body, x):
    return jax.lax.scan(body, x, None, length=1)[0]


def jit_of_a_body(read):
    inner = jax.jit(read)
    return lambda x, _: (inner(x), None)


def if_positive(read, x):
    return jax.lax.cond(x > 0, read, zero, x)


def zero(x):
    return jnp.zeros_like(x)


def while_first(body, x):
    return jax.lax.while_loop(is_first, body, (0, x))[1]


def is_first(carry):
    return carry[0] < 1


@pytest.mark.filterwarnings("ignore:.* was compiled again")
@pytest.mark.parametrize("keep", KEPT_BY_JAX.values(), ids=KEPT_BY_JAX)
def test_no_trace_that_jax_keeps_shows_old_weights(keep):
    model, other = Scale(), Scale()
    inner = keep(lambda x: model.w * x)
    x = jnp.array(1.0)
    inner(x)  # JAX keeps this trace, too
    step, numbered = nnx.jit(lambda x: inner(x)), nnx.jit(lambda x, n: inner(x), static_argnums=1)
    for n, value in enumerate((3.0, 5.0, 7.0)):
        other.w, model.w = model.w, jnp.array(value)  # the old array is a weight still, but of another Module
        assert step(x) == nnx.jit(lambda x: inner(x))(x) == numbered(x, n) == value


def test_a_weight_that_is_read_outside_and_inside_of_a_loop_is_current_in_both():
    model = Scale()

    @nnx.jit
    def step(x):
        inner = jax.jit(lambda x: model.w * x)
        return model.w + scan_once(lambda x, _: (inner(x), None), x), inner(x)

    assert step(jnp.array(1.0)) == (4.0, 2.0)
    model.w = jnp.array(3.0)
    with pytest.warns(UserWarning, match=r"Scale\.w has changed"):
        assert step(jnp.array(1.0)) == (6.0, 3.0)


def test_functions_that_capture_nothing_share_the_traces_of_functions_inside():
    traced = []
    inner = jax.jit(lambda x: traced.append(1) or 2 * x)
    for _ in range(3):
        nnx.jit(lambda x: inner(x))(jnp.array(1.0))
    assert len(traced) == 1


def test_weights_that_jax_writes_into_the_equations_are_found():
    # JAX decides on import whether it does so; it has announced it as the default.
    program = """
import jax, jax.numpy as jnp, nnx
model = nnx.Dict(w=nnx.Param(jnp.ones(3)))
inner = jax.jit(lambda x: x * model.w)
step, opened = nnx.jit(lambda x: x * model.w), nnx.jit(lambda x: inner(2 * x))
looped = nnx.jit(lambda x: jax.lax.fori_loop(0, 1, lambda _, x: x * model.w, x))
for value in (1.0, 2.0, 3.0):
    model.w = jnp.full(3, value)
    print(step(1.0)[0], opened(1.0)[0], looped(jnp.ones(3))[0])
print(step.trace_count, opened.trace_count)
"""
    env = {**os.environ, "JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "1", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["1.0 2.0 1.0", "2.0 4.0 2.0", "3.0 6.0 3.0", "1 1"]


def with_rule_of_jax(model):
    @jax.custom_vjp
    def scaled(x):
        return model.w * x

    scaled.defvjp(lambda x: (model.w * x, model.w), lambda w, g: (w * g,))
    return lambda a, x: scaled(x)


def with_jvp_rule_of_jax(model):
    @jax.custom_jvp
    def scaled(x):
        return model.w * x

    scaled.defjvp(lambda primals, tangents: (model.w * primals[0], model.w * tangents[0]))
    return lambda a, x: scaled(x)


def with_rule_of_nnx(model):
    @nnx.custom_vjp
    def scaled(a, x):
        return model.w * x * a.w

    scaled.defvjp(lambda a, x: (model.w * x * a.w, model.w), lambda w, g: (None, w * g))
    return scaled


@pytest.mark.parametrize("make", [with_rule_of_jax, with_jvp_rule_of_jax, with_rule_of_nnx])
def test_a_derivative_rule_reads_current_weights_in_a_gradient_of_a_compiled_function(make):
    model, one = Scale(), Scale(1.0)
    step = nnx.jit(make(model))
    for value in (2.0, 3.0, 5.0):
        model.w = jnp.array(value)
        assert step(one, 1.0) == value
        assert nnx.grad(step, argnums=1)(one, 1.0) == value


def test_the_derivative_rules_of_jax_need_no_new_trace():
    model = Scale()
    step = nnx.jit(lambda x: jax.nn.relu(model.w * x))
    for value in (2.0, 3.0, 5.0):
        model.w = jnp.array(value)
        assert jax.grad(step)(1.0) == value
    assert step.trace_count == 1


def test_ahead_of_time_compiled_functions_read_captured_weights():
    model = Scale()
    compiled = nnx.jit(lambda x: model(x)).lower(jnp.array(1.0)).compile()
    for value in (2.0, 3.0):
        model.w = jnp.array(value)
        assert compiled(jnp.array(1.0)) == value


def test_a_jitted_function_inside_a_transform_reads_the_values_of_that_transform():
    @nnx.jit
    def outer(model, x):
        inner = nnx.jit(lambda x: model(x))
        first = inner(x)
        model.w = model.w + 1
        return first, inner(x)

    model = Scale(2.0)
    assert [float(y) for y in outer(model, jnp.array(1.0))] == [2.0, 3.0]
    assert [float(y) for y in outer(model, jnp.array(1.0))] == [3.0, 4.0]
    grads = nnx.grad(lambda m: nnx.jit(lambda x: m(x))(jnp.array(3.0)))(model)
    assert grads["w"].value == 3.0
