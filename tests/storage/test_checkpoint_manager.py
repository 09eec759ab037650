"""CheckpointManager: steps, the best ones, the background, and resuming."""

import os
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx
from nnx.storage.checkpoints import manager as manager_module
from nnx.storage.checkpoints import saving
from nnx.storage.checkpoints.steps import Steps


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


def test_later_changes_do_not_reach_a_running_save(tmp_path):
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


def test_a_warning_names_the_saves_that_make_every_step_copy_what_it_donates(tmp_path, monkeypatch):
    write, stepped = saving.write_pieces, threading.Event()
    monkeypatch.setattr(saving, "write_pieces", lambda *args: stepped.wait() and write(*args))

    @nnx.jit(donate_argnames="model")
    def step(model):
        model.w += 1

    model = make_model()
    with (
        nnx.CheckpointManager(tmp_path, keep_last=None) as manager,
        pytest.warns(UserWarning, match="CheckpointManager"),
    ):
        for number in range(4):
            stepped.clear()
            manager.save(number, model)
            step(model)
            stepped.set()
            manager.wait()
    assert [nnx.load(tmp_path / str(number))["w"][0] for number in range(4)] == [0, 1, 2, 3]


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


FORKS = """
import os, pathlib, sys
import jax.numpy as jnp, nnx, tensorstore
from nnx.storage.checkpoints import saving
directory = pathlib.Path(sys.argv[1])
children = {}
for mode in sys.argv[2:]:
    children[os.fork()] = mode
    if 0 in children:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(directory / f"{mode}.{name}", os.O_CREAT | os.O_WRONLY), number)
        break
else:
    for child, mode in children.items():
        (directory / f"{mode}.code").write_text(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    os._exit(0)
"""


def run_each(program: str, directory, *modes: str) -> dict[str, tuple[int, str, str]]:
    """Runs a program in a process for each mode, all forked from one that has made the imports.

    Returns:
        The exit code of each process, and what it wrote to standard output and standard error, by mode.
    """
    done = subprocess.run([sys.executable, "-c", FORKS + program, str(directory), *modes], timeout=250)
    assert done.returncode == 0
    texts = {mode: [(directory / f"{mode}.{kind}").read_text() for kind in ("code", "out", "err")] for mode in modes}
    return {mode: (int(code), out, err) for mode, (code, out, err) in texts.items()}


ENDS_AT_ONCE = """
if mode == "cannot":
    saving.write_pieces = lambda *args: 1 / 0
nnx.CheckpointManager(directory / mode).save(0, {"x": jnp.ones(1000)})
"""


def test_a_program_that_ends_finishes_its_save_or_says_why_it_could_not(tmp_path):
    found = run_each(ENDS_AT_ONCE, tmp_path, "can", "cannot")
    assert nnx.CheckpointManager(tmp_path / "can").steps() == [0] and found["can"] == (0, "", "")
    assert "could not be completed: division by zero\nEnd with manager.wait()" in found["cannot"][2]


def test_steps_that_are_not_there_or_there_already_are_named(tmp_path):
    manager = nnx.CheckpointManager(tmp_path)
    with pytest.raises(FileNotFoundError, match="no finished checkpoint in"):
        manager.load(make_model())
    manager.save(3, make_model(1.0))
    with pytest.raises(FileNotFoundError, match="no finished checkpoint of step 5 .*the available steps are: 3"):
        manager.load(make_model(), step=5)
    with pytest.raises(ValueError, match="Step 3 was saved to .* before"):
        manager.save(3, make_model())
    manager.save(3, make_model(2.0), overwrite=True)
    assert (manager.load(make_model()).w == 2).all()
    for step in (-1, 1.0, True):
        with pytest.raises(ValueError, match="A step is an integer, 0 or larger"):
            manager.save(step, make_model())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep_last >= 1, got 0"):
        nnx.CheckpointManager(tmp_path, keep_last=0)


def test_unfinished_step_does_not_count(tmp_path):
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
    counts = np.zeros(3)
    with pytest.raises(nnx.CheckpointError, match="tuple cannot change"):
        manager.resume(({"x": 1}, counts))  # refused before anything is filled
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


# Going back


def test_a_lower_step_is_refused_and_what_was_just_saved_is_kept(tmp_path):
    manager = nnx.CheckpointManager(tmp_path, keep_last=2)
    for step in (10, 11, 12):
        manager.save(step, make_model(step))
    with pytest.raises(ValueError, match="Step 5 comes before step 12(.|\n)*overwrite=True.*removes the steps after 5"):
        manager.save(5, make_model(5))
    assert manager.steps() == [11, 12]
    manager.save(5, make_model(5), overwrite=True)
    manager.wait()
    assert manager.steps() == [5] and (manager.load(make_model()).w == 5).all()
    manager.save(6, make_model(6))
    manager.wait()
    assert manager.steps() == [5, 6]


def test_overwriting_a_step_removes_the_later_ones(tmp_path):
    manager = nnx.CheckpointManager(tmp_path, keep_last=None, asynchronous=False)
    for step in range(5):
        manager.save(step, make_model(step))
    manager.save(2, make_model(20), overwrite=True)
    assert manager.steps() == [0, 1, 2] and (manager.load(make_model()).w == 20).all()
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_while_going_back_leaves_the_old_run_or_the_new_one(tmp_path, monkeypatch, when):
    manager = nnx.CheckpointManager(tmp_path, keep_last=None, asynchronous=False)
    for step in range(5):
        manager.save(step, make_model(step))

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # "before" the new step is finished, or "after" it is but before the later ones are removed
        patch.setattr(saving.Saving if when == "before" else Steps, "_commit" if when == "before" else "tidy", killed)
        with pytest.raises(KeyboardInterrupt):
            manager.save(2, make_model(20), overwrite=True)
    again = nnx.CheckpointManager(tmp_path, keep_last=None)
    assert again.steps() == ([0, 1, 2, 3, 4] if when == "before" else [0, 1, 2])
    assert (again.load(make_model(), 2).w == (2 if when == "before" else 20)).all()
    again.save(again.latest_step() + 1, make_model(9))
    again.wait()
    assert again.steps() == ([0, 1, 2, 3, 4, 5] if when == "before" else [0, 1, 2, 3])


def test_integers_of_numpy_and_jax_are_steps(tmp_path):
    manager = nnx.CheckpointManager(tmp_path)
    for step in (np.int32(1), jnp.array(2), np.array(3), np.uint8(4)):
        manager.save(step, make_model())
    manager.wait()
    assert manager.steps() == [2, 3, 4] and manager.load(make_model(), np.int64(3)) is not None
    for step in (np.float32(5), jnp.array(True), np.True_, "5", None, jnp.array([5])):
        with pytest.raises(ValueError, match="A step is an integer, 0 or larger"):
            manager.save(step, make_model())


# Damage


def test_resume_falls_back_to_the_newest_intact_step_and_goes_on_from_there(tmp_path):
    manager = nnx.CheckpointManager(tmp_path, keep_last=None, asynchronous=False)
    for step in (1, 2, 3):
        manager.save(step, make_model(step))
    for step in (2, 3):
        file = next((tmp_path / str(step)).glob("nnx-data-*/pack-0/c.0"))
        file.write_bytes(bytes(file.stat().st_size))
    model = make_model()
    again = nnx.CheckpointManager(tmp_path, keep_last=None, asynchronous=False)
    with pytest.warns(
        UserWarning, match="Resumed from step 1(.|\n)*- step 3: .*differs from what was saved(.|\n)*- step 2: "
    ):
        assert again.resume(model) == 1
    assert (model.w == 1).all() and again.latest_step() == 1
    again.save(2, make_model(22))
    assert again.steps() == [1, 2] and sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_resume_does_not_pass_over_a_checkpoint_that_does_not_fit(tmp_path):
    manager = nnx.CheckpointManager(tmp_path)
    manager.save(1, make_model(1))
    manager.save(2, nnx.Dict(other=nnx.Param(jnp.ones(2))))
    with pytest.raises(nnx.CheckpointError, match="does not fit the target"):
        manager.resume(make_model())


def test_if_every_step_is_damaged_the_error_is_that_of_the_latest(tmp_path):
    manager = nnx.CheckpointManager(tmp_path, asynchronous=False)
    for step in (1, 2):
        manager.save(step, make_model())
        (tmp_path / str(step) / "manifest.json").write_text("{}")
    with pytest.raises(nnx.CheckpointError, match=f"{tmp_path}/2 is damaged"):
        manager.resume(make_model())


# When to save


def test_only_every_nth_step_is_saved_unless_forced(tmp_path):
    manager = nnx.CheckpointManager(tmp_path, every_steps=3, keep_last=None)
    saved = [step for step in range(8) if manager.save(step, make_model(step))]
    assert saved == [0, 3, 6] and manager.save(8, make_model(8), force=True)
    manager.wait()
    assert manager.steps() == [0, 3, 6, 8]


def test_steps_are_saved_after_so_many_minutes(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("nnx.storage.checkpoints.manager.time.monotonic", lambda: now[0])
    manager = nnx.CheckpointManager(tmp_path, every_minutes=2, keep_last=None, asynchronous=False)
    saved = []
    for step in range(6):
        now[0] += 50
        if manager.save(step, make_model(step)):
            saved.append(step)
    assert saved == [2, 5]
    both = nnx.CheckpointManager(tmp_path / "both", every_steps=2, every_minutes=0.01, asynchronous=False)
    now[0] += 50
    assert both.save(1, make_model()) and both.save(2, make_model()) and not both.save(3, make_model())


@pytest.mark.parametrize("options", [{"every_steps": 0}, {"every_minutes": 0}, {"every_minutes": float("nan")}])
def test_a_policy_that_means_nothing_is_refused(tmp_path, options):
    with pytest.raises(ValueError, match="every_(steps is at least 1|minutes is more than 0), got"):
        nnx.CheckpointManager(tmp_path, **options)


# SIGTERM

TERMINATED = """
import signal, time
slow = saving.write_pieces
def write_slowly(*args):
    time.sleep(0.5)
    return slow(*args)
if mode != "handled":
    saving.write_pieces = write_slowly
else:
    signal.signal(signal.SIGTERM, lambda *args: (print("mine"), sys.exit(7)))
    def write_and_get_signal(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return slow(*args)
    saving.write_pieces = write_and_get_signal
manager = nnx.CheckpointManager(
    directory / mode, every_steps=5, save_on_sigterm=mode == "once more", asynchronous=mode != "handled"
)
for step in range(100):
    manager.save(step, {"x": jnp.full(3, step)})
    if step == 7:
        os.kill(os.getpid(), signal.SIGTERM)
    if step == 5 and mode == "finish":
        os.kill(os.getpid(), signal.SIGTERM)
print("was not ended")
"""


def test_sigterm_finishes_the_save_under_way(tmp_path):
    expected = {"finish": (-15, [0, 5]), "once more": (-15, [0, 5, 8]), "handled": (7, [0])}
    found = run_each(TERMINATED, tmp_path, *expected)
    for mode, (code, steps) in expected.items():
        assert found[mode][0] == code, found[mode]
        assert ("mine" in found[mode][1]) == (code == 7)
        assert nnx.CheckpointManager(tmp_path / mode).steps() == steps
        assert nnx.load(tmp_path / mode / str(steps[-1]))["x"].tolist() == [steps[-1]] * 3


def test_the_handler_of_sigterm_is_given_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with nnx.CheckpointManager(tmp_path, save_on_sigterm=True) as manager:
        manager.save(0, make_model())
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    other = nnx.CheckpointManager(tmp_path)
    other.save(1, make_model())
    other.wait()
    assert signal.getsignal(signal.SIGTERM) is before


# Other jobs


def test_a_job_that_saves_to_the_directory_of_another_one_is_refused_or_refuses_it(tmp_path, monkeypatch):
    manager, other = nnx.CheckpointManager(tmp_path), nnx.CheckpointManager(tmp_path, asynchronous=False)
    manager.save(0, make_model())
    manager.wait()
    write, calls = saving.write_pieces, []

    def other_saves_first(*args):
        if not calls:
            calls.append(1)
            other.save(1, make_model(5))
        return write(*args)

    monkeypatch.setattr(saving, "write_pieces", other_saves_first)
    manager.save(1, make_model(1))
    with pytest.raises(nnx.CheckpointError, match="another job has saved there"):
        manager.wait()
    assert manager.steps() == [0, 1] and (manager.load(make_model()).w == 5).all()


def test_the_rest_of_a_killed_save_is_removed_by_the_next_one(tmp_path, monkeypatch):
    manager = nnx.CheckpointManager(tmp_path, asynchronous=False)
    manager.save(0, make_model())

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saving.Saving, "_commit", killed)
        patch.setattr(saving.Saving, "_remove_unfinished", lambda self: None)
        with pytest.raises(KeyboardInterrupt):
            manager.save(7, make_model(7))
    assert len(os.listdir(tmp_path / "7")) == 2 and nnx.CheckpointManager(tmp_path).steps() == [0]
    manager.save(3, make_model(3))
    assert sorted(os.listdir(tmp_path)) == ["0", "3"]


def test_a_manager_that_only_reads_refuses_to_save(tmp_path):
    with nnx.CheckpointManager(tmp_path / "run") as manager:
        manager.save(4, make_model(4))
    reader = nnx.CheckpointManager(tmp_path / "run", read_only=True)
    with pytest.raises(ValueError, match="cannot save: it was made with read_only=True"):
        reader.save(5, make_model())
    model = make_model()
    assert reader.resume(model) == 4 and (model.w == 4).all()


# What is kept


def test_steps_of_a_period_are_kept_for_good(tmp_path):
    with nnx.CheckpointManager(tmp_path, keep_last=2, keep_period=4) as manager:
        for step in range(11):
            manager.save(step, make_model(step))
    assert manager.steps() == [0, 4, 8, 9, 10] and sorted(map(int, os.listdir(tmp_path))) == manager.steps()
    with pytest.raises(ValueError, match="keep_period is at least 1, got 0"):
        nnx.CheckpointManager(tmp_path, keep_period=0)


def test_metadata_is_stored_with_a_step(tmp_path):
    manager = nnx.CheckpointManager(tmp_path, asynchronous=False)
    metadata = {"tokens": 10**12, "data": {"name": "web", "weights": [0.5, None]}}
    manager.save(1, make_model(), metadata=metadata, metrics={"loss": 2})
    manager.save(2, make_model())
    assert manager.metadata(1) == metadata and manager.metrics(1) == {"loss": 2.0} and manager.metadata(2) == {}
    with pytest.raises(TypeError, match="JSON, which cannot hold .*arrays belong to the saved object"):
        manager.save(3, make_model(), metadata={"x": jnp.ones(2)})
    assert manager.steps() == [1, 2]


def test_old_steps_are_removed_in_the_background(tmp_path, monkeypatch):
    removed = threading.Event()
    remove = manager_module.remove

    def slowly(rests):
        removed.wait(60)
        remove(rests)

    monkeypatch.setattr(manager_module, "remove", slowly)
    manager = nnx.CheckpointManager(tmp_path, keep_last=1)
    for step in range(3):  # no save waits for the removal of an old step, which does not count any more
        manager.save(step, make_model(step))
    assert (manager.load(make_model()).w == 2).all() and manager.steps() == [2]
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]
    removed.set()
    manager.wait()
    assert os.listdir(tmp_path) == ["2"]
