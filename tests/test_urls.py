"""Checkpoints take URLs of object stores (tests/storage/test_locations.py); everything else refuses them.

No URL ever becomes a local folder.
"""

import inspect
import io
import pathlib

import jax.numpy as jnp
import pytest

import nnx

MODEL = nnx.Dict(w=nnx.Param(jnp.ones(2)))
LINEAR = nnx.Linear(2, 2, ctx=nnx.context(0))


def tiny_decoder():
    sizes = {"vocab_size": 4, "features": 4, "hidden_features": 4, "num_layers": 1, "num_heads": 1}
    return nnx.models.Decoder(nnx.models.DecoderConfig(model_type="llama", **sizes, max_length=8), ctx=nnx.context(0))


def adapted_decoder():
    model = tiny_decoder()
    nnx.add_lora(model, 1, where="layers/**", ctx=nnx.context(0))
    return model


def plan_of_a_step():
    return nnx.plan(lambda x: x, jnp.ones(2), on="cpu-1")


CALLS = {
    "nnx.CheckpointManager": lambda path: nnx.CheckpointManager(path),
    "nnx.TrainLog": lambda path: nnx.TrainLog(path=path, file=io.StringIO()),
    "nnx.checkpoint_entries": lambda path: nnx.checkpoint_entries(path),
    "nnx.display": lambda path: nnx.display(MODEL, path),
    "nnx.export": lambda path: nnx.export(path, lambda x: x, jnp.ones(2)),
    "nnx.load": lambda path: nnx.load(path, MODEL),
    "nnx.load_exported": lambda path: nnx.load_exported(path),
    "nnx.load_safetensors": lambda path: nnx.load_safetensors(path, MODEL),
    "nnx.models.ImageProcessor.from_pretrained": lambda path: nnx.models.ImageProcessor.from_pretrained(path),
    "nnx.models.Tokenizer.from_pretrained": lambda path: nnx.models.Tokenizer.from_pretrained(path),
    "nnx.models.explain": lambda path: nnx.models.explain(path),
    "nnx.models.from_pretrained": lambda path: nnx.models.from_pretrained(path),
    "nnx.models.generation_defaults": lambda path: nnx.models.generation_defaults(path),
    "nnx.models.load_adapter": lambda path: nnx.models.load_adapter(tiny_decoder(), path),
    "nnx.models.save_adapter": lambda path: nnx.models.save_adapter(adapted_decoder(), path),
    "nnx.models.save_pretrained": lambda path: nnx.models.save_pretrained(tiny_decoder(), path),
    "nnx.Plan.plot": lambda path: plan_of_a_step().plot(path),
    "nnx.Plans.plot": lambda path: nnx.plan(lambda x: x, jnp.ones(2), on=["cpu-1"]).plot(path),
    "nnx.ModelPicture.save": lambda path: nnx.plot_model(LINEAR, jnp.ones(2)).save(path),
    "nnx.plot_attention": lambda path: nnx.plot_attention(jnp.ones((1, 2, 2)), path),
    "nnx.plot_model": lambda path: nnx.plot_model(LINEAR, jnp.ones(2), path=path),
    "nnx.plot_metrics": lambda path: nnx.plot_metrics([{"step": 0, "loss": 1.0}], path),
    "nnx.read_metrics": lambda path: nnx.read_metrics(path),
    "nnx.save": lambda path: nnx.save(path, MODEL),
    "nnx.save_safetensors": lambda path: nnx.save_safetensors(path, MODEL),
    "nnx.tensorboard_sink": lambda path: nnx.tensorboard_sink(path),
}


def takers():
    """The public functions, classes and class methods that take a path."""
    for prefix, namespace in (("nnx", nnx), ("nnx.models", nnx.models)):
        for name, value in vars(namespace).items():
            if name.startswith("_") or not callable(value):
                continue
            members = [] if not isinstance(value, type) else [n for n in vars(value) if not n.startswith("_")]
            for full, part in [(name, value), *((f"{name}.{n}", getattr(value, n, None)) for n in members)]:
                if callable(part) and "PathLike" in _signature(part):
                    yield f"{prefix}.{full}"


def _signature(value):
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""


def test_everything_that_takes_a_path_is_tested_here():
    assert set(takers()) - {"nnx.compilation_cache"} == set(CALLS)  # JAX itself opens the folder of the cache


ANY_STORE = ("nnx.CheckpointManager", "nnx.checkpoint_entries", "nnx.load", "nnx.save")
LOCAL = {name: call for name, call in CALLS.items() if name not in ANY_STORE}


@pytest.mark.parametrize("call", LOCAL.values(), ids=LOCAL)
@pytest.mark.parametrize("url", ["gs://bucket/model", pathlib.Path("s3://bucket/model")], ids=["str", "Path"])
def test_a_url_is_refused_and_nothing_is_written(call, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="bucket/model' is a URL.*not supported yet"):
        call(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ANY_STORE)
@pytest.mark.parametrize("url", ["http://bucket/model", pathlib.Path("s3://bucket/model")], ids=["str", "Path"])
def test_a_url_that_is_no_store_is_refused_for_checkpoints(name, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is a URL that cannot be read or written|was a URL before pathlib"):
        CALLS[name](url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["file:///tmp/model", pathlib.Path("file:///tmp/model"), "FILE:///tmp/model"])
def test_a_file_url_is_refused_with_the_path_to_write(url):
    with pytest.raises(ValueError, match=r"without its scheme: '/tmp/model'"):
        nnx.load_safetensors(url)


@pytest.mark.parametrize("name", ["run:1", "a:b/c", "C:model", "10:30/model"])
def test_colon_alone_does_not_make_a_url(name, tmp_path):
    nnx.save(tmp_path / name, MODEL)
    assert nnx.load(str(tmp_path / name))["w"].shape == (2,)
