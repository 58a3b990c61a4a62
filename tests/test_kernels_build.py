"""Building: by any compiler, by several processes at once, and what happens where none works."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING

import pytest
import torch

from paceline import kernels
from paceline.errors import KernelError
from paceline.kernels import build
from tests.decoders import Cache, piece, tiny_decoder, tiny_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(build, "compilers", lambda: iter(()))
    kernels.library.cache_clear()
    yield
    kernels.library.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_runs_after_one_warning() -> None:
    with pytest.warns(kernels.PacelineWarning, match="no C compiler works") as caught:
        decoder = tiny_decoder(tiny_spec())
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiny_decoder(tiny_spec()).path == decoder.path == "torch reference"
        assert kernels.describe()["path"] == "torch reference"
    assert Cache(decoder).run(piece(0, [1, 2, 3])).logits.isfinite().all()


def test_a_compiler_that_fails_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", f"{sys.executable} -c 'raise SystemExit(3)'")
    chosen = next(build.compilers())
    monkeypatch.setattr(build, "compilers", lambda: iter([chosen]))
    with pytest.raises(KernelError, match="status 3"):
        build.built_library()
    assert not list((tmp_path / "kernels").iterdir())


def test_processes_may_build_at_the_same_time(tmp_path: Path) -> None:
    source = tmp_path / "csrc"
    source.mkdir()
    (source / "one.c").write_text("int pl_one(void) { return 1; }\n")
    code = (
        "import pathlib, sys; from paceline.kernels import build; build.SOURCES = pathlib.Path(sys.argv[1]);"
        "print(build.built_library().library)"
    )
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(source)],
            env={**os.environ, "PACELINE_CACHE": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    found = {job.communicate()[0].strip() for job in jobs}
    assert [job.returncode for job in jobs] == [0] * 4
    assert len(found) == 1
    assert ctypes.CDLL(found.pop()).pl_one() == 1
    assert len(list((tmp_path / "kernels").iterdir())) == 1


def test_the_description_names_what_runs() -> None:
    found = kernels.describe()
    assert found["path"] in kernels.PATHS
    assert found["compiler"]
    assert found["version"]
    assert found["library"].endswith("libpaceline.so")


@pytest.mark.long
def test_zig_builds_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every path of the library that the ziglang wheel builds gives the numbers of the system's compiler."""
    ids = [1, 2, 3, 4, 5]
    expected = Cache(tiny_decoder(tiny_spec(), "int8")).run(piece(0, ids)).logits
    path = kernels.describe()["path"]
    command = (sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline", "-fno-sanitize=undefined")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "compilers", lambda: iter([command]))
    kernels.library.cache_clear()
    try:
        decoder = tiny_decoder(tiny_spec(), "int8")
        assert "ziglang" in kernels.describe()["compiler"]
        assert kernels.describe()["path"] == path
        assert torch.allclose(Cache(decoder).run(piece(0, ids)).logits, expected, atol=1e-4)
    finally:
        kernels.library.cache_clear()
