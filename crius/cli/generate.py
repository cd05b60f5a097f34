"""``crius generate``."""

from typing import Annotated

from crius.cli.app import STARTED, Json, app, need_torch
from crius.config.arguments import Option
from crius.tools.generate.settings import Settings, read_prompts


@app.verb
def generate(
    source: Annotated[str, "Run folder, checkpoint, Hugging Face folder, or its name on the hub."],
    *,
    prompt: Annotated[tuple[str, ...], Option(help="Text to continue; repeat it for several.", takes_hyphen=True)] = (),
    prompt_file: Annotated[
        str,
        Option(
            help="File with one prompt, .jsonl file with one prompt per line, or - for standard input.",
            takes_hyphen=True,
        ),
    ] = "",
    settings: Settings = Settings(),  # noqa: B008
    as_json: Json = False,
) -> int:
    """Continue prompts with a trained model, and print the text as it comes.

    With --json one line per prompt: text, tokens, their log-probabilities, why it ended, and tokens per second.
    """
    settings.check()
    prompts = read_prompts(prompt, prompt_file, chat=settings.chat)
    from crius.interop.hub import located
    from crius.tools.generate.checked import open_answering

    source = located(source)
    weights = open_answering(source, settings)
    need_torch()
    if settings.ranks > 1:
        from crius.tools.generate.split import run_split

        return run_split(source, prompts, settings, STARTED, as_json=as_json)
    from crius.tools.generate.run import answer_all
    from crius.tools.generate.source import read_source

    answer_all(read_source(weights, settings), prompts, settings, STARTED, as_json=as_json)
    return 0
