"""`jax.Ref`, a mutable array of JAX's own: refused as an attribute, free to use as an argument or a captured value."""

import argparse
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import nnx
from tests.models import Scale


class Pair(NamedTuple):
    w: object
    ref: object


def holding(ref):
    return lambda: ref[...]


@pytest.mark.parametrize(
    "hide",
    [
        lambda ref: ref,
        lambda ref: [ref],
        lambda ref: {"w": jnp.ones(2), "ref": ref},
        lambda ref: Pair(jnp.ones(2), ref),
        lambda ref: argparse.Namespace(ref=ref),
        lambda ref: nnx.Static(ref),
        lambda ref: holding(ref),
        lambda ref: functools.partial(print, ref),
    ],
    ids=["itself", "list", "dict", "namedtuple", "namespace", "Static", "closure", "partial"],
)
def test_a_jax_ref_is_refused_at_assignment_wherever_it_hides(hide):
    m = Scale()
    value = hide(jax.new_ref(jnp.ones(2)))
    with pytest.raises(ValueError, match=r"Cannot assign attribute 'total' of Scale: .*(jax\.Ref|JAX does not accept)"):
        m.total = value
    assert "total" not in vars(m)
    if isinstance(value, (jax.Ref, list, dict, tuple)):  # what a variable could hold
        with pytest.raises(ValueError, match=r"Cannot assign attribute 's' of Scale: .*jax\.Ref"):
            m.s = value


def test_the_refusal_of_a_jax_ref_says_what_to_write():
    m, ref = Scale(), jax.new_ref(jnp.ones(2))
    with pytest.raises(ValueError) as error:
        m.total = ref
    assert "`self.total = nnx.Variable(ref[...])`" in str(error.value)
    m.total = nnx.Variable(ref[...])
    nnx.jit(lambda m: setattr(m, "total", m.total + 1))(m)
    assert m.total.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("box", [nnx.Param, nnx.Variable, nnx.Node, lambda ref: nnx.Ref(nnx.Param(ref))])
def test_a_container_refuses_a_jax_ref(box):
    ref = jax.new_ref(jnp.ones(2))
    for value in (ref, [ref], {"a": (1.0, ref)}):
        with pytest.raises(ValueError, match=r"(Param|Variable|Node) cannot hold a jax\.Ref.*\n.*\(ref\[\.\.\.\]\)"):
            box(value)
    with pytest.raises(ValueError, match=r"Param cannot hold a jax\.Ref"):
        nnx.Param(1.0).replace(ref)


def test_a_list_that_comes_to_hold_a_jax_ref_is_an_error_naming_the_path():
    m = nnx.Dict(sizes=[1])
    m.sizes.append(jax.new_ref(jnp.ones(2)))
    with pytest.raises(ValueError, match="'sizes' has come to hold Ref"):
        m.get_state()


def test_an_update_refuses_a_jax_ref_and_changes_nothing():
    m, ref = nnx.Dict(w=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones(2))), jax.new_ref(jnp.zeros(2))
    for paths in (["b", "w"], ["b", "new"]):
        with pytest.raises(ValueError, match=rf"Cannot update '{paths[1]}': .*jax\.Ref.*`ref\[\.\.\.\]`"):
            m.update_state(nnx.State({paths[0]: jnp.zeros(2), paths[1]: ref}))
        assert m.b.tolist() == m.w.tolist() == [1.0, 1.0] and len(m.get_state()) == 2


def test_a_jax_ref_is_refused_at_assignment_inside_a_trace():
    def assign(m, ref):
        m.total = ref

    def make(m, ref):
        m.total = jax.new_ref(jnp.ones(2))

    for body in (assign, make):
        with pytest.raises(ValueError, match=r"Cannot assign attribute 'total' of Dict: the value is a jax\.Ref"):
            nnx.jit(body)(nnx.Dict(), jax.new_ref(jnp.ones(2)))


def add(ref, value):
    ref[...] = ref[...] + jax.lax.stop_gradient(value)


def test_a_jax_ref_is_an_argument_of_a_transform():
    m, total = Scale(2.0), jax.new_ref(jnp.zeros(()))

    def loss(m, total):
        add(total, m.s)
        return m.s**2

    f = nnx.jit(loss)
    assert [float(f(m, total)) for _ in range(2)] == [4.0, 4.0] and float(total[...]) == 4.0
    assert float(nnx.grad(loss)(m, total)["s"].value) == 4.0 and float(total[...]) == 6.0
    assert float(nnx.jit(nnx.grad(loss))(m, total)["s"].value) == 4.0 and float(total[...]) == 8.0


def test_a_jax_ref_is_captured_by_a_transform():
    m, total = Scale(2.0), jax.new_ref(jnp.zeros(()))

    def loss(m):
        add(total, m.s)
        return m.s**2

    def step(m, carry, _):
        add(total, 1.0)
        return carry * m.s, None

    f = nnx.jit(loss)
    assert [float(f(m)) for _ in range(2)] == [4.0, 4.0] and float(total[...]) == 4.0
    assert float(nnx.grad(loss)(m)["s"].value) == 4.0 and float(total[...]) == 6.0
    scanned = nnx.scan(step, length=3)
    for expected in (9.0, 12.0):
        assert float(scanned(m, 1.0, None)[0]) == 8.0 and float(total[...]) == expected
    jitted = nnx.jit(lambda m: scanned(m, 1.0, None)[0])
    assert [float(jitted(m)) for _ in range(2)] == [8.0, 8.0] and float(total[...]) == 18.0
