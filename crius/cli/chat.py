"""``crius chat``."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated

from crius.cli.app import app, need_torch
from crius.errors import ConfigError
from crius.tools.generate.settings import ChatSettings, Settings


@app.verb
def chat(
    source: Annotated[str, "Run folder, checkpoint, Hugging Face folder, or its name on the hub."],
    *,
    web: Annotated[bool, "Talk on a page for a browser of this machine, in place of the terminal."] = False,
    against: Annotated[str, "Source of a second model, whose answers stand on the page beside the first one's."] = "",
    settings: ChatSettings = ChatSettings(),  # noqa: B008
) -> int:
    """Talk to a model that has a chat template.

    Each line is a question. Keys and values of earlier turns are kept. /help lists the commands of a session.
    """
    checked = Settings(**vars(settings), chat=True)
    checked.check()
    if against and not web:
        raise ConfigError("--against needs the page.", where="command line", fix="--web")
    from crius.interop.hub import located
    from crius.tools.generate.checked import open_answering

    weights = [open_answering(located(source), checked)]
    if against:  # it gets the first one's template
        weights.append(open_answering(located(against), replace(checked, chat=False)))
    need_torch()
    from crius.tools.generate.chat import chatting
    from crius.tools.generate.session import talk
    from crius.tools.generate.source import read_source
    from crius.tools.generate.web import serve

    with ExitStack() as stack:
        chats = []
        for one in weights:
            with_template = replace(one, chat_template=one.chat_template or weights[0].chat_template)
            chats.append(stack.enter_context(chatting(read_source(with_template, checked))))
        if not web:
            return talk(chats[0], checked)
        serve(chats, checked)
    return 0
