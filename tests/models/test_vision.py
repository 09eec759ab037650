"""Encoders of images, and CLIP: wrong images, the end of a text, embeddings, and settings that are refused."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models.golden_files import sums
from tests.models.published import edited, golden_arrays, golden_directory, golden_model


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((12, 12, 3), r"ViT: expected images of shape \[batch, 12, 12, 3\], got \(12, 12, 3\).$"),
        ((2, 16, 12, 3), r"\[batch, 12, 12, 3\], got \(2, 16, 12, 3\).$"),
        ((2, 3, 12, 12), r"got \(2, 3, 12, 12\). Channels come last: transpose them with `images.transpose"),
    ],
)
def test_images_that_do_not_fit_are_errors(shape, message):
    with pytest.raises(ValueError, match=message):
        golden_model("vit")(jnp.ones(shape))


def test_integers_are_not_images():
    with pytest.raises(ValueError, match=r"floating-point numbers, got dtype uint8. See `nnx.models.ImageProcessor`"):
        golden_model("vit")(np.zeros((2, 12, 12, 3), np.uint8))


def test_patches_must_fill_the_image():
    for make in (nnx.models.ViTConfig, nnx.models.CLIPVisionConfig):
        with pytest.raises(ValueError, match=f"{make.__name__}: .* image_size=30 to be a multiple of patch_size=7"):
            make(image_size=30, patch_size=7)
    with pytest.raises(ValueError, match="PatchEmbed: expected image_size=30"):
        nnx.models.PatchEmbed(30, 7, 3, 8, ctx=nnx.context(0))


def test_a_pooler_of_another_size_is_refused(tmp_path):
    directory = shutil.copytree(golden_directory("vit"), tmp_path / "vit")
    edited(directory, pooler_output_size=5)
    with pytest.raises(ValueError, match="config.json: pooler_output_size=5 is not supported for vit; only 24 is"):
        nnx.models.from_pretrained(directory)


class TestCLIP:
    def test_the_end_of_a_text_decides_its_embedding(self):
        model, embed = golden_model("clip"), nnx.jit(lambda model, tokens: model.embed_text(tokens))
        texts = jnp.array([[5, 6, 58, 0, 0], [5, 6, 58, 9, 7], [5, 7, 58, 0, 0]])  # 58 is the end token
        out = embed(model, texts)
        np.testing.assert_allclose(out[0], out[1], atol=1e-6)  # what comes after the end does not matter
        assert np.abs(out[0] - out[2]).max() > 0.01
        np.testing.assert_allclose(jnp.linalg.norm(out, axis=-1), 1, rtol=1e-5)

    def test_embeddings_alone_agree_with_those_of_a_comparison(self):
        model, (inputs, expected) = golden_model("clip"), golden_arrays("clip")
        images = nnx.jit(lambda model, images: model.embed_images(images))(model, inputs["images"])
        np.testing.assert_allclose(sums(images), expected["image_embeds"], atol=1e-5)
        assert expected["logits_per_image"].shape == (3,)

    def test_wrong_inputs_name_the_encoder(self):
        model = golden_model("clip")
        with pytest.raises(ValueError, match=r"CLIPText: expected tokens within 0..59 .* got 60 at index \(0, 1\)"):
            model.embed_text(jnp.array([[1, 60]]))
        with pytest.raises(ValueError, match="CLIPText: .* max_length=16 tokens, and the text has 17"):
            model.embed_text(jnp.ones((1, 17), jnp.int32))
        with pytest.raises(ValueError, match=r"CLIPText: expected a mask of shape \[batch, length\] = \(1, 2\)"):
            model.embed_text(jnp.array([[1, 2]]), mask=jnp.ones((2, 1), bool))
        with pytest.raises(ValueError, match=r"CLIPVision: expected images of shape \[batch, 12, 12, 3\]"):
            model.embed_images(jnp.ones((1, 8, 8, 3)))

    def test_entries_of_either_encoder_are_checked(self, tmp_path):
        directory = shutil.copytree(golden_directory("clip"), tmp_path / "clip")
        edited(directory, text_config=3)
        with pytest.raises(ValueError, match="'text_config' to be an object, got 3"):
            nnx.models.from_pretrained(directory)
        edited(directory, text_config={"hidden_size": -1})
        with pytest.raises(ValueError, match=r"config.json \(text_config\): expected 'hidden_size' to be a positive"):
            nnx.models.from_pretrained(directory)


class TestResNet:
    def test_training_uses_the_statistics_of_the_batch_and_updates_the_averages(self):
        model = golden_model("resnet_classifier").clone()
        images = jnp.asarray(np.random.default_rng(0).standard_normal((4, 32, 32, 3)), jnp.float32)
        before = model.encoder.stem.norm.mean

        @nnx.jit
        def train(model, images):
            return model(images, use_running_average=False)

        out = train(model, images)
        seen = model.encoder.stem.conv(images).mean(axis=(0, 1, 2))
        np.testing.assert_allclose(model.encoder.stem.norm.mean, 0.9 * before + 0.1 * seen, rtol=1e-4, atol=1e-5)
        assert np.abs(out - golden_model("resnet_classifier")(images)).max() > 0.1

    def test_statistics_stay_in_float32(self, tmp_path):
        model = nnx.models.from_pretrained(golden_directory("resnet"), dtype=jnp.bfloat16)
        assert model.stem.norm.var.dtype == jnp.float32 and model.stem.norm.scale.dtype == jnp.bfloat16
        np.testing.assert_array_equal(model.stem.norm.var, golden_model("resnet").stem.norm.var)
        nnx.models.save_pretrained(model, tmp_path)
        assert nnx.models.from_pretrained(tmp_path).get_state() == model.get_state()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"depths": (1, 2)}, r"one depth per stage, got .*2048\) and depths=\(1, 2\)"),
            ({"depths": (3, 4, 0, 3)}, r"depths to be a positive integer, got \(3, 4, 0, 3\)"),
            ({"block": "wide"}, "'basic' or 'bottleneck', got 'wide'"),
            ({"stage_features": (6,), "depths": (1,)}, r"expected multiples of 4, got \(6,\)"),
        ],
    )
    def test_configs_that_make_no_sense_are_refused(self, changes, message):
        with pytest.raises(ValueError, match=f"ResNetConfig: .*{message}"):
            nnx.models.ResNetConfig(**changes)

    def test_images_can_have_any_size_but_not_any_channels(self):
        model = golden_model("resnet")
        assert nnx.eval_shape(lambda model: model(jnp.ones((1, 64, 48, 3))), model).pooler_output.shape == (1, 24)
        with pytest.raises(ValueError, match=r"ResNet: expected images of shape \[batch, height, width, 3\], got"):
            model(jnp.ones((1, 64, 48, 4)))
