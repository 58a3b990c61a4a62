"""Heads from a repository: fetched once through the hub's own client, then read from this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.heads_files import eagle3, medusa, write
from tests.hub_server import HubServer, Repository

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import json, sys
from paceline.errors import PacelineError
from paceline.heads.formats import is_head, read_head
for name in sys.argv[1:]:
    try:
        found = read_head(name)
        print(json.dumps({"layout": found.provenance.dialect, "head": is_head(name)}))
    except PacelineError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
"""


def ask(server: HubServer, home: Path, *names: str, **variables: str) -> list[dict[str, Any]]:
    """What a process of its own answers: the hub's library reads its settings once."""
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1", **variables}
    command = [sys.executable, "-c", SCRIPT, *names]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_repositories(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("nothing")
    repositories = {
        "owner/eagle3": Repository(write(tmp_path / "eagle3", *eagle3(), "pytorch_model.bin")),
        "owner/medusa": Repository(write(tmp_path / "medusa", *medusa(), "medusa_lm_head.pt")),
        "owner/empty": Repository(tmp_path / "empty"),
    }
    (tmp_path / "eagle3" / "training_args.bin").write_bytes(b"not wanted")
    with HubServer(repositories) as server:
        names = ["owner/eagle3", "owner/medusa", "owner/empty", "owner/gone"]
        eagle, original, empty, gone = ask(server, tmp_path / "home", *names)
        assert eagle == {"layout": "eagle3", "head": True}
        assert original == {"layout": "medusa", "head": True}
        assert "has no config.json with safetensors or torch weights" in empty["error"]
        assert "there is no repository owner/gone" in gone["error"]
        assert not any("training_args" in request for request in server.requests)
        server.requests.clear()
        assert ask(server, tmp_path / "home", *names[:2], HF_HUB_OFFLINE="1") == [eagle, original]
        assert server.requests == []
