"""NNX: neural networks for JAX. Modules behave like Python, at the speed of hand-written JAX."""

# core: what a Module is
from nnx.core.attributes import is_node as is_node
from nnx.core.attributes import register_node_type as register_node_type
from nnx.core.containers import Dict as Dict
from nnx.core.containers import Sequence as Sequence
from nnx.core.context import Context as Context
from nnx.core.context import ContextDef as ContextDef
from nnx.core.context import PureContext as PureContext
from nnx.core.context import context as context
from nnx.core.errors import TraceContextError as TraceContextError
from nnx.core.fields import dataclass as dataclass
from nnx.core.fields import field as field
from nnx.core.fields import node_field as node_field
from nnx.core.fields import param_field as param_field
from nnx.core.fields import static_field as static_field
from nnx.core.fields import var_field as var_field
from nnx.core.filters import All as All
from nnx.core.filters import Any as Any
from nnx.core.filters import Filter as Filter
from nnx.core.filters import Not as Not
from nnx.core.filters import OfType as OfType
from nnx.core.filters import PathMatches as PathMatches
from nnx.core.filters import buffers as buffers
from nnx.core.module import Module as Module
from nnx.core.moduledef import ModuleDef as ModuleDef
from nnx.core.pure import Pure as Pure
from nnx.core.pure import PureModule as PureModule
from nnx.core.pytree import Pytree as Pytree
from nnx.core.refs import Ref as Ref
from nnx.core.state import State as State
from nnx.core.variables import BatchStat as BatchStat
from nnx.core.variables import Cache as Cache
from nnx.core.variables import Container as Container
from nnx.core.variables import ContainerMetadata as ContainerMetadata
from nnx.core.variables import Intermediate as Intermediate
from nnx.core.variables import Node as Node
from nnx.core.variables import Param as Param
from nnx.core.variables import Static as Static
from nnx.core.variables import TreeNode as TreeNode
from nnx.core.variables import Variable as Variable
from nnx.core.variables import node as node
from nnx.core.variables import param as param
from nnx.core.variables import static as static
from nnx.core.variables import var as var
from nnx.core.variables import with_metadata as with_metadata
from nnx.core.variables import with_partitioning as with_partitioning

# transforms: JAX transforms, lifted
from nnx.transforms.autodiff import hessian as hessian
from nnx.transforms.autodiff import jacfwd as jacfwd
from nnx.transforms.autodiff import jacrev as jacrev
from nnx.transforms.autodiff import jvp as jvp
from nnx.transforms.autodiff import linearize as linearize
from nnx.transforms.autodiff import vjp as vjp
from nnx.transforms.grad import grad as grad
from nnx.transforms.grad import value_and_grad as value_and_grad
from nnx.transforms.jit import jit as jit

__version__ = "0.1.0"
