"""The peaks of memory that `nnx.summary` reads from a compiled program, next to what XLA says about it."""

import jax
import jax.numpy as jnp
import pytest

import nnx
from nnx.inspection.buffers import peaks
from nnx.inspection.flops import scopes_in
from nnx.inspection.recording import record


class Block(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.attention = nnx.MultiHeadAttention(2, 16, ctx=ctx)
        self.mlp = nnx.MLP(16, 64, 16, activation=nnx.gelu, ctx=ctx)

    def __call__(self, x):
        x = x + self.attention(x, is_causal=True)
        return x + self.mlp(x), None


class Layers(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        stack = nnx.Scan(Block, variable_axes={nnx.Param: 0}, split_rngs="params", length=3)
        self.layers = stack(ctx=ctx)

    def __call__(self, x):
        return self.layers(x)[0]


class Images(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.conv = nnx.Conv(3, 8, kernel_size=(3, 3), ctx=ctx)
        self.norm = nnx.BatchNorm(8, use_running_average=False, ctx=ctx)
        self.head = nnx.Linear(8, 4, ctx=ctx)

    def __call__(self, x):
        return self.head(nnx.global_avg_pool(nnx.relu(self.norm(self.conv(x)))))


@pytest.fixture(autouse=True)
def _on_a_cpu():  # other compilers have rules of their own, for which a fifth may be too little
    with jax.default_device(jax.devices("cpu")[0]):
        yield


CTX = nnx.context(0)
CASES = {
    "mlp": (nnx.MLP(64, (256, 32, 512), 8, ctx=CTX), (128, 64)),
    "convolution": (Images(ctx=CTX), (4, 32, 32, 3)),
    "attention": (nnx.MultiHeadAttention(4, 32, ctx=CTX), (4, 128, 32)),
    "scan": (Layers(ctx=CTX), (2, 64, 16)),
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("case", CASES)
def test_peak_is_within_a_fifth_of_what_xla_says(case, backward):
    model, shape = CASES[case]
    recording = record(model, "__call__", (jax.ShapeDtypeStruct(shape, jnp.float32),), {}, backward=backward)
    compiled = recording.compiled()
    stated = compiled.memory_analysis()
    found = peaks(compiled.as_text(), scopes_in)
    expected = stated.temp_size_in_bytes + stated.output_size_in_bytes
    assert found.whole == pytest.approx(expected, rel=0.2)  # XLA leaves gaps between buffers
    assert max(found.by_scope.values()) <= found.whole


def test_summary_shows_the_peak_of_each_module_where_it_has_operations():
    model, x = CASES["mlp"][0], jax.ShapeDtypeStruct((128, 64), jnp.float32)
    plain, summary = nnx.summary(model, x), nnx.summary(model, x, peak_memory=True)
    found = {row.path: row.peak for row in summary.rows}
    assert found["layers/2"] >= 128 * (32 + 512) * 4  # its input and output
    assert summary.peak == found[""] >= max(peak for peak in found.values() if peak is not None)
    assert found["layers/2"] > found["layers/1"] and found["layers"] is None
    header, _, line, *_ = str(summary).splitlines()
    assert header.split()[-1] == "peak" and line.split()[-1] == "KiB"
    assert plain.peak is None and "peak" not in str(plain)


TEXT = """HloModule jit_f, is_scheduled=true

%fused (p: f32[8,100]) -> f32[8,100] {
  %p = f32[8,100]{1,0:T(8,128)} parameter(0)
  ROOT %twice = f32[8,100]{1,0:T(8,128)} add(%p, %p), metadata={op_name="jit(f)/nnx[0]/nnx[2]/add"}
}

ENTRY %main (x: f32[8,100]) -> (f32[8,100], f32[]) {
  %x = f32[8,100]{1,0:T(8,128)} parameter(0)
  %dot = f32[8,100]{1,0:T(8,128)} dot(%x, %x), metadata={op_name="jit(f)/nnx[0]/nnx[1]/dot_general"}
  %near = f32[8,100]{1,0:T(8,128)S(1)} copy(%dot)
  %sum = f32[8,100]{1,0:T(8,128)} fusion(%dot), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/nnx[0]/add"}
  %two = (f32[8,100]{1,0:T(8,128)}, f32[]) custom-call(%sum), custom_call_target="f"
  %first = f32[8,100]{1,0:T(8,128)} get-tuple-element(%two), index=0
  %second = f32[] get-tuple-element(%two), index=1
  ROOT %out = (f32[8,100]{1,0:T(8,128)}, f32[]) tuple(%first, %second)
}
"""


def test_tiles_are_padded_fused_scopes_count_and_memory_on_the_chip_does_not():
    tile = 8 * 128 * 4
    found = peaks(TEXT, scopes_in)
    assert found.by_scope == {0: tile, 1: tile, 2: tile}  # the sum is written over the product
    assert found.whole == 2 * tile + 4  # the sum, and both results
