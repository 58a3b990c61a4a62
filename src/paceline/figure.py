"""Drawing with matplotlib, which an extra brings: empty figures, and files of them that are the same twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import OptionError, ResourceError

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure


def blank(width: float, height: float) -> Figure:
    """An empty figure of so many inches.

    Raises:
        OptionError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError("a plot takes matplotlib: install paceline[plot].") from None
    return Figure((width, height), layout="constrained")


def check(path: Path) -> None:
    """Refuse what :func:`save` would refuse, before anything is measured for it.

    Raises:
        OptionError: matplotlib is not installed, or does not know the kind of file.
    """
    known = blank(1, 1).canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise OptionError(f"no plot becomes of {path}: its name must end in one of .{', .'.join(sorted(known))}.")


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the same figure gives the same file.

    Raises:
        OptionError: matplotlib does not know the kind of file.
        ResourceError: the file cannot be written.
    """
    from matplotlib import rc_context

    check(path)
    try:
        with rc_context({"svg.hashsalt": "paceline", "svg.fonttype": "none"}):
            figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error}.") from error
