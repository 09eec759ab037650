"""The typing samples beside this file hold what a type checker must (and must not) accept; pyright judges them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SAMPLES = sorted(path.name for path in HERE.glob("*.py") if not path.name.startswith("test_"))


def find_pyright() -> str | None:
    beside = Path(sys.executable).parent / "pyright"
    return str(beside) if beside.exists() else shutil.which("pyright")


@pytest.fixture(scope="module")
def diagnostics() -> dict[str, list[str]]:
    """What pyright says about each sample, under the project's own settings."""
    pyright = find_pyright()
    if pyright is None:
        pytest.skip("pyright is not installed")
    command = [pyright, "--outputjson", "--pythonpath", sys.executable, *(str(HERE / name) for name in SAMPLES)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent.parent, timeout=280)
    report: dict[str, Any] = json.loads(run.stdout)
    assert report["summary"]["filesAnalyzed"] >= len(SAMPLES)
    found: dict[str, list[str]] = {name: [] for name in SAMPLES}
    for item in report["generalDiagnostics"]:
        line = item["range"]["start"]["line"] + 1
        found[Path(item["file"]).name].append(f"line {line}: {item['message']}")
    return found


@pytest.mark.parametrize("sample", SAMPLES)
def test_sample_has_the_documented_types(sample: str, diagnostics: dict[str, list[str]]):
    assert diagnostics[sample] == []
