"""Paths: segments, their order, and how they are listed in errors."""

import jax.numpy as jnp
import pytest

import nnx


def test_item_named_like_a_method_has_its_own_name_in_paths():
    heads = nnx.Dict(keys=jnp.ones(1), inner=nnx.Dict(items=jnp.ones(2)))
    assert list(heads.get_state()) == ["inner/items", "keys"]
    assert heads["keys"].shape == (1,) and callable(heads.keys)
    assert heads.get_path("inner/items").shape == (2,)


def test_numbers_sort_by_value_and_before_names():
    paths = ["b", "layers/10/w", "layers/9/w", "a/b", "a", "10", "9"]
    assert list(nnx.State(dict.fromkeys(paths))) == ["9", "10", "a", "a/b", "b", "layers/9/w", "layers/10/w"]


def test_errors_quote_the_first_paths_and_count_the_rest():
    def error_for(count: int) -> str:
        with pytest.raises(ValueError, match="non-empty remainder") as raised:
            nnx.State({str(i): jnp.ones(1) for i in range(count)}).partition(nnx.Param)
        return str(raised.value)

    assert "remainder: '0', '1'." in error_for(2)
    assert "'10', '11'." in error_for(12) and " more" not in error_for(12)
    assert "'11' and 1 more." in error_for(13)
