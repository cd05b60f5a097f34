"""``crius completion``: a shell completes verbs, flags, choices and files."""

import re
import sys
from typing import Literal

from crius.cli import add_verbs
from crius.cli.app import app

_ZSH = """
compdef _cyclopts_crius crius
[[ $funcstack[1] != _crius ]] || _cyclopts_crius "$@"
"""
"""cyclopts' script only defines a function. With these lines it works when sourced, and as file _crius in $fpath."""

_ZSH_TEXT = re.compile(r"^( +'(?:\*--[\w.]+\[.*\]:[\w.]+|\d+:(?:[^:\\]|\\.)*))' \\$", re.MULTILINE)
"""Line of the script for zsh about a value or an argument that is any text, without the end of the line."""


@app.command
def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print the script with which a shell completes verbs, flags, choices, and files where any text may stand.

    docs/config.md says where to put it.
    """
    add_verbs()
    script = app.generate_completion(shell=shell)
    if shell == "bash":
        script = script.replace("complete -F ", "complete -o default -F ")
    if shell == "zsh":
        script = _ZSH_TEXT.sub(r"\1:_files' \\", script) + _ZSH
    sys.stdout.write(script)
    return 0
