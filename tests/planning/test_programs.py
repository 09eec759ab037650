"""What is read from the text of compiled programs: loops, operations, bytes and groups of devices."""

import jax
import jax.numpy as jnp
import pytest

from nnx.inspection.hlo import read
from nnx.planning.collectives import collective, group_of
from nnx.planning.costs import costs_of
from nnx.planning.estimate import estimate
from nnx.planning.largest import path_of
from nnx.planning.machines import machine_named


def cost_of(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return costs_of(read(jax.jit(function).lower(*arguments).compile().as_text()))


def convolve(x, k, **options):
    return jax.lax.conv_general_dilated(x, k, (1, 1), dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def test_operations_of_products_in_loops_count_once_per_iteration():
    def run(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)[0]

    costs = cost_of(run, (4, 16), (16, 16))
    assert costs.flops == 7 * 2 * 4 * 16 * 16
    assert costs.loops == 7


@pytest.mark.parametrize(
    ("padding", "dilation", "taps"),
    [("VALID", 1, 6 * 6 * 9), ("SAME", 1, 8 * 8 * 9 - 4 * 8 * 3 + 4), (((0, 0), (0, 0)), 2, 15 * 15 * 9)],
    ids=["valid", "same", "dilated"],
)
def test_operations_of_convolutions_leave_out_padding_and_holes(padding, dilation, taps):
    costs = cost_of(
        lambda x, k: convolve(x, k, padding=padding, lhs_dilation=(dilation,) * 2), (2, 8, 8, 3), (3, 3, 3, 5)
    )
    if dilation == 2:  # 13 outputs; about a quarter of the 9 taps of each meets no hole
        assert costs.flops < 2 * 2 * 3 * 5 * taps // 3
    else:
        assert costs.flops == 2 * 2 * 3 * 5 * taps


LOOP = """HloModule step
%body (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p = (s32[], f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,16]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %w = f32[16,16]{1,0} constant({...})
  %y = f32[8,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %z = f32[8,16]{1,0} all-reduce(%y), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%sum
  %again = f32[8,16]{1,0} all-reduce(%y), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%sum
  ROOT %out = (s32[], f32[8,16]{1,0}) tuple(%next, %z)
}

%condition (p: (s32[], f32[8,16])) -> pred[] {
  %p = (s32[], f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %bound = s32[] constant(32)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], /*index=1*/f32[8,16]{1,0}) tuple(%zero, %x)
  %loop = (s32[], f32[8,16]{1,0}) while(%init), condition=%condition, body=%body
  %cache = f32[64,16]{1,0:S(1)} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %out = f32[8,16]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_unrolled_loop_without_a_known_count_runs_bound_over_step_times():
    costs = costs_of(read(LOOP))
    assert costs.loops == 16
    assert costs.flops == 16 * 2 * 8 * 16 * 16


def test_parts_of_one_collective_count_once_and_groups_are_read():
    costs = costs_of(read(LOOP))
    (found,) = costs.collectives
    assert (found.kind, found.times, found.bytes, found.group) == ("all-reduce", 16, 512, (0, 2, 4, 6))
    assert found.received(8) == 2 * 3 / 4 * 512


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,3},{1,2}}", (0, 3)),
        ("[4,2]<=[8]", (0, 1)),
        ("[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", (0, 1, 2, 3)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", (0, 4)),
        ("mesh['axis_0'=8] {'axis_0':(1)2}", ()),
    ],
)
def test_groups_of_devices_are_read_in_every_form(groups, expected):
    line = f"  ROOT %r = f32[8]{{0}} all-gather(%x), channel_id=1, replica_groups={groups}, dimensions={{0}}"
    instruction = read(f"ENTRY %main (x: f32[1]) -> f32[8] {{\n{line}\n}}").computations["main"]["r"]
    assert group_of(instruction) == expected
    assert collective(instruction, 1).bytes == 32  # pyright: ignore[reportOptionalMemberAccess]


def test_bytes_of_an_update_in_place_are_those_of_the_update():
    def write(cache, x, at):
        return jax.lax.dynamic_update_slice(cache, x, (at.astype(int)[0], 0))

    compiled = jax.jit(write, donate_argnums=0).lower(
        *[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 64), (1, 64), (1,))]
    )
    assert costs_of(read(compiled.compile().as_text())).bytes < 4096 * 64


def test_estimate_is_bound_by_what_takes_longest():
    costs = costs_of(read(LOOP))
    found = estimate(costs, machine_named("h100-8"))
    assert found is not None and found.bound_by == "interconnect"  # 16 all-reduces of almost nothing
    assert found.seconds == found.interconnect > found.memory > found.compute == 0
    assert estimate(costs, machine_named("cpu-8")) is None


@pytest.mark.parametrize(("features", "part"), [(64, 0.28), (128, 0.5)])
def test_fused_attention_has_a_rate_of_its_own(features, part):
    shape = f"bf16[4,1024,16,{features}]{{3,2,1,0}}"
    lines = [f"  %{name} = {shape} parameter({i})" for i, name in enumerate("qkv")]
    lines.append(f'  ROOT %out = {shape} custom-call(%q, %k, %v), custom_call_target="__cudnn$fmhaSoftmax"')
    costs = costs_of(read(f"ENTRY %main (q: {shape}) -> {shape} {{\n" + "\n".join(lines) + "\n}"))
    found, machine = estimate(costs, machine_named("h200-1")), machine_named("h200-1")
    assert costs.flops == 4 * 4 * 16 * 1024**2 * features
    assert found is not None and found.bound_by == "compute"
    assert found.compute == pytest.approx(costs.flops / (part * machine.chip.rate("bf16")))


def test_links_between_nodes_are_slower_than_links_within():
    within, between = (collective_of(f"[{8 // n},{n}]<=[8]", 8) for n in (8, 8))
    assert within == between
    near = collective_of("[2,8]<=[16]", 16)
    far = collective_of("[8,2]<=[2,8]T(1,0)", 16)
    assert far > near


def collective_of(groups, count):
    line = f"  ROOT %r = f32[800]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%sum"
    instruction = read(f"ENTRY %main (x: f32[800]) -> f32[800] {{\n{line}\n}}").computations["main"]["r"]
    found = collective(instruction, 1)
    assert found is not None
    return found.seconds(machine_named(f"h100-{count}"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "jit(step)/jvp()/while/body/closed_call/attention/query/jit(_contract)/dot_general",
            ("attention/query", "forward"),
        ),
        ("jit(step)/transpose(jvp(head))/jit(_contract)/dot_general", ("head", "backward")),
        ("jit(s)/transpose(jvp())/while/body/checkpoint/rematted_computation/mlp/mul", ("mlp", "recomputed")),
        ("jit(step)/jvp(layers/0)/attention/BTNH,BSNH->BNTS/dot_general", ("layers/0/attention", "forward")),
    ],
)
def test_path_of_a_submodule_is_found_among_the_names_of_transforms(source, expected):
    assert path_of(source)[:2] == expected
