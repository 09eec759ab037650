"""`log_mel`: the features of sound that Whisper takes.

A *frame* is the power spectrum of 25 ms of sound, one every 10 ms. A *mel band* is a weighted sum of its frequencies;
the bands are narrow for low frequencies and wide for high ones, as in hearing.
"""

import functools
import math
from typing import Any

import numpy as np

SAMPLE_RATE = 16_000
WINDOW, HOP = 400, 160  # samples of a frame, and between the starts of two
RANGE = 8.0  # the dynamic range, in decades of power below the loudest; anything quieter is raised to its end

NOT_SOUND = "log_mel: expected sound as floats [samples] or [batch, samples], got {got}."
TOO_FEW = "log_mel: expected {name} to be a positive integer, got {got!r}."


def log_mel(audio: Any, *, num_bands: int = 80, num_frames: int = 3000) -> np.ndarray:
    """Returns the logarithm of the power in each mel band and frame, as `Whisper` takes it.

    Args:
        audio: sound with 16,000 samples per second, floats `[samples]` or `[batch, samples]`, usually from -1 to 1. It
            is cut or padded with silence to `num_frames`, by default 30 seconds.
        num_bands: the number of mel bands; 128 for the third large model.
        num_frames: the number of frames, twice the `max_source_length` of the model.

    Returns:
        An array `[batch, num_frames, num_bands]` in float32; without the batch if there was none.

    >>> nnx.models.log_mel(np.zeros(16_000), num_frames=200).shape
    (200, 80)
    """
    for name, number in (("num_bands", num_bands), ("num_frames", num_frames)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(TOO_FEW.format(name=name, got=number))
    sound = np.asarray(audio)
    if sound.ndim not in (1, 2) or not np.issubdtype(sound.dtype, np.floating):
        raise ValueError(NOT_SOUND.format(got=f"shape {sound.shape}, dtype {sound.dtype}"))
    samples = num_frames * HOP
    sound = sound[..., :samples].astype(np.float64)
    ends = [(0, 0)] * (sound.ndim - 1)
    sound = np.pad(sound, [*ends, (0, samples - sound.shape[-1])])
    sound = np.pad(sound, [*ends, (WINDOW // 2, WINDOW // 2)], mode="reflect")  # frames are centered
    frames = np.lib.stride_tricks.sliding_window_view(sound, WINDOW, axis=-1)[..., :samples:HOP, :]
    window = 0.5 - 0.5 * np.cos(2 * math.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(frames * window)) ** 2  # [..., num_frames, WINDOW // 2 + 1]
    logs = np.log10(np.maximum(power @ mel_bands(num_bands), 1e-10))
    loudest = logs.max(axis=(-2, -1), keepdims=True)
    return ((np.maximum(logs, loudest - RANGE) + 4.0) / 4.0).astype(np.float32)


@functools.cache
def mel_bands(number: int) -> np.ndarray:
    """Returns the weight of each frequency in each mel band, `[frequencies, number]`.

    Each band is a triangle between the centers of its neighbors, with an area that does not depend on its width.
    """
    edges = _to_hertz(np.linspace(0.0, _to_mel(SAMPLE_RATE / 2), number + 2))
    low, center, high = edges[:-2], edges[1:-1], edges[2:]
    frequencies = np.linspace(0.0, SAMPLE_RATE / 2, WINDOW // 2 + 1)[:, None]
    rising, falling = (frequencies - low) / (center - low), (high - frequencies) / (high - center)
    return np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (high - low)


# The scale is linear up to 1000 Hz, which are 15 mel, and then logarithmic: 27 mel are a factor of 6.4.


def _to_mel(hertz: float) -> float:
    return 3.0 * hertz / 200.0 if hertz < 1000.0 else 15.0 + 27.0 * math.log(hertz / 1000.0) / math.log(6.4)


def _to_hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < 15.0, 200.0 * mel / 3.0, 1000.0 * np.exp((mel - 15.0) * math.log(6.4) / 27.0))
