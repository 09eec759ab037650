"""Paths that were renamed since they were saved."""

import pytest

from nnx.storage.renaming import renamed


@pytest.mark.parametrize(
    ("path", "rules", "expected"),
    [
        ("a/b", {}, "a/b"),
        ("a/b", {"c": "d", "a/b": "x/y/z"}, "x/y/z"),
        ("old/a/b", {"old/**": "new/**"}, "new/a/b"),
        ("old", {"old/**": "new/**"}, "new"),
        ("older/a", {"old/**": "new/**"}, "older/a"),
        ("a/b/kernel", {"**/kernel": "**/w"}, "a/b/w"),
        ("kernel", {"**/kernel": "**/w"}, "w"),
        ("model.layers.3.weight", {"model.layers.*.weight": "layers/*/kernel"}, "layers/3/kernel"),
        ("a/b", {"a/*": "first/*", "a/**": "second/**"}, "first/b"),
        ("deep/a", {"deep/**": "**"}, "a"),
        ("a/b/c/d", {"*/b/**": "*/x/**"}, "a/x/c/d"),
        ("w[0]+", {"w[0]+": "w"}, "w"),  # only stars are special
    ],
)
def test_a_path_takes_the_first_rule_that_matches(path, rules, expected):
    others = {"c", "old/1", "z/kernel", "model.layers.0.weight", "a/1", "a/1/2", "deep/1", "q/b"} - {path}
    assert {new for new, old in renamed([path, *others], rules).items() if old == path} == {expected}


@pytest.mark.parametrize(
    ("rename", "path", "new"),
    [
        ({"a/**": "b/**"}, "a/x/y", "b/x/y"),
        ({"a/**": "**"}, "a/x/y", "x/y"),
        ({"**": "m/**"}, "a", "m/a"),
        ({"**/w": "**/kernel"}, "a/b/w", "a/b/kernel"),
        ({"layer_*/w": "layers/*/kernel"}, "layer_12/w", "layers/12/kernel"),
        ({"*/*": "x/*-*"}, "a/b", "x/a-b"),
        ({"a": "b", "**": "c/**"}, "a", "b"),
        ({"z/**": "y/**", "**": "c/**"}, "z/a", "y/a"),
    ],
)
def test_wildcards_are_replaced_by_their_matches(rename, path, new):
    others = [pattern.replace("**", "q").replace("*", "q") for pattern in rename if pattern not in ("**",)] + ["r"]
    assert renamed([path, *(other for other in others if other != path)], rename)[new] == path


@pytest.mark.parametrize("rule", [("a/*", "b"), ("a", "b/**"), ("*/**", "**/*"), ("a", 3), (3, "a")])
def test_a_rule_with_other_wildcards_is_refused(rule):
    with pytest.raises(ValueError, match="both sides must have the same wildcards, in the same order|is not a string"):
        renamed(["a/b"], dict([rule]))


def test_a_rule_that_matches_nothing_and_paths_that_become_one_are_refused():
    with pytest.raises(ValueError, match="no path of .* matches 'encodr/.*'; its paths are: 'encoder/w'"):
        renamed(["encoder/w"], {"encodr/**": "x/**"})
    with pytest.raises(ValueError, match="'a' and 'b' of the checkpoint to the same name, 'b'"):
        renamed(["a", "b"], {"a": "b"})
