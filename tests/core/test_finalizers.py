"""`__del__` on a Module would run on every copy that a transform makes; `weakref.finalize` runs once."""

import dataclasses
import gc
import weakref
from typing import Generic, TypeVar

import jax.numpy as jnp
import pytest

import nnx

T = TypeVar("T")


class Closing:
    """A base that cannot be changed."""

    closed = 0

    def __del__(self):
        type(self).closed += 1


def test_a_class_with_del_is_refused_and_told_of_finalize():
    with pytest.raises(
        TypeError, match=r"Reader has a __del__ method\. (.|\n)*weakref\.finalize\(self, self\.file\.close\)"
    ):

        class Reader(nnx.Module):
            def __del__(self):
                pass


def test_an_inherited_del_is_refused_and_its_origin_named():
    with pytest.raises(TypeError, match=r"Reader has a __del__ method, from Closing\."):

        class Reader(nnx.Module, Closing):
            pass


def test_a_del_that_comes_later_is_refused_on_the_class_and_found_on_its_bases():
    class Plain:
        pass

    class Reader(nnx.Module, Plain):
        pass

    class Careful(Reader, finalizers=True):
        pass

    def close(self):
        pass

    with pytest.raises(TypeError, match=r"Reader has a __del__ method\. "):
        Reader.__del__ = close
    assert not hasattr(Reader, "__del__")
    Careful.__del__ = close
    Plain.__del__ = close
    with pytest.raises(TypeError, match=r"Reader has a __del__ method, from Plain\."):
        Reader()
    assert Careful().__del__


def test_a_dataclass_and_a_generic_with_del_are_refused():
    with pytest.raises(TypeError, match="Data has a __del__"):

        @nnx.dataclass
        class Data(nnx.Module):
            width: int

            def __del__(self):
                pass

    with pytest.raises(TypeError, match="Box has a __del__"):

        class Box(nnx.Module, Generic[T]):
            def __del__(self):
                pass


def test_an_opted_out_class_and_its_subclasses_keep_their_del():
    class Reader(nnx.Module, Closing, finalizers=True):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

    class Child(Reader):
        def __del__(self):
            super().__del__()

    @dataclasses.dataclass
    class Data(Reader):
        width: int = 2

    for cls in (Reader, Child, Data):
        cls()
        gc.collect()
        assert cls.closed > 0


def test_other_class_arguments_reach_the_other_bases():
    class Named:
        def __init_subclass__(cls, name="", **kwargs):
            super().__init_subclass__(**kwargs)
            cls.name = name

    class Both(nnx.Module, Named, name="both", finalizers=True):
        pass

    assert Both.name == "both"


def test_a_finalizer_runs_once_however_many_transforms_copy_the_module():
    closed = []

    class Reader(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))
            weakref.finalize(self, closed.append, "file")

    model = Reader()
    nnx.grad(lambda m: (m.w**2).sum())(model)
    nnx.jit(lambda m: m.w.sum())(model)
    model.clone()
    gc.collect()
    assert not closed
    del model
    gc.collect()
    assert closed == ["file"]
