"""The tree stays a house whose folders show it: `make house` counts, and these are the limits."""

from tools import house

PACKAGE = house.ROOT / "nnx"
MOST_FILES = 24


def test_no_folder_is_too_full_to_read_at_a_glance():
    folder, files = house.fullest_folder(PACKAGE)
    assert files <= MOST_FILES, folder


def test_package_runs_no_text_as_code():
    assert house.source_figures(PACKAGE)["uses of exec and eval"] == "0"


def test_a_class_name_has_one_meaning():
    assert house.shared_class_names(PACKAGE) == {}


def test_a_noun_is_defined_once():
    assert house.shared_nouns(PACKAGE) == {}


def test_an_underscore_does_not_make_another_name(tmp_path):
    (tmp_path / "one.py").write_text("class Row: ...\nclass Cell: ...\n")
    (tmp_path / "two.py").write_text("class _Row: ...\nclass Shape: ...\n")
    assert [*house.shared_class_names(tmp_path)] == ["Row"]


def test_nouns_are_the_terms_before_the_colon_of_a_vocabulary_item(tmp_path):
    items = "- *Cell*, **flat form**: the first of *several*.\n- *Level*: one\n  line more, *twice*.\n"
    (tmp_path / "README.md").write_text(f"# Title\n\n{items}\n*Not a noun*: not an item.\n")
    counted = house.readme_figures(tmp_path)
    assert (counted["nouns in all READMEs"], counted["further terms in their definitions"]) == ("3", "2")


def test_table_has_a_column_per_tree_and_the_rows_of_both():
    lines = house.table([("before", {"files": "3", "gone": "1"}), ("now", {"files": "2", "new": "4"})]).splitlines()
    assert [line.split() for line in lines] == [
        ["before", "now"],
        ["files", "3", "2"],
        ["new", "-", "4"],
        ["gone", "1", "-"],
    ]


def test_docstrings_do_not_make_a_function_long(tmp_path):
    body = "\n".join(f"    x = {number}" for number in range(40))
    (tmp_path / "long.py").write_text(
        f'def short():\n    """Says\n\n    much."""\n    return 1\n\n\ndef long():\n{body}\n'
    )
    assert house.source_figures(tmp_path)["functions over 40 lines"] == "1 of 2"


def test_file_is_named_by_its_name_a_path_or_its_suffix(tmp_path):
    for name in ("walk", "flat", "vit_format", "caches"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "README.md").write_text("`structure/walk` and `flat.is_valid`, `…_format`, but not caches\n")
    assert [file.rpartition("/")[2] for file in house.unnamed_files(tmp_path)] == ["caches.py"]
