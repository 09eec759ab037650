"""Eight virtual devices: parameters are read straight into their parts, and large models are planned without memory."""

import json
from pathlib import Path

import pytest

from tests.models.published import DIFFERENT
from tests.models.sharded_program import WITH_LOGITS, settings
from tests.sharding.programs import finish, start

PROGRAM = Path(__file__).parent / "sharded_program.py"
LIMIT = 400  # seconds


@pytest.fixture(scope="module")
def small():
    (output,) = finish([start(PROGRAM, "small", devices=8)], LIMIT)
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def large():
    (output,) = finish([start(PROGRAM, "large", devices=8)], LIMIT)
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize(("name", "setting"), [(name, setting) for name in DIFFERENT for setting in settings(name)])
def test_a_sharded_model_has_the_values_of_one_device(small, name, setting):
    assert small[f"{name} {setting}"]["same"]


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_a_sharded_model_has_the_logits_of_one_device(small, name):
    assert small[f"{name} logits"] < 1e-4


def part(small, name, setting, path):
    found = small[f"{name} {setting}"]
    path = path.replace("layers/0", "layers/scan_module/layers/0") if found["scanned"] else path
    whole, part = found["parts"][path]
    return (whole[1:], part[1:]) if found["scanned"] and "layers" in path else (whole, part)


def test_parameters_are_really_split(small):
    assert part(small, "llama", "tensor", "layers/0/attention/query/kernel") == ([32, 4, 8], [32, 2, 8])
    assert part(small, "phi3", "fsdp", "layers/0/attention/out/kernel") == ([4, 8, 32], [4, 8, 8])
    assert part(small, "phi3", "both", "layers/0/mlp/up/kernel") == ([32, 48], [8, 24])
    assert part(small, "gpt2", "tensor", "layers/0/attention/value/bias") == ([4, 8], [2, 8])
    assert part(small, "gpt2", "both", "embed/embedding") == ([96, 32], [48, 8])
    assert part(small, "qwen3", "both", "head/kernel") == ([32, 96], [8, 48])


@pytest.mark.parametrize(
    ("name", "path", "part"),
    [
        ("bert_masked_lm", "encoder/embed/embedding", ([60, 24], [30, 6])),
        ("bert_masked_lm", "encoder/layers/0/attention/query/kernel", ([24, 4, 6], [6, 2, 6])),
        ("vit_classifier", "encoder/embed/patches/kernel", ([3, 3, 3, 24], [3, 3, 3, 6])),
        ("clip", "text/layers/1/mlp/layers/0/kernel", ([16, 40], [4, 20])),
        ("resnet_classifier", "encoder/stages/0/0/layers/2/conv/kernel", ([1, 1, 4, 16], [1, 1, 1, 8])),
    ],
)
def test_a_sharded_encoder_is_split_and_computes_the_same(small, name, path, part):
    assert small[name]["error"] < 1e-4
    assert tuple(small[name]["parts"][path]) == part


class TestLargeModels:
    def test_8b_and_70b_are_planned_in_less_than_a_gigabyte(self, large):
        assert large["8B"]["parameters"] == 8_030_261_248 and large["8B"]["bytes"] == 2 * 8_030_261_248
        assert large["70B"]["parameters"] == 70_553_706_496
        assert large["peak bytes"] < 1e9

    @pytest.mark.parametrize("size", ["8B", "70B"])
    def test_shapes_dtypes_and_shardings_are_known(self, large, size):
        found = large[size]
        layers, features, hidden = {"8B": (32, 4096, 14336), "70B": (80, 8192, 28672)}[size]
        stack = "layers/scan_module/layers/0"
        assert found["dtypes"] == ["bfloat16"] and found["traced alike"]
        assert found["specs"][f"{stack}/mlp/down/kernel"] == [[layers, hidden, features], ["None", "model", "data"]]
        assert found["specs"][f"{stack}/attention/key/kernel"][0] == [layers, features, 8, 128]
        assert found["specs"][f"{stack}/attention/key/kernel"][1][:3] == ["None", "data", "model"]
        assert found["specs"]["embed/embedding"] == [[128256, features], ["model", "data"]]
