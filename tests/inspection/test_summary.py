"""nnx.summary: the table of a model, computed without allocating or changing anything."""

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import nnx

ROOT = Path(__file__).parent.parent.parent


class Block(nnx.Module):
    def __init__(self, features, *, ctx):
        self.linear = nnx.Linear(features, features, ctx=ctx)
        self.norm = nnx.BatchNorm(features, ctx=ctx)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, *, ctx):
        return self.dropout(self.norm(self.linear(x), ctx=ctx), ctx=ctx)


class TwoHeads(nnx.Module):
    def __init__(self, features=4, *, ctx):
        self.blocks = [Block(features, ctx=ctx), Block(features, ctx=ctx)]
        self.heads = {"mean": nnx.Linear(features, 2, ctx=ctx), "scale": nnx.Linear(features, 1, ctx=ctx)}
        self.table = jnp.zeros((3,))

    def __call__(self, x, *, ctx):
        for block in self.blocks:
            x = block(x, ctx=ctx)
        return {name: head(x) for name, head in self.heads.items()}


def linear(din=3, dout=2):
    return nnx.Linear(din, dout, ctx=nnx.context(0))


def running_context():
    return nnx.context(0, dropout=1, flags={"deterministic": False, "use_running_average": False})


def rows_of(summary):
    return {row.path: row for row in summary.rows}


def test_the_text_is_a_table_with_totals_per_collection():
    model = nnx.Sequence([linear(2, 3), jax.nn.relu])
    assert str(nnx.summary(model, jnp.ones((4, 2)))) == (
        "path    layer     output        parameters  bytes  FLOPs\n"
        "--------------------------------------------------------\n"
        "(root)  Sequence  float32[4,3]           9   36 B     72\n"
        "0       Linear    float32[4,3]           9   36 B     60\n"
        "\n"
        "collection  arrays  elements  bytes\n"
        "-----------------------------------\n"
        "params           2         9   36 B\n"
        "total            2         9   36 B"
    )


def test_every_module_has_a_row_with_its_contents_and_output():
    summary = nnx.summary(TwoHeads(ctx=nnx.context(0)), jnp.ones((5, 4)), ctx=running_context())
    rows = rows_of(summary)
    assert list(rows)[:3] == ["", "blocks", "blocks/0"]
    assert rows[""].layer == "TwoHeads"
    assert rows[""].output == "{mean: float32[5,2], scale: float32[5,1]}"
    assert rows["blocks/1/linear"].output == "float32[5,4]"
    assert rows["blocks/1/linear"].parameters == 4 * 4 + 4
    assert rows["blocks/0"].parameters == 20 + 8  # what lies below is included
    assert rows["blocks/0"].bytes == 4 * (20 + 8 + 8)  # and so are running statistics
    assert rows["blocks"].output is None and rows["blocks"].flops is None  # never called itself


def test_each_collection_has_its_own_total():
    summary = nnx.summary(TwoHeads(ctx=nnx.context(0)))
    assert summary.collections["params"] == (12, 56 + 10 + 5, 4 * 71)
    assert summary.collections["batch_stats"] == (4, 16, 64)
    assert summary.collections["(none)"] == (1, 3, 12)
    assert (summary.parameters, summary.bytes) == (71, 4 * 90)
    assert "total            17        90  360 B" in str(summary)


def test_keys_and_plain_numbers_are_counted_as_jax_stores_them():
    class Odd(nnx.Module):
        def __init__(self):
            self.key = jax.random.key(0)
            self.calls = nnx.var("calls", 0)

    summary = nnx.summary(Odd())
    assert summary.collections == {"(none)": (1, 1, 8), "calls": (1, 1, 4)}
    assert summary.parameters == 0


def test_without_inputs_there_are_no_outputs_and_no_flops():
    summary = nnx.summary(TwoHeads(ctx=nnx.context(0)))
    assert summary.flops is None
    assert str(summary).splitlines()[0].split() == ["path", "layer", "parameters", "bytes"]


def test_a_shape_in_place_of_an_input_is_noted():
    with pytest.raises(TypeError) as raised:
        nnx.summary(nnx.Linear(4, 4, ctx=nnx.context(0)), (1, 4))
    assert "jax.ShapeDtypeStruct((1, 4), jnp.float32)" in "".join(raised.value.__notes__)


def test_a_model_whose_mode_nobody_has_set_can_be_looked_at():
    model = nnx.Sequence([nnx.Linear(4, 4, ctx=nnx.context(0)), nnx.BatchNorm(4), nnx.Dropout(0.5)])
    assert "Dropout" in str(nnx.summary(model, jnp.ones((2, 4))))
    assert model[2].deterministic is None
    flagged = nnx.context(0, flags={"deterministic": False, "use_running_average": False, "update_stats": True})
    with pytest.raises(ValueError, match="dropout"):  # whoever chooses training has to bring a key
        nnx.summary(model, jnp.ones((2, 4)), ctx=flagged)


def test_a_shared_module_is_counted_once_and_works_as_often_as_it_is_called():
    class Tied(nnx.Module):
        def __init__(self):
            self.first = linear(3, 3)
            self.second = self.first

        def __call__(self, x):
            return self.second(self.first(x))

    summary = nnx.summary(Tied(), jnp.ones((1, 3)))
    assert [row.path for row in summary.rows] == ["", "first"]
    assert summary.parameters == 12
    assert summary.rows[1].flops == summary.flops == 2 * (2 * 9 + 3)


def test_a_shared_variable_is_counted_once():
    class Tied(nnx.Module):
        def __init__(self):
            table = nnx.Ref(nnx.Param(jnp.ones((5, 2))))
            self.embed, self.out = nnx.Dict(w=table), nnx.Dict(w=table)

    assert nnx.summary(Tied()).parameters == nnx.count_params(Tied()) == 10


def test_a_module_called_with_different_shapes_shows_them_all():
    class Twice(nnx.Module):
        def __init__(self):
            self.linear = linear()

        def __call__(self, x):
            return self.linear(x), self.linear(x[0])

    rows = rows_of(nnx.summary(Twice(), jnp.ones((4, 3))))
    assert rows["linear"].output == "float32[4,2] | float32[2]"


# FLOPs


def xla_flops(model, x):
    state, moduledef = model.partition()
    with jax.default_device(jax.devices("cpu")[0]):  # XLA does not count for a GPU
        return jax.jit(lambda state, x: moduledef.merge(state)(x)).lower(state, x).cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (lambda ctx: nnx.Linear(64, 32, ctx=ctx), (16, 64)),
        (lambda ctx: nnx.Conv(8, 16, (3, 3), padding="VALID", ctx=ctx), (2, 12, 12, 8)),
        (lambda ctx: nnx.Conv(8, 8, (3,), padding="VALID", feature_group_count=4, ctx=ctx), (2, 30, 8)),
    ],
    ids=["linear", "conv", "grouped conv"],
)
def test_flops_agree_with_the_compiler(model, shape):
    module, x = nnx.eval_shape(model, nnx.context(0)), jax.ShapeDtypeStruct(shape, jnp.float32)
    assert nnx.summary(module, x).flops == pytest.approx(xla_flops(module, x), rel=0.05)


class Layer(nnx.Module):
    def __init__(self, features=3, *, ctx):
        self.linear = nnx.Linear(features, features, ctx=ctx)

    def __call__(self, x, _=None):
        return self.linear(x), None


ONE = 2 * 9 + 3  # FLOPs of one Linear(3, 3) on one row


def test_a_scanned_layer_counts_once_per_step():
    stack = nnx.Scan(Layer, variable_axes={nnx.Param: 0}, split_rngs="params", length=5)(ctx=nnx.context(0))
    rows = rows_of(nnx.summary(stack, jnp.ones((1, 3)), None))
    assert rows["scan_module/linear"].output == "float32[1,3]"
    assert rows["scan_module/linear"].parameters == 5 * 12
    assert rows["scan_module/linear"].flops == rows[""].flops == 5 * ONE


def test_modules_are_known_again_inside_of_a_lifted_function():
    class Jitted(nnx.Module):
        def __init__(self):
            self.layers = nnx.Sequence([linear(3, 3), linear(3, 3)])

        @nnx.jit
        def __call__(self, x):
            return self.layers(x)

    model = Jitted()
    for _ in range(2):  # the second time the function is compiled for these shapes already
        rows = rows_of(nnx.summary(model, jnp.ones((1, 3))))
        assert rows["layers/1"].output == "float32[1,3]"
        assert rows["layers/1"].flops == ONE
        assert rows[""].flops == rows["layers"].flops == 2 * ONE


def test_looking_often_does_not_warn_of_recompiling():
    class Jitted(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

        @nnx.jit
        def __call__(self, x):
            return self.w * x

    model = Jitted()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12):
            nnx.summary(model, jnp.ones(2))


def test_of_several_branches_the_dearest_counts():
    class Either(nnx.Module):
        def __init__(self):
            self.linear = linear(3, 3)

        def __call__(self, x):
            return nnx.cond(x[0, 0] > 0, lambda m, x: m(m(x)), lambda m, x: m(x), self.linear, x)

    assert rows_of(nnx.summary(Either(), jnp.ones((1, 3))))["linear"].flops == 2 * ONE


def test_the_backward_pass_counts_where_it_is_part_of_the_call():
    class Step(nnx.Module):
        def __init__(self):
            self.linear = linear(3, 3)

        def __call__(self, x):
            return nnx.grad(lambda m: jnp.sum(m(x)))(self.linear)["kernel"]

    assert nnx.summary(Step(), jnp.ones((1, 3))).flops > 2 * ONE - 3


# What is called, and with what


def test_arrays_are_abstract_and_other_arguments_are_passed_as_they_are():
    class Switched(nnx.Module):
        def __call__(self, x, *, double, name):
            assert name == "it"
            return jnp.concatenate([x, x]) if double else x

    x = jax.ShapeDtypeStruct((2,), jnp.bfloat16)
    assert nnx.summary(Switched(), x, double=True, name="it").rows[0].output == "bfloat16[4]"
    assert nnx.summary(Switched(), x, double=False, name="it").rows[0].output == "bfloat16[2]"


@pytest.mark.parametrize("method", ["encode", lambda model, x: model.encode(x)], ids=["name", "function"])
def test_another_method_can_be_looked_at(method):
    class Coder(nnx.Module):
        def __init__(self):
            self.encoder, self.decoder = linear(3, 2), linear(2, 3)

        def encode(self, x):
            return self.encoder(x)

    rows = rows_of(nnx.summary(Coder(), jnp.ones((1, 3)), method=method))
    assert rows["encoder"].output == rows[""].output == "float32[1,2]"
    assert rows["decoder"].output is None


def test_inputs_for_a_model_that_cannot_be_called_are_an_error():
    class Holder(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

    with pytest.raises(ValueError, match=r"given inputs for Holder, which has no method '__call__'.*`method=`"):
        nnx.summary(Holder(), jnp.ones(2))


def test_a_call_of_the_parent_class_is_one_call():
    class Base(nnx.Module):
        def __call__(self, x):
            return x[0]

    class Derived(Base):
        def __call__(self, x):
            return super().__call__(x)[0]

    class Both(nnx.Module):
        def __init__(self):
            self.base, self.derived = Base(), Derived()

        def __call__(self, x):
            return self.base(x), self.derived(x)

    rows = rows_of(nnx.summary(Both(), jnp.ones((2, 3))))
    assert (rows["base"].output, rows["derived"].output) == ("float32[3]", "float32[]")


def test_items_of_a_dict_are_only_its_items():
    class Heads(nnx.Dict):
        def __call__(self, x):
            return [head(x) for head in self.values()]

    rows = rows_of(nnx.summary(nnx.Sequence([Heads(a=linear(3, 1), b=linear(3, 2))]), jnp.ones((1, 3))))
    assert rows["0"].output == "[float32[1,1], float32[1,2]]"


def test_frozen_dataclass_modules_can_be_looked_at():
    @nnx.dataclass(frozen=True)
    class Scale(nnx.Module):
        scale: jax.Array = nnx.param_field()

        def __call__(self, x):
            return self.scale * x

    assert nnx.summary(Scale(jnp.ones(3)), jnp.ones(3)).rows[0].output == "float32[3]"


def test_argument_that_is_not_a_module_raises():
    with pytest.raises(TypeError, match="nnx.summary takes a Module, got float32\\[2\\] of type ArrayImpl"):
        nnx.summary(jnp.ones(2))  # pyright: ignore[reportArgumentType]


# Nothing changes


def test_neither_model_nor_context_nor_classes_change():
    model, ctx = TwoHeads(ctx=nnx.context(0)), running_context()
    state, moduledef = model.partition()
    calls = {cls: cls.__dict__.get("__call__") for cls in map(type, model.modules())}
    nnx.summary(model, jnp.ones((5, 4)), ctx=ctx)
    assert model.get_state() == state
    assert model.get_module_def() == moduledef
    assert {cls: cls.__dict__.get("__call__") for cls in calls} == calls
    assert ctx.make_rng("dropout") == running_context().make_rng("dropout")


def test_an_error_in_the_call_leaves_the_classes_as_they_were():
    class Broken(nnx.Module):
        def __call__(self, x):
            raise RuntimeError("no")

    before = Broken.__call__
    with pytest.raises(RuntimeError, match="no"):
        nnx.summary(Broken(), jnp.ones(1))
    assert Broken.__call__ is before


def test_several_threads_may_look_at_once():
    model, before, texts = linear(), nnx.Linear.__call__, []

    def look():
        texts.append(str(nnx.summary(model, jnp.ones((2, 3)))))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(texts)) == 1 and len(texts) == 4
    assert nnx.Linear.__call__ is before


# Showing it


def test_depth_limits_the_rows_shown():
    text = nnx.summary(TwoHeads(ctx=nnx.context(0))).table(depth=1)
    assert "heads" in text and "heads/mean" not in text


def test_summary_prints_and_displays_in_a_notebook(capsys):
    summary = nnx.summary(linear(), jnp.ones((2, 3)))
    summary.print()
    assert "Linear" in capsys.readouterr().out
    assert "<td>float32[2,2]</td>" in summary._repr_html_()
    assert repr(summary) == str(summary)


def test_large_numbers_are_readable():
    class Large(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jax.ShapeDtypeStruct((1 << 20, 1 << 12), jnp.bfloat16))

        def __call__(self, x):
            return x @ self.w

    text = str(nnx.summary(Large(), jax.ShapeDtypeStruct((1, 1 << 20), jnp.bfloat16)))
    assert "4,294,967,296" in text and "8.00 GiB" in text and "8.59 G" in text


# count_params


def test_parameters_are_counted_by_filter():
    model = TwoHeads(ctx=nnx.context(0))
    assert nnx.count_params(model) == nnx.count_params(model.get_state()) == nnx.count_params(model.partition()) == 71
    assert nnx.count_params(model, nnx.BatchStat) == 16
    assert nnx.count_params(model, "batch_stats") == 16
    assert nnx.count_params(model, ...) == 90
    assert nnx.count_params(model, nnx.PathMatches("heads/**")) == 15


def test_abstract_parameters_are_counted():
    assert nnx.count_params(nnx.eval_shape(nnx.Linear, 10, 10, ctx=nnx.context(0))) == 110


def test_counting_something_else_is_an_error():
    with pytest.raises(TypeError, match="nnx.count_params takes a Module, a State or a Pure, got .*jax.tree.leaves"):
        nnx.count_params({"w": jnp.ones(2)})


# A model that fits nowhere

SEVENTY_BILLION = """
import psutil, time
import jax, jax.numpy as jnp
import nnx

WIDTH, HIDDEN, WORDS, LAYERS = 8192, 28672, 128256, 80
BF16 = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)

class Block(nnx.Module):
    def __init__(self, *, ctx):
        self.norm1 = nnx.RMSNorm(WIDTH, ctx=ctx, **BF16)
        self.attention = nnx.MultiHeadAttention(64, WIDTH, num_kv_heads=8, use_bias=False, ctx=ctx, **BF16)
        self.norm2 = nnx.RMSNorm(WIDTH, ctx=ctx, **BF16)
        self.gate = nnx.Linear(WIDTH, HIDDEN, use_bias=False, ctx=ctx, **BF16)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, ctx=ctx, **BF16)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, ctx=ctx, **BF16)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), is_causal=True, deterministic=True, decode=False)
        y = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))

class Decoder(nnx.Module):
    def __init__(self, *, ctx):
        self.embed = nnx.Embed(WORDS, WIDTH, ctx=ctx, **BF16)
        self.blocks = [Block(ctx=ctx) for _ in range(LAYERS)]
        self.norm = nnx.RMSNorm(WIDTH, ctx=ctx, **BF16)
        self.head = nnx.Linear(WIDTH, WORDS, use_bias=False, ctx=ctx, **BF16)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

model = nnx.eval_shape(Decoder, ctx=nnx.context(0))
start = time.perf_counter()
summary = nnx.summary(model, jax.ShapeDtypeStruct((1, 4096), jnp.int32))
text = str(summary)
seconds = time.perf_counter() - start
try:  # not ru_maxrss: that begins with the peak of the process that started this one
    megabytes = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
except FileNotFoundError:  # no Linux
    megabytes = psutil.Process().memory_info().rss / 2**20
print(len(text.splitlines()), summary.parameters, summary.flops, seconds, megabytes)
"""


def test_a_model_of_seventy_billion_parameters_is_summarised_in_seconds():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SEVENTY_BILLION]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)
    assert run.returncode == 0, run.stderr
    lines, parameters, flops, seconds, megabytes = map(float, run.stdout.split())
    assert lines > 80 * 11
    assert parameters == 70_553_706_496
    assert flops == pytest.approx(2 * parameters * 4096, rel=0.1)  # two per parameter and token, and attention
    assert seconds < 10
    assert megabytes < 1000


def test_a_list_that_a_loop_runs_over_shows_the_flops_of_its_items():
    class Stack(nnx.Module):
        def __init__(self):
            self.layers = [nnx.MLP(2, 4, 2, ctx=nnx.context(0)) for _ in range(2)]

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    summary = nnx.summary(Stack(), jnp.ones((1, 2)))
    by_path = {row.path: row for row in summary.rows}
    assert by_path["layers"].flops is None
    line = next(line for line in str(summary).splitlines() if line.startswith("layers "))
    assert line.endswith(f"({by_path['layers/0'].flops + by_path['layers/1'].flops})")
    assert "FLOPs in parentheses are those of the submodules" in str(summary)


def test_looking_inside_is_no_reason_to_explain_a_recompilation():
    class Jitted(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(2, 2, ctx=nnx.context(0))

        @nnx.jit(explain_recompiles=True)
        def __call__(self, x):
            return self.linear(x)

    model, x = nnx.Sequence([Jitted()]), jnp.ones((1, 2))
    model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            nnx.summary(model, x)
            nnx.capture(model)(x)
        model(x)


# Training


def test_backward_adds_the_flops_of_the_gradient_and_the_bytes_kept_for_it():
    ctx = nnx.context(0)
    model = nnx.Sequence([nnx.Linear(8, 8, ctx=ctx), jnp.sin, nnx.Linear(8, 8, ctx=ctx)])
    plain, summary = (nnx.summary(model, jnp.ones((4, 8)), backward=on) for on in (False, True))
    root, first, second = summary.rows
    assert [row.flops for row in summary.rows] == [row.flops for row in plain.rows]
    product, bias = 2 * 4 * 8 * 8, 4 * 8
    assert first.backward == product + bias  # of the kernel and the bias
    assert second.backward == 2 * product + bias  # and of the input
    assert root.kept >= 2 * 4 * 8 * 4  # the cosine, and the input of the second layer
    assert root.backward >= first.backward + second.backward
    header, _, line, *_ = str(summary).splitlines()
    assert header.split()[-3:] == ["FLOPs", "backward", "kept"] and line.split()[-2:] == [str(root.kept), "B"]
    assert plain.rows[0].backward is None and "backward" not in str(plain)


def test_backward_leaves_integers_alone():
    class Deep(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(10, 4, ctx=nnx.context(0))
            self.norm = nnx.BatchNorm(4, use_running_average=False)
            self.counts = nnx.var("counts", jnp.zeros(2, int))

        def __call__(self, tokens):
            return self.norm(self.embed(tokens))

    rows = rows_of(nnx.summary(Deep(), jnp.zeros((2, 5), int), backward=True))
    assert rows["norm"].backward > 0 and rows["norm"].kept > 0
