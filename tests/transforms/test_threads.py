"""Threads: several of them call one jitted function, on models of their own, and each gets its own result."""

import threading

import jax.numpy as jnp
import numpy as np

import nnx


class Scale(nnx.Module):
    def __init__(self, factor):
        self.w = nnx.Param(jnp.ones(()))
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


def run_threads(count, body):
    """Runs `body(number)` in several threads at once and returns what they raised or returned, if anything."""
    found, barrier = [], threading.Barrier(count)

    def run(number):
        barrier.wait()
        try:
            result = body(number)
        except BaseException as error:
            result = error
        if result is not None:
            found.append(result)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_threads_that_alternate_flags_get_the_results_of_their_own_calls():
    f = nnx.jit(lambda x, ctx: x * (2 if ctx.get_flag("double") else 1))
    contexts = [nnx.context(flags={"double": False}), nnx.context(flags={"double": True})]
    x = jnp.ones(())

    def body(number):
        for i in range(3_000):
            which = (i + number) % 2
            if np.asarray(f(x, contexts[which])) != which + 1:
                return f"call {i} of thread {number} got another call's result"

    assert run_threads(4, body) == []


def test_threads_with_models_of_different_structure_do_not_disturb_each_other():
    f = nnx.jit(lambda model, x: model(x))

    def body(number):
        models = [Scale(float(number)), Scale(float(number + 4))]
        for i in range(1_000):
            model = models[i % 2]
            if float(f(model, 1.0)) != model.factor:
                return f"call {i} of thread {number} used another model's factor"

    assert run_threads(4, body) == []


def test_submodules_can_be_replaced_in_one_thread_while_others_call():
    f = nnx.jit(lambda model, x: model.child(x))

    def body(number):
        model = nnx.Dict(child=Scale(1.0))
        for i in range(500):
            if number < 2:
                model.child = Scale(1.0)
            if float(f(model, 2.0)) != 2.0:
                return f"call {i} of thread {number} is wrong"

    assert run_threads(4, body) == []


def test_the_cache_can_be_cleared_in_one_thread_while_others_call():
    f = nnx.jit(lambda model, x: model(x))

    def body(number):
        model = Scale(float(number))
        for i in range(200):
            if number == 0 and i % 50 == 0:
                f.clear_cache()
            if float(f(model, 1.0)) != number:
                return f"call {i} of thread {number} is wrong"

    assert run_threads(3, body) == []


def test_configs_changed_in_place_by_their_own_thread_are_noticed_there_and_nowhere_else():
    f = nnx.jit(lambda model, x: x * model.factor[0])

    def body(number):
        model = Scale([0.0])
        for i in range(300):
            model.factor[0] = float(i % 3 + number)
            if float(f(model, 1.0)) != model.factor[0]:
                return f"call {i} of thread {number} is wrong"

    assert run_threads(4, body) == []
