"""Metrics: running figures that are Modules, so that a compiled step may update them.

A metric *updates* with a batch, *computes* its figure, and is *reset*. Under `jit` with sharded arrays the figures are
those of the whole batch already. Where each device holds a metric of its own (inside `shard_map`, `pmap`, `vmap` with
an axis name), `metric.reduce(axis_name)` makes all of them the metric of all; `metric.merge(other)` takes another one's
batches into this one, e.g. of another process.
"""

import abc
import copy
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from nnx.core.module import Module
from nnx.core.variables import Variable

T = TypeVar("T")

NO_VALUE = """{metric}.update expected the keyword argument {name!r}, got {given}. Its name is chosen where the metric \
is made: nnx.{metric}({name!r})."""
NO_CLASS_AXIS = """Accuracy expected logits with one axis more than labels, got logits of shape {logits} and labels of \
shape {labels}. For binary labels write nnx.Accuracy(threshold=0.5)."""
NOT_BINARY = """Accuracy(threshold=...) expected logits and labels of one shape, got logits of shape {logits} and \
labels of shape {labels}. For several classes write nnx.Accuracy()."""
NOT_CLASSES = "Accuracy expected integer labels, got {dtype}."
NOT_MERGEABLE = "{metric}.merge takes another {metric} that was made alike, got {other}."
METRIC_NAME = "MultiMetric cannot hold a metric under the name {name!r}: it is part of its own interface."
NOT_A_METRIC = "MultiMetric takes metrics by name, e.g. loss=nnx.Average(); {name!r} is {got}."


class MetricState(Variable[T]):
    """What a metric accumulates. The collection "metrics"."""

    __slots__ = ()
    collection = "metrics"


class Metric(Module):
    """The base of metrics. A subclass keeps its figures in `MetricState` Variables.

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
        """Takes a batch in."""

    @abc.abstractmethod
    def compute(self) -> Any:
        """The figure so far."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Starts anew."""

    @abc.abstractmethod
    def merge(self, other: Any) -> None:
        """Takes in what another metric of the same make has seen."""

    def reduce(self, axis_name: Any) -> None:
        """Merges the metrics that the members of a mapped axis hold; all of them then have seen everything."""
        own = self.filter(MetricState)
        gathered = jax.lax.all_gather(own, axis_name)
        members = jax.tree.leaves(gathered)[0].shape[0]
        total = copy.copy(self)
        total.update_state(jax.tree.map(lambda x: x[0], gathered))
        for i in range(1, members):
            other = copy.copy(self)
            other.update_state(jax.tree.map(lambda x, i=i: x[i], gathered))
            total.merge(other)
        self.update_state(total.filter(MetricState))

    def _check_mergeable(self, other: Any) -> None:
        if type(other) is not type(self) or other.get_module_def() != self.get_module_def():
            raise ValueError(NOT_MERGEABLE.format(metric=type(self).__name__, other=type(other).__name__))


class Average(Metric):
    """The mean of all values seen; NaN before the first.

    Args:
        argname: the keyword argument of `update` that holds the values.

    >>> loss = nnx.Average("loss")
    >>> loss.update(loss=jnp.array([1.0, 2.0]))
    >>> loss.update(loss=6.0)
    >>> float(loss.compute())
    3.0
    """

    def __init__(self, argname: str = "values"):
        self.argname = argname
        self.total = MetricState(jnp.zeros((), jnp.float32))
        self.count = MetricState(jnp.zeros((), jnp.int32))

    def update(self, mask: Any = None, **values: Any) -> None:
        """Takes values in; those where `mask` is false do not count."""
        self._add(_argument(self, values), mask)

    def _add(self, values: Any, mask: Any) -> None:
        values = jnp.asarray(values)
        if mask is None:
            self.total += jnp.sum(values, dtype=jnp.float32)
            self.count += values.size
        else:
            mask = jnp.broadcast_to(jnp.asarray(mask, bool), values.shape)
            self.total += jnp.sum(jnp.where(mask, values, 0), dtype=jnp.float32)
            self.count += jnp.sum(mask, dtype=jnp.int32)

    def compute(self) -> jax.Array:
        """The mean."""
        return self.total / self.count

    def reset(self) -> None:
        """Forgets all values."""
        self.total, self.count = jnp.zeros_like(self.total), jnp.zeros_like(self.count)

    def merge(self, other: Any) -> None:
        """Takes in the values that another one has seen."""
        self._check_mergeable(other)
        self.total += other.total
        self.count += other.count

    def reduce(self, axis_name: Any) -> None:
        """Takes in the values that the other members of a mapped axis have seen."""
        self.total, self.count = jax.lax.psum((self.total, self.count), axis_name)


class Accuracy(Average):
    """The fraction of predictions that are right.

    Args:
        threshold: for binary labels: a prediction is 1 where the logit is above it.

    >>> accuracy = nnx.Accuracy()
    >>> accuracy.update(logits=jnp.array([[0.1, 0.9], [0.8, 0.2]]), labels=jnp.array([1, 1]))
    >>> float(accuracy.compute())
    0.5
    """

    def __init__(self, threshold: float | None = None):
        super().__init__()
        self.threshold = threshold

    def update(self, mask: Any = None, *, logits: Any, labels: Any, **_: Any) -> None:
        """Takes predictions in.

        Args:
            mask: those where it is false do not count; of the shape of `labels`, or broadcast to it.
            logits: `(..., classes)`, or the shape of `labels` with a threshold.
            labels: the classes, integers.
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
        self._add(right, mask)


class Statistics(NamedTuple):
    """What `nnx.Welford` computes.

    Attributes:
        mean: the mean of all values.
        standard_error_of_mean: how far the mean itself is uncertain.
        standard_deviation: the spread of the values.
    """

    mean: jax.Array
    standard_error_of_mean: jax.Array
    standard_deviation: jax.Array


class Welford(Metric):
    """Mean and spread of all values seen, by Welford's method: exact even where the spread is small beside the mean.

    Args:
        argname: the keyword argument of `update` that holds the values.

    >>> spread = nnx.Welford()
    >>> spread.update(values=jnp.array([1.0, 3.0]))
    >>> spread.update(values=jnp.array([1.0, 3.0]))
    >>> float(spread.compute().mean), float(spread.compute().standard_deviation)
    (2.0, 1.0)
    """

    def __init__(self, argname: str = "values"):
        self.argname = argname
        self.count = MetricState(jnp.zeros((), jnp.int32))
        self.mean = MetricState(jnp.zeros((), jnp.float32))
        self.m2 = MetricState(jnp.zeros((), jnp.float32))  # the sum of squared distances from the mean

    def update(self, mask: Any = None, **values: Any) -> None:
        """Takes values in; those where `mask` is false do not count."""
        x = jnp.asarray(_argument(self, values), jnp.float32)
        mask = jnp.ones(x.shape, bool) if mask is None else jnp.broadcast_to(jnp.asarray(mask, bool), x.shape)
        count = jnp.sum(mask, dtype=jnp.int32)
        mean = jnp.sum(jnp.where(mask, x, 0)) / jnp.maximum(count, 1)
        self._take(count, mean, jnp.sum(jnp.where(mask, (x - mean) ** 2, 0)))

    def _take(self, count: jax.Array, mean: jax.Array, m2: jax.Array) -> None:
        total = self.count + count
        delta, share = mean - self.mean, count / jnp.maximum(total, 1)
        self.mean += delta * share
        self.m2 += m2 + delta**2 * self.count * share
        self.count = total

    def compute(self) -> Statistics:
        """Mean, standard error of the mean, and standard deviation; NaN before the first value."""
        deviation = jnp.sqrt(self.m2 / self.count)
        mean = jnp.where(self.count > 0, self.mean, jnp.nan)
        return Statistics(mean, deviation / jnp.sqrt(self.count), deviation)

    def reset(self) -> None:
        """Forgets all values."""
        self.count, self.mean, self.m2 = map(jnp.zeros_like, (self.count, self.mean, self.m2))

    def merge(self, other: Any) -> None:
        """Takes in the values that another one has seen."""
        self._check_mergeable(other)
        self._take(other.count, other.mean, other.m2)

    def reduce(self, axis_name: Any) -> None:
        """Takes in the values that the other members of a mapped axis have seen."""
        count = jax.lax.psum(self.count, axis_name)
        mean = jax.lax.psum(self.count * self.mean, axis_name) / jnp.maximum(count, 1)
        self.m2 = jax.lax.psum(self.m2 + self.count * (self.mean - mean) ** 2, axis_name)
        self.count, self.mean = count, mean


class MultiMetric(Metric):
    """Several metrics, updated by one call; each takes the keyword arguments it knows.

    >>> metrics = nnx.MultiMetric(accuracy=nnx.Accuracy(), loss=nnx.Average("loss"))
    >>> metrics.update(logits=jnp.array([[0.0, 1.0]]), labels=jnp.array([1]), loss=0.5)
    >>> {name: float(value) for name, value in metrics.compute().items()}
    {'accuracy': 1.0, 'loss': 0.5}
    """

    def __init__(self, **metrics: Metric):
        for name, metric in metrics.items():
            if hasattr(MultiMetric, name) or name == "names":
                raise ValueError(METRIC_NAME.format(name=name))
            if not isinstance(metric, Metric):
                raise TypeError(NOT_A_METRIC.format(name=name, got=type(metric).__name__))
            setattr(self, name, metric)
        self.names = tuple(metrics)

    def _metrics(self) -> dict[str, Metric]:
        return {name: getattr(self, name) for name in self.names}

    def update(self, **updates: Any) -> None:
        """Updates each metric with the same arguments."""
        for metric in self._metrics().values():
            metric.update(**updates)

    def compute(self) -> dict[str, Any]:
        """The figure of each metric, by name."""
        return {name: metric.compute() for name, metric in self._metrics().items()}

    def reset(self) -> None:
        """Resets each metric."""
        for metric in self._metrics().values():
            metric.reset()

    def merge(self, other: Any) -> None:
        """Merges each metric with the other's of that name."""
        self._check_mergeable(other)
        for name, metric in self._metrics().items():
            metric.merge(getattr(other, name))

    def reduce(self, axis_name: Any) -> None:
        """Reduces each metric over a mapped axis."""
        for metric in self._metrics().values():
            metric.reduce(axis_name)


def _argument(metric: Any, values: dict[str, Any]) -> Any:
    if metric.argname not in values:
        given = ", ".join(sorted(values)) or "none"
        raise TypeError(NO_VALUE.format(metric=type(metric).__name__, name=metric.argname, given=given))
    return values[metric.argname]
