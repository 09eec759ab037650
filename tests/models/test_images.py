"""Preprocessing of images: it agrees with that of `transformers`, and files that make no sense are refused."""

import json

import numpy as np
import pytest

import nnx
from tests.models.golden_files import FOLDER

CASES = sorted(path.parent.name for path in FOLDER.glob("images/*/expected.npz"))


@pytest.mark.parametrize("name", CASES)
def test_images_agree_with_those_of_transformers(name):
    processor = nnx.models.ImageProcessor.from_pretrained(FOLDER / "images" / name)
    with np.load(FOLDER / "images" / name / "expected.npz") as arrays:
        out = processor(arrays["image"])
        assert out.dtype == np.float32 and out.shape == (1, *arrays["out"].shape)
        np.testing.assert_allclose(out[0], arrays["out"], rtol=0, atol=1e-6)  # a bit of a byte would be 0.004


def test_there_is_a_golden_for_every_family():
    assert {name.split("_")[0] for name in CASES} == {"vit", "clip", "resnet"}


def test_images_of_different_sizes_make_a_batch():
    prepare = nnx.models.ImageProcessor(size=8, crop=(8, 8), resample="bicubic")
    images = [np.full((h, w, 1), 51 * i, np.uint8) for i, (h, w) in enumerate([(9, 30), (30, 9), (8, 8)])]
    out = prepare(images)
    assert out.shape == (3, 8, 8, 1)
    np.testing.assert_allclose(out.mean(axis=(1, 2, 3)), [0, 0.2, 0.4], atol=1e-6)


def processor(tmp_path, **fields):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    return nnx.models.ImageProcessor.from_pretrained(tmp_path)


class TestFiles:
    def test_older_files_have_one_number_for_a_size(self, tmp_path):
        older = {"size": 12, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        found = processor(tmp_path, feature_extractor_type="ViTFeatureExtractor", resample=2, **older)
        assert found.size == (12, 12) and found.crop is None and found.mean == (0.5, 0.5, 0.5)
        found = processor(tmp_path, feature_extractor_type="CLIPFeatureExtractor", crop_size=10, **older)
        assert found.size == 12 and found.crop == (10, 10) and found.resample == "bicubic"
        found = processor(tmp_path, feature_extractor_type="ConvNextFeatureExtractor", **older)
        assert found.size == 13 and found.crop == (12, 12)

    def test_absent_entries_mean_the_defaults_of_transformers(self, tmp_path):
        found = processor(tmp_path, image_processor_type="CLIPImageProcessorFast")
        assert (found.size, found.crop, found.resample) == (224, (224, 224), "bicubic")
        np.testing.assert_allclose(found.mean, [0.48145466, 0.4578275, 0.40821073])
        found = processor(tmp_path, image_processor_type="ConvNextImageProcessor")
        assert (found.size, found.crop) == ((384, 384), None)
        found = processor(tmp_path, image_processor_type="ViTImageProcessor", do_rescale=False, do_normalize=False)
        assert (found.size, found.scale, found.mean) == ((224, 224), 1.0, None)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"image_processor_type": "SamImageProcessor"}, "'SamImageProcessor' is not .* ViTImageProcessor, CLIP"),
            ({"size": "big"}, "'size' to be a height and a width, got 'big'"),
            ({"size": {"width": 3}}, "'size' to be a height and a width, got {'width': 3}"),
            ({"image_processor_type": "CLIPImageProcessor", "size": -1}, "'size' to be a positive integer, got -1"),
            ({"resample": 7}, "'resample' to be one of 0, 1, 2, 3, got 7"),
            ({"image_mean": "gray"}, "'image_mean' to be a list of numbers, got 'gray'"),
        ],
    )
    def test_entries_that_cannot_be_used_say_why(self, tmp_path, fields, message):
        with pytest.raises(ValueError, match=f"preprocessor_config.json: .*{message}"):
            processor(tmp_path, **fields)

    def test_missing_and_broken_files(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="contains no preprocessor_config.json"):
            nnx.models.ImageProcessor.from_pretrained(tmp_path)
        for text in ("{", "[]"):
            (tmp_path / "preprocessor_config.json").write_text(text)
            with pytest.raises(ValueError, match="preprocessor_config.json cannot be read as JSON"):
                nnx.models.ImageProcessor.from_pretrained(tmp_path)


def test_images_that_do_not_fit_are_errors():
    prepare = nnx.models.ImageProcessor(size=8, mean=(0.5,), std=(0.5,))
    with pytest.raises(ValueError, match=r"image as bytes \(uint8\) .* got float32 of shape \(9, 9, 1\)"):
        prepare(np.ones((9, 9, 1), np.float32))
    with pytest.raises(ValueError, match=r"with 1 channels, one for each mean, got 3"):
        prepare(np.ones((9, 9, 3), np.uint8))
    with pytest.raises(ValueError, match="Cannot crop 9 × 9 out of an image that is 8 × 8 after resizing"):
        nnx.models.ImageProcessor(size=8, crop=(9, 9))(np.ones((9, 9, 3), np.uint8))
    with pytest.raises(ValueError, match="resample to be one of 'nearest', .* got 'box'"):
        nnx.models.resize_image(np.ones((9, 9, 3), np.uint8), 2, 2, "box")
