"""A chat as the text that a model was trained on: the tokenizer's own template, rendered at arm's length."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from crius.errors import DataError, EnvironmentError
from crius.plugins import REQUIREMENTS, install_line
from crius.tools.generate.settings import Message

_SCRIPT = Path(__file__).with_name("render.py")
_SECONDS = 20
"""More than its limit of CPU time, for a machine that is busy."""


def render_chat(template: str, messages: Sequence[Message], tokens: Mapping[str, str]) -> str:
    """The text of a chat up to where the assistant answers.

    Args:
        template: jinja2 text, by anybody.
        messages: the chat so far.
        tokens: such as ``bos_token``, by name.

    Raises:
        DataError: the template cannot be rendered, or takes too much time, memory or text.
        EnvironmentError: jinja2 is missing.
    """
    if importlib.util.find_spec("jinja2") is None:
        fix = f"{install_line(REQUIREMENTS['jinja2'])}, or leave out --chat"
        raise EnvironmentError("chat templates need the jinja2 package, which is not installed.", fix=fix)
    task = {"template": template, "messages": list(messages), "tokens": dict(tokens)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_SCRIPT)],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env={key: value for key, value in os.environ.items() if key in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")},
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else {"error": "it takes more than 4 s, or crashes"}
    except subprocess.TimeoutExpired:
        answer = {"error": f"it takes more than {_SECONDS} s"}
    if "text" in answer:
        return str(answer["text"])
    raise DataError(
        "the chat template cannot be rendered.",
        where="--chat",
        why=str(answer["error"]),
        fix="mend chat_template.jinja beside the tokenizer, or leave out --chat",
    )
