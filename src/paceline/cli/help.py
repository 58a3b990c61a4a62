"""Help by headings, in which no flag is cut, however narrow the screen is."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class Headed(TyperCommand):
    """A verb whose help has its flags under the headings that they were given."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        headings: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            own = "Arguments" if parameter.param_type_name == "argument" else "Options"
            record = parameter.get_help_record(ctx)
            if record is not None:
                headings.setdefault(getattr(parameter, "rich_help_panel", None) or own, []).append(record)
        for heading, records in headings.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
