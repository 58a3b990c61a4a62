"""A small server on loopback that speaks the file protocol of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType


@dataclass
class Repository:
    """A repository: its files, and what is wrong with it.

    Attributes:
        gated: nobody may read files; their list is open.
        announced: files in the list that are not there.
        cut: the file of which each answer ends in the middle.
    """

    folder: Path
    gated: bool = False
    announced: tuple[str, ...] = ()
    cut: str | None = None

    def files(self) -> dict[str, bytes]:
        found = {str(path.relative_to(self.folder)): path for path in self.folder.rglob("*") if path.is_file()}
        return {name: path.read_bytes() for name, path in sorted(found.items())}

    def sizes(self) -> dict[str, int]:
        found = {file: len(content) for file, content in self.files().items()}
        return {**found, **dict.fromkeys(self.announced, 10)}

    def commit(self) -> str:
        return hashlib.sha1(b"".join(self.files().values())).hexdigest()


@dataclass
class HubServer:
    """Serves repositories by their id until it is left; `requests` lists what was asked for."""

    repositories: dict[str, Repository]
    requests: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: HubServer, *arguments: object) -> None:
        self._hub = hub
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        self._hub.requests.append(f"{self.command} {path}")
        api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/")
        repository = self._hub.repositories.get("/".join(parts[:2]))
        revision = parts[3] if len(parts) > 3 else "main"
        if repository is None:
            self._fail(401, "RepoNotFound")
        elif revision not in {"main", repository.commit()}:
            self._fail(404, "RevisionNotFound")
        elif api and parts[2:3] == ["tree"]:
            self._tree(repository)
        elif api:
            self._list("/".join(parts[:2]), repository)
        elif repository.gated:
            self._fail(403, "GatedRepo")
        else:
            self._file("/".join(parts[4:]), repository)

    def _tree(self, repository: Repository) -> None:
        files = [
            {"type": "file", "path": file, "size": size, "oid": hashlib.sha1(file.encode()).hexdigest()}
            for file, size in repository.sizes().items()
        ]
        self._send(200, json.dumps(files).encode(), {"Content-Type": "application/json"})

    def _list(self, name: str, repository: Repository) -> None:
        siblings = [{"rfilename": file, "size": size} for file, size in repository.sizes().items()]
        content = {"id": name, "sha": repository.commit(), "private": False, "siblings": siblings}
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, repository: Repository) -> None:
        content = repository.files().get(name)
        if content is None:
            self._fail(404, "EntryNotFound")
            return
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": repository.commit()}
        first = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        cut = name == repository.cut and self.command == "GET"
        self._send(206 if first else 200, content[first:], headers, cut)

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Nothing: the tests read `requests`."""
