"""Compiles the pages of docs/many-devices for eight chips that are not here, in place of running them."""

import textwrap
import types
from unittest import mock

import jax
import numpy as np
from jax.sharding import PartitionSpec

import nnx
from tests.sharding.recipes_program import FENCE
from tests.sharding.recipes_program import PAGES as FOLDER
from tests.targets import topologies

PAGES = sorted(
    page.stem
    for page in FOLDER.glob("*.md")
    if page.stem != "index" and any("train_sharded(" in match["code"] for match in FENCE.finditer(page.read_text()))
)


class _RestOfBlock(Exception):
    """What follows in a block of a page runs on one device, or looks at results."""


def compile_page(stem: str) -> int:
    """Compiles every training step of a page; returns how many there are."""
    count = 0
    module = types.ModuleType(f"page_{stem}")

    def train_sharded(optimizer, mesh, rules, step=None):
        nonlocal count
        by_rows = nnx.logical_to_mesh_sharding(PartitionSpec("batch"), mesh, rules)
        tokens = jax.ShapeDtypeStruct((16, 17), np.int32, sharding=by_rows)
        with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
            topologies.optimized((step or module.__dict__["train_step"]).lower(optimizer, tokens))
        count += 1
        raise _RestOfBlock

    def init_sharded(build, mesh, rules, ctx):
        if mesh is None:
            raise _RestOfBlock
        return nnx.shard(nnx.eval_shape(build, ctx), mesh, rules)

    def blocks(page, chosen):
        codes = (match["code"] for match in FENCE.finditer((FOLDER / f"{page}.md").read_text()))
        return [textwrap.dedent(code) for code in codes if chosen(code)]

    with mock.patch.object(nnx, "init_sharded", init_sharded):
        for code in blocks("index", lambda code: True):
            exec(code.split("one_device = ")[0], module.__dict__)
        module.__dict__["make_mesh"] = lambda **axes: topologies.mesh(**axes)
        module.__dict__["train_sharded"] = train_sharded
        for code in blocks(stem, lambda code: "train_sharded(" in code or "class " in code):
            try:
                exec(code, module.__dict__)
            except _RestOfBlock:
                pass
    return count
