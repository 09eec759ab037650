"""nnx.plot_metrics: metrics over steps as a picture."""

import json
import sys

import pytest

import nnx

RECORDS = [{"step": s, "time": 0.0, "loss": 1.0 / (s + 1), "valid_loss": 1.0, "accuracy": s / 10} for s in range(10)]


def words_of(svg):
    return {line.split("<!--")[1].split("-->")[0].strip() for line in svg.read_text().splitlines() if "<!--" in line}


def test_records_become_a_png(tmp_path):
    path = nnx.plot_metrics(RECORDS, tmp_path / "new" / "metrics.png")
    assert path == tmp_path / "new" / "metrics.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_metrics_file_or_its_folder_can_be_given(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    for source in (tmp_path, str(tmp_path / "metrics.jsonl")):
        assert nnx.plot_metrics(source, tmp_path / "plot.png").exists()


def test_metrics_of_one_sort_share_a_panel_and_each_has_its_name(tmp_path):
    words = words_of(nnx.plot_metrics(RECORDS, tmp_path / "plot.svg", title="a run"))
    assert {"a run", "step", "loss", "valid_loss", "accuracy"} <= words


def test_only_the_metrics_asked_for_are_drawn(tmp_path):
    words = words_of(nnx.plot_metrics(RECORDS, tmp_path / "plot.svg", names=["accuracy"]))
    assert "accuracy" in words and "loss" not in words


def test_values_that_are_not_finite_leave_gaps(tmp_path):
    records = [*RECORDS, {"step": 10, "loss": float("nan")}, {"step": 11, "loss": float("inf")}]
    assert nnx.plot_metrics(records, tmp_path / "plot.png").exists()


def test_nothing_to_plot_is_an_error_that_lists_the_metrics(tmp_path):
    with pytest.raises(ValueError, match=r"none of the 10 records has one of \['los'\].*accuracy, loss, valid_loss"):
        nnx.plot_metrics(RECORDS, tmp_path / "plot.png", names=["los"])
    with pytest.raises(ValueError, match="none of the 0 records has a metric.*none"):
        nnx.plot_metrics([], tmp_path / "plot.png")


def test_a_missing_library_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"nnx.plot_metrics needs the package 'matplotlib'.*nnx\[plot\]"):
        nnx.plot_metrics(RECORDS, tmp_path / "plot.png")
