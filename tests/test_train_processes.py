"""Processes that torchrun starts, which train one drafter together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.errors import ResourceError
from paceline.train.processes import Processes, joined

_TOGETHER = """
import json, sys
from pathlib import Path
import torch
from paceline.errors import ResourceError
from paceline.train.processes import joined
folder = Path(sys.argv[1])
torch.set_num_threads(1)
with joined() as them:
    mine = [torch.full((2, 3), float(them.rank + 1)), torch.arange(4.0) * (3 * them.rank + 1)]
    apart = torch.randn(1000, generator=torch.Generator().manual_seed(them.rank))
    them.average([*mine, apart])
    found = {"rank": [them.rank, them.count, them.beside, them.chief], "mean": [part.tolist() for part in mine]}
    found |= {"bits": apart.view(torch.int32).tolist(), "sums": them.sums([1, 10 ** 9 + them.rank])}
    with them.first():
        found["seen"] = (folder / "first").exists()
        (folder / "first").write_text("")
    (folder / f"{them.rank}.json").write_text(json.dumps(found))
    if them.rank == 1:
        sys.exit()
    try:
        them.sums([0.0])
    except ResourceError as error:
        (folder / "left").write_text(str(error))
"""


def test_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "together.py"
    script.write_text(_TOGETHER)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*start, str(script), str(tmp_path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, two = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert (one["rank"], two["rank"]) == ([0, 2, 2, True], [1, 2, 2, False])
    for found in (one, two):
        assert found["mean"] == [[[1.5] * 3] * 2, [0.0, 2.5, 5.0, 7.5]]
        assert found["sums"] == [2, 2 * 10**9 + 1]
    assert one["bits"] == two["bits"]
    drawn = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in (0, 1)]
    assert torch.allclose(torch.tensor(one["bits"], dtype=torch.int32).view(torch.float32), (drawn[0] + drawn[1]) / 2)
    assert (one["seen"], two["seen"]) == (False, True)
    assert "another process of this training has ended" in (tmp_path / "left").read_text()


def test_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined() as them:
        assert them == Processes(0, 1, 1)
        tensor = torch.arange(3.0)
        them.average([tensor])
        assert tensor.tolist() == [0.0, 1.0, 2.0]
        assert them.sums([3, 0.5]) == [3, 0.5]
        with them.first():
            pass
        assert them.chief


def test_processes_that_cannot_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ResourceError, match=r"cannot be reached.*torchrun"), joined():
        pass
