"""Published ResNet models: the entries of `config.json` and the names of tensors, as the `Architecture` `RESNET`."""

from typing import Any

import numpy as np

from nnx.models.architecture import Architecture
from nnx.models.architectures.resnet import ResNet, ResNetClassifier
from nnx.models.architectures.resnet import ResNetConfig as Config
from nnx.models.family import Family
from nnx.models.files.config_entries import Labels
from nnx.models.files.layouts import KERNEL_2D
from nnx.models.files.table import Link, Table, TableEntry, linear


def _normed_conv(name: str, path: str) -> tuple[TableEntry, ...]:
    statistics = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
    return (
        TableEntry(f"{name}.convolution.weight", (f"{path}/conv/kernel",), KERNEL_2D),
        *(
            TableEntry(f"{name}.normalization.{tensor}", (f"{path}/norm/{ours}",))
            for tensor, ours in statistics.items()
        ),
    )


_BLOCK = ("encoder.stages.{}.layers.{}", "stages/{}/{}")
_TABLE = Table(
    (
        *_normed_conv("embedder.embedder", "stem"),
        *_normed_conv(f"{_BLOCK[0]}.layer.{{}}", f"{_BLOCK[1]}/layers/{{}}"),
        *_normed_conv(f"{_BLOCK[0]}.shortcut", f"{_BLOCK[1]}/shortcut"),
    ),
    linear("classifier.1", "head"),
    "resnet.",
    "encoder/",
    ignored=(r".*\.normalization\.num_batches_tracked",),
)
_FAMILY = Family(
    "resnet",
    {None: "ResNetModel", "image_classification": "ResNetForImageClassification"},
    _TABLE,
    {
        "num_channels": "channels",
        "embedding_size": "stem_features",
        "hidden_sizes": "stage_features",
        "depths": "depths",
        "layer_type": "block",
        "hidden_act": "activation",
        "downsample_in_first_stage": "downsample_first_stage",
        "downsample_in_bottleneck": "downsample_in_bottleneck",
    },
    parts=(Labels(),),
    config=Config,
)


def _counters(config: Any, links: list[Link]) -> dict[str, np.ndarray]:
    """Returns PyTorch's counters of batches. Nothing uses them, but `transformers` reports them if they are missing."""
    means = [link.name for link in links if link.name.endswith("running_mean")]
    return {name.replace("running_mean", "num_batches_tracked"): np.array(0, np.int64) for name in means}


RESNET = Architecture(
    families=(_FAMILY,),
    modules=(ResNet, ResNetClassifier),
    build=lambda config, **options: (ResNet if config.task is None else ResNetClassifier)(config, **options),
    dtype_paths=("stem/conv/kernel", "encoder/stem/conv/kernel"),
    constants=_counters,
)
"""How `resnet` models are opened and written."""
