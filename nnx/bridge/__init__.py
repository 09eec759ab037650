"""Bridges to Flax, Equinox, Haiku and plain functions, in and out. See README.md in this folder."""

from nnx.bridge.equinox import from_equinox as from_equinox
from nnx.bridge.flax import from_flax as from_flax
from nnx.bridge.flax_variables import from_flax_state as from_flax_state
from nnx.bridge.flax_variables import to_flax_state as to_flax_state
from nnx.bridge.foreign import Foreign as Foreign
from nnx.bridge.functions import from_functions as from_functions
from nnx.bridge.functions import from_haiku as from_haiku
from nnx.bridge.linen import from_linen as from_linen
from nnx.bridge.out import to_flax as to_flax
from nnx.bridge.out import to_linen as to_linen
