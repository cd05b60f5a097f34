"""``crius models``."""

import inspect
import json
import re
import sys
import textwrap
from typing import Any

from crius.cli.app import Json, app, emit
from crius.cli.help import plain
from crius.config.load import recipe_names
from crius.errors import ConfigError
from crius.models.config import WORDS, DecoderConfig
from crius.models.huggingface import Kinds
from crius.models.registry import SPECS, find_spec
from crius.models.spec import ModelSpec
from crius.models.words import usual_words
from crius.plugins import MODELS, installed

_WIDTH = 100


@app.verb
def models(*, as_json: Json = False) -> int:
    """Print the families of models with their flavors, the words that describe their layers, and the recipes.

    A family uses a word if its layers differ in it from Llama's, or if its config.json can say it. docs/models.md
    explains the words.
    """
    for name in installed(MODELS):
        try:
            find_spec(name)
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
    families = {name: _described(spec) for name, spec in sorted(SPECS.items())}
    said = _attributes(inspect.getdoc(DecoderConfig) or "")
    words = {name: said[name] for name in said if name in WORDS}
    if as_json:
        emit(json.dumps({"families": families, "words": words, "recipes": recipe_names()}, indent=2))
        return 0
    emit("families (--model.name) with flavors (--model.flavor) and their parameters in millions")
    for name, family in families.items():
        emit(f"{name}: {family['model_type'] or 'not in transformers'} {family['architecture']}".rstrip())
        flavors = [f"{flavor} {count / 1e6:,.0f}" for flavor, count in family["flavors"].items()]
        emit(_wrapped("  flavors  ", "; ".join(flavors)))
        emit(_wrapped("  words    ", ", ".join(family["words"]) or "none"))
    emit("\nwords (--model.words)")
    for word, text in words.items():
        emit(_wrapped(f"  {word:<28}  ", text))
    emit(_wrapped("\nrecipes (--recipe): ", ", ".join(recipe_names())))
    return 0


def _attributes(docstring: str) -> dict[str, str]:
    """The names below ``Attributes:`` in a docstring, and what it says about each."""
    rows = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", docstring.partition("Attributes:")[2], re.MULTILINE)
    return {name: " ".join(plain(text).split()) for name, text in rows}


def _described(spec: ModelSpec) -> dict[str, Any]:
    config = type(next(iter(spec.flavors.values())))
    usual = usual_words(config)
    used = {word for word, value in usual_words(DecoderConfig).items() if usual[word] != value}
    if spec.hf:
        used |= {size.field for size in spec.hf.sizes}
    if spec.hf and spec.hf.kinds != Kinds():
        used.add("pattern")
    return {
        "model_type": spec.hf.model_type if spec.hf else "",
        "architecture": spec.hf.architecture if spec.hf else "",
        "flavors": {flavor: spec.describe(flavor).num_parameters for flavor in spec.flavors},
        "words": [word for word in WORDS if word in used],
    }


def _wrapped(head: str, text: str) -> str:
    indent = "".ljust(len(head))
    return textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)
