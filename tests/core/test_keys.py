"""No key is ever produced twice, however Contexts are forked, split, copied and pickled."""

import pickle

import jax
from hypothesis import given, settings
from hypothesis import strategies as st

import nnx


@given(
    st.lists(
        st.tuples(st.sampled_from(["draw", "fork", "merge", "copy", "pickle", "split"]), st.integers(0, 20)),
        max_size=25,
    ),
    st.integers(0, 3),
)
@settings(max_examples=50)
def test_no_key_is_ever_produced_twice(operations, seed):
    contexts = [nnx.context(seed)]
    keys = []

    def draw(ctx):
        keys.append(tuple(jax.random.key_data(ctx.make_rng("params")).tolist()))

    for what, which in operations:
        ctx = contexts[which % len(contexts)]
        match what:
            case "draw":
                draw(ctx)
            case "fork":
                contexts.append(ctx.fork())
            case "merge":
                contexts.append(ctx.partition().merge())
            case "copy":
                contexts.append(ctx.copy())
            case "split":
                split, ctxdef = ctx.split(2)
                contexts += [ctxdef.merge({"params": key}) for key in split["params"]]
            case "pickle":
                contexts.append(pickle.loads(pickle.dumps(ctx.fork())))
    for ctx in contexts:
        draw(ctx)
    assert len(set(keys)) == len(keys)
