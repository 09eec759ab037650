"""Paths: segments, their order, and how they are listed in errors."""

from nnx.core.state.paths import join, listing, path_order, segment_of


def test_a_name_that_hides_from_the_class_is_the_same_segment_in_a_path():
    assert segment_of("/keys") == segment_of("keys") == "keys"
    assert join("heads", "/keys") == "heads/keys" and join("", "w") == "w"


def test_numbers_sort_by_value_and_before_names():
    paths = ["b", "layers/10/w", "layers/9/w", "a/b", "a", "10", "9"]
    assert sorted(paths, key=path_order) == ["9", "10", "a", "a/b", "b", "layers/9/w", "layers/10/w"]


def test_a_listing_quotes_the_first_paths_and_counts_the_rest():
    assert listing([]) == ""
    assert listing(["a", "b"]) == "'a', 'b'"
    assert listing((str(i) for i in range(5)), limit=2) == "'0', '1' and 3 more"
    assert listing(map(str, range(12))).endswith("'11'") and listing(map(str, range(13))).endswith(" and 1 more")
