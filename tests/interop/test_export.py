"""`nnx.export` and `nnx.load_exported`: a program runs without the model's code, and computes what the model does."""

import collections
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.checks import sealed

ROOT = Path(__file__).parent.parent.parent
X = jnp.arange(6.0).reshape(2, 3)
Scores = collections.namedtuple("Scores", ["logits", "total"])


class Net(nnx.Module):
    def __init__(self):
        ctx = nnx.context(0)
        self.norm = nnx.BatchNorm(3, use_running_average=False)
        self.linear = nnx.Linear(3, 4, ctx=ctx)
        self.key = jax.random.key(3)
        self.calls = nnx.Variable(0)

    def __call__(self, x, scale=1.0):
        self.calls += 1
        return self.linear(self.norm(x)) * scale + jax.random.uniform(self.key)

    def logits(self, x):
        return self.linear(x)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """An export of a Net, for the tests that only read."""
    path = tmp_path_factory.mktemp("export")
    nnx.export(path, Net(), X, scale=2.0, symbolic_batch=True, platforms=("cpu", "cuda"))
    return path


def test_the_program_computes_what_the_model_does_for_any_batch(directory):
    program = nnx.load_exported(directory)
    for batch in (2, 5):
        x = jnp.linspace(0.0, 1.0, batch * 3).reshape(batch, 3)
        np.testing.assert_allclose(program(x), Net()(x, scale=2.0), rtol=1e-6)
        np.testing.assert_allclose(jax.jit(lambda x: program(x))(x), program(x), rtol=1e-6)
    assert program.platforms == ("cpu", "cuda")
    assert repr(program) == "Exported(Net(float32[batch,3]), platforms=('cpu', 'cuda'), weights=8)"


def test_a_process_without_the_code_of_the_model_runs_it(directory):
    np.save(directory / "expected.npy", Net()(X, scale=2.0))
    code = f"""
import importlib.util, sys
sys.path.insert(0, {str(ROOT)!r})
import jax.numpy as jnp, numpy as np, nnx
assert importlib.util.find_spec("test_export") is None
out = nnx.load_exported({str(directory)!r})(jnp.arange(6.0).reshape(2, 3))
np.testing.assert_allclose(out, np.load({str(directory / "expected.npy")!r}), rtol=1e-6)
print("ran")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=directory)
    assert result.stdout == "ran\n", result.stderr


def test_state_changes_are_discarded_unless_they_are_returned(tmp_path):
    model = Net()
    nnx.export(tmp_path, lambda model, x: (model(x), model.filter(nnx.BatchStat)), model, X)
    assert model.calls == 0 and (model.norm.mean == 0).all()
    _, statistics = nnx.load_exported(tmp_path)(X)
    model(X)
    assert sorted(statistics) == ["norm/mean", "norm/var"]
    np.testing.assert_allclose(statistics["norm/mean"], model.norm.mean, rtol=1e-6)


def test_the_weights_are_a_safetensors_file_of_the_model(directory):
    model = Net()
    loaded = nnx.load_safetensors(directory / "weights.safetensors", model)
    assert sorted(loaded) == sorted(model.get_state())
    program = nnx.load_exported(directory)
    program.weights["linear/kernel"] = jnp.zeros((3, 4))
    program.weights["linear/bias"] = jnp.ones(4)
    np.testing.assert_allclose(program(X), 2.0 + jax.random.uniform(model.key) * jnp.ones((2, 4)), rtol=1e-6)


def test_methods_functions_and_nested_arguments_keep_their_form(tmp_path):
    model = Net()
    nnx.export(tmp_path / "method", model.logits, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    np.testing.assert_allclose(nnx.load_exported(tmp_path / "method")(X), model.logits(X), rtol=1e-6)

    def scores(a, model, batch, *, b, options=None):
        y = model.linear(batch["x"]) + a
        return Scores(y, {"sum": (y.sum() + b[0], [None, b[1]])})

    args: dict[str, Any] = {"batch": {"x": X}, "b": (jnp.ones(()), X)}
    nnx.export(tmp_path / "function", scores, jnp.ones(4), model, args["batch"], b=args["b"], options="fast")
    out = nnx.load_exported(tmp_path / "function")(jnp.ones(4), args["batch"], b=args["b"])
    expected = scores(jnp.ones(4), model, **args)
    assert type(out).__name__ == "Scores" and out._fields == expected._fields
    jax.tree.map(np.testing.assert_allclose, tuple(out), tuple(expected))


def test_inputs_can_have_any_symbolic_axes(tmp_path):
    rows, columns = jax.export.symbolic_shape("r, c")
    nnx.export(tmp_path, lambda x: x.T, jax.ShapeDtypeStruct((rows, columns), jnp.float32))
    assert nnx.load_exported(tmp_path)(jnp.ones((2, 7))).shape == (7, 2)


# Mistakes


def test_call_with_other_arguments_raises_with_the_exported_ones(directory, tmp_path):
    program = nnx.load_exported(directory)
    for error, args, kwargs, message in [
        (TypeError, (), {}, "Net takes 1 positional arguments and none by name; got 0 and none"),
        (TypeError, (X,), {"scale": 3.0}, "got 1 and 'scale'"),
        (TypeError, (X.astype(jnp.int32),), {}, r"input 0 should be float32\[batch,3\].*got int32\[2,3\]"),
        (ValueError, (X[0],), {}, r"input 0 should be float32\[batch,3\].*got float32\[3\]"),
        (ValueError, (X.T,), {}, r"float32\[batch,3\].*got float32\[3,2\]"),
    ]:
        with pytest.raises(error, match=message):
            program(*args, **kwargs)
    nnx.export(tmp_path, lambda x, y: x["a"], {"a": X}, (X, None))
    program = nnx.load_exported(tmp_path)
    with pytest.raises(TypeError, match=r"argument 0 should be a dict with 'a'.*got \{'b'"):
        program({"b": X}, (X, None))
    with pytest.raises(TypeError, match="argument 1 should be a tuple of 2"):
        program({"a": X}, X)
    with pytest.raises(TypeError, match=r"argument 1\[1\] should be None"):
        program({"a": X}, (X, X))


def test_export_refuses_unsupported_models_before_writing(tmp_path):
    path = tmp_path / "never"
    model = Net()
    for error, call, message in [
        (TypeError, lambda: nnx.export(path, model, X, nnx.context(0)), "contain a Context.*nnx.context\\(key\\)"),
        (
            TypeError,
            lambda: nnx.export(path, lambda pair: pair, (model, X)),
            "argument 0 holds arrays and a Module, Net",
        ),
        (TypeError, lambda: nnx.export(path, lambda pair: pair, {"a": X, "b": 3}), "argument 0 holds arrays and 3"),
        (TypeError, lambda: nnx.export(path, lambda model, x: model, model, X), "returns a Module.*model.get_state()"),
        (TypeError, lambda: nnx.export(path, lambda x: (x, 1.0), X), r"the result\[1\] is 1.0"),
        (TypeError, lambda: nnx.export(path, 3, X), "nnx.export takes a function, a Module or a method"),
        (ValueError, lambda: nnx.export(path, lambda x, y: x, X, X[0], symbolic_batch=True), "first axis of every"),
    ]:
        with pytest.raises(error, match=message):
            call()
    assert not path.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(nnx.CheckpointError, match="exists and is not a directory"):
        nnx.export(tmp_path / "file", lambda x: x, X)


def test_the_extra_is_named_when_it_is_missing(monkeypatch, directory):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(ImportError, match=r"nnx.export needs.*nnx\[export\]"):
        nnx.export(directory, lambda x: x, X)
    with pytest.raises(ImportError, match=r"nnx.load_exported needs.*nnx\[export\]"):
        nnx.load_exported(directory)


@pytest.fixture
def copy(directory, tmp_path) -> Path:
    """A copy of the export, to be damaged."""
    for name in ("export.json", "program.bin", "weights.safetensors"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    return tmp_path


def test_directories_that_are_no_finished_export_are_explained(copy):
    with pytest.raises(FileNotFoundError, match="There is no exported program at"):
        nnx.load_exported(copy / "nowhere")
    (copy / "export.json").unlink()
    with pytest.raises(nnx.CheckpointError, match="has no export.json, which nnx.export writes last"):
        nnx.load_exported(copy)


def test_damage_to_any_file_is_noticed(copy):
    for name in ("export.json", "program.bin", "weights.safetensors"):
        intact = (copy / name).read_bytes()
        for damaged in (intact[:-9], intact[:-9] + bytes([intact[-9] ^ 1]) + intact[-8:], b""):
            (copy / name).write_bytes(damaged)
            with pytest.raises(nnx.CheckpointError, match=str(copy)):
                nnx.load_exported(copy)
        (copy / name).unlink()
        with pytest.raises((nnx.CheckpointError, FileNotFoundError), match=str(copy)):
            nnx.load_exported(copy)
        (copy / name).write_bytes(intact)
    nnx.load_exported(copy)


def test_other_descriptions_are_refused(copy):
    fields = json.loads((copy / "export.json").read_text())
    fields.pop("crc32")
    for change, message in [
        ({"format": "zip"}, "the format in its export.json is 'zip'"),
        ({"version": 9}, "has format version 9"),
        ({"args": [{"dict": 3}]}, "a form is"),
        ({"args": []}, "its arguments are not its inputs"),
        ({"result": {"record": ["a b", {}]}}, "a form is"),
        ({"inputs": ["float32"]}, "an array is 'float32'"),
        ({"weights": {}}, "other inputs and outputs than export.json says"),
        ({"weights": {"a": "float99[]"}}, "cannot be read"),
    ]:
        (copy / "export.json").write_text(sealed({**fields, **change}))
        with pytest.raises(nnx.CheckpointError, match=message):
            nnx.load_exported(copy)
