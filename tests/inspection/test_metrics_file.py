"""Reading files of metrics, whoever wrote them and however they ended."""

import json

import pytest

import nnx


def write(path, *lines):
    path = path / "metrics.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_lines_of_one_step_are_one_record_and_records_are_in_order(tmp_path):
    path = write(tmp_path, {"step": 0, "a": 1}, {"step": 2, "a": 3}, {"step": 2, "b": 4}, {"step": 1, "c": 5})
    assert nnx.read_metrics(path) == [{"step": 0, "a": 1}, {"step": 1, "c": 5}, {"step": 2, "a": 3, "b": 4}]


def test_a_metric_that_goes_back_loses_its_later_values_and_others_keep_theirs(tmp_path):
    early = [{"step": step, "loss": 1.0, "lr": 0.1} for step in range(4)]
    path = write(tmp_path, *early, {"step": 3, "valid": 7.0}, {"step": 1, "loss": 5.0, "lr": 0.2})
    assert nnx.read_metrics(path) == [
        {"step": 0, "loss": 1.0, "lr": 0.1},
        {"step": 1, "loss": 5.0, "lr": 0.2},
        {"step": 3, "valid": 7.0},
    ]


MALFORMED = [b"hello", b"[1]", b"3", b"null", b'"text"', b"{}", b'{"step": "1"}', b'{"step": 1.5}', b'{"step": true}']
MALFORMED += [b'{"step": null}', b'{"step": 1e3}', b"\xff\xfe", b"[" * 100_000, b'{"step": ' + b"9" * 5000 + b"}"]
MALFORMED += [b'{"step": 99999999999999999999}', b'{"step": 1, "loss": }', b'{"a":' * 100_000 + b"}"]


@pytest.mark.parametrize("line", MALFORMED, ids=lambda line: line[:20].decode(errors="replace"))
def test_a_malformed_line_is_skipped_with_a_warning_that_names_it(tmp_path, line):
    path = write(tmp_path, {"step": 0, "loss": 1.0}, line, {"step": 1, "loss": 2.0})
    with pytest.warns(UserWarning, match="Skipped line 2 of .*metrics.jsonl, which is not a record of metrics"):
        assert [record["loss"] for record in nnx.read_metrics(path)] == [1.0, 2.0]


def test_lines_that_were_cut_short_and_empty_ones_are_no_reason_for_a_warning(tmp_path):
    path = write(tmp_path, b"", {"step": 0}, b'{"step": 1, "lo', b'{"step": 1', b"   ", {"step": 2}, b'{"step": 3, "a"')
    assert [record["step"] for record in nnx.read_metrics(path)] == [0, 2]


def test_a_file_without_records_or_that_cannot_be_read_is_an_error_that_names_it(tmp_path):
    for lines in ((), (b"hello", b"[1]"), (b"\xff",)):
        with pytest.raises(nnx.CheckpointError, match="metrics.jsonl holds no metrics"):
            nnx.read_metrics(write(tmp_path, *lines))
    with pytest.raises(FileNotFoundError):
        nnx.read_metrics(tmp_path / "other.jsonl")
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(nnx.CheckpointError, match="metrics.jsonl cannot be read: IsADirectoryError"):
        nnx.read_metrics(tmp_path)


def test_fields_that_are_no_numbers_are_kept_and_not_plotted(tmp_path):
    path = write(tmp_path, {"step": 0, "phase": "warmup", "loss": 1.0, "big": 10**400, "list": [1], "none": None})
    (record,) = nnx.read_metrics(path)
    assert record["phase"] == "warmup" and record["list"] == [1] and record["none"] is None
    assert nnx.plot_metrics(path, tmp_path / "picture.png").exists()
