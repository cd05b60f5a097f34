"""``crius completion``: a shell completes verbs, flags, values and files. It asks ``candidates`` at each TAB."""

import sys
from collections.abc import Iterator, Sequence
from typing import Literal

from crius.cli import add_verbs
from crius.cli.app import app, emit
from crius.cli.help import plain
from crius.cli.verbs import Verbs
from crius.config.command_line import is_flag, named
from crius.errors import ConfigError

_SCRIPTS = {
    "bash": """_crius() {
    local IFS=$'\\n'
    COMPREPLY=($(crius _complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f 1))
}
complete -o default -F _crius crius
""",
    "zsh": """#compdef crius
_crius() {
    local -a found
    found=(${(f)"$(crius _complete "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    (( ${#found} )) || { _files; return }
    local -a texts=(${found%%$'\\t'*})
    local -a lines=(${found/$'\\t'/  })
    compadd -l -d lines -- $texts
}
compdef _crius crius
[[ $funcstack[1] != _crius ]] || _crius "$@"
""",
    "fish": """complete -c crius -a '(crius _complete (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}
"""Each prints the candidates one per line: the word, a tab, and what it is."""


@app.verb
def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print the script with which a shell completes verbs, flags, values, and files where any text may stand.

    docs/config.md says where to put it.
    """
    sys.stdout.write(_SCRIPTS[shell])
    return 0


@app.verb(name="_complete", is_listed=False, takes_all=True)
def complete(*words: str) -> int:
    """Print what a shell may complete the last of ``words`` to."""
    add_verbs(words[0] if len(words) > 1 else "")
    for line in candidates(words):
        emit(line)
    return 0


def candidates(words: Sequence[str]) -> Iterator[str]:
    """Lines for the words that may stand in place of the last one of ``words``; none where any text may stand."""
    *before, current = words or [""]
    try:
        verb, rest = app.find(before)
    except ConfigError:
        return
    if not rest:
        for member in verb if isinstance(verb, Verbs) else app:
            *outer, word = member.words
            if tuple(outer) == verb.words and word.startswith(current):
                yield _line(word, member.about)
    if isinstance(verb, Verbs):
        return
    arguments = verb.arguments()
    if verb.train:
        arguments |= verb.train().arguments()
    last, _ = named(rest[-1], arguments) if rest and is_flag(rest[-1]) else (None, False)
    if current.startswith("-") and not (last and not last.setting.is_switch):
        flags = {f"--{name}": one.setting for name, one in arguments.items() if one.setting.has_flag}
        yield from (_line(flag, setting.help) for flag, setting in flags.items() if flag.startswith(current))
        return
    asked = [one for one in arguments.values() if one.setting.takes_word]
    if last and not last.setting.is_switch:
        asked = [last]
    for argument in asked:
        known = argument.setting.option.known
        values = [*argument.setting.choices, *(known() if known else ())]
        yield from (value for value in values if value and value.startswith(current))


def _line(word: str, about: str) -> str:
    sentence = " ".join(plain(about).split()).partition(". ")[0].removesuffix(".")
    return f"{word}\t{sentence}" if sentence else word
