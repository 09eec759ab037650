"""Adapters of PEFT: a model with one equals the model whose published weights were changed as PEFT documents it."""

import json
import shutil

import numpy as np
import pytest

import nnx
from tests.models import golden_files
from tests.models.published import golden_directory, golden_model

Q, K, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj", "model.layers.1.mlp.up_proj"


def write_adapter(directory, matrices, **settings):
    """Writes an adapter of `{module: (A, B)}`."""
    directory.mkdir(exist_ok=True)
    tensors = {}
    for module, (a, b) in matrices.items():
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    nnx.save_safetensors(directory / "adapter_model.safetensors", nnx.State(tensors))
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", **settings}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def drawn(name, modules):
    """Random matrices for modules of a golden, of the given ranks."""
    random, weights, pairs = np.random.default_rng(0), golden_files.weights(golden_files.read(name)), {}
    for module, rank in modules.items():
        outputs, inputs = weights[f"{module}.weight"].shape[:: -1 if name == "gpt2" else 1]
        shapes = (rank, inputs), (outputs, rank)
        pairs[module] = tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)
    return pairs


def changed_model(name, matrices, scales, folder):
    """The model of a golden after `W + scale * B @ A` in its file."""
    shutil.copytree(golden_directory(name), folder)
    tensors = dict(golden_files.weights(golden_files.read(name)))
    for module, (a, b) in matrices.items():
        delta = scales[module] * (b @ a)
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + (delta.T if name == "gpt2" else delta)
    nnx.save_safetensors(folder / "model.safetensors", nnx.State(tensors))
    return nnx.models.from_pretrained(folder)


def assert_equal(ours, theirs):
    ours, theirs = ours.get_state(), theirs.get_state()
    assert list(ours) == list(theirs)
    for path in ours:
        np.testing.assert_allclose(ours[path].value, theirs[path].value, atol=2e-5, err_msg=path)


CASES = {
    "alpha over rank": ("llama", {Q: 2, K: 4}, {}, {Q: 3.0, K: 1.5}),
    "rank-stabilized, patterns": (
        "llama",
        {Q: 4, K: 4, UP: 2},
        {"use_rslora": True, "alpha_pattern": {"k_proj": 2, "layers.1.mlp.up_proj": 4}},
        {Q: 3.0, K: 1.0, UP: 4 / 2**0.5},
    ),
    "fused": (
        "phi3",
        {"model.layers.0.self_attn.qkv_proj": 2, "model.layers.1.mlp.gate_up_proj": 3},
        {},
        {"model.layers.0.self_attn.qkv_proj": 3.0, "model.layers.1.mlp.gate_up_proj": 2.0},
    ),
    "stored by input": ("gpt2", {"transformer.h.1.attn.c_attn": 2}, {}, {"transformer.h.1.attn.c_attn": 3.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_changes_the_weights_as_documented_and_is_written_as_it_was(case, tmp_path):
    name, ranks, settings, scales = CASES[case]
    matrices = drawn(name, ranks)
    adapter = write_adapter(tmp_path / "adapter", matrices, **settings)
    expected = changed_model(name, matrices, scales, tmp_path / "changed")

    model = nnx.models.from_pretrained(golden_directory(name))
    paths = nnx.models.load_adapter(model, adapter)
    nnx.models.save_adapter(model, tmp_path / "written")
    assert nnx.merge_lora(model) == paths
    assert_equal(model, expected)

    again = nnx.models.from_pretrained(golden_directory(name))
    assert nnx.models.load_adapter(again, tmp_path / "written") == paths
    nnx.merge_lora(again)
    assert_equal(again, expected)
    written = nnx.load_safetensors(tmp_path / "written" / "adapter_model.safetensors")
    before = nnx.load_safetensors(adapter / "adapter_model.safetensors")
    assert {name: tensor.shape for name, tensor in written.items()} == {name: t.shape for name, t in before.items()}


def test_layers_of_a_stack_may_have_ranks_and_scales_of_their_own(tmp_path):
    matrices = drawn("llama", {Q: 2, "model.layers.1.self_attn.q_proj": 3, UP: 2})
    adapter = write_adapter(tmp_path / "adapter", matrices, alpha_pattern={"layers.1.self_attn.q_proj": 30})
    expected = changed_model(
        "llama", matrices, {Q: 3.0, "model.layers.1.self_attn.q_proj": 10.0, UP: 3.0}, tmp_path / "b"
    )
    model = nnx.models.from_pretrained(golden_directory("llama"), scan_layers=True)
    assert len(nnx.models.load_adapter(model, adapter)) == 2
    nnx.models.save_adapter(model, tmp_path / "written")
    nnx.merge_lora(model)
    assert_equal(model.unscanned(), expected)
    plain = nnx.models.from_pretrained(golden_directory("llama"))
    nnx.models.load_adapter(plain, tmp_path / "written")
    nnx.merge_lora(plain)
    assert_equal(plain, expected)


def test_separate_adaptations_of_a_fused_tensor_are_written_as_one(tmp_path):
    model = nnx.models.from_pretrained(golden_directory("phi3"))
    normal = nnx.initializers.normal(1.0)
    nnx.add_lora(model, 2, where="layers/0/attention/query", alpha=3.0, b_initializer=normal, ctx=nnx.context(0))
    nnx.add_lora(model, 3, where="layers/0/attention/value", b_initializer=normal, ctx=nnx.context(1))
    nnx.models.save_adapter(model, tmp_path)
    again = nnx.models.from_pretrained(golden_directory("phi3"))
    nnx.models.load_adapter(again, tmp_path)
    nnx.merge_lora(model)
    nnx.merge_lora(again)
    assert_equal(again, model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported; only 'LORA' is"),
        ({"use_dora": True}, "use_dora=True is not supported. Merge the adapter"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.'lm_head'. is not supported. Merge"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the weights of the model"),
    ],
)
def test_an_adapter_that_is_more_than_two_matrices_is_refused(settings, message, tmp_path):
    write_adapter(tmp_path, drawn("llama", {Q: 2}), **settings)
    with pytest.raises(ValueError, match=message):
        nnx.models.load_adapter(golden_model("llama"), tmp_path)


def test_everything_that_does_not_fit_is_one_error(tmp_path):
    fits = drawn("llama", {Q: 2})
    a, b = fits[Q]
    other = {"model.layers.7.self_attn.q_proj": (a, b), "model.layers.1.self_attn.q_proj": (a[:, :-1], b)}
    write_adapter(tmp_path, {**fits, **other, "model.embed_tokens": (a, b)})
    with pytest.raises(nnx.CheckpointError) as error:
        nnx.models.load_adapter(golden_model("llama"), tmp_path)
    assert "no linear layer: model.layers.7.self_attn.q_proj" in str(error.value)
    assert "no linear layer: model.embed_tokens" in str(error.value)
    assert "wrong shapes: model.layers.1.self_attn.q_proj has (2, 31) and (32, 2)" in str(error.value)


def test_missing_files_adapted_models_and_plain_models_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="contains no adapter_config.json"):
        nnx.models.load_adapter(golden_model("llama"), tmp_path)
    with pytest.raises(ValueError, match=r"has no low-rank adaptations. Add them with `nnx.add_lora"):
        nnx.models.save_adapter(golden_model("llama"), tmp_path)
    model = nnx.models.from_pretrained(golden_directory("llama"))
    nnx.add_lora(model, 2, where="head", ctx=nnx.context(0))
    write_adapter(tmp_path, drawn("llama", {Q: 2}))
    with pytest.raises(ValueError, match="low-rank adaptations already, at 'head'"):
        nnx.models.load_adapter(model, tmp_path)
