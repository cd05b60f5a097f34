"""``crius completion``: a shell completes verbs, flags and choices."""

import sys
from typing import Literal

from crius.cli import add_verbs
from crius.cli.app import app

_ZSH = """
compdef _cyclopts_crius crius
[[ $funcstack[1] != _crius ]] || _cyclopts_crius "$@"
"""
"""cyclopts' script only defines a function. With these lines it works when sourced, and as file _crius in $fpath."""


@app.command
def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print the script with which a shell completes verbs, flags and choices: docs/config.md says where to put it."""
    add_verbs()
    sys.stdout.write(app.generate_completion(shell=shell) + (_ZSH if shell == "zsh" else ""))
    return 0
