"""Which ways to draft there are: those that have a file in ``drafters/``."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

from paceline import drafters
from paceline.acceptance import RULES
from paceline.errors import DrafterError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.drafters import Drafter, Method, Models, Surroundings
    from paceline.options import Speculation
    from paceline.pages import CacheGroup


_JUDGED = ("model", "draft_layers", "tree", "rule", "random")
"""Options that :func:`check` has an opinion of."""


def names() -> list[str]:
    """The methods, in alphabetical order; nothing is imported for it."""
    return list(_found(tuple(drafters.__path__)))


@cache
def _found(folders: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folders) if module.name[0] != "_"))


def find(name: str) -> Method:
    """The method of that name.

    Raises:
        DrafterError: its file does not say how to make a drafter.
    """
    module = importlib.import_module(f"{drafters.__name__}.{name}")
    method = getattr(module, "METHOD", None)
    if not isinstance(method, drafters.Method):
        raise DrafterError(
            f"{module.__file__} holds no METHOD = Method(...) and so is no way to draft; give it one, or let its name "
            "begin with an underscore."
        )
    return method


def chosen(speculation: Speculation) -> str:
    """The method that is meant: "auto" is the cascade of what is at hand."""
    return "cascade" if speculation.method == "auto" else speculation.method


def check(speculation: Speculation) -> None:
    """Refuse a method, a draft model and a rule that do not go together.

    Raises:
        OptionError: with what to do.
    """
    name = chosen(speculation)
    _check_rule(name, speculation)
    method = find(name)
    model = method.model
    if speculation.random and "random" not in method.options:
        able = ", ".join(other for other in names() if "random" in find(other).options)
        raise OptionError(
            f"random is for methods that have a head ({able}), and {name!r} has none; take one of those, "
            "or leave it out."
        )
    if speculation.random and speculation.model is not None:
        raise OptionError("random and model exclude each other: a head has random weights or is named; leave one out.")
    if not method.trees and isinstance(speculation.tree, int) and speculation.tree > 1:
        raise OptionError(f"method {name!r} drafts chains, and tree is {speculation.tree}; take tree 'none'.")
    if not method.shapes and speculation.shape is not None:
        able = ", ".join(other for other in names() if find(other).shapes)
        raise OptionError(
            f"method {name!r} fills no tree of a file, and tree is {speculation.tree!r}; take tree 'auto', or one of "
            f"the methods {able}."
        )
    if model == "none" and speculation.named:
        option = "draft_layers" if speculation.model is None else "model"
        raise OptionError(f"{option} is given, and method {name!r} drafts without; leave it out, or use 'draft_model'.")
    if speculation.draft_layers is not None and "draft_layers" not in method.options:
        raise OptionError(
            f"draft_layers is given, and method {name!r} drafts without; leave it out, or use 'draft_model'."
        )
    if model == "needed" and not (speculation.named or speculation.random):
        raise OptionError(
            f"method {name!r} needs a draft model: name one with model=..., or take the target's own first layers "
            "with draft_layers=..."
            if "draft_layers" in method.options
            else f"method {name!r} needs a head that was trained for the target: name its checkpoint with model=..."
        )


def check_given(options: Iterable[str], speculation: Speculation) -> None:
    """Refuse an option of single methods that was given by name and that the method in use does not read.

    Raises:
        OptionError: with the methods that read it.
    """
    name = chosen(speculation)
    for option in options:
        if option in _JUDGED or option in find(name).options:
            continue
        readers = [method for method in names() if option in find(method).options]
        if readers:
            raise OptionError(f"{option} is an option of {', '.join(readers)}; method {name!r} does not read it.")


def _check_rule(name: str, speculation: Speculation) -> None:
    rule = RULES.get(speculation.rule)
    if rule is None:
        return
    if rule.sampled and not find(name).sampled:
        able = ", ".join(method for method in names() if find(method).sampled)
        raise OptionError(
            f"rule {speculation.rule!r} needs drafts that are drawn from probabilities, and those of method {name!r} "
            f"are not; take rule 'coupled', or one of the methods {able}."
        )
    if not rule.trees and isinstance(speculation.tree, int) and speculation.tree > 1:
        raise OptionError(
            f"rule {speculation.rule!r} accepts chains, and tree is {speculation.tree}; take tree 'none', or rule "
            "'recursive' or 'traversal'."
        )
    shape = speculation.shape
    if not rule.trees and shape is not None and not shape.is_chain:
        raise OptionError(
            f"rule {speculation.rule!r} accepts chains, and the file {speculation.tree!r} holds a tree; give one that "
            "holds a chain, or take rule 'recursive' or 'traversal'."
        )


def recipe(speculation: Speculation) -> tuple[object, ...]:
    """What the drafter that ``speculation`` asks for is made from: requests whose recipes are equal share it."""
    name = chosen(speculation)
    return (name, *(_part(speculation, option) for option in find(name).options))


def _part(speculation: Speculation, option: str) -> object:
    """What a drafter is made from; of the rule it matters whether drafts are drawn, and as chains or trees."""
    if option != "rule":
        return getattr(speculation, option)
    rule = RULES.get(speculation.rule)
    return (rule.sampled, rule.trees) if rule is not None and rule.sampled else None


def groups(speculation: Speculation, models: Models) -> Sequence[CacheGroup]:
    """The cache groups of the drafter that ``speculation`` asks for; the errors are those of :func:`create`."""
    return find(chosen(speculation)).groups(speculation, models)


def create(speculation: Speculation, around: Surroundings) -> Drafter:
    """The drafter that ``speculation`` asks for.

    Raises:
        OptionError: method and draft model do not go together.
        DrafterError: the drafter does not fit the target.
        ModelError: the draft model cannot be loaded.
    """
    check(speculation)
    return find(chosen(speculation)).make(speculation, around)
