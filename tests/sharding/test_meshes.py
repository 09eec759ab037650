"""Which mesh the library uses: that of `jax.set_mesh`, or else that of a `with mesh:` block. On four devices."""

import json
import re
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import nnx
from nnx.core import trace
from nnx.sharding.meshes import current_mesh, mesh_with_devices
from tests.sharding.programs import HERE, finish, start

pytestmark = pytest.mark.skipif(not hasattr(jax.sharding.Mesh, "__enter__"), reason="this JAX has no such blocks")


@pytest.fixture(scope="module")
def seen():
    (output,) = finish([start(HERE / "meshes_program.py", devices=4)], 120)
    return json.loads(output.splitlines()[-1])


FORMS = ("with", "with, explicit", "set", "with inside set", "set inside with", "with inside with")


@pytest.mark.parametrize("form", FORMS)
def test_arrays_are_split_over_the_mesh_the_program_is_under(seen, form):
    assert seen["shapes"][form] == dict.fromkeys(seen["shapes"][form], [4, 1])


def test_without_a_mesh_nothing_is_split(seen):
    assert seen["shapes"]["none"] == dict.fromkeys(seen["shapes"]["none"], [8, 2])


def test_parallel_layers_use_the_mesh_of_a_block(seen):
    mapped = seen["mapped"]
    assert mapped["body"] == [4, 4] and mapped["exchanged"] and mapped["attention"] == [2, 4, 2, 4]
    assert max(mapped["differences"]) < 1e-5


@pytest.fixture
def mesh():
    return jax.make_mesh((1,), ("data",))


def test_a_block_belongs_to_its_thread_and_ends(mesh):
    found = []
    with pytest.warns(DeprecationWarning, match="with mesh"), mesh:
        thread = threading.Thread(target=lambda: found.append(current_mesh()))
        thread.start()
        thread.join()
        assert current_mesh().axis_names == mesh_with_devices().axis_names == ("data",)
    assert found == [None] and current_mesh() is None and mesh_with_devices() is None


def test_on_a_version_of_jax_without_blocks_there_is_no_mesh(mesh, monkeypatch):
    monkeypatch.setattr(trace, "_mesh_blocks", None)
    x = jnp.ones((4, 2))
    with pytest.warns(DeprecationWarning, match="with mesh"), mesh, nnx.logical_axis_rules([("batch", "data")]):
        assert nnx.with_logical_constraint(x, ("batch", None)) is x


def test_one_file_asks_jax_for_the_mesh_that_names_refer_to():
    package = Path(nnx.__file__).parent
    asking = {f.name for f in package.rglob("*.py") if re.search(r"sharding\.get_(abstract_)?mesh\(", f.read_text())}
    # The other two ask for its devices: which platform they are of, and whether they are here.
    assert asking == {"meshes.py", "target.py", "context.py"}
