"""A checkpoint that was written by eight devices is read by one and by four, in another layout."""

from pathlib import Path

from tests.sharding.programs import finish, start
from tests.storage import sharded_run


def test_save_of_eight_devices_is_loaded_by_four_and_by_one(tmp_path):
    finish([start(Path(sharded_run.__file__), str(tmp_path / "c"), devices=8)], 250)
    sharded_run.load(str(tmp_path / "c"), 1)
