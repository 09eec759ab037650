"""The programs of examples/programs learn at their small settings, go on from each other, and agree on any devices."""

import json
import pathlib
import re

import pytest

from tests.scripts import ROOT, copy_examples, run_script
from tests.sharding.programs import finish, start

ON_DEVICES = ROOT / "tests" / "programs_on_devices.py"
TIME_LIMIT = 200  # seconds, on a machine that does much else


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return copy_examples(tmp_path_factory.mktemp("copy")) / "programs"


def final_figure(printed: str) -> float:
    found = re.fullmatch(r"final .*: (-?\d[\d.]*)", printed.strip().splitlines()[-1])
    assert found, printed[-2000:]
    return float(found[1])


@pytest.mark.timeout(TIME_LIMIT + 20)
@pytest.mark.filterwarnings("default")  # those of the libraries that programs plot with and take data from
class TestPrograms:
    def test_ppo_learns_to_balance(self, programs):
        assert final_figure(run_script(programs / "ppo.py", "--smoke")) > 100

    def test_a_finetuned_model_is_evaluated_and_trained_by_rewards(self, programs, tmp_path):
        model, tuned = tmp_path / "model" / "model", tmp_path / "tuned"
        printed = run_script(programs / "finetune.py", "--smoke", "--batch", "32", "--output", str(tmp_path / "model"))
        assert 0 <= final_figure(printed) <= 1
        assert 0 <= final_figure(run_script(programs / "evaluate.py", str(model), "--smoke")) <= 1
        printed = run_script(programs / "evaluate.py", str(model), "--text", str(programs / "ppo.py"), "--window", "64")
        assert float(re.findall(r"^ppo.py +([\d.]+)", printed, re.MULTILINE)[0]) > 1
        printed = run_script(
            programs / "grpo.py", str(model), "--smoke", "--prompts", "8", "--output", str(tmp_path / "grpo")
        )
        assert 0 <= final_figure(printed) <= 1
        chats = tmp_path / "chats.jsonl"
        chats.write_text("\n".join(json.dumps({"question": f"say {i}", "answer": f"<{i}>"}) for i in range(40)))
        options = (str(model), "--how", "int8", "--chats", str(chats), "--steps", "2", "--batch", "4", "--smoke")
        assert final_figure(run_script(programs / "finetune.py", *options, "--output", str(tuned))) == 0
        assert (tuned / "model" / "tokenizer.json").exists() and (tuned / "adapters").exists()


@pytest.mark.timeout(TIME_LIMIT + 20)
def test_the_losses_do_not_depend_on_the_number_of_devices(programs):
    steps = {"pretrain": 12, "diffusion": 10}
    options = [f"{name}={count}" for name, count in steps.items()]
    (printed,) = finish([start(ON_DEVICES, str(programs), *options, devices=8)], TIME_LIMIT)
    losses = json.loads(printed.splitlines()[-1])
    assert losses.keys() == steps.keys()
    for one, eight in losses.values():
        assert one == pytest.approx(eight, abs=2e-5)
