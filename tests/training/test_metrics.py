"""Metrics, against numpy."""

from fractions import Fraction

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
    metric.update(loss=jnp.array([[1.0, jnp.nan], [3.0, 8.0]]), mask=jnp.array([[True, False], [True, False]]))
    assert metric.compute() == 2.0 and metric.count == 2
    metric.update(loss=jnp.array([[1.0, 2.0], [3.0, 100.0]]), mask=jnp.array([True, False]))  # broadcast
    assert metric.compute() == 2.0 and metric.count == 4


UPDATES = {
    "Average": (nnx.Average, {"values": jnp.ones(2)}),
    "Accuracy": (nnx.Accuracy, {"logits": jnp.zeros((2, 3)), "labels": jnp.zeros(2, int)}),
    "Welford": (nnx.Welford, {"values": jnp.ones(2)}),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_mask_that_is_not_boolean_is_refused_and_weights_are_shown(name):
    make, batch = UPDATES[name]
    for mask in (jnp.array([1.0, 0.5]), np.array([1, 0]), 1):
        with pytest.raises(ValueError, match=rf"{name}.update expected a boolean mask.*weights=(.|\n)*mask.astype"):
            make().update(**batch, mask=mask)


def test_values_cannot_be_named_like_other_arguments_of_update():
    for name in ("mask", "weights"):
        with pytest.raises(ValueError, match=rf"Average\('{name}'\): `update` takes '{name}' for what counts"):
            nnx.Average(name)


@pytest.mark.parametrize("metric", [nnx.Average(), nnx.Welford()], ids=["Average", "Welford"])
def test_complex_weights_are_refused(metric):
    with pytest.raises(ValueError, match=r"update expected real weights, got complex64"):
        metric.update(values=jnp.ones(2), weights=jnp.ones(2, jnp.complex64))


def weighted(values, weights):
    """The sum of the weights, the weighted sum and the standard deviation, with Python's exact fractions."""
    values, weights = ([Fraction(float(v)) for v in array] for array in (values, weights))
    count, total = sum(weights), sum(v * w for v, w in zip(values, weights))
    var = sum((v - total / count) ** 2 * w for v, w in zip(values, weights)) / count
    return count, total, float(var) ** 0.5


def share(pair, exact):
    """A pair of float32 numbers over the exact sum."""
    return float(sum(map(Fraction, pair.tolist())) / exact)


@pytest.mark.parametrize("scale", [1, 1e-4])
def test_weighted_metrics_agree_with_exact_fractions(scale):
    values = rng.normal(100, 1, 40).astype(np.float32)
    weights, mask = (scale * rng.random(40)).astype(np.float32), rng.random(40) < 0.7
    count, total, deviation = weighted(values[mask], weights[mask])
    metrics = nnx.MultiMetric(average=nnx.Average(), spread=nnx.Welford())
    values = np.where(mask, values, np.nan)
    for part in (slice(0, 20), slice(20, 40)):
        metrics.update(values=values[part], weights=weights[part], mask=mask[part])
    assert share(metrics.average.total_pair, total) == pytest.approx(1, rel=1e-13)
    assert share(metrics.average.count_pair, count) == pytest.approx(1, rel=1e-13)
    mean, _, spread = metrics.spread.compute()
    for found in (mean, metrics.average.compute()):
        assert float(found) == pytest.approx(float(total / count), rel=2e-7)
    assert float(spread) == pytest.approx(deviation, rel=1e-5)


def test_a_value_of_weight_two_counts_like_two_values_and_one_of_weight_zero_not_at_all():
    logits, labels = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), np.array([0, 0, 1])
    once, twice = nnx.Accuracy(), nnx.Accuracy()
    once.update(logits=logits, labels=labels, weights=np.array([2, 1, 0]))
    twice.update(logits=logits[[0, 0, 1]], labels=labels[[0, 0, 1]])
    assert once.compute() == twice.compute() == np.float32(2 / 3)
    spread = nnx.Welford()
    spread.update(values=jnp.array([1.0, 4.0, jnp.nan]), weights=jnp.array([2.0, 1.0, 0.0]))
    # The quotients of a GPU are off by up to two roundings.
    np.testing.assert_allclose(spread.compute(), (2.0, np.sqrt(2 / 3), np.sqrt(2)), rtol=2e-7)


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


def test_accuracy_of_wrong_shapes_raises_with_the_expected_ones():
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


def test_fully_masked_batch_changes_nothing():
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
    assert mean == pytest.approx(499.5, rel=2e-7)


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


def test_weighted_sums_are_exact_after_a_billion_values():
    values, weights = np.full(1000, 0.1, np.float32), np.full(1000, 0.3, np.float32)
    values[0], weights[0] = 7.0, 1e-3
    metric = nnx.Average()
    metric.update(values=values, weights=weights)
    doubled(metric, 20)
    metric.update(values=7.0, weights=1e-3)  # far below the precision of a float32 sum
    count, total, _ = weighted(values, weights)
    one = Fraction(float(np.float32(1e-3)))
    assert share(metric.count_pair, count * 2**20 + one) == pytest.approx(1, rel=1e-12)
    assert share(metric.total_pair, total * 2**20 + 7 * one) == pytest.approx(1, rel=1e-12)


def test_weighted_integers_are_summed_exactly():
    values, weights = rng.integers(0, 2**31, 100), rng.integers(0, 100, 100)
    metric = nnx.Average()
    metric.update(values=values.astype(np.int32), weights=weights.astype(np.int32))
    assert share(metric.total_pair, int((values * weights).sum())) == 1


def test_weighted_values_may_be_as_large_as_float32_allows():
    metric = nnx.Average()
    metric.update(values=np.array([3.4028e38, 1], np.float32), weights=np.array([0.5, 0.5], np.float32))
    assert float(metric.compute()) == pytest.approx(1.7014e38)
    metric.update(values=np.inf, weights=0.5)
    assert metric.compute() == np.inf


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
        seen = jnp.arange(6) < i  # the first member has seen nothing
        metrics.update(values=1000.0 + jnp.arange(6.0), mask=seen, weights=0.1 * (i + 1))
        metrics.reduce("members")
        return metrics.compute()

    out = jax.vmap(member, axis_name="members")(jnp.array([0, 1, 6, 2]))
    values = 1000 + np.concatenate([np.arange(n) for n in (0, 1, 6, 2)])
    weights = np.repeat([1, 2, 7, 3], (0, 1, 6, 2))
    mean = np.average(values, weights=weights)
    deviation = np.sqrt(np.average((values - mean) ** 2, weights=weights))
    np.testing.assert_allclose(out["average"], np.full(4, mean), rtol=2e-7)
    np.testing.assert_allclose(out["spread"].mean, np.full(4, mean), rtol=2e-7)
    np.testing.assert_allclose(out["spread"].standard_deviation, np.full(4, deviation), rtol=1e-5)


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


@pytest.mark.parametrize("argument", ["mask", "weights"])
def test_what_does_not_broadcast_to_the_values_is_named(argument):
    with pytest.raises(
        ValueError, match=rf"Average.update: {argument} of the shape \[3\] cannot be broadcast .* \[3, 2\]"
    ):
        nnx.Average("loss").update(loss=jnp.ones((3, 2)), **{argument: jnp.ones(3, bool)})
