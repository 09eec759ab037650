"""Sound: `log_mel` computes what the feature extractor of `transformers` computes."""

import numpy as np
import pytest

import nnx
from tests.models.golden_files import FOLDER


@pytest.fixture(scope="module")
def golden():
    with np.load(FOLDER / "audio" / "expected.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("bands", [80, 128])
def test_features_agree(golden, bands):
    out = nnx.models.log_mel(golden["sound"], num_bands=bands, num_frames=100)
    assert out.dtype == np.float32 and out.shape == (100, bands)
    np.testing.assert_allclose(out, golden[f"out.{bands}"], atol=1e-4)


def test_sound_is_cut_or_padded_and_rows_are_independent(golden):
    sound = golden["sound"]
    both = nnx.models.log_mel(np.stack([sound, 0.01 * sound]), num_frames=100)
    np.testing.assert_array_equal(both[0], nnx.models.log_mel(sound, num_frames=100))
    np.testing.assert_array_equal(both[1], nnx.models.log_mel(0.01 * sound, num_frames=100))
    cut = nnx.models.log_mel(sound, num_frames=30)
    np.testing.assert_allclose(cut[:29], nnx.models.log_mel(sound[:4800], num_frames=30)[:29], atol=1e-6)


def test_silence_is_finite():
    assert (nnx.models.log_mel(np.zeros(100), num_frames=3) == -1.5).all()


def test_every_band_responds_to_noise():
    noise = np.random.default_rng(0).standard_normal(16000)
    loudest = nnx.models.log_mel(noise, num_frames=100).max(axis=0)
    assert loudest.shape == (80,) and (loudest > loudest.max() - 1).all()  # silence would be 2 below the loudest band


@pytest.mark.parametrize(
    ("sound", "options", "message"),
    [
        (np.zeros((1, 2, 3)), {}, r"\[samples\] or \[batch, samples\], got shape \(1, 2, 3\), dtype float64"),
        (np.zeros(5, np.int16), {}, "got shape .*, dtype int16"),
        (np.zeros(5), {"num_bands": 0}, "expected num_bands to be a positive integer, got 0"),
        (np.zeros(5), {"num_frames": 2.5}, "expected num_frames to be a positive integer, got 2.5"),
    ],
)
def test_input_that_is_not_sound_is_refused(sound, options, message):
    with pytest.raises(ValueError, match=message):
        nnx.models.log_mel(sound, **options)
