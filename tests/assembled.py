"""The arguments of each command, assembled once per process. cyclopts assembles all 416 for each parse, which takes
0.1 CPU seconds, and tests parse thousands of command lines. Values, tokens and errors are of each parse alone."""

import copy
from typing import Any

from cyclopts import App, ArgumentCollection

_assemble = App.assemble_argument_collection
_known: dict[tuple[int, str], tuple[App, Any, ArgumentCollection]] = {}


def assemble(app: App, **options: Any) -> ArgumentCollection:
    """``App.assemble_argument_collection``, from what it gave the first time."""
    key = (id(app), repr((app.app_stack.default_parameter, options)))  # a command found through its parents inherits
    if key not in _known or _known[key][1] is not app.default_command:
        _known[key] = (app, app.default_command, _assemble(app, **options))
    return _unused(_known[key][2])


def _unused(arguments: ArgumentCollection) -> ArgumentCollection:
    """Copies of arguments that no parse has filled, joined to each other as the originals are."""
    copies = {id(argument): copy.copy(argument) for argument in arguments}
    for one in copies.values():
        one.tokens = []
        one.children = ArgumentCollection(copies[id(child)] for child in one.children)
    return ArgumentCollection(copies.values())


def install() -> None:
    """Let every parse in this process use what was assembled."""
    App.assemble_argument_collection = assemble  # type: ignore[method-assign]
