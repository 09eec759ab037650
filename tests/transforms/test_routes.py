"""The search for what a function reaches: it finds everything, and does not take long in a large program."""

import inspect
import json
from unittest import mock

import pytest

import nnx
from nnx.transforms.engine import routes

METHODS = {f"method_{i}": lambda self: None for i in range(50)}


def test_methods_are_looked_up_once_for_all_objects_of_a_class():
    Many = type("Many", (), METHODS)
    objects = [Many() for _ in range(200)]

    def body():
        return objects

    with mock.patch.object(routes, "attribute", wraps=routes.attribute) as lookup:
        assert routes.Reach([body]).modules == []
    assert lookup.call_count < 2 * len(METHODS)


@pytest.mark.parametrize("method", [lambda f: f, classmethod, staticmethod, property], ids=lambda m: m.__name__)
def test_a_module_that_a_method_names_is_found_through_the_second_object_as_well(method):
    model = nnx.Linear(2, 2, ctx=nnx.context(0))
    Both = type("Both", (), {"read": method(lambda *_: model)})
    first, second = Both(), Both()
    assert [value for value, _ in routes.Reach([lambda: (first, second)]).modules] == [model]


def test_the_search_does_not_wander_through_the_standard_library_and_the_test_runner():
    def body(x):
        assert x is not None  # which pytest rewrites to name a module of its own
        return json.dumps(x), inspect.signature(body)

    with mock.patch.object(routes, "_reached_from", wraps=routes._reached_from) as visited:
        assert routes.Reach([body]).modules == []
    assert visited.call_count < 20
