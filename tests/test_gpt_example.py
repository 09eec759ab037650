"""GPT-2 of examples/gpt trains, is saved, and writes text; its benchmarks compare programs that compute the same."""

import re

import pytest

from tests.scripts import copy_examples, run_module, run_script

TIME_LIMIT = 140  # seconds for one program, on a machine that does much else


@pytest.mark.timeout(2 * TIME_LIMIT + 20)
def test_gpt_learns_and_then_writes_text_from_its_checkpoint(tmp_path):
    folder = copy_examples(tmp_path) / "gpt"
    trained = run_script(folder / "train.py", "--smoke").strip().splitlines()
    assert re.match(r"final .*: \d", trained[-1]), trained[-1]
    assert any("tokens/s" in line for line in trained)

    written = run_script(folder / "sample.py", "--smoke", "--prompt", "import ").strip().splitlines()
    assert written[0].startswith("import ▶")
    assert re.match(r"final .*: 60$", written[-1]), written[-1]


@pytest.mark.timeout(TIME_LIMIT + 20)
def test_our_step_and_the_hand_written_ones_start_from_the_same_loss():
    table = run_module("benchmarks.gpu.train", "--tiny", "--seconds", "0.1").splitlines()
    rows = {cells[1].strip(): cells for cells in (line.split("|") for line in table) if len(cells) > 5}
    ours, raw, tuned = (float(rows[name][-2]) for name in ("nnx", "hand-written JAX", "the same, tuned"))
    assert ours == pytest.approx(raw, rel=2e-3)  # all compute in bfloat16, in another order
    assert ours == pytest.approx(tuned, rel=2e-3)


@pytest.mark.timeout(TIME_LIMIT + 20)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_our_decoding_and_the_hand_written_one_write_the_same_tokens(model):
    lines = run_module("benchmarks.gpu.decode", "--tiny", "--model", model, "--rows", "2").splitlines()
    (agreement,) = [line for line in lines if "the same tokens as by hand" in line]
    assert "nnx, scanned layers 1.000, nnx, layers in a list 1.000" in agreement
    assert any("Time to the first token" in line for line in lines)
