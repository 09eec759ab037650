"""Which dtypes a checkpoint holds, and that none changes silently on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


@pytest.mark.parametrize(
    ("array", "advice"),
    [
        (np.array([1, 2], "timedelta64[s]"), "astype\\('int64'\\)"),
        (np.array(["2020-01-01"], "datetime64[D]"), "astype\\('int64'\\)"),
        (np.array([1.0], np.longdouble), "float64"),
        (np.array([1.0], np.clongdouble), "complex128"),
        (np.array([1.0], ">f4"), "newbyteorder\\('='\\)"),
        (np.array(["a", "b"]), "list of Python strings"),
        (np.array([b"a"]), "list of Python strings"),
        (np.array([None, 1], object), "list of its elements"),
        (np.zeros(2, [("a", "f4"), ("b", "i4")]), "fields one by one"),
        (np.str_("text"), "list of Python strings"),
        (np.datetime64("2020-01-01"), "int64"),
    ],
    ids=lambda value: str(value.dtype) if hasattr(value, "dtype") else "",
)
def test_a_dtype_that_checkpoints_do_not_hold_is_refused_with_its_path(tmp_path, array, advice):
    with pytest.raises(TypeError, match=rf"Cannot save 'data/0': it is a .* array(.|\n)*{advice}"):
        nnx.save(tmp_path / "c", {"data": [array], "x": jnp.ones(2)})
    assert not (tmp_path / "c").exists()


WIDE = [np.arange(3, dtype=np.int64), np.array([1.5]), np.array([1j]), np.arange(3, dtype=np.uint64)]


@pytest.mark.parametrize("array", WIDE, ids=lambda array: str(array.dtype))
def test_64_bits_without_x64_are_an_error_unless_cast(tmp_path, array):
    nnx.save(tmp_path / "c", {"x": array})
    assert nnx.load(tmp_path / "c", {"x": array})["x"].dtype == array.dtype  # numpy has them
    abstract = {"x": jax.ShapeDtypeStruct(array.shape, array.dtype)}
    with pytest.raises(
        nnx.CheckpointError, match=rf"'x' is {array.dtype}\[.*, which JAX can hold only with jax_enable_x64"
    ):
        nnx.load(tmp_path / "c", abstract)
    back = nnx.load(tmp_path / "c", abstract, cast=True)["x"]
    assert isinstance(back, jax.Array) and (np.asarray(back) == array).all()


def test_a_wide_scalar_in_the_place_of_a_python_number_is_an_error_unless_cast(tmp_path):
    nnx.save(tmp_path / "c", {"step": np.int64(2**40)})
    target = {"step": 0}
    with pytest.raises(nnx.CheckpointError, match="jax_enable_x64"):
        nnx.load(tmp_path / "c", target)
    assert target == {"step": 0}


def test_a_number_that_does_not_fit_its_array_is_refused(tmp_path):
    nnx.save(tmp_path / "c", {"count": 2**40})
    target = {"count": jnp.array(3, jnp.int32)}
    with pytest.raises(nnx.CheckpointError, match="'count' is the number 1099511627776 in the checkpoint"):
        nnx.load(tmp_path / "c", target)
    assert target["count"] == 3


@pytest.mark.parametrize(
    "name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "int2", "float4_e2m1fn", "complex64", "bool"]
)
def test_every_dtype_of_jax_keeps_its_bits(tmp_path, name):
    dtype = jnp.dtype(name)
    array = np.array([0, 1, 1, 0, 1], dtype)
    nnx.save(tmp_path / "c", {"x": array, "y": jnp.asarray(array)})
    assert str(nnx.checkpoint_entries(tmp_path / "c")["y"].dtype) == name
    back = nnx.load(tmp_path / "c", {"x": np.zeros(5, dtype), "y": jnp.zeros(5, dtype)})
    assert back["x"].dtype == back["y"].dtype == dtype
    assert back["x"].tobytes() == np.asarray(back["y"]).tobytes() == array.tobytes()
