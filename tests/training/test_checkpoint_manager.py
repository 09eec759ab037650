"""CheckpointManager: steps, the best ones, the background, and resuming."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx


def make_model(value: float = 0.0):
    return nnx.Dict(w=nnx.Param(jnp.full((3,), float(value))))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_last_are_kept_and_the_latest_is_loaded(tmp_path, asynchronous):
    with nnx.CheckpointManager(tmp_path / "run", keep_last=2, asynchronous=asynchronous) as manager:
        assert manager.latest_step() is None and manager.resume(make_model()) is None
        for step in range(5):
            manager.save(step, make_model(step))
    assert manager.steps() == [3, 4]
    model = make_model()
    assert manager.load(model) is model and (model.w == 4).all()
    assert (manager.load(make_model(), step=3).w == 3).all()
    assert nnx.CheckpointManager(tmp_path / "run").resume(model) == 4  # another process, later
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["3", "4"]


def test_the_best_are_kept_beside_the_last(tmp_path):
    losses = {0: 3.0, 1: 1.0, 2: float("nan"), 3: 2.0, 4: 5.0}
    manager = nnx.CheckpointManager(tmp_path, keep_last=1, keep_best=2)
    for step, loss in losses.items():
        manager.save(step, make_model(step), metrics={"loss": jnp.array(loss)})
    manager.wait()
    assert manager.steps() == [1, 3, 4] and manager.best_step() == 1
    assert manager.metrics(3) == {"loss": 2.0}
    largest = nnx.CheckpointManager(tmp_path, keep_best=1, best_mode="max")
    assert largest.best_step() == 4
    with pytest.raises(ValueError, match=r"keeps the best by metrics\['loss'\], but save got the metrics: accuracy"):
        manager.save(7, make_model(), metrics={"accuracy": 1.0})


def test_what_is_saved_is_what_it_was_when_save_was_called(tmp_path):
    manager = nnx.CheckpointManager(tmp_path, keep_last=None)
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)
    x, counts = jnp.zeros((1000, 100)), np.zeros(100_000)
    for step in range(4):
        manager.save(step, {"x": x, "counts": counts})
        x = donate(x)
        counts += 1
    manager.wait()
    for step in range(4):
        back = manager.load({"x": x, "counts": counts}, step)
        assert (back["x"] == step).all() and (back["counts"] == step).all()


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path, monkeypatch):
    manager = nnx.CheckpointManager(tmp_path)
    manager.save(0, make_model(1.0))
    manager.wait()

    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", no_space)
        manager.save(1, make_model(2.0))
        with pytest.raises(nnx.CheckpointError, match="Could not save to .*No space left on device.*are intact"):
            manager.wait()
    assert manager.steps() == [0] and (manager.load(make_model()).w == 1).all()
    manager.save(2, make_model(3.0))  # and goes on
    manager.wait()
    assert manager.latest_step() == 2


ENDS_AT_ONCE = """
import sys, jax.numpy as jnp, nnx
nnx.CheckpointManager(sys.argv[1]).save(0, {"x": jnp.ones(1000)})
"""


def test_a_program_that_ends_finishes_its_save_or_says_how(tmp_path):
    command = [sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    finished = nnx.CheckpointManager(tmp_path / "run").steps() == [0]
    assert finished or "End with manager.wait()" in done.stderr, done.stderr


def test_steps_that_are_not_there_or_there_already_are_named(tmp_path):
    manager = nnx.CheckpointManager(tmp_path)
    with pytest.raises(FileNotFoundError, match="no finished checkpoint in"):
        manager.load(make_model())
    manager.save(3, make_model(1.0))
    with pytest.raises(FileNotFoundError, match="no finished checkpoint of step 5 .*the steps there are: 3"):
        manager.load(make_model(), step=5)
    with pytest.raises(ValueError, match="Step 3 was saved to .* before"):
        manager.save(3, make_model())
    manager.save(3, make_model(2.0), overwrite=True)
    assert (manager.load(make_model()).w == 2).all()
    for step in (-1, 1.0, True):
        with pytest.raises(ValueError, match="A step is an int from 0 on"):
            manager.save(step, make_model())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep_last >= 1, got 0"):
        nnx.CheckpointManager(tmp_path, keep_last=0)


def test_an_unfinished_step_is_no_step(tmp_path):
    manager = nnx.CheckpointManager(tmp_path)
    manager.save(0, make_model(1.0))
    manager.wait()
    (tmp_path / "1" / "nnx-data-0.orbax-checkpoint-tmp-3").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    assert manager.steps() == [0] and manager.resume(make_model()) == 0
    manager.save(1, make_model(2.0))  # the remains are no obstacle
    assert (manager.load(make_model()).w == 2).all()


def test_resume_fills_in_place_only(tmp_path):
    manager = nnx.CheckpointManager(tmp_path)
    state = make_model(1.0).get_state()
    manager.save(0, state)
    with pytest.raises(nnx.CheckpointError, match="State cannot change: put it into a dict"):
        manager.resume(state)
    target = {"state": make_model().get_state()}
    manager.save(1, {"state": state})
    assert manager.resume(target) == 1 and target["state"] == state


def test_training_resumes_where_it_was(tmp_path):
    data = np.random.default_rng(0).normal(size=(20, 4, 3)).astype(np.float32)

    @nnx.jit
    def train_step(model, optimizer, x, ctx):
        def loss_fn(model, ctx):
            noise = jax.random.normal(ctx.make_rng("noise"), x.shape)
            return jnp.mean(((x + noise) * model.w - x) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model, ctx)
        optimizer.update(grads)
        return loss

    def run(manager, until):
        model = make_model(0.5)
        things = {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(0.1)), "ctx": nnx.context(noise=1)}
        start = manager.resume(things) if manager else None
        losses = {}
        for step in range(0 if start is None else start + 1, until):
            losses[step] = float(train_step(model, things["optimizer"], data[step], things["ctx"]))
            if manager:
                manager.save(step, things)
        return losses

    whole = run(None, 12)
    with nnx.CheckpointManager(tmp_path) as manager:
        first, second = run(manager, 5), run(manager, 12)
    assert list(second) == list(range(5, 12))
    assert {**first, **second} == whole
