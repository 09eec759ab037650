"""`python -m nnx plan`: what it plans, what it prints, and how it fails."""

import json

import pytest

from nnx.__main__ import main

SCRIPT = """
import jax
import jax.numpy as jnp
import nnx


@nnx.jit(donate_argnums=0)
def step(model, x):
    return model(x).sum()


def plan():
    return step, nnx.Linear(8, 4, ctx=nnx.context(0)), jnp.zeros((2, 8))


def wrong():
    return 3
"""
CONFIG = {
    **{"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "hidden_act": "silu"},
    **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False},
}


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def test_function_of_a_script_is_planned(script, capsys):
    assert main(["plan", f"{script}:plan", "--on", "cpu-1", "--mesh", "data=1"]) == 0
    output = capsys.readouterr()
    assert "step on cpu-1" in output.out and "parameters" in output.out
    assert "compiling for cpu-1, data=1 ..." in output.err


def test_published_config_is_planned_without_weights(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["--batch", "2", "--length", "8", "--on", "cpu-1"]
    assert main(["plan", str(tmp_path), "--train", *arguments, "cpu-1"]) == 0
    assert capsys.readouterr().out.count("cpu-1") == 2  # a row for each
    assert main(["plan", str(tmp_path / "config.json"), "--write", "4", *arguments]) == 0
    assert "write on cpu-1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "options", "text"),
    [
        ("{script}:nothing", [], "has no function 'nothing'. It has: step, plan, wrong"),
        ("{script}:wrong", [], "wrong() must return a step and its arguments"),
        ("{script}:plan", ["--mesh", "data"], "--mesh takes axes and sizes"),
        ("{script}:plan", ["--batch", "8"], "a script decides about its batch itself"),
        ("{script}", [], "neither a config.json nor a directory with one"),
        ("missing.py:plan", [], "There is no script missing.py. Paths are relative to /"),
    ],
)
def test_mistake_is_one_line_that_says_what_to_write(script, what, options, text, capsys):
    if what == "{script}":
        what = str(script.parent / "nothing")
    assert main(["plan", what.format(script=script), "--on", "cpu-1", *options]) == 1
    assert text in capsys.readouterr().err
