"""Users do not clone: the wheel, in a clean environment, generates what the checkout generates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REQUEST = ["generate", "--json", "--temperature", "0", "--max-tokens", "16", "The capital of France is"]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    return next(folder.glob("paceline-*.whl"))


def test_the_wheel_carries_what_it_needs(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "paceline").rglob("*") if path.is_file()}
    assert {name for name in sources if "__pycache__" not in name} <= names


def test_a_clean_environment_generates(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "clean", cwd=tmp_path)
    python = tmp_path / "clean" / "bin" / "python"
    limits: list[str | Path] = ["-c", ROOT / "constraints.txt"]
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *limits, wheel, cwd=tmp_path)
    theirs = json.loads(run(python.with_name("paceline"), *REQUEST, cwd=tmp_path))
    ours = json.loads(run(sys.executable, "-m", "paceline", *REQUEST, cwd=tmp_path))
    assert theirs["token_ids"] == ours["token_ids"]
    assert theirs["completion_tokens"] == 16
