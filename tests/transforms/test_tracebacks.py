"""An error inside a lifted function shows the user's frames; those of the library are hidden as JAX hides its own."""

import os
import subprocess
import sys
import traceback

import jax
import jax.numpy as jnp
import pytest

import nnx

PACKAGE = os.path.dirname(nnx.__file__) + os.sep


class UserError(Exception):
    pass


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))
        self.count = nnx.Variable(jnp.array(0))
        self.broken = True

    def __call__(self, x):
        return loss_of(self, x)


def loss_of(model, x):
    if model.broken:
        raise UserError("from the user's code")
    return (model.w * x).sum()


def scanned_body(model, carry, x):
    return loss_of(model, x), None


def in_jit(model, x):
    return nnx.jit(loss_of)(model, x)


def in_jit_with_keywords(model, x):
    return nnx.jit(loss_of)(model, x=x)


def in_grad(model, x):
    return nnx.grad(loss_of)(model, x)


def in_scan(model, x):
    return nnx.scan(scanned_body)(model, x.sum(), x)


def in_vmap(model, x):
    return nnx.vmap(loss_of)(model, x)


def in_remat(model, x):
    return nnx.remat(loss_of)(model, x)


def in_vjp(model, x):
    return nnx.vjp(loss_of, model, x)


def in_cond(model, x):
    return nnx.cond(True, loss_of, loss_of, model, x)


def in_while_loop(model, x):
    return nnx.while_loop(lambda value: loss_of(*value) > 0, lambda value: value, (model, x))


def in_eval_shape(model, x):
    return nnx.eval_shape(loss_of, model, x)


def in_a_module(model, x):
    return nnx.jit(model)(x)


def in_a_custom_rule(model, x):
    f = nnx.custom_vjp(loss_of)
    f.defvjp(lambda model, x: (loss_of(model, x), None), lambda residuals, g: (None, None))
    return nnx.grad(f)(model, x)


def in_nested(model, x):
    def step(model, x):
        return nnx.grad(lambda model: nnx.remat(loss_of)(model, x))(model)

    return nnx.jit(step)(model, x)


RUNNERS = [
    in_jit,
    in_jit_with_keywords,
    in_grad,
    in_scan,
    in_vmap,
    in_remat,
    in_vjp,
    in_cond,
    in_while_loop,
    in_eval_shape,
    in_a_module,
    in_a_custom_rule,
    in_nested,
]


def frames_of(error):
    return traceback.extract_tb(error.__traceback__)


def library_frames(error):
    return [frame for frame in frames_of(error) if frame.filename.startswith(PACKAGE)]


def fail(runner, model, x, error=UserError):
    with pytest.raises(error) as caught:
        runner(model, x)
    return caught.value


@pytest.mark.parametrize("runner", RUNNERS, ids=lambda runner: runner.__name__)
def test_an_error_shows_only_the_users_frames(runner):
    error = fail(runner, Model(), jnp.ones(3))
    assert {frame.filename for frame in frames_of(error)} == {__file__}
    names = [frame.name for frame in frames_of(error)]
    assert names[:2] == ["fail", runner.__name__] and names[-1] == "loss_of"
    notes = "".join(error.__notes__)
    assert notes.count("JAX_TRACEBACK_FILTERING=off") == 1


def test_an_error_of_the_library_shows_where_it_was_called():
    def body(model, carry, x):
        model.broken = False
        return carry, None

    def scans(model, x):
        return nnx.scan(body)(model, x.sum(), x)

    error = fail(scans, Model(), jnp.ones(3), ValueError)
    assert "the body changes the static attribute 'broken'" in str(error)
    assert not library_frames(error) and frames_of(error)[-1].name == "scans"


def test_a_note_says_that_frames_were_removed_even_if_jax_was_never_called():
    def differentiates(model, x):
        return nnx.grad(loss_of, argnums=5)(model, x)

    error = fail(differentiates, Model(), jnp.ones(3), ValueError)
    assert not library_frames(error) and frames_of(error)[-1].name == "differentiates"
    assert [note for note in error.__notes__ if "NNX has removed its internal frames" in note] == error.__notes__


@pytest.mark.parametrize("keywords", [False, True])
def test_an_error_in_a_later_trace_is_not_chained_to_the_fast_path(keywords):
    @nnx.jit
    def step(model, x):
        model.count += 1
        if x.shape == (4,):
            raise UserError("only for this shape")

    def runs(model, x):
        return step(model, x=x) if keywords else step(model, x)

    model = Model()
    for _ in range(2):
        runs(model, jnp.ones(3))
    error = fail(runs, model, jnp.ones(4))
    assert error.__cause__ is None and error.__context__ is None
    assert [frame.name for frame in frames_of(error)] == ["fail", "runs", "step"]
    assert model.count == 2


def test_filtering_that_is_off_shows_every_frame():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        error = fail(in_jit, Model(), jnp.ones(3))
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert library_frames(error) and not getattr(error, "__notes__", [])


def test_filtering_can_keep_the_complete_traceback_as_the_cause():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "remove_frames")
    try:
        error = fail(in_nested, Model(), jnp.ones(3))
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert not library_frames(error)
    causes, cause = [], error.__cause__
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__
    assert any(map(library_frames, causes))


def test_frames_can_be_marked_as_hidden_for_ipython():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "tracebackhide")
    try:
        error = fail(in_grad, Model(), jnp.ones(3))
    finally:
        jax.config.update("jax_traceback_filtering", before)
    entry, internal = error.__traceback__, []
    while entry is not None:
        if entry.tb_frame.f_code.co_filename.startswith(PACKAGE):
            internal.append(entry.tb_frame.f_locals.get("__tracebackhide__", False))
        entry = entry.tb_next
    assert internal and all(internal)


def test_a_program_prints_only_its_own_lines(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import nnx, jax.numpy as jnp\n"
        "@nnx.jit\n"
        "def step(model):\n"
        "    return nnx.grad(lambda model: model.w.sum() * (1 / 0))(model)\n"
        "step(nnx.Dict(w=nnx.Param(jnp.ones(3))))\n"
    )

    def lines(**environment):
        command = [sys.executable, str(program)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
        return [line for line in done.stderr.splitlines() if line.startswith("  File")]

    assert [line.split('"')[1] for line in lines()] == [str(program)] * 3
    assert any(PACKAGE in line for line in lines(JAX_TRACEBACK_FILTERING="off"))
