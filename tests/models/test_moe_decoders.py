"""Decoders with mixtures of experts: stacks of layers, losses of routers, and what their configs can say."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models.published import (
    edited,
    golden_arrays,
    golden_directory,
    golden_model,
    golden_text,
    tiny_config,
    tiny_model,
    tokens_for,
)

EXPERTS = {"model_type": "mixtral", "num_experts": 4, "num_selected": 2, "norm_epsilon": 1e-5}


def test_a_scanned_model_has_the_losses_of_its_list_of_layers():
    scanned = tiny_model(scan_layers=True, **EXPERTS).train()
    listed, tokens = scanned.unscanned(), tokens_for(scanned.config, 2, 6)
    for model in (scanned, listed):
        nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    stored = scanned.layers.scan_module.layers[0].mlp.z_loss
    np.testing.assert_allclose(stored, [block.mlp.z_loss for block in listed.layers], rtol=1e-5)
    np.testing.assert_allclose(nnx.router_losses(scanned), nnx.router_losses(listed), rtol=1e-5)
    assert (stored > 0).all()


def test_losses_are_stored_in_training_only_and_never_by_decoding():
    model = tiny_model(**EXPERTS, num_layers=1)
    tokens = tokens_for(model.config, 1, 4)
    run = nnx.jit(lambda model, tokens: model(tokens))
    run(model, tokens)
    assert nnx.router_losses(model).z == 0
    nnx.jit(lambda model, *args: model.decode(*args))(model.train(), tokens, model.init_cache(1, 4))
    assert nnx.router_losses(model).z == 0
    run(model, tokens)
    assert nnx.router_losses(model).z > 0


def test_a_model_is_saved_without_its_losses(tmp_path):
    model = tiny_model(**EXPERTS)
    model.layers[1].mlp.z_loss = jnp.ones(())
    nnx.models.save_pretrained(model, tmp_path)
    again = nnx.models.from_pretrained(tmp_path, scan_layers=True)
    assert nnx.router_losses(again) == nnx.RouterLosses(0, 0)
    written, read = model.filter(nnx.Param).arrays(), again.unscanned().filter(nnx.Param).arrays()
    assert written.keys() == read.keys()
    assert all(np.array_equal(written[path], read[path]) for path in written)


def test_generate_writes_what_transformers_does():
    tokens, greedy = golden_arrays("qwen3_moe")[0]["tokens"], golden_text("qwen3_moe")
    out = nnx.generate(golden_model("qwen3_moe"), jnp.asarray(tokens), max_new_tokens=8, temperature=0)
    np.testing.assert_array_equal(out, greedy[:, :8])


def test_the_axis_of_experts_is_named_in_lists_and_stacks():
    names = ("expert", "embed", "mlp")
    listed, scanned = (nnx.name_axes(nnx.eval_shape(lambda s=s: tiny_model(scan_layers=s, **EXPERTS))) for s in (0, 1))
    assert listed.layers[1].mlp.variable("gate").sharding == names
    assert scanned.layers.scan_module.layers[0].mlp.variable("gate").sharding == ("layers", *names)


class TestConfigs:
    def test_both_numbers_of_experts_are_needed(self):
        for wrong in ({"num_selected": None}, {"num_selected": 5}, {"num_experts": None}, {"num_selected": 0}):
            with pytest.raises(ValueError, match="1 <= num_selected <= num_experts, got num_experts="):
                tiny_config(**{**EXPERTS, **wrong})

    def test_dense_layers_among_the_others_are_refused(self, tmp_path):
        directory = shutil.copytree(golden_directory("qwen3_moe"), tmp_path / "model")
        edited(directory, mlp_only_layers=[1])
        with pytest.raises(ValueError, match=r"mlp_only_layers=\[1\] is not supported for qwen3_moe"):
            nnx.models.from_pretrained(directory)

    def test_a_missing_expert_is_named(self, tmp_path):
        directory = shutil.copytree(golden_directory("mixtral"), tmp_path / "model")
        edited(directory, num_local_experts=6)
        message = (
            r"missing: model\.layers\.0\.block_sparse_moe\.experts\.5\.w1\.weight \[48, 32\], for layers/0/mlp/gate"
        )
        with pytest.raises(nnx.CheckpointError, match=message):
            nnx.models.from_pretrained(directory)
