"""Published architectures, made from public layers, and the checkpoints they come in."""

from nnx.models.activations import ACTIVATIONS as ACTIVATIONS
from nnx.models.bert import Bert as Bert
from nnx.models.bert import BertConfig as BertConfig
from nnx.models.bert import BertWithHead as BertWithHead
from nnx.models.bert import MaskedLMHead as MaskedLMHead
from nnx.models.config import DecoderConfig as DecoderConfig
from nnx.models.config import RotaryConfig as RotaryConfig
from nnx.models.decoder import Decoder as Decoder
from nnx.models.decoder import DecoderBlock as DecoderBlock
from nnx.models.encoder import EncoderBlock as EncoderBlock
from nnx.models.encoder import EncoderOutput as EncoderOutput
from nnx.models.families import FAMILIES as FAMILIES
from nnx.models.pretrained import from_pretrained as from_pretrained
from nnx.models.pretrained import save_pretrained as save_pretrained
from nnx.models.registry import ARCHITECTURES as ARCHITECTURES
from nnx.models.tokenizer import Tokenizer as Tokenizer
