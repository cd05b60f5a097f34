"""Texts of a model while it trains: prompts from held-out data, continued every ``samples.every`` steps.

The model is the one that trains, with its shards, its adapters and its precision. Its compiled blocks run eager, since
tokens come one by one. All ranks have the same prompts and read as many tokens, because each gather of weights takes
all of them.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from crius.data.corpus import Corpus
from crius.data.show import Opening, openings
from crius.launch.status import status
from crius.metrics.sinks import FIT
from crius.models.decode import generate
from crius.models.decoder import Decoder
from crius.parallel.fsdp import fsdp_modules
from crius.redact import printable, redact
from crius.tokens.template import END_OF_TURN
from crius.tokens.tokenizer import Tokenizer
from crius.tools.generate.run import picker
from crius.tools.generate.samples import forget, keep
from crius.tools.generate.settings import Settings
from crius.tools.generate.stream import TextStream
from crius.train.loop import Loop

log = logging.getLogger("crius.train")

NUM_PROMPTS = 3
SETTINGS = Settings(max_new_tokens=64, temperature=0.4)
"""Drawn with a fixed seed of its own: a small model's most probable tokens soon repeat."""


def with_texts(loop: Loop, corpus: Corpus, run_dir: Path) -> Loop:
    """``loop`` with its ``texts``, if its layout and its data allow them; logs which. Every rank calls this.

    Samples of the run after the step that it resumes from are removed.
    """
    found = openings(corpus, NUM_PROMPTS)
    obstacle = ""
    if loop.layout.pp > 1 or loop.layout.cp > 1:
        obstacle = "pipeline and context parallelism split the tokens that a text grows by"
    elif loop.config.training.enable_cpu_offload:
        obstacle = "training.enable_cpu_offload keeps the weights off the device"
    elif not found:
        obstacle = "a stream without validation has no text to continue"
    if obstacle:
        log.info("samples: none (%s)", obstacle)
        return loop
    data = "held-out" if corpus.held_out else "training"
    every = loop.config.samples.every
    log.info("samples: %d prompts from %s data, continued every %d steps", len(found), data, every)
    if loop.world.rank == 0:
        forget(run_dir, loop.state.step)
    return replace(loop, texts=functools.partial(_write, loop, corpus.tokenizer, found, run_dir))


def _write(loop: Loop, tokenizer: Tokenizer, prompts: Sequence[Opening], run_dir: Path) -> None:
    """Continue the prompts; rank 0 logs and keeps the texts."""
    [model] = loop.state.parts
    assert isinstance(model, Decoder)
    answers = [
        (prompt.text, *_text(tokenizer, prompt.ids, ids))
        for prompt, ids in zip(prompts, _continued(model, loop, tokenizer, prompts), strict=True)
    ]
    if loop.world.rank != 0:
        return
    step = loop.state.step
    for prompt, text, _ in answers:
        _log(step, prompt, text)
    settings = replace(SETTINGS, chat=loop.config.data.format == "chat")
    keep(run_dir, step, answers, settings, log.warning)


def _log(step: int, prompt: str, text: str) -> None:
    words = " ".join(f"{prompt} | {text}".split())
    line = printable(redact(f"sample at step {step}  {words}"))
    log.info("%s", line, extra={FIT: lambda columns: line[:columns]})


def _continued(model: Decoder, loop: Loop, tokenizer: Tokenizer, prompts: Sequence[Opening]) -> list[list[int]]:
    """The ids that follow each prompt, as many on each rank."""
    draw = picker(SETTINGS, range(len(prompts)))

    def pick(logits_BV: Tensor) -> Tensor:
        status.update()  # a long text is not a hang
        return draw(logits_BV)

    ids = [prompt.ids for prompt in prompts]
    with torch.compiler.set_stance("force_eager"):
        steps = list(
            generate(
                model,
                ids,
                pick,
                max_new_tokens=SETTINGS.max_new_tokens,
                num_ids=tokenizer.vocab_size,
                unit=loop.layout.tp,
            )
        )
    for module in fsdp_modules(model):
        module.reshard()
    answers: list[list[int]] = torch.stack([step.ids_B for step in steps], dim=1).tolist()
    return answers


def _text(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> tuple[str, list[int]]:
    """The text of ``ids`` up to a token that ends an answer, and these ids with that token."""
    ends = {tokenizer.eos_id, *tokenizer.special_ids(END_OF_TURN)}
    stream = TextStream(tokenizer, prompt)
    for number, token in enumerate(ids):
        if token in ends:
            ids = ids[: number + 1]
            break
        stream.push(token)
    stream.finish()
    return stream.text, ids
