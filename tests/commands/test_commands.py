"""`python -m nnx`: what the commands print and return."""

import builtins
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import nnx
from nnx.__main__ import main
from nnx.commands import doctor
from nnx.commands.command import COMMANDS, command_named
from tests.models.tiny_tokenizer import TEMPLATE
from tests.models.tiny_tokenizer import write as write_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A checkpoint, a safetensors file, a published directory and a run with several steps."""
    folder = tmp_path_factory.mktemp("files")
    model = nnx.Dict(conv=nnx.Conv(1, 2, (3, 3), ctx=nnx.context(0)), norm=nnx.BatchNorm(2))
    nnx.save(folder / "checkpoint", {"model": model, "epoch": 3, "name": "run"})
    nnx.save_safetensors(folder / "model.safetensors", model)
    with nnx.CheckpointManager(folder / "run") as manager:
        for step in (5, 10):
            manager.save(step, model)
    config = nnx.models.DecoderConfig(
        model_type="llama", vocab_size=264, features=8, hidden_features=16, num_layers=1, num_heads=2, max_length=64
    )
    nnx.models.save_pretrained(nnx.models.Decoder(config, ctx=nnx.context(0)), folder / "published")
    write_tokenizer(folder / "published", chat_template=TEMPLATE)
    return folder


def test_help_has_every_command_with_its_examples(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert name in text and all(f"python -m nnx {line}" in text for line in command_named(name).examples)
    with pytest.raises(SystemExit, match="0"):
        main(["inspect", "--help"])
    assert "examples:\n  python -m nnx inspect" in capsys.readouterr().out


def test_examples_of_the_help_are_valid_command_lines():
    import shlex

    from nnx.commands.command import make_parser

    parser = make_parser()
    for name in COMMANDS:
        for line in command_named(name).examples:
            assert parser.parse_args(shlex.split(line)).command == name


def test_inspect_lists_the_entries_of_a_checkpoint_with_totals_by_type(files, capsys):
    assert main(["inspect", str(files / "checkpoint")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{files / 'checkpoint'}: a checkpoint of NNX"
    cells = [line.split() for line in lines]
    assert ["BatchStat", "float32", "2", "4", "16", "B"] in cells
    assert ["Param", "float32", "4", "24", "96", "B"] in cells
    assert ["model/conv/kernel", "Param", "[3,", "3,", "1,", "2]", "float32", "72", "B"] in cells
    assert any(line[:1] == ["name"] and "text" in line for line in cells)


def test_inspect_takes_the_last_step_of_a_run_and_groups_by_depth(files, capsys):
    assert main(["inspect", str(files / "run"), "--depth", "1"]) == 0
    text = capsys.readouterr().out
    assert "the checkpoints of 2 steps; this is the last one, 10" in text
    assert ["conv", "Param", "20", "in", "2", "float32", "80", "B"] in [line.split() for line in text.splitlines()]


def test_inspect_says_of_a_published_directory_which_model_it_is(files, capsys):
    assert main(["inspect", str(files / "published")]) == 0
    text = capsys.readouterr().out
    assert "a published model of type 'llama', with tokenizer.json" in text and "model.embed_tokens.weight" in text


@pytest.mark.parametrize("name", ["nowhere", "weights.pt"])
def test_an_error_is_one_line_and_status_1(files, capsys, name):
    (files / "weights.pt").write_bytes(b"PK")
    assert main(["inspect", str(files / name)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("python -m nnx inspect: ") and len(error.splitlines()) == 1
    assert ("torch.load" in error) == (name == "weights.pt")
    with pytest.raises((OSError, ValueError)):
        main(["--traceback", "inspect", str(files / name)])


def test_convert_goes_from_a_checkpoint_to_safetensors_and_back(files, tmp_path, capsys):
    target, back = tmp_path / "model.safetensors", tmp_path / "back"
    assert main(["convert", str(files / "run" / "10"), str(target), "--params", "--dtype", "bfloat16"]) == 0
    entries = nnx.checkpoint_entries(target)
    assert sorted(entries) == ["conv/bias", "conv/kernel", "norm/bias", "norm/scale"]
    assert {entry.dtype for entry in entries.values()} == {"bfloat16"}
    assert main(["convert", str(target), str(back), "--dtype", "float32"]) == 0
    model = nnx.Dict(conv=nnx.Conv(1, 2, (3, 3), ctx=nnx.context(1)), norm=nnx.BatchNorm(2))
    original = nnx.load(files / "run" / "10", model.clone())
    nnx.load(back, model, strict=False, report=nnx.LoadReport())
    assert jnp.allclose(model.conv.kernel, original.conv.kernel, atol=1e-2)
    assert main(["convert", str(target), str(back)]) == 1 and "--overwrite" in capsys.readouterr().err


def test_convert_writes_a_published_directory_again_with_its_tokenizer(files, tmp_path):
    target = tmp_path / "small"
    assert main(["convert", str(files / "published"), str(target), "--published", "--dtype", "bfloat16"]) == 0
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (target / "tokenizer.json").is_file()
    assert nnx.models.from_pretrained(target, abstract=True).param_dtype == jnp.bfloat16
    assert main(["convert", str(files / "run" / "10"), str(tmp_path / "other"), "--published"]) == 1


def test_chat_answers_each_line_and_remembers_the_messages(files, capsys, monkeypatch):
    lines = iter(["hello", "world", "/new", "hello"])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines, ""))
    prompts = []
    generate = nnx.generate

    def watched(model, prompt, **options):
        prompts.append(prompt.shape[1])
        return generate(model, prompt, **options)

    monkeypatch.setattr(nnx, "generate", watched)
    assert main(["chat", str(files / "published"), "--max-new-tokens", "3", "--temperature", "0"]) == 0
    assert len(prompts) == 3 and prompts[1] > prompts[0] == prompts[2]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_doctor_reports_versions_devices_and_extras_and_exits_with_0(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in (
        "Python",
        nnx.__version__,
        jax.__version__,
        "devices",
        "a training step",
        "compilation cache",
        "extra plot",
    ):
        assert part in text
    assert "broken" not in text


def test_doctor_exits_with_1_only_if_nnx_cannot_run(capsys, monkeypatch):
    def no_device():
        raise RuntimeError("no device\nat all")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (no_device, doctor._extras))
    monkeypatch.setattr(doctor, "EXTRAS", {"none": ("no_such_package",)})
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "RuntimeError: no device" in text and "pip install 'nnx[none]'" in text and "NNX cannot run here" in text


def test_doctor_knows_every_extra_for_users():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    assert set(doctor.EXTRAS) == set(everything.partition("[")[2].rstrip("]").split(","))


def test_the_command_line_runs_as_a_program(files):
    run = subprocess.run(
        [sys.executable, "-m", "nnx", "inspect", str(files / "model.safetensors")],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    assert "conv/kernel" in run.stdout and run.stderr == ""


def test_tables_are_drawn_by_rich_on_a_terminal(capsys, monkeypatch):
    from nnx.commands.tables import print_table

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("name", "bytes"), [("a[0]", "12")], right=("bytes",))
    assert "a[0]" in capsys.readouterr().out
