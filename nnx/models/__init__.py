"""Published architectures, made from public layers, and their checkpoints. See README.md in this folder."""

import typing as _typing

from nnx.models.activations_by_name import ACTIVATIONS as ACTIVATIONS
from nnx.models.adapters import load_adapter as load_adapter
from nnx.models.adapters import save_adapter as save_adapter
from nnx.models.architectures.bert import Bert as Bert
from nnx.models.architectures.bert import BertConfig as BertConfig
from nnx.models.architectures.bert import BertWithHead as BertWithHead
from nnx.models.architectures.clip import CLIP as CLIP
from nnx.models.architectures.clip import CLIPConfig as CLIPConfig
from nnx.models.architectures.clip import CLIPOutput as CLIPOutput
from nnx.models.architectures.clip import CLIPText as CLIPText
from nnx.models.architectures.clip import CLIPTextConfig as CLIPTextConfig
from nnx.models.architectures.clip import CLIPVision as CLIPVision
from nnx.models.architectures.clip import CLIPVisionConfig as CLIPVisionConfig
from nnx.models.architectures.conditioned import Conditioned as Conditioned
from nnx.models.architectures.conditioned import ConditionedCache as ConditionedCache
from nnx.models.architectures.encoder import EncoderBlock as EncoderBlock
from nnx.models.architectures.encoder import EncoderOutput as EncoderOutput
from nnx.models.architectures.patches import PatchEmbed as PatchEmbed
from nnx.models.architectures.relative_positions import RelativePositionBias as RelativePositionBias
from nnx.models.architectures.resnet import NormedConv as NormedConv
from nnx.models.architectures.resnet import ResNet as ResNet
from nnx.models.architectures.resnet import ResNetBlock as ResNetBlock
from nnx.models.architectures.resnet import ResNetClassifier as ResNetClassifier
from nnx.models.architectures.resnet import ResNetConfig as ResNetConfig
from nnx.models.architectures.t5 import T5 as T5
from nnx.models.architectures.t5 import T5Block as T5Block
from nnx.models.architectures.t5 import T5Config as T5Config
from nnx.models.architectures.t5 import T5Encoder as T5Encoder
from nnx.models.architectures.t5 import T5Stack as T5Stack
from nnx.models.architectures.vit import ViT as ViT
from nnx.models.architectures.vit import ViTClassifier as ViTClassifier
from nnx.models.architectures.vit import ViTConfig as ViTConfig
from nnx.models.architectures.whisper import Whisper as Whisper
from nnx.models.architectures.whisper import WhisperConfig as WhisperConfig
from nnx.models.architectures.whisper import WhisperDecoderBlock as WhisperDecoderBlock
from nnx.models.architectures.whisper import WhisperEncoder as WhisperEncoder
from nnx.models.block import DecoderBlock as DecoderBlock
from nnx.models.config import DecoderConfig as DecoderConfig
from nnx.models.decoder import Decoder as Decoder
from nnx.models.explain import Explanation as Explanation
from nnx.models.explain import explain as explain
from nnx.models.families.families import FAMILIES as FAMILIES
from nnx.models.files.generation_defaults import generation_defaults as generation_defaults
from nnx.models.inputs.audio import log_mel as log_mel
from nnx.models.inputs.images import ImageProcessor as ImageProcessor
from nnx.models.inputs.images import resize_image as resize_image
from nnx.models.inputs.tokenizer import Tokenizer as Tokenizer
from nnx.models.layer_spec import LayerSpec as LayerSpec
from nnx.models.layer_spec import PositionScale as PositionScale
from nnx.models.layer_spec import RotaryConfig as RotaryConfig
from nnx.models.masked_lm_head import MaskedLMHead as MaskedLMHead
from nnx.models.pretrained import from_pretrained as from_pretrained
from nnx.models.pretrained import save_pretrained as save_pretrained
from nnx.models.registry import ARCHITECTURES as ARCHITECTURES

if not _typing.TYPE_CHECKING:  # a checker would take `__getattr__` to mean that the package has every name

    def __getattr__(name: str) -> object:
        """Explains what a name of transformers is called here."""
        from nnx.core.hints.hints import models_error

        raise models_error(name)
