"""NNX: neural networks for JAX. Modules behave like Python, at the speed of hand-written JAX."""

import typing as _typing

# isort: split
# core: what a Module is
from nnx.core.context import Context as Context
from nnx.core.context import ContextDef as ContextDef
from nnx.core.context import PureContext as PureContext
from nnx.core.context import context as context
from nnx.core.errors import TraceContextError as TraceContextError
from nnx.core.module.attributes import register_node_type as register_node_type
from nnx.core.module.dict_sequence import Dict as Dict
from nnx.core.module.dict_sequence import Sequence as Sequence
from nnx.core.module.fields import dataclass as dataclass
from nnx.core.module.fields import field as field
from nnx.core.module.fields import node_field as node_field
from nnx.core.module.fields import param_field as param_field
from nnx.core.module.fields import static_field as static_field
from nnx.core.module.fields import var_field as var_field
from nnx.core.module.modes import set_mode as set_mode
from nnx.core.module.module import Module as Module
from nnx.core.state.filters import All as All
from nnx.core.state.filters import Any as Any
from nnx.core.state.filters import Filter as Filter
from nnx.core.state.filters import Not as Not
from nnx.core.state.filters import OfType as OfType
from nnx.core.state.filters import PathMatches as PathMatches
from nnx.core.state.filters import buffers as buffers
from nnx.core.state.moduledef import ModuleDef as ModuleDef
from nnx.core.state.pure import Pure as Pure
from nnx.core.state.pure import PureModule as PureModule
from nnx.core.state.pytree import Pytree as Pytree
from nnx.core.state.pytree import is_node as is_node
from nnx.core.state.state import State as State
from nnx.core.variables.on_demand import node as node
from nnx.core.variables.on_demand import param as param
from nnx.core.variables.on_demand import static as static
from nnx.core.variables.on_demand import var as var
from nnx.core.variables.refs import Ref as Ref
from nnx.core.variables.variables import BatchStat as BatchStat
from nnx.core.variables.variables import Cache as Cache
from nnx.core.variables.variables import Container as Container
from nnx.core.variables.variables import ContainerMetadata as ContainerMetadata
from nnx.core.variables.variables import Intermediate as Intermediate
from nnx.core.variables.variables import Loss as Loss
from nnx.core.variables.variables import Node as Node
from nnx.core.variables.variables import Param as Param
from nnx.core.variables.variables import Static as Static
from nnx.core.variables.variables import TreeNode as TreeNode
from nnx.core.variables.variables import Variable as Variable
from nnx.core.variables.variables import with_metadata as with_metadata
from nnx.core.variables.variables import with_partitioning as with_partitioning
from nnx.storage.errors import LoadReport as LoadReport

# isort: split
# sharding: logical axes to meshes
from nnx.sharding.axes import PARTITION_NAME as PARTITION_NAME
from nnx.sharding.constraints import with_logical_constraint as with_logical_constraint
from nnx.sharding.constraints import with_logical_partitioning as with_logical_partitioning
from nnx.sharding.defaults import name_axes as name_axes
from nnx.sharding.placement import init_sharded as init_sharded
from nnx.sharding.placement import shard as shard
from nnx.sharding.report import ShardingReport as ShardingReport
from nnx.sharding.report import sharding_report as sharding_report
from nnx.sharding.rules import RulesFallback as RulesFallback
from nnx.sharding.rules import get_logical_axis_rules as get_logical_axis_rules
from nnx.sharding.rules import logical_axis_rules as logical_axis_rules
from nnx.sharding.rules import logical_to_mesh_axes as logical_to_mesh_axes
from nnx.sharding.rules import on_host as on_host
from nnx.sharding.rules import set_logical_axis_rules as set_logical_axis_rules
from nnx.sharding.rulesets import data_parallel_rules as data_parallel_rules
from nnx.sharding.rulesets import fsdp_rules as fsdp_rules
from nnx.sharding.rulesets import fsdp_tensor_parallel_rules as fsdp_tensor_parallel_rules
from nnx.sharding.rulesets import tensor_parallel_rules as tensor_parallel_rules
from nnx.sharding.specs import get_partition_spec as get_partition_spec
from nnx.sharding.specs import logical_to_mesh as logical_to_mesh
from nnx.sharding.specs import logical_to_mesh_sharding as logical_to_mesh_sharding

# isort: split
# transforms: JAX transforms, lifted
from nnx.transforms.control.branches import cond as cond
from nnx.transforms.control.branches import switch as switch
from nnx.transforms.control.checkify import checkify as checkify
from nnx.transforms.control.class_forms import Remat as Remat
from nnx.transforms.control.class_forms import Scan as Scan
from nnx.transforms.control.class_forms import Vmap as Vmap
from nnx.transforms.control.eval_shape import eval_shape as eval_shape
from nnx.transforms.control.loops import fori_loop as fori_loop
from nnx.transforms.control.loops import while_loop as while_loop
from nnx.transforms.control.remat import remat as remat
from nnx.transforms.control.scan import scan as scan
from nnx.transforms.control.shard_map import shard_map as shard_map
from nnx.transforms.control.vmap import vmap as vmap
from nnx.transforms.derivatives.custom_derivatives import custom_jvp as custom_jvp
from nnx.transforms.derivatives.custom_derivatives import custom_vjp as custom_vjp
from nnx.transforms.derivatives.grad import grad as grad
from nnx.transforms.derivatives.grad import value_and_grad as value_and_grad
from nnx.transforms.derivatives.jacobians import hessian as hessian
from nnx.transforms.derivatives.jacobians import jacfwd as jacfwd
from nnx.transforms.derivatives.jacobians import jacrev as jacrev
from nnx.transforms.derivatives.jacobians import jvp as jvp
from nnx.transforms.derivatives.jacobians import linearize as linearize
from nnx.transforms.derivatives.jacobians import vjp as vjp
from nnx.transforms.engine.annotations import JitWrapped as JitWrapped
from nnx.transforms.jit.compilation_cache import compilation_cache as compilation_cache
from nnx.transforms.jit.jit import jit as jit

# isort: split
# nn: layers
from nnx.nn import initializers as initializers
from nnx.nn.activations import PReLU as PReLU
from nnx.nn.activations import celu as celu
from nnx.nn.activations import elu as elu
from nnx.nn.activations import gelu as gelu
from nnx.nn.activations import get_scaled_dot_general_config as get_scaled_dot_general_config
from nnx.nn.activations import glu as glu
from nnx.nn.activations import hard_sigmoid as hard_sigmoid
from nnx.nn.activations import hard_silu as hard_silu
from nnx.nn.activations import hard_swish as hard_swish
from nnx.nn.activations import hard_tanh as hard_tanh
from nnx.nn.activations import identity as identity
from nnx.nn.activations import leaky_relu as leaky_relu
from nnx.nn.activations import log1mexp as log1mexp
from nnx.nn.activations import log_sigmoid as log_sigmoid
from nnx.nn.activations import log_softmax as log_softmax
from nnx.nn.activations import logmeanexp as logmeanexp
from nnx.nn.activations import logsumexp as logsumexp
from nnx.nn.activations import mish as mish
from nnx.nn.activations import normalize as normalize
from nnx.nn.activations import one_hot as one_hot
from nnx.nn.activations import relu as relu
from nnx.nn.activations import relu6 as relu6
from nnx.nn.activations import scaled_dot_general as scaled_dot_general
from nnx.nn.activations import scaled_matmul as scaled_matmul
from nnx.nn.activations import selu as selu
from nnx.nn.activations import sigmoid as sigmoid
from nnx.nn.activations import silu as silu
from nnx.nn.activations import soft_sign as soft_sign
from nnx.nn.activations import softmax as softmax
from nnx.nn.activations import softplus as softplus
from nnx.nn.activations import sparse_plus as sparse_plus
from nnx.nn.activations import sparse_sigmoid as sparse_sigmoid
from nnx.nn.activations import squareplus as squareplus
from nnx.nn.activations import standardize as standardize
from nnx.nn.activations import swish as swish
from nnx.nn.activations import tanh as tanh
from nnx.nn.adaptive_pool import AdaptiveAvgPool as AdaptiveAvgPool
from nnx.nn.adaptive_pool import AdaptiveMaxPool as AdaptiveMaxPool
from nnx.nn.adaptive_pool import GlobalAvgPool as GlobalAvgPool
from nnx.nn.adaptive_pool import GlobalMaxPool as GlobalMaxPool
from nnx.nn.adaptive_pool import adaptive_avg_pool as adaptive_avg_pool
from nnx.nn.adaptive_pool import adaptive_max_pool as adaptive_max_pool
from nnx.nn.adaptive_pool import global_avg_pool as global_avg_pool
from nnx.nn.adaptive_pool import global_max_pool as global_max_pool
from nnx.nn.attention.attention import MultiHeadAttention as MultiHeadAttention
from nnx.nn.attention.attention_kernel import attention_implementation as attention_implementation
from nnx.nn.attention.dot_product import dot_product_attention as dot_product_attention
from nnx.nn.attention.kv_cache import DecoderCache as DecoderCache
from nnx.nn.attention.kv_cache import KVCache as KVCache
from nnx.nn.attention.kv_cache import LayerCache as LayerCache
from nnx.nn.attention.latent import LatentAttention as LatentAttention
from nnx.nn.attention.masks import combine_masks as combine_masks
from nnx.nn.attention.masks import make_attention_mask as make_attention_mask
from nnx.nn.attention.masks import make_causal_mask as make_causal_mask
from nnx.nn.attention.masks import make_padding_mask as make_padding_mask
from nnx.nn.attention.masks import make_segment_mask as make_segment_mask
from nnx.nn.attention.masks import make_sliding_window_mask as make_sliding_window_mask
from nnx.nn.attention.ring_attention import ring_attention as ring_attention
from nnx.nn.attention.rotary import RotaryEmbedding as RotaryEmbedding
from nnx.nn.attention.rotary import apply_rotary as apply_rotary
from nnx.nn.attention.rotary_scaling import DynamicNTKScaling as DynamicNTKScaling
from nnx.nn.attention.rotary_scaling import LinearScaling as LinearScaling
from nnx.nn.attention.rotary_scaling import Llama3Scaling as Llama3Scaling
from nnx.nn.attention.rotary_scaling import LongRoPEScaling as LongRoPEScaling
from nnx.nn.attention.rotary_scaling import NTKScaling as NTKScaling
from nnx.nn.attention.rotary_scaling import RotaryScaling as RotaryScaling
from nnx.nn.attention.rotary_scaling import YaRNScaling as YaRNScaling
from nnx.nn.conv import Conv as Conv
from nnx.nn.conv import ConvTranspose as ConvTranspose
from nnx.nn.cross_entropy import cross_entropy as cross_entropy
from nnx.nn.dtypes import set_dtypes as set_dtypes
from nnx.nn.einsum import Bilinear as Bilinear
from nnx.nn.einsum import Einsum as Einsum
from nnx.nn.embed import Embed as Embed
from nnx.nn.embed import LearnedPositionEmbed as LearnedPositionEmbed
from nnx.nn.embed import SinusoidalPositionEmbed as SinusoidalPositionEmbed
from nnx.nn.embed import sinusoidal_positions as sinusoidal_positions
from nnx.nn.fp8 import fp8_dot_general as fp8_dot_general
from nnx.nn.linear import Linear as Linear
from nnx.nn.linear import LinearGeneral as LinearGeneral
from nnx.nn.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from nnx.nn.lora import LoRA as LoRA
from nnx.nn.lora import LoRALinear as LoRALinear
from nnx.nn.lora import LoRALinearGeneral as LoRALinearGeneral
from nnx.nn.lora import LoRAParam as LoRAParam
from nnx.nn.lora import add_lora as add_lora
from nnx.nn.lora import merge_lora as merge_lora
from nnx.nn.mlp import MLP as MLP
from nnx.nn.mlp import GatedMLP as GatedMLP
from nnx.nn.mlp import Identity as Identity
from nnx.nn.moe.moe import MoE as MoE
from nnx.nn.moe.moe import router_losses as router_losses
from nnx.nn.moe.routing import ExpertGroups as ExpertGroups
from nnx.nn.moe.routing import RouterLosses as RouterLosses
from nnx.nn.norms.batch_norm import BatchNorm as BatchNorm
from nnx.nn.norms.norm import GroupNorm as GroupNorm
from nnx.nn.norms.norm import InstanceNorm as InstanceNorm
from nnx.nn.norms.norm import LayerNorm as LayerNorm
from nnx.nn.norms.norm import RMSNorm as RMSNorm
from nnx.nn.norms.weight_norm import SpectralNorm as SpectralNorm
from nnx.nn.norms.weight_norm import WeightNorm as WeightNorm
from nnx.nn.pool import AvgPool as AvgPool
from nnx.nn.pool import MaxPool as MaxPool
from nnx.nn.pool import MinPool as MinPool
from nnx.nn.pool import avg_pool as avg_pool
from nnx.nn.pool import max_pool as max_pool
from nnx.nn.pool import min_pool as min_pool
from nnx.nn.pool import pool as pool
from nnx.nn.quantized.quantize import dequantize as dequantize
from nnx.nn.quantized.quantize import quantize as quantize
from nnx.nn.quantized.quantized import QuantizedParam as QuantizedParam
from nnx.nn.recurrent.cell_base import RNNCellBase as RNNCellBase
from nnx.nn.recurrent.delta_rule import gated_delta_rule as gated_delta_rule
from nnx.nn.recurrent.gated_delta import DeltaCache as DeltaCache
from nnx.nn.recurrent.gated_delta import GatedDeltaNet as GatedDeltaNet
from nnx.nn.recurrent.recurrent import RNN as RNN
from nnx.nn.recurrent.recurrent import Bidirectional as Bidirectional
from nnx.nn.recurrent.rnn_cells import ConvLSTMCell as ConvLSTMCell
from nnx.nn.recurrent.rnn_cells import GRUCell as GRUCell
from nnx.nn.recurrent.rnn_cells import LSTMCell as LSTMCell
from nnx.nn.recurrent.rnn_cells import OptimizedLSTMCell as OptimizedLSTMCell
from nnx.nn.recurrent.rnn_cells import SimpleCell as SimpleCell
from nnx.nn.stochastic import Dropout as Dropout
from nnx.nn.stochastic import DropPath as DropPath
from nnx.nn.stochastic import GaussianNoise as GaussianNoise
from nnx.nn.upsample import Upsample as Upsample

# isort: split
# training: fitting a model
from nnx.storage.checkpoints.checkpoint import CheckpointEntry as CheckpointEntry
from nnx.storage.checkpoints.checkpoint import load as load
from nnx.storage.checkpoints.checkpoint import save as save
from nnx.storage.checkpoints.manager import CheckpointManager as CheckpointManager
from nnx.storage.errors import CheckpointError as CheckpointError
from nnx.training.dynamic_scale import DynamicScale as DynamicScale
from nnx.training.early_stopping import EarlyStopping as EarlyStopping
from nnx.training.ema import EMA as EMA
from nnx.training.ema import EmaState as EmaState
from nnx.training.metrics import Accuracy as Accuracy
from nnx.training.metrics import Average as Average
from nnx.training.metrics import Metric as Metric
from nnx.training.metrics import MetricState as MetricState
from nnx.training.metrics import MultiMetric as MultiMetric
from nnx.training.metrics import Statistics as Statistics
from nnx.training.metrics import Welford as Welford
from nnx.training.muon import muon_dimensions as muon_dimensions
from nnx.training.optimizer import Optimizer as Optimizer
from nnx.training.optimizer_state import OptState as OptState
from nnx.training.prefetch import prefetch as prefetch
from nnx.training.train_state import TrainState as TrainState

# isort: split
# inspection: looking at a model
from nnx.inspection.capture import capture as capture
from nnx.inspection.display import display as display
from nnx.inspection.find_nans import NotFinite as NotFinite
from nnx.inspection.find_nans import find_nans as find_nans
from nnx.inspection.intercept import intercept as intercept
from nnx.inspection.metrics_file import read_metrics as read_metrics
from nnx.inspection.plot_attention import plot_attention as plot_attention
from nnx.inspection.plot_model import ModelPicture as ModelPicture
from nnx.inspection.plot_model import plot_model as plot_model
from nnx.inspection.plots import plot_metrics as plot_metrics
from nnx.inspection.sinks import tensorboard_sink as tensorboard_sink
from nnx.inspection.sinks import wandb_sink as wandb_sink
from nnx.inspection.summary import count_params as count_params
from nnx.inspection.summary import summary as summary
from nnx.inspection.train_log import TrainLog as TrainLog

# isort: split
# interop: other people's weights
from nnx.interop.export import export as export
from nnx.interop.exported import Exported as Exported
from nnx.interop.exported import load_exported as load_exported
from nnx.interop.torch_state_dict import load_torch_state_dict as load_torch_state_dict
from nnx.storage.checkpoints.checkpoint import checkpoint_entries as checkpoint_entries
from nnx.storage.safetensors.safetensors import load_safetensors as load_safetensors
from nnx.storage.safetensors.safetensors import save_safetensors as save_safetensors

# isort: split
# bridge: models of other libraries, under `nnx.bridge`
from nnx import bridge as bridge

# isort: split
# models: published architectures, under `nnx.models`
from nnx import models as models

# isort: split
# generation: writing with a model
from nnx.generation.generate import generate as generate

# isort: split
# planning: what a step needs of a machine that is not here
from nnx.planning.plan import Plan as Plan
from nnx.planning.plan import Plans as Plans
from nnx.planning.plan import plan as plan

__version__ = "0.2.0"

# What `from nnx import *` takes. `nnx.Any` and `nnx.Sequence` are left out: they would shadow the names of `typing` and
# `collections.abc`, which most files that import everything use as well. Rooms (`nnx.models`) are left out, too.
# fmt: off
__all__ = [
    # core
    "All", "BatchStat", "buffers", "Cache", "Container", "ContainerMetadata", "Context", "context", "ContextDef",
    "dataclass", "Dict", "field", "Filter", "Intermediate", "is_node", "LoadReport", "Loss", "Module", "ModuleDef",
    "Node", "node", "node_field", "Not", "OfType", "Param", "param", "param_field", "PathMatches", "Pure",
    "PureContext", "PureModule", "Pytree", "Ref", "register_node_type", "set_mode", "State", "Static", "static",
    "static_field", "TraceContextError", "TreeNode", "var", "var_field", "Variable", "with_metadata",
    "with_partitioning",
    # sharding
    "data_parallel_rules", "fsdp_rules", "fsdp_tensor_parallel_rules", "get_logical_axis_rules", "get_partition_spec",
    "init_sharded", "logical_axis_rules", "logical_to_mesh", "logical_to_mesh_axes", "logical_to_mesh_sharding",
    "name_axes", "on_host", "PARTITION_NAME", "RulesFallback", "set_logical_axis_rules", "shard", "sharding_report",
    "ShardingReport", "tensor_parallel_rules", "with_logical_constraint", "with_logical_partitioning",
    # transforms
    "checkify", "compilation_cache", "cond", "custom_jvp", "custom_vjp", "eval_shape", "fori_loop", "grad",
    "hessian", "jacfwd", "jacrev", "jit", "JitWrapped", "jvp", "linearize", "Remat", "remat", "Scan", "scan",
    "shard_map", "switch", "value_and_grad", "vjp", "Vmap", "vmap", "while_loop",
    # nn
    "adaptive_avg_pool", "adaptive_max_pool", "AdaptiveAvgPool", "AdaptiveMaxPool", "add_lora", "apply_rotary",
    "attention_implementation", "avg_pool", "AvgPool", "BatchNorm", "Bidirectional", "Bilinear", "celu",
    "combine_masks", "Conv", "ConvLSTMCell", "ConvTranspose", "cross_entropy", "DecoderCache", "DeltaCache",
    "dequantize", "dot_product_attention", "Dropout", "DropPath", "DynamicNTKScaling", "Einsum", "elu", "Embed",
    "ExpertGroups", "fp8_dot_general", "gated_delta_rule", "GatedDeltaNet", "GatedMLP", "GaussianNoise", "gelu",
    "get_scaled_dot_general_config", "global_avg_pool", "global_max_pool", "GlobalAvgPool", "GlobalMaxPool", "glu",
    "GroupNorm", "GRUCell", "hard_sigmoid", "hard_silu", "hard_swish", "hard_tanh", "Identity", "identity",
    "initializers", "InstanceNorm", "KVCache", "LatentAttention", "LayerCache", "LayerNorm", "leaky_relu",
    "LearnedPositionEmbed", "Linear", "linear_cross_entropy", "LinearGeneral", "LinearScaling", "Llama3Scaling",
    "log1mexp", "log_sigmoid", "log_softmax", "logmeanexp", "logsumexp", "LongRoPEScaling", "LoRA", "LoRALinear",
    "LoRALinearGeneral", "LoRAParam", "LSTMCell", "make_attention_mask", "make_causal_mask", "make_padding_mask",
    "make_segment_mask", "make_sliding_window_mask", "max_pool", "MaxPool", "merge_lora", "min_pool", "MinPool",
    "mish", "MLP", "MoE", "MultiHeadAttention", "normalize", "NTKScaling", "one_hot", "OptimizedLSTMCell", "pool",
    "PReLU", "quantize", "QuantizedParam", "relu", "relu6", "ring_attention", "RMSNorm", "RNN", "RNNCellBase",
    "RotaryEmbedding", "RotaryScaling", "router_losses", "RouterLosses", "scaled_dot_general", "scaled_matmul",
    "selu", "set_dtypes", "sigmoid", "silu", "SimpleCell", "sinusoidal_positions", "SinusoidalPositionEmbed",
    "soft_sign", "softmax", "softplus", "sparse_plus", "sparse_sigmoid", "SpectralNorm", "squareplus", "standardize",
    "swish", "tanh", "Upsample", "WeightNorm", "YaRNScaling",
    # training
    "Accuracy", "Average", "CheckpointEntry", "CheckpointError", "CheckpointManager", "DynamicScale", "EarlyStopping",
    "EMA", "EmaState", "load", "Metric", "MetricState", "MultiMetric", "muon_dimensions", "Optimizer", "OptState",
    "prefetch", "save", "Statistics", "TrainState", "Welford",
    # inspection
    "capture", "count_params", "display", "find_nans", "intercept", "ModelPicture", "NotFinite", "plot_attention",
    "plot_metrics", "plot_model", "read_metrics", "summary", "tensorboard_sink", "TrainLog", "wandb_sink",
    # interop
    "checkpoint_entries", "export", "Exported", "load_exported", "load_safetensors", "load_torch_state_dict",
    "save_safetensors",
    # generation
    "generate",
    # planning
    "Plan", "plan", "Plans",
]
# fmt: on


# In versions 0.0.3 and 0.0.4 the initializers were at the top. These names still work, but completion does not offer
# them: `zeros` and `normal` would be mistaken for those of `jax.numpy` and `jax.random`.
if _typing.TYPE_CHECKING:
    from nnx.nn.initializers import Initializer as Initializer
    from nnx.nn.initializers import constant as constant
    from nnx.nn.initializers import delta_orthogonal as delta_orthogonal
    from nnx.nn.initializers import glorot_normal as glorot_normal
    from nnx.nn.initializers import glorot_uniform as glorot_uniform
    from nnx.nn.initializers import he_normal as he_normal
    from nnx.nn.initializers import he_uniform as he_uniform
    from nnx.nn.initializers import kaiming_normal as kaiming_normal
    from nnx.nn.initializers import kaiming_uniform as kaiming_uniform
    from nnx.nn.initializers import lecun_normal as lecun_normal
    from nnx.nn.initializers import lecun_uniform as lecun_uniform
    from nnx.nn.initializers import normal as normal
    from nnx.nn.initializers import ones as ones
    from nnx.nn.initializers import orthogonal as orthogonal
    from nnx.nn.initializers import uniform as uniform
    from nnx.nn.initializers import variance_scaling as variance_scaling
    from nnx.nn.initializers import xavier_normal as xavier_normal
    from nnx.nn.initializers import xavier_uniform as xavier_uniform
    from nnx.nn.initializers import zeros as zeros

else:  # a checker would take `__getattr__` to mean that the package has every name
    # fmt: off
    _INITIALIZERS = frozenset({
        "constant", "delta_orthogonal", "glorot_normal", "glorot_uniform", "he_normal", "he_uniform", "Initializer",
        "kaiming_normal", "kaiming_uniform", "lecun_normal", "lecun_uniform", "normal", "ones", "orthogonal", "uniform",
        "variance_scaling", "xavier_normal", "xavier_uniform", "zeros",
    })
    # fmt: on

    def __getattr__(name: str) -> object:
        """Returns an initializer; explains what a name of an earlier version, Flax or PyTorch is called here."""
        if name in _INITIALIZERS:
            return getattr(initializers, name)
        from nnx.core.hints.hints import package_error

        raise package_error(name, hasattr(models, name))

    from nnx.core.old_modules import answer_for_old_modules

    answer_for_old_modules()
    del answer_for_old_modules


def __dir__() -> list[str]:
    """Returns the public names, for completion. The rooms, which Python makes attributes too, are left out."""
    return [*__all__, "Any", "Sequence", "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]
