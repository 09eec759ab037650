"""What the class forms are: classes to test against and to annotate with, and what `nnx.scan(Block, ...)` means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


class Block(nnx.Module):
    def __init__(self, features=2, *, ctx):
        self.linear = nnx.Linear(features, features, ctx=ctx)

    def __call__(self, x, _=None):
        return self.linear(x), None


STACKED = {"variable_axes": {nnx.Param: 0}, "split_rngs": "params"}
FORMS = {
    "scan": (nnx.Scan, nnx.scan, {**STACKED, "length": 3}),
    "vmap": (nnx.Vmap, nnx.vmap, {**STACKED, "axis_size": 3, "in_axes": None}),
    "remat": (nnx.Remat, nnx.remat, {"policy": "kept"}),
}
X = jnp.ones((1, 2))


@pytest.mark.parametrize("name", FORMS)
def test_class_form_builds_an_instance_of_itself(name):
    form, _, options = FORMS[name]
    others = {other for other, *_ in FORMS.values()} - {form}
    model = form(Block, **options)(ctx=nnx.context(0))
    assert type(model) is form and issubclass(form, nnx.Module)
    assert not any(isinstance(model, other) for other in others)
    assert nnx.jit(lambda model: isinstance(model, form))(model) and type(model.clone()) is form
    assert type(form[Block](Block, **options)(ctx=nnx.context(0))) is form


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("style", ["call", "keyword", "decorator"])
def test_a_transform_of_a_class_is_its_class_form(name, style):
    form, transform, options = FORMS[name]
    if style == "call":
        make = transform(Block, **options)
    elif style == "keyword":
        make = transform(fun=Block, **options)
    else:
        make = transform(**options)(Block)
    model, expected = make(ctx=nnx.context(0)), form(Block, **options)(ctx=nnx.context(0))
    assert type(model) is form and model.get_module_def() == expected.get_module_def()
    jax.tree.map(np.testing.assert_array_equal, model(X, None), expected(X, None))


def test_class_forms_of_transforms_nest():
    _, scan, options = FORMS["scan"]
    model = scan(nnx.remat(Block), **options)(ctx=nnx.context(0))
    assert isinstance(model, nnx.Scan) and isinstance(model.scan_module, nnx.Remat)
    assert model.scan_module.remat_module.linear.kernel.shape == (3, 2, 2)
    assert model(X, None)[0].shape == (1, 2)


def test_the_function_may_be_called_f():
    carry, ys = nnx.scan(f=lambda _, carry, x: (carry + x, carry), length=3)(None, 0, jnp.arange(3))
    assert (int(carry), ys.tolist()) == (3, [0, 0, 1])
    assert nnx.remat(f=lambda model, x: model(x)[0], policy="kept")(Block(ctx=nnx.context(0)), X).shape == (1, 2)


def test_options_of_remat_can_be_positional():
    model = nnx.Remat(Block, False, 1, "kept")(ctx=nnx.context(0))
    assert model.options == {"prevent_cse": False, "static_argnums": 1, "policy": "kept"}


class Both(nnx.Module):
    """A Module whose method takes a flag that decides an `if`."""

    def __init__(self):
        self.w = nnx.Param(jnp.array(3.0))

    def __call__(self, x, double):
        return self.w * (2 * x if double else x)

    @nnx.remat(static_argnums=1)
    def decorated(self, x, double):
        return self(x, double)

    @staticmethod
    @nnx.remat(static_argnums=1)
    def free(x, double):
        return 2 * x if double else x


def plain(model, x, double):
    return model(x, double)


CALLS = {
    "class": lambda: nnx.Remat(Both, static_argnums=1)()(1.0, True),
    "another method of the class": lambda: nnx.Remat(Both, static_argnums=1)().call.decorated(1.0, True),
    "Module": lambda: nnx.remat(Both(), static_argnums=1)(1.0, True),
    "bound method": lambda: nnx.remat(Both().__call__, static_argnums=1)(1.0, True),
    "decorated method": lambda: Both().decorated(1.0, True),
    "decorated method, by name": lambda: Both().decorated(1.0, double=True),
    "decorated method, from the end": lambda: nnx.remat(static_argnums=-1)(Both.__call__)(Both(), 1.0, True),
    "function of the class": lambda: nnx.remat(Both.__call__, static_argnums=1)(Both(), 1.0, True),
    "static method": lambda: 3 * Both.free(1.0, True),
    "function": lambda: nnx.remat(plain, static_argnums=2)(Both(), 1.0, True),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_static_arguments_of_remat_are_counted_without_the_module_in_front_of_the_dot(call):
    assert call() == 6


@pytest.mark.parametrize("name", ["grad", "value_and_grad", "jacrev", "checkify", "capture", "custom_vjp"])
def test_transforms_without_a_class_form_say_so(name):
    with pytest.raises(TypeError, match=rf"nnx\.{name} takes a function, .* got the Module class Linear"):
        getattr(nnx, name)(nnx.Linear)
