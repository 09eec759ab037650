"""Images for published models: resizing, cropping and normalizing, as set by a model's `preprocessor_config.json`.

This runs on the host, in NumPy. Models were trained on images that Pillow resized, whose filters grow with the factor
of reduction and round to 8 bits after each axis; `resize_image` does the same arithmetic, without Pillow.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nnx.models.files.directory import read_json
from nnx.storage.files import local_path

NO_FILE = (
    "{path} contains no preprocessor_config.json, nor a processor_config.json with an image_processor, so it is "
    "unknown how images should be preprocessed."
)
UNKNOWN_TYPE = "{where}: the processor {got!r} is not among the known ones: {known}."
BAD_ENTRY = "{where}: expected {key!r} to be {expected}, got {got!r}."
NOT_AN_IMAGE = "Expected an image as bytes (uint8) of shape [height, width, channels], got {dtype} of shape {shape}."
TOO_SMALL = "Cannot crop {height} × {width} out of an image that is {got_height} × {got_width} after resizing."
UNKNOWN_FILTER = "Expected resample to be one of {known}, got {got!r}."
WRONG_CHANNELS = "Expected an image with {expected} channels, one for each mean, got {got} (shape {shape})."

_BITS = 22  # the binary digits of Pillow's fixed-point weights


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


# The filters by name: the number that Pillow has for it, its reach, and the function; none for the nearest pixel.
_FILTERS: dict[str, tuple[int, float, Callable[[np.ndarray], np.ndarray] | None]] = {
    "nearest": (0, 0.0, None),
    "lanczos": (1, 3.0, _lanczos),
    "bilinear": (2, 1.0, _triangle),
    "bicubic": (3, 2.0, _cubic),
}


def resize_image(image: np.ndarray, height: int, width: int, resample: str = "bilinear") -> np.ndarray:
    """Resizes an image with the arithmetic of Pillow, along the width and then along the height.

    The bytes are those of Pillow 11. Pillow 13 begins with the height for some sizes, mostly when the height shrinks
    and the width grows, and rounds differently there.

    Args:
        image: bytes of shape `[height, width, channels]`.
        height, width: the new size.
        resample: "nearest", "bilinear", "bicubic" or "lanczos".

    Returns:
        Bytes of shape `[height, width, channels]`.

    >>> image = np.arange(16, dtype=np.uint8).reshape(4, 4, 1)
    >>> nnx.models.resize_image(image, 2, 2)[..., 0].tolist()
    [[4, 5], [10, 11]]
    """
    if resample not in _FILTERS:
        raise ValueError(UNKNOWN_FILTER.format(known=", ".join(map(repr, _FILTERS)), got=resample))
    _check_image(image)
    return _resized_axis(_resized_axis(image, 1, width, resample), 0, height, resample)


def _resized_axis(image: np.ndarray, axis: int, size: int, resample: str) -> np.ndarray:
    before = image.shape[axis]
    _, reach, function = _FILTERS[resample]
    if before == size:
        return image
    factor = before / size
    if function is None:
        # Pillow adds up the steps, and their rounding errors decide which of two equally near pixels is taken.
        steps = np.full(size, factor)
        steps[0] = 0.5 * factor
        return image.take(np.cumsum(steps).astype(int), axis)
    centers = (np.arange(size) + 0.5) * factor
    # When an image shrinks, the filter widens by the same factor; otherwise most pixels would be ignored.
    stretch = max(factor, 1.0)
    first = np.maximum((centers - reach * stretch + 0.5).astype(int), 0)
    last = np.minimum((centers + reach * stretch + 0.5).astype(int), before)
    pixels = np.arange(before)
    weights = function((pixels - centers[:, None] + 0.5) / stretch)  # [size, before]
    weights = np.where((pixels >= first[:, None]) & (pixels < last[:, None]), weights, 0)
    weights = weights / weights.sum(axis=1, keepdims=True) * 2**_BITS
    fixed = np.trunc(weights + np.copysign(0.5, weights)).astype(np.int64)
    sums = np.tensordot(fixed, image.astype(np.int64), (1, axis)) + 2 ** (_BITS - 1)  # the new axis is the first one
    return np.moveaxis(np.clip(sums >> _BITS, 0, 255).astype(np.uint8), 0, axis)


@dataclasses.dataclass(frozen=True)
class ImageProcessor:
    """Prepares images for a model: resizes, crops, scales and normalizes them.

    Args:
        size: the height and width to resize to; or an int, the length of the shorter side, which keeps the proportions;
            None to keep the size.
        crop: the height and width to cut out of the middle; None for all of it.
        resample: "nearest", "bilinear", "bicubic" or "lanczos".
        scale: the factor from bytes to numbers.
        mean, std: the mean and standard deviation of every channel, to normalize by; None for no normalization.

    >>> prepare = nnx.models.ImageProcessor(size=(8, 8), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    >>> images = [np.full((20, 30, 3), 255, np.uint8), np.zeros((9, 9, 3), np.uint8)]
    >>> out = prepare(images)
    >>> out.shape, out.max().item(), out.min().item()
    ((2, 8, 8, 3), 1.0, -1.0)
    """

    size: int | tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    resample: str = "bilinear"
    scale: float = 1 / 255
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> "ImageProcessor":
        """Reads the `preprocessor_config.json` of a published vit, clip or resnet.

        Without one, the entry `image_processor` of `processor_config.json`, where newer directories have it.

        Raises:
            FileNotFoundError: the directory has no such file.
            ValueError: the file is malformed, or of a processor that is not known.
        """
        folder = local_path(directory).absolute()
        file, whole = folder / "preprocessor_config.json", folder / "processor_config.json"
        if file.is_file():
            return _read_processor(read_json(file), str(file))
        inner = read_json(whole).get("image_processor") if whole.is_file() else None
        if not isinstance(inner, Mapping):
            raise FileNotFoundError(NO_FILE.format(path=folder))
        return _read_processor(inner, str(whole))

    def __call__(self, images: np.ndarray | Sequence[np.ndarray]) -> np.ndarray:
        """Prepares one image or several.

        Args:
            images: bytes of shape `[height, width, channels]`, or a list of such images, each of any size.

        Returns:
            A float32 array of shape `[batch, height, width, channels]`; one image makes a batch of one.
        """
        several = [images] if isinstance(images, np.ndarray) and images.ndim == 3 else images
        return np.stack([self._prepared(np.asarray(image)) for image in several])

    def _prepared(self, image: np.ndarray) -> np.ndarray:
        _check_image(image)
        height, width, channels = image.shape
        if isinstance(self.size, int):
            short = min(height, width)
            # The longer side is truncated, not rounded, as in transformers.
            height, width = int(self.size * height / short), int(self.size * width / short)
        elif self.size is not None:
            height, width = self.size
        image = resize_image(image, height, width, self.resample)
        if self.crop is not None:
            image = _cropped(image, *self.crop)
        out = (image * self.scale).astype(np.float32)
        if self.mean is None or self.std is None:
            return out
        if channels != len(self.mean):
            raise ValueError(WRONG_CHANNELS.format(expected=len(self.mean), got=channels, shape=image.shape))
        return (out - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)


def _check_image(image: np.ndarray) -> None:
    if image.ndim != 3 or image.dtype != np.uint8:
        raise ValueError(NOT_AN_IMAGE.format(dtype=image.dtype, shape=image.shape))


def _cropped(image: np.ndarray, height: int, width: int) -> np.ndarray:
    got_height, got_width = image.shape[:2]
    if got_height < height or got_width < width:
        raise ValueError(TOO_SMALL.format(height=height, width=width, got_height=got_height, got_width=got_width))
    top, left = (got_height - height) // 2, (got_width - width) // 2
    return image[top : top + height, left : left + width]


# preprocessor_config.json


def _read_processor(fields: Mapping[str, Any], where: str) -> ImageProcessor:
    name = fields.get("image_processor_type", fields.get("feature_extractor_type")) or "ViTImageProcessor"
    readers = {"ViT": _vit_sizes, "CLIP": _clip_sizes, "ConvNext": _convnext_sizes}
    kind = str(name)
    for end in ("Fast", "Pil", "ImageProcessor", "FeatureExtractor"):
        kind = kind.removesuffix(end)
    if kind not in readers:
        known = ", ".join(f"{known}ImageProcessor" for known in readers)
        raise ValueError(UNKNOWN_TYPE.format(where=where, got=name, known=known))
    size, crop = readers[kind](fields, where)
    number = fields.get("resample", 2 if kind == "ViT" else 3)
    names = {pillow: name for name, (pillow, _, _) in _FILTERS.items()}
    if number not in names:
        expected = f"one of {', '.join(map(str, names))}"
        raise ValueError(BAD_ENTRY.format(where=where, key="resample", expected=expected, got=number))
    clip = kind == "CLIP"
    normalize = fields.get("do_normalize", True)
    mean = _channels(fields, "image_mean", (0.48145466, 0.4578275, 0.40821073) if clip else (0.5,) * 3, where)
    std = _channels(fields, "image_std", (0.26862954, 0.26130258, 0.27577711) if clip else (0.5,) * 3, where)
    return ImageProcessor(
        size if fields.get("do_resize", True) else None,
        crop,
        names[number],
        fields.get("rescale_factor", 1 / 255) if fields.get("do_rescale", True) else 1.0,
        mean if normalize else None,
        std if normalize else None,
    )


def _vit_sizes(fields: Mapping[str, Any], where: str) -> tuple[Any, Any]:
    return _pair(fields, "size", 224, where), None


def _clip_sizes(fields: Mapping[str, Any], where: str) -> tuple[Any, Any]:
    crop = _pair(fields, "crop_size", 224, where) if fields.get("do_center_crop", True) else None
    return _shorter(fields, 224, where), crop


def _convnext_sizes(fields: Mapping[str, Any], where: str) -> tuple[Any, Any]:
    """Sizes below 384 are cropped from a slightly larger image; from 384 up, the whole image is resized."""
    size, part = _shorter(fields, 384, where), fields.get("crop_pct") or 224 / 256
    if not isinstance(size, int) or not fields.get("do_resize", True):
        return size, None
    return ((size, size), None) if size >= 384 else (int(size / part), (size, size))


def _shorter(fields: Mapping[str, Any], default: int, where: str) -> int | tuple[int, int]:
    """Returns the length of the shorter side, or both sides if the file lists both."""
    size = fields.get("size", default)
    short = size.get("shortest_edge") if isinstance(size, Mapping) else size
    if short is None:
        return _pair(fields, "size", default, where)
    if not isinstance(short, int) or isinstance(short, bool) or short < 1:
        raise ValueError(BAD_ENTRY.format(where=where, key="size", expected="a positive integer", got=size))
    return short


def _pair(fields: Mapping[str, Any], key: str, default: int, where: str) -> tuple[int, int]:
    size = fields.get(key, default)
    pair: tuple[Any, Any] = (size.get("height"), size.get("width")) if isinstance(size, Mapping) else (size, size)
    if not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in pair):
        raise ValueError(BAD_ENTRY.format(where=where, key=key, expected="a height and a width", got=size))
    return pair


def _channels(fields: Mapping[str, Any], key: str, default: tuple[float, ...], where: str) -> tuple[float, ...]:
    values = fields.get(key, default)
    numbers = isinstance(values, (list, tuple)) and all(isinstance(value, (int, float)) for value in values)
    if not numbers or not all(map(math.isfinite, values)):
        raise ValueError(BAD_ENTRY.format(where=where, key=key, expected="a list of numbers", got=values))
    return tuple(float(value) for value in values)
