"""The goldens of image preprocessing: what the processors of `transformers`, which use Pillow, make of an image.

`tests/models/golden/images/<name>/` holds a `preprocessor_config.json`, and `expected.npz`: `image`, bytes `[height,
width, 3]`, and `out`, floats with the channels last.
"""

import pathlib
import shutil
from typing import Any

import numpy as np
import transformers

_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]

# The processor, its settings, and the size of the image: larger and smaller than wanted, upright and lying.
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "vit": ("ViT", dict(size={"height": 12, "width": 12}), (41, 30)),
    "vit_enlarged": ("ViT", dict(size={"height": 24, "width": 20}, resample=3), (9, 13)),
    "vit_plain": ("ViT", dict(do_resize=False, do_normalize=False), (9, 13)),
    "vit_nearest": ("ViT", dict(size={"height": 7, "width": 20}, resample=0), (19, 13)),
    "vit_lanczos": ("ViT", dict(size={"height": 20, "width": 14}, resample=1), (25, 40)),
    "clip": ("CLIP", dict(size={"shortest_edge": 14}, crop_size={"height": 14, "width": 14}), (33, 47)),
    "clip_upright": ("CLIP", dict(size={"shortest_edge": 15}, crop_size={"height": 12, "width": 10}), (50, 31)),
    "resnet": ("ConvNext", dict(size={"shortest_edge": 21}, resample=2, image_mean=_MEAN, image_std=_STD), (60, 40)),
}


def write(name: str, golden: pathlib.Path) -> str:
    """Writes the golden of one processor and returns a line about it."""
    kind, settings, (height, width) = CASES[name]
    directory = golden / "images" / name
    shutil.rmtree(directory, ignore_errors=True)
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(**settings)
    processor.save_pretrained(directory)
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    out = processor(image, return_tensors="np").pixel_values[0].transpose(1, 2, 0)
    np.savez_compressed(directory / "expected.npz", image=image, out=out.astype(np.float32))
    return f"images/{name}: {[file.name for file in sorted(directory.iterdir())]}, {image.shape} to {out.shape}"
