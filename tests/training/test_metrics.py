"""Metrics, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx

rng = np.random.default_rng(0)
BATCHES = [rng.normal(5, 2, size).astype(np.float32) for size in (7, 3, 12)]
ALL = np.concatenate(BATCHES)
LOGITS, LABELS = rng.normal(size=(4, 6, 3)).astype(np.float32), rng.integers(0, 3, (4, 6))


def test_average_is_the_mean_of_all_values():
    metric = nnx.Average()
    assert np.isnan(metric.compute())
    for batch in BATCHES:
        metric.update(values=batch)
    np.testing.assert_allclose(metric.compute(), ALL.mean(), rtol=1e-6)
    metric.update(values=1)  # a number counts as one value
    np.testing.assert_allclose(metric.compute(), np.append(ALL, 1).mean(), rtol=1e-6)
    metric.reset()
    assert np.isnan(metric.compute()) and metric.count == 0


def test_masked_values_do_not_count_even_if_they_are_nan():
    metric = nnx.Average("loss")
    metric.update(loss=jnp.array([[1.0, jnp.nan], [3.0, 8.0]]), mask=jnp.array([[1, 0], [1, 0]]))
    assert metric.compute() == 2.0 and metric.count == 2
    metric.update(loss=jnp.array([[1.0, 2.0], [3.0, 100.0]]), mask=jnp.array([True, False]))  # broadcast
    assert metric.compute() == 2.0 and metric.count == 4


def test_average_names_the_argument_it_misses():
    with pytest.raises(TypeError, match="expected the keyword argument 'loss', got values"):
        nnx.Average("loss").update(values=1.0)


def test_accuracy_counts_the_right_classes():
    metric = nnx.Accuracy()
    for logits, labels in zip(LOGITS, LABELS):
        metric.update(logits=logits, labels=labels, loss=0.0)
    np.testing.assert_allclose(metric.compute(), (LOGITS.argmax(-1) == LABELS).mean(), rtol=1e-6)


def test_accuracy_with_a_mask_and_with_a_threshold():
    metric = nnx.Accuracy()
    mask = np.array([1, 1, 0, 0, 1, 0], bool)
    metric.update(logits=LOGITS, labels=LABELS, mask=mask)
    right = (LOGITS.argmax(-1) == LABELS)[:, mask]
    np.testing.assert_allclose(metric.compute(), right.mean(), rtol=1e-6)
    binary = nnx.Accuracy(threshold=0.5)
    binary.update(logits=jnp.array([0.2, 0.7, 0.9, 0.4]), labels=jnp.array([0, 1, 0, 1]))
    assert binary.compute() == 0.5


def test_accuracy_says_which_shapes_it_wants():
    with pytest.raises(ValueError, match="one axis more than labels, got logits of shape .4, 6, 3. and labels"):
        nnx.Accuracy().update(logits=LOGITS, labels=LABELS[0])
    with pytest.raises(ValueError, match="logits and labels of one shape"):
        nnx.Accuracy(threshold=0.5).update(logits=LOGITS, labels=LABELS)
    with pytest.raises(ValueError, match="expected integer labels, got float32"):
        nnx.Accuracy().update(logits=LOGITS, labels=LABELS.astype(np.float32))


def test_welford_gives_mean_and_spread_even_far_from_zero():
    metric = nnx.Welford()
    for batch in BATCHES:
        metric.update(values=batch + 10_000)
    mean, error, deviation = metric.compute()
    values = ALL.astype(np.float64) + 10_000
    np.testing.assert_allclose(mean, values.mean(), rtol=1e-6)
    np.testing.assert_allclose(deviation, values.std(), rtol=1e-3)
    np.testing.assert_allclose(error, values.std() / np.sqrt(len(values)), rtol=1e-3)
    metric.reset()
    assert np.isnan(metric.compute().mean)


def test_a_batch_that_is_masked_wholly_changes_nothing():
    metric = nnx.Welford()
    metric.update(values=jnp.array([1.0, 3.0]))
    metric.update(values=jnp.array([9.0, 9.0]), mask=jnp.zeros(2, bool))
    assert metric.compute().mean == 2 and metric.compute().standard_deviation == 1


def make_metrics():
    return nnx.MultiMetric(accuracy=nnx.Accuracy(), loss=nnx.Average("loss"), spread=nnx.Welford("loss"))


def feed(metrics, i):
    metrics.update(logits=LOGITS[i], labels=LABELS[i], loss=LOGITS[i, :, 0])


def check_all(metrics):
    out = metrics.compute()
    np.testing.assert_allclose(out["accuracy"], (LOGITS.argmax(-1) == LABELS).mean(), rtol=1e-6)
    np.testing.assert_allclose(out["loss"], LOGITS[:, :, 0].mean(), rtol=1e-4)
    np.testing.assert_allclose(out["spread"].standard_deviation, LOGITS[:, :, 0].std(), rtol=1e-5)


def test_multimetric_updates_all_of_its_metrics():
    metrics = make_metrics()
    for i in range(4):
        feed(metrics, i)
    check_all(metrics)
    assert list(metrics.compute()) == ["accuracy", "loss", "spread"]
    metrics.reset()
    assert all(np.isnan(leaf) for leaf in jax.tree.leaves(metrics.compute()))


def test_multimetric_takes_metrics_under_names_of_their_own():
    with pytest.raises(ValueError, match="under the name 'update'"):
        nnx.MultiMetric(update=nnx.Average())
    with pytest.raises(TypeError, match="'loss' is str"):
        nnx.MultiMetric(loss="mean")  # type: ignore[arg-type]


def test_metrics_run_inside_jit_and_are_traced_once():
    @nnx.jit
    def step(metrics, logits, labels):
        metrics.update(logits=logits, labels=labels, loss=logits[:, 0])

    metrics = make_metrics()
    for i in range(4):
        step(metrics, LOGITS[i], LABELS[i])
    assert step.trace_count == 1
    check_all(metrics)
    assert metrics.collections() == {"metrics"}


def test_metrics_of_two_processes_merge():
    first, second = make_metrics(), make_metrics()
    for i in range(3):
        feed(first, i)
    feed(second, 3)
    first.merge(second)
    check_all(first)
    with pytest.raises(ValueError, match="merge takes another Average made with the same arguments, got Welford"):
        nnx.Average().merge(nnx.Welford())
    with pytest.raises(ValueError, match="made with the same arguments"):
        nnx.Average("a").merge(nnx.Average("b"))


class Largest(nnx.Metric):
    """A metric of one's own that says only how two merge."""

    def __init__(self):
        self.value = nnx.MetricState(jnp.array(-jnp.inf))

    def update(self, **values):
        self.value = jnp.maximum(self.value, jnp.max(values["loss"]))

    def compute(self):
        return self.value

    def reset(self):
        self.value = jnp.array(-jnp.inf)

    def merge(self, other):
        self.value = jnp.maximum(self.value, other.value)


def test_metrics_on_the_members_of_an_axis_reduce_to_one():
    def member(logits, labels):
        metrics = nnx.MultiMetric(
            accuracy=nnx.Accuracy(), loss=nnx.Average("loss"), spread=nnx.Welford("loss"), top=Largest()
        )
        metrics.update(logits=logits, labels=labels, loss=logits[:, 0])
        metrics.reduce("devices")
        return metrics.get_state(), metrics.compute()["top"]

    states, top = jax.vmap(member, axis_name="devices")(LOGITS, LABELS)
    metrics = nnx.MultiMetric(
        accuracy=nnx.Accuracy(), loss=nnx.Average("loss"), spread=nnx.Welford("loss"), top=Largest()
    )
    metrics.update_state(jax.tree.map(lambda x: x[2], states))  # any of them
    check_all(metrics)
    np.testing.assert_array_equal(top, np.full(4, LOGITS[:, :, 0].max()))


# Long runs


def doubled(metric, times):
    """The metric after seeing everything so often: each merge with a copy of itself doubles it."""
    for _ in range(times):
        metric.merge(metric.clone())
    return metric


def count_of(metric):
    return sum(int(float(part)) for part in metric.count_pair)


@pytest.mark.parametrize("make", [nnx.Average, nnx.Welford])
def test_counts_are_exact_past_the_range_of_int32(make):
    metric = make()
    metric.update(values=jnp.arange(1000.0))
    doubled(metric, 30)
    metric.update(values=jnp.array([499.5, 499.5, 499.5]))
    metric.update(values=499.5, mask=True)
    assert count_of(metric) == 1000 * 2**30 + 4
    mean = metric.compute() if make is nnx.Average else metric.compute().mean
    assert mean == 499.5


def test_accuracy_counts_every_prediction_past_the_range_of_int32():
    metric = nnx.Accuracy()
    metric.update(logits=jnp.array([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]), labels=jnp.array([1, 0, 0]))
    doubled(metric, 31)
    metric.update(logits=jnp.array([[0.0, 1.0]]), labels=jnp.array([1]))
    assert count_of(metric) == 3 * 2**31 + 1
    assert sum(int(float(part)) for part in metric.total_pair) == 2 * 2**31 + 1


def test_small_batches_still_count_after_a_billion_values():
    metric, spread = nnx.Average(), nnx.Welford()
    for each in (metric, spread):
        each.update(values=np.full(1000, 0.1, np.float32))
        doubled(each, 20)  # 10**9 values, whose sum is 10**8: one more 0.1 is far below its precision
    start = np.float64(np.float32(0.1)) * 1000 * 2**20

    @jax.jit
    def many(state):
        def step(state, _):
            metrics = moduledef.merge(state)
            metrics.update(values=jnp.full(2, 7.0))
            return metrics.get_state(), None

        return jax.lax.scan(step, state, None, length=100_000)[0]

    metrics = nnx.MultiMetric(metric=metric, spread=spread)
    state, moduledef = metrics.partition()
    metrics.update_state(many(state))
    count = 1000 * 2**20 + 200_000
    mean = (start + 200_000 * 7.0) / count
    assert count_of(metric) == count_of(spread) == count
    total = sum(float(part) for part in metric.total_pair)
    assert total == pytest.approx(start + 200_000 * 7.0, rel=1e-12)
    np.testing.assert_allclose(metric.compute(), mean, rtol=1e-7)
    np.testing.assert_allclose(spread.compute().mean, mean, rtol=2e-7)
    share = 200_000 / count
    deviation = np.sqrt(share * (1 - share)) * (7.0 - np.float64(np.float32(0.1)))
    np.testing.assert_allclose(spread.compute().standard_deviation, deviation, rtol=1e-5)


def test_one_large_batch_is_summed_far_beyond_the_precision_of_float32():
    values = np.full(2_000_003, 0.1, np.float32)
    values[::7] = 1e4
    metric = nnx.Average()
    metric.update(values=values)
    exact = values.astype(np.float64).sum()
    assert sum(float(part) for part in metric.total_pair) == pytest.approx(exact, rel=1e-9)
    np.testing.assert_allclose(metric.compute(), exact / values.size, rtol=1e-7)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.bool_])
def test_integers_are_summed_exactly(dtype):
    largest = True if dtype is np.bool_ else np.iinfo(dtype).max
    metric = nnx.Average()
    metric.update(values=np.full(3001, largest, dtype))
    assert sum(int(float(part)) for part in metric.total_pair) == 3001 * int(largest)


def test_infinite_values_are_not_turned_into_nan():
    metric = nnx.Average()
    metric.update(values=jnp.array([1.0, jnp.inf]))
    metric.update(values=2.0)
    assert metric.compute() == jnp.inf


def test_members_with_very_different_counts_reduce_to_one():
    def member(i):
        metrics = nnx.MultiMetric(average=nnx.Average(), spread=nnx.Welford())
        metrics.update(values=1000.0 + jnp.arange(6.0), mask=jnp.arange(6) < i)  # the first member has seen nothing
        metrics.reduce("members")
        return metrics.compute()

    out = jax.vmap(member, axis_name="members")(jnp.array([0, 1, 6, 2]))
    values = 1000 + np.concatenate([np.arange(n) for n in (0, 1, 6, 2)])
    np.testing.assert_allclose(out["average"], np.full(4, values.mean()), rtol=1e-7)
    np.testing.assert_allclose(out["spread"].mean, np.full(4, values.mean()), rtol=1e-7)
    np.testing.assert_allclose(out["spread"].standard_deviation, np.full(4, values.std()), rtol=1e-5)


def test_welford_survives_a_large_first_value():
    metric = nnx.Welford()
    for _ in range(2):
        metric.update(values=jnp.array([3e19]))
    mean, _, deviation = metric.compute()
    assert float(mean) == pytest.approx(3e19) and float(deviation) == 0
    metric.merge(nnx.Welford())
    assert float(metric.compute().standard_deviation) == 0

    def member(x, mask):
        metric = nnx.Welford()
        metric.update(values=x, mask=mask)
        metric.reduce("members")
        return metric.compute()

    found = jax.vmap(member, axis_name="members")(jnp.full(2, 3e19), jnp.array([True, False]))
    assert found.mean.tolist() == pytest.approx([3e19] * 2) and found.standard_deviation.tolist() == [0, 0]
