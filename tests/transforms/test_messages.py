"""What is said about mistakes that JAX, or Python, would report in terms of this library's internals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import nnx

XS = jnp.arange(3.0)


def counter():
    return nnx.Dict(v=nnx.Variable(jnp.ones(2)))


# What is handed from step to step

NEW = {
    "scan, a new Module": lambda: nnx.scan(lambda m, c, x: (counter(), x))(None, counter(), XS),
    "scan, a clone": lambda: nnx.scan(lambda m, c, x: (c.clone(), x))(None, counter(), XS),
    "scan, a clone for a number": lambda: nnx.scan(lambda m, c, x: (m.clone(), x))(counter(), 0.0, XS),
    "while_loop": lambda: nnx.while_loop(lambda m: m.v[0] < 2, lambda m: m.clone(), counter()),
    "fori_loop": lambda: nnx.fori_loop(0, 2, lambda i, m: counter(), counter()),
}


@pytest.mark.parametrize("run", NEW.values(), ids=NEW)
def test_replacing_the_module_in_a_carry_raises_with_advice(run):
    with pytest.raises(TypeError, match="must keep its structure") as error:
        run()
    assert "<Module 1: Dict> was made in the body" in str(error.value) and "update_state" in str(error.value)
    assert "object at 0x" not in str(error.value)


OTHER = {
    "scan": lambda: nnx.scan(lambda m, c, x: (c[::-1], x))(None, (counter(), counter()), XS),
    "fori_loop": lambda: nnx.fori_loop(0, 2, lambda i, c: c[::-1], (counter(), counter())),
}


@pytest.mark.parametrize("run", OTHER.values(), ids=OTHER)
def test_modules_that_change_places_are_shown_by_number_and_class(run):
    with pytest.raises(TypeError) as error:
        run()
    before, after = "(<Module 0: Dict>, <Module 1: Dict>)", "(<Module 1: Dict>, <Module 0: Dict>)"
    assert f"of the structure {before} and returned {after}" in str(error.value)
    assert "A Module stays where it is: hand on what changes, such as a State" in str(error.value)


def test_branches_that_return_other_modules_are_shown_as_written():
    with pytest.raises(TypeError, match=r"branch 0 returns <Module 0: Dict>, branch 1 returns <Module 1: Dict>"):
        nnx.cond(True, lambda a, b: a, lambda a, b: b, counter(), counter())
    with pytest.raises(TypeError, match=r"branch 0 returns \(<Module 0: Dict>, \*\), branch 1 returns \{'a': \*\}"):
        nnx.switch(0, [lambda m: (m, 1.0), lambda m: {"a": 1.0}], counter())


@pytest.mark.parametrize("module", [None, counter()], ids=["no Module", "a Module"])
def test_new_modules_that_a_scan_collects_have_to_be_stacked(module):
    def body(m, c, x):
        return c, counter()

    with pytest.raises(ValueError, match=r"adds the variable 'v', Variable\(\).*variable_axes, e.g. \{Variable: 0\}"):
        nnx.scan(body)(module, 0.0, XS)
    stacked = nnx.scan(body, variable_axes={nnx.Variable: 0}, length=3)(None, 0.0, XS)[1]
    assert stacked.v.shape == (3, 2)


# Arguments


class Trainer:
    @nnx.jit
    def jit(self, x):
        return x

    @nnx.jit
    def takes_a_keyword(self, *, x):
        return x

    @nnx.grad
    def grad(self, x):
        return x

    @nnx.value_and_grad
    def value_and_grad(self, x):
        return x

    @nnx.vmap
    def vmap(self, x):
        return x

    @nnx.remat
    def remat(self, x):
        return x

    @nnx.jit(static_argnums=0)
    def static(self, x):
        return 2 * x


@pytest.mark.parametrize("name", ["jit", "grad", "value_and_grad", "vmap", "remat"])
def test_lifted_method_of_a_plain_class_raises_that_self_is_not_a_module(name):
    with pytest.raises((TypeError, ValueError)) as error:
        getattr(Trainer(), name)(XS)
    text = str(error.value)
    assert f"nnx.{name}: Trainer.{name} is a method of Trainer, which is not an nnx.Module" in text
    assert "class Trainer(nnx.Module)" in text and f"{name} = nnx.{name}(lambda model, x: ...)" in text
    assert (f"@nnx.{name}(static_argnums=0)" in text) == (name in ("jit", "remat"))
    assert "data[0]" not in text


def test_self_is_recognized_with_keywords_and_in_lower():
    with pytest.raises(TypeError, match="`self` is neither a Module"):
        Trainer().takes_a_keyword(x=XS)
    with pytest.raises(TypeError, match="`self` is neither a Module"):
        Trainer.jit.lower(Trainer(), XS)
    assert Trainer().static(2.0) == 4.0


@pytest.mark.parametrize(
    "args, kwargs, argument, value",
    [
        ((counter(), "a"), {}, "x", "'a'"),
        ((counter(), {"k": [1, "z"]}), {}, "x['k'][1]", "'z'"),
        ((counter(), 1.0), {"mode": "fast"}, "mode", "'fast'"),
    ],
)
def test_an_argument_that_cannot_be_traced_is_named(args, kwargs, argument, value):
    @nnx.jit
    def step(model, x, mode=0):
        return model.v

    for _ in range(2):
        step(counter(), 1.0)
    with pytest.raises(TypeError) as error:
        step(*args, **kwargs)
    assert f"nnx.jit(step): {argument} is {value}, a str, which is neither a Module" in str(error.value)
    assert f"nnx.jit(..., static_argnames={argument.partition('[')[0]!r})" in str(error.value)


def test_other_type_errors_of_a_call_are_left_alone():
    with pytest.raises(TypeError, match="unsupported operand|not a valid JAX type|add"):
        nnx.jit(lambda model, x: x + "a")(counter(), 1.0)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        nnx.jit(lambda model, x: x)(counter())


# Functions


def generates(model, x):
    yield x


async def waits(model, x):
    return x


async def generates_later(model, x):
    yield x


class Generating(nnx.Module):
    def __call__(self, x):
        yield x

    async def wait(self, x):
        return x


LATER = {
    "generator": (generates, "a generator"),
    "coroutine": (waits, "a coroutine"),
    "async generator": (generates_later, "an async generator"),
    "partial": (functools.partial(generates, x=1), "a generator"),
    "Module": (Generating(), "a generator"),
    "bound method": (Generating().wait, "a coroutine"),
}


@pytest.mark.parametrize("fun, kind", LATER.values(), ids=LATER)
@pytest.mark.parametrize(
    "transform",
    [nnx.jit, nnx.grad, nnx.value_and_grad, nnx.vmap, nnx.scan, nnx.remat, nnx.jacrev, nnx.jacfwd, nnx.hessian],
)
def test_a_function_whose_body_runs_later_is_refused_where_it_is_lifted(transform, fun, kind):
    with pytest.raises(TypeError) as error:
        transform(fun)
    start = f"nnx.{transform.__name__} was given "
    assert str(error.value).startswith(start) and f"{kind} function: calling it only makes {kind}" in str(error.value)


@pytest.mark.parametrize("fun, kind", [LATER["generator"], LATER["coroutine"]])
def test_a_loop_refuses_functions_whose_body_runs_later(fun, kind):
    loops = {
        "nnx.while_loop": [
            lambda: nnx.while_loop(fun, lambda m: m, counter()),
            lambda: nnx.while_loop(lambda m: True, fun, counter()),
        ],
        "nnx.fori_loop": [lambda: nnx.fori_loop(0, 2, fun, counter())],
    }
    for name, calls in loops.items():
        for call in calls:
            with pytest.raises(TypeError, match=f"^{name} was given {fun.__name__}, {kind} function"):
                call()


# Classes


def test_slots_on_a_module_are_refused():
    with pytest.raises(TypeError) as error:

        class Slotted(nnx.Module):
            __slots__ = ("kernel",)

    assert "Slotted declares __slots__ = ('kernel',)" in str(error.value) and "Remove __slots__" in str(error.value)
    with pytest.raises(TypeError, match=r"Point declares __slots__ = \('x',\).*slots=True"):

        @dataclasses.dataclass(slots=True)
        class Point(nnx.Module):
            x: int


def test_empty_slots_do_no_harm():
    class Empty(nnx.Module):
        __slots__ = ()

        def __init__(self):
            self.a = 1

    assert nnx.jit(lambda m: m)(Empty()).a == 1


# shard_map


def mapped(fun, out_specs=None, **options):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    return nnx.shard_map(fun, mesh=mesh, in_specs=(P(), P("data")), out_specs=out_specs or P(), **options)


def write(model, x):
    model.v = model.v + x.sum()
    return x


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_a_value_that_differs_between_devices_names_the_variable_the_axis_and_the_spec(wrap):
    with pytest.raises(ValueError, match=r"\(write\): the value written to 'v' differs.*mesh axis 'data'.*spec P\(\)"):
        wrap(mapped(write, P("data")))(counter(), XS)
    with pytest.raises(ValueError, match=r"the result\['a'\]\[0\] differs.*pmean\(x, 'data'\).*in out_specs"):
        wrap(mapped(lambda model, x: {"a": (x.sum(), model.v), "b": None}))(counter(), XS)


def test_values_that_agree_or_are_split_are_written():
    def combine(model, x):
        model.v = model.v + jax.lax.psum(x.sum(), "data")
        return (x,), None

    model = counter()
    (out,), _ = mapped(combine, ((P("data"),), None))(model, XS)
    assert out.shape == (3,) and model.v.tolist() == [4.0, 4.0]
    mapped(write, P("data"), check_vma=False)(model, XS)
    assert model.v.tolist() == [7.0, 7.0]
