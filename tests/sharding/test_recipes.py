"""Every page of docs/many-devices runs on eight virtual devices, with the losses of one device over 20 steps."""

import json

import numpy as np
import pytest

from tests.sharding.programs import HERE, finish, start
from tests.sharding.recipes_program import FENCE, PAGES

LIMIT = 280  # seconds, for all pages
RECIPES = (
    "expert-parallelism",
    "fsdp",
    "gradient-accumulation",
    "memory",
    "pipeline",
    "sequence-parallelism",
    "slices",
    "tensor-parallelism",
    "zero-1",
)


@pytest.fixture(scope="module")
def seen():
    """What the pages found; they run one after the other in one process."""
    (output,) = finish([start(HERE / "recipes_program.py", devices=8)], LIMIT)
    return json.loads(output.splitlines()[-1])


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipe_has_the_losses_of_one_device(seen, recipe):
    losses, expected = seen[recipe]["losses"], seen[recipe]["one device"]
    assert len(losses) == len(expected) == 20 and expected[-1] < 0.8 * expected[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_every_page_with_code_is_tested_and_listed():
    pages = {page.stem for page in PAGES.glob("*.md")}
    with_code = {stem for stem in pages if FENCE.search((PAGES / f"{stem}.md").read_text())}
    assert with_code == {"index", *RECIPES}
    overview = (PAGES / "index.md").read_text()
    assert [stem for stem in pages - {"index"} if f"({stem}.md)" not in overview] == []
