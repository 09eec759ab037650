"""Every public name of the earlier versions that is not gone can be imported."""

import pytest

import nnx
from tests.lineage.names import HINTS, PUBLIC_NAMES


@pytest.mark.parametrize("version", PUBLIC_NAMES)
def test_every_name_of_a_version_is_here_or_has_a_hint(version):
    assert [name for name in PUBLIC_NAMES[version] if name not in HINTS and not hasattr(nnx, name)] == []
