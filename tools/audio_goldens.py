"""The golden of sound: what the feature extractor of `transformers` makes of it for Whisper.

`tests/models/golden/audio/expected.npz` holds `sound`, floats `[samples]` of 0.7 seconds, and its features padded to
one second, `[frames, bands]`, with 80 bands as `out.80` and 128 bands as `out.128`.
"""

import pathlib

import numpy as np
import transformers


def write(golden: pathlib.Path) -> str:
    """Writes the golden and returns a line about it."""
    time = np.arange(11_200) / 16_000
    noise = np.random.default_rng(0).standard_normal(time.size)
    sound = (0.3 * np.sin(2 * np.pi * (200 + 3000 * time) * time) + 0.01 * noise).astype(np.float32)  # a rising tone
    arrays = {"sound": sound}
    for bands in (80, 128):
        extractor = transformers.WhisperFeatureExtractor(feature_size=bands, chunk_length=1)
        features = extractor(sound, sampling_rate=16_000, return_tensors="np").input_features
        arrays[f"out.{bands}"] = features[0].T
    file = golden / "audio" / "expected.npz"
    file.parent.mkdir(exist_ok=True)
    np.savez_compressed(file, **arrays)
    return f"audio: {file.stat().st_size:,} bytes, {[array.shape for array in arrays.values()]}"
