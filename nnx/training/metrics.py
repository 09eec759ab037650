"""Metrics: running statistics that are Modules, so that a compiled step can update them.

A metric is *updated* with a batch, *computes* its result, and is *reset*. Under `jit` with sharded arrays the results
already are those of the whole batch. Where each device holds its own metric (inside `shard_map`, `pmap`, `vmap` with an
axis name), `metric.reduce(axis_name)` combines them on every device; `metric.merge(other)` adds the batches of another
metric, e.g. from another process. Sums and counts are pairs of float32 numbers (`exact_sums`).

A *mask* says which values count. *Weights* say how much: a value of weight 2 counts like two equal values.
"""

import abc
import copy
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from nnx.core.module.module import Module
from nnx.core.variables.variables import Variable
from nnx.training import exact_sums

T = TypeVar("T")

NO_VALUE = """{metric}.update expected the keyword argument {name!r}, got {given}. Its name is chosen where the metric \
is made: nnx.{metric}({name!r})."""
RESERVED_NAME = """{metric}({name!r}): `update` takes {name!r} for what counts, so the values need another name."""
NOT_A_MASK = """{metric}.update expected a boolean mask, got {dtype}{shape}. If these say how much each value counts, \
write {metric}.update(..., weights=...) instead; if they are zeros and ones, write mask=mask.astype(bool)."""
NOT_WEIGHTS = "{metric}.update expected real weights, got {dtype}."
DOES_NOT_FIT = """{metric}.update: {argument} of the shape {given} cannot be broadcast to the values, which have the \
shape {shape}. Add axes of size 1, as in {argument}[:, None]."""
NO_CLASS_AXIS = """Accuracy expected logits with one axis more than labels, got logits of shape {logits} and labels of \
shape {labels}. For binary labels write nnx.Accuracy(threshold=0.5)."""
NOT_BINARY = """Accuracy(threshold=...) expected logits and labels of one shape, got logits of shape {logits} and \
labels of shape {labels}. For several classes write nnx.Accuracy()."""
NOT_CLASSES = "Accuracy expected integer labels, got {dtype}."
NOT_MERGEABLE = "{metric}.merge takes another {metric} made with the same arguments, got {other}."
METRIC_NAME = "MultiMetric cannot hold a metric under the name {name!r}, which is part of its interface."
NOT_A_METRIC = "MultiMetric takes metrics by name, e.g. loss=nnx.Average(); {name!r} is {got}."
METRIC_CLASS = "the class {name}: write `{name}()`"


class MetricState(Variable[T]):
    """A value that a metric accumulates. The collection "metrics"."""

    __slots__ = ()
    collection = "metrics"


class Metric(Module):
    """The base class of metrics. A subclass stores what it accumulates in `MetricState` Variables.

    >>> class Count(nnx.Metric):
    ...     def __init__(self):
    ...         self.count = nnx.MetricState(0)
    ...     def update(self, *, labels, **_):
    ...         self.count += labels.shape[0]
    ...     def compute(self):
    ...         return self.count
    ...     def reset(self):
    ...         self.count = 0
    ...     def merge(self, other):
    ...         self.count += other.count
    >>> metric = Count()
    >>> metric.update(labels=jnp.zeros(8))
    >>> metric.compute()
    8
    """

    @abc.abstractmethod
    def update(self, **values: Any) -> None:
        """Adds a batch."""

    @abc.abstractmethod
    def compute(self) -> Any:
        """Returns the result so far."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Starts over, without any batch."""

    @abc.abstractmethod
    def merge(self, other: Any) -> None:
        """Adds the batches that another metric of the same kind has seen."""

    def reduce(self, axis_name: Any) -> None:
        """Merges the metrics that the members of a mapped axis hold, so that each has seen all batches."""
        own = Module.filter(self, MetricState)
        gathered = jax.lax.all_gather(own, axis_name)
        members = jax.tree.leaves(gathered)[0].shape[0]
        total = copy.copy(self)
        Module.update_state(total, jax.tree.map(lambda x: x[0], gathered))
        for i in range(1, members):
            other = copy.copy(self)
            Module.update_state(other, jax.tree.map(lambda x, i=i: x[i], gathered))
            total.merge(other)
        Module.update_state(self, Module.filter(total, MetricState))

    def _check_mergeable(self, other: Any) -> None:
        if type(other) is not type(self) or Module.get_module_def(other) != Module.get_module_def(self):
            raise ValueError(NOT_MERGEABLE.format(metric=type(self).__name__, other=type(other).__name__))


class Average(Metric):
    """The mean of all values so far; NaN before the first. It stays exact over billions of values.

    Args:
        argname: the keyword argument of `update` that holds the values.

    >>> loss = nnx.Average("loss")
    >>> loss.update(loss=jnp.array([1.0, 2.0]))
    >>> loss.update(loss=6.0)
    >>> float(loss.compute())
    3.0
    >>> loss.reset()
    >>> loss.update(loss=jnp.array([1.0, 2.0]), weights=jnp.array([3, 1]))
    >>> float(loss.compute())
    1.25
    """

    argname: str
    total_pair: exact_sums.Pair
    count_pair: exact_sums.Pair

    def __init__(self, argname: str = "values"):
        self.argname = _checked_name(self, argname)
        self.total_pair = MetricState(exact_sums.zero())
        self.count_pair = MetricState(exact_sums.zero())

    @property
    def total(self) -> jax.Array:
        """The weighted sum of the values so far, rounded to float32."""
        return exact_sums.value(self.total_pair)

    @property
    def count(self) -> jax.Array:
        """The number of values so far, or the sum of their weights, rounded to float32."""
        return exact_sums.value(self.count_pair)

    def update(self, *, mask: Any = None, weights: Any = None, **values: Any) -> None:
        """Adds values.

        Args:
            mask: a boolean mask of the shape of the values, or broadcast to it; values where it is False do not count.
            weights: how much each value counts, 0 or more, of the shape of the values or broadcast to it. A value of
                weight 2 counts like two equal values, also toward the standard error of `Welford`.
            **values: the values, under the name `argname`. Others are ignored.

        Raises:
            TypeError: the values are missing.
            ValueError: the mask is not boolean, or the weights are complex.
        """
        self._add(_argument(self, values), mask, weights)

    def _add(self, values: Any, mask: Any, weights: Any) -> None:
        values = jnp.asarray(values)
        mask, weights = _mask(self, mask, values.shape), _weights(self, weights, values.shape)
        self.total_pair = exact_sums.add(self.total_pair, exact_sums.exact_sum(values, mask, weights))
        self.count_pair = exact_sums.add(self.count_pair, _counted(values.size, mask, weights))

    def compute(self) -> jax.Array:
        """Returns the mean."""
        return self.total / self.count

    def reset(self) -> None:
        """Starts over, without any value."""
        self.total_pair, self.count_pair = exact_sums.zero(), exact_sums.zero()

    def merge(self, other: Any) -> None:
        """Adds the values that another metric has seen."""
        self._check_mergeable(other)
        self.total_pair = exact_sums.add(self.total_pair, other.total_pair)
        self.count_pair = exact_sums.add(self.count_pair, other.count_pair)

    def reduce(self, axis_name: Any) -> None:
        """Adds the values that the other members of a mapped axis have seen."""
        self.total_pair = exact_sums.sum_members(self.total_pair, axis_name)
        self.count_pair = exact_sums.sum_members(self.count_pair, axis_name)


class Accuracy(Average):
    """The fraction of correct predictions.

    Args:
        threshold: the threshold for binary labels: the prediction is 1 where the logit is above it.

    >>> accuracy = nnx.Accuracy()
    >>> accuracy.update(logits=jnp.array([[0.1, 0.9], [0.8, 0.2]]), labels=jnp.array([1, 1]))
    >>> float(accuracy.compute())
    0.5
    """

    def __init__(self, threshold: float | None = None):
        super().__init__()
        self.threshold = threshold

    def update(self, *, logits: Any, labels: Any, mask: Any = None, weights: Any = None, **_: Any) -> None:
        """Adds predictions.

        Args:
            logits: the logits, `(..., classes)`; with a threshold, of the shape of `labels`.
            labels: the correct classes, as integers.
            mask: a boolean mask of the shape of `labels`, or broadcast to it; predictions where it is False do not
                count.
            weights: how much each prediction counts, 0 or more, of the shape of `labels` or broadcast to it.

        Raises:
            ValueError: the shapes do not match, the labels are not integers, the mask is not boolean, or the weights
                are complex.
        """
        logits, labels = jnp.asarray(logits), jnp.asarray(labels)
        if not (jnp.issubdtype(labels.dtype, jnp.integer) or labels.dtype == bool):
            raise ValueError(NOT_CLASSES.format(dtype=labels.dtype))
        if self.threshold is None:
            if logits.shape[:-1] != labels.shape or logits.ndim != labels.ndim + 1:
                raise ValueError(NO_CLASS_AXIS.format(logits=logits.shape, labels=labels.shape))
            right = logits.argmax(axis=-1) == labels
        else:
            if logits.shape != labels.shape:
                raise ValueError(NOT_BINARY.format(logits=logits.shape, labels=labels.shape))
            right = (logits > self.threshold) == labels.astype(bool)
        self._add(right, mask, weights)


class Statistics(NamedTuple):
    """The result of `nnx.Welford`.

    Attributes:
        mean: the mean of all values.
        standard_error_of_mean: the uncertainty of the mean.
        standard_deviation: the spread of the values.
    """

    mean: jax.Array
    standard_error_of_mean: jax.Array
    standard_deviation: jax.Array


class Welford(Metric):
    """The mean and spread of all values so far, by Welford's method.

    Both stay exact over billions of values, even if the spread is small compared to the mean.

    Args:
        argname: the keyword argument of `update` that holds the values.

    >>> spread = nnx.Welford()
    >>> spread.update(values=jnp.array([1.0, 3.0]))
    >>> spread.update(values=jnp.array([1.0, 3.0]))
    >>> float(spread.compute().mean), float(spread.compute().standard_deviation)
    (2.0, 1.0)
    """

    argname: str
    count_pair: exact_sums.Pair
    mean_pair: exact_sums.Pair
    m2_pair: exact_sums.Pair

    def __init__(self, argname: str = "values"):
        self.argname = _checked_name(self, argname)
        self.count_pair = MetricState(exact_sums.zero())
        self.mean_pair = MetricState(exact_sums.zero())
        self.m2_pair = MetricState(exact_sums.zero())  # the sum of squared distances from the mean

    @property
    def count(self) -> jax.Array:
        """The number of values so far, or the sum of their weights, rounded to float32."""
        return exact_sums.value(self.count_pair)

    def update(self, *, mask: Any = None, weights: Any = None, **values: Any) -> None:
        """Adds values; the arguments are those of `Average.update`."""
        x = jnp.asarray(_argument(self, values), jnp.float32)
        mask, weights = _mask(self, mask, x.shape), _weights(self, weights, x.shape)
        count_pair = _counted(x.size, mask, weights)
        self._take(count_pair, *_moments(x, mask, weights, count_pair))

    def _take(self, count_pair: jax.Array, mean_pair: jax.Array, m2_pair: jax.Array) -> None:
        own, other = (self.count_pair, self.mean_pair, self.m2_pair), (count_pair, mean_pair, m2_pair)
        self.count_pair, self.mean_pair, self.m2_pair = _combined(own, other)

    def compute(self) -> Statistics:
        """Returns mean, standard error of the mean, and standard deviation; NaN before the first value."""
        count = self.count
        deviation = jnp.sqrt(exact_sums.value(self.m2_pair) / count)
        mean = jnp.where(count > 0, exact_sums.value(self.mean_pair), jnp.nan)
        return Statistics(mean, deviation / jnp.sqrt(count), deviation)

    def reset(self) -> None:
        """Starts over, without any value."""
        self.count_pair, self.mean_pair, self.m2_pair = exact_sums.zero(), exact_sums.zero(), exact_sums.zero()

    def merge(self, other: Any) -> None:
        """Adds the values that another metric has seen."""
        self._check_mergeable(other)
        self._take(other.count_pair, other.mean_pair, other.m2_pair)

    def reduce(self, axis_name: Any) -> None:
        """Adds the values that the other members of a mapped axis have seen."""
        count = self.count
        count_pair = exact_sums.sum_members(self.count_pair, axis_name)
        share = count / _divisor(count_pair)
        # As in `_moments`: first the rounded mean, then its error from the distances.
        center = jax.lax.psum(share * exact_sums.value(self.mean_pair), axis_name)
        distance = exact_sums.value(exact_sums.subtract(self.mean_pair, exact_sums.from_float(center)))
        correction = jax.lax.psum(share * distance, axis_name)
        distance -= correction
        # Not `distance**2`, which would overflow for a large first value and then meet a count of zero.
        between = exact_sums.from_float(distance * (distance * count))
        self.m2_pair = exact_sums.sum_members(exact_sums.add(self.m2_pair, between), axis_name)
        self.count_pair, self.mean_pair = count_pair, exact_sums.from_float(center, correction)


@jax.jit
def _moments(
    x: jax.Array, mask: jax.Array | None, weights: jax.Array | None, count_pair: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean of a batch, and the sum of squared distances from it."""
    count = _divisor(count_pair)
    # First the rounded mean, then its error from the distances, which are small and therefore precise.
    center = exact_sums.value(exact_sums.exact_sum(x, mask, weights)) / count
    correction = exact_sums.value(exact_sums.exact_sum(x - center, mask, weights)) / count
    squares = exact_sums.exact_sum((x - center - correction) ** 2, mask, weights)
    return exact_sums.from_float(center, correction), squares


@jax.jit
def _combined(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns count, mean and squared distances of two sets of values together."""
    count_pair = exact_sums.add(a[0], b[0])
    delta = exact_sums.value(exact_sums.subtract(b[1], a[1]))
    share = exact_sums.value(b[0]) / _divisor(count_pair)
    # Not `delta**2`, which would overflow for a large first value and then meet a count of zero.
    between = exact_sums.from_float(delta * (delta * exact_sums.value(a[0]) * share))
    mean_pair = exact_sums.add(a[1], exact_sums.from_float(delta * share))
    return count_pair, mean_pair, exact_sums.add(exact_sums.add(a[2], b[2]), between)


class MultiMetric(Metric):
    """Several metrics, updated by one call; each uses the keyword arguments it knows.

    >>> metrics = nnx.MultiMetric(accuracy=nnx.Accuracy(), loss=nnx.Average("loss"))
    >>> metrics.update(logits=jnp.array([[0.0, 1.0]]), labels=jnp.array([1]), loss=0.5)
    >>> {name: float(value) for name, value in metrics.compute().items()}
    {'accuracy': 1.0, 'loss': 0.5}
    """

    names: tuple[str, ...]

    def __init__(self, **metrics: Metric):
        for name, metric in metrics.items():
            if hasattr(MultiMetric, name) or name == "names":
                raise ValueError(METRIC_NAME.format(name=name))
            if not isinstance(metric, Metric):
                is_class = isinstance(metric, type)
                got = METRIC_CLASS.format(name=metric.__name__) if is_class else type(metric).__name__
                raise TypeError(NOT_A_METRIC.format(name=name, got=got))
            setattr(self, name, metric)
        self.names = tuple(metrics)

    def _metrics(self) -> dict[str, Metric]:
        return {name: getattr(self, name) for name in self.names}

    def update(self, **updates: Any) -> None:
        """Updates each metric with the same arguments."""
        for metric in self._metrics().values():
            metric.update(**updates)

    def compute(self) -> dict[str, Any]:
        """Returns the result of each metric, by name."""
        return {name: metric.compute() for name, metric in self._metrics().items()}

    def reset(self) -> None:
        """Resets each metric."""
        for metric in self._metrics().values():
            metric.reset()

    def merge(self, other: Any) -> None:
        """Merges each metric with the one of the same name in `other`."""
        self._check_mergeable(other)
        for name, metric in self._metrics().items():
            metric.merge(getattr(other, name))

    def reduce(self, axis_name: Any) -> None:
        """Reduces each metric over a mapped axis."""
        for metric in self._metrics().values():
            metric.reduce(axis_name)


def _checked_name(metric: Any, argname: str) -> str:
    if argname in ("mask", "weights"):
        raise ValueError(RESERVED_NAME.format(metric=type(metric).__name__, name=argname))
    return argname


def _mask(metric: Any, mask: Any, shape: tuple[int, ...]) -> jax.Array | None:
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise ValueError(NOT_A_MASK.format(metric=type(metric).__name__, dtype=mask.dtype, shape=list(mask.shape)))
    return _fitted(metric, "mask", mask, shape)


def _weights(metric: Any, weights: Any, shape: tuple[int, ...]) -> jax.Array | None:
    if weights is None:
        return None
    weights = jnp.asarray(weights)
    if jnp.iscomplexobj(weights):
        raise ValueError(NOT_WEIGHTS.format(metric=type(metric).__name__, dtype=weights.dtype))
    return _fitted(metric, "weights", weights, shape)


def _fitted(metric: Any, argument: str, given: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    try:
        return jnp.broadcast_to(given, shape)
    except ValueError:
        text = {"metric": type(metric).__name__, "argument": argument, "given": list(given.shape), "shape": list(shape)}
        raise ValueError(DOES_NOT_FIT.format(**text)) from None


def _counted(size: int, mask: jax.Array | None, weights: jax.Array | None) -> jax.Array:
    if weights is not None:
        return exact_sums.exact_sum(weights, mask)
    return exact_sums.from_int(size) if mask is None else exact_sums.exact_sum(mask)


def _divisor(count_pair: jax.Array) -> jax.Array:
    """Returns the count to divide by; 1 before the first value. A sum of weights can be less than 1."""
    count = exact_sums.value(count_pair)
    return jnp.where(count == 0, 1, count)


def _argument(metric: Any, values: dict[str, Any]) -> Any:
    if metric.argname not in values:
        given = ", ".join(sorted(values)) or "none"
        raise TypeError(NO_VALUE.format(metric=type(metric).__name__, name=metric.argname, given=given))
    return values[metric.argname]
