"""Chat templates in the formats of the families: the mask of transformers, whose templates say what is trained on."""

import pytest
from pretrained_samples import save_tokenizer

from crius.config.data import DataConfig, TokenizerConfig
from crius.data.chat.conversations import Conversation
from crius.data.chat.mask import ChatEncoder
from crius.tokens.tokenizer import build_tokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|eot_id|>", "<|start_header_id|>", "<|end|>"]
TOKENS += ["<|end_header_id|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>"]
TOKENS += ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<seed:bos>", "<seed:eos>", "<|system|>"]


def turns(opening, closing, role="m.role", content="m.content", start=""):
    """A template of turns.

    Args:
        opening: expression of what is before a text, by the variable ``role``.
        closing: expression of what ends a turn.
        role: expression of ``role`` by the message ``m``.
        content: expression of the text by the message.
        start: what is before all turns.
    """
    return (
        start + "{% for m in messages %}{% set role = " + role + " %}{{ " + opening + " }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ " + content + " + " + closing + " }}{% endgeneration %}"
        "{% else %}{{ " + content + " + " + closing + " }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{% set role = " + role.replace("m.role", "'assistant'") + " %}"
        "{{ " + opening + " }}{% endif %}"
    )


CHATML = ("'<|im_start|>' + role + '\n'", "'<|im_end|>\n'")
USUAL = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
EMPTY_THOUGHT = " + ('<think>\n\n</think>\n' if role == 'assistant' else '')"
# templates with marks, and whether they take a system message
TEMPLATES = {
    "qwen2.5": (turns(*CHATML, start=USUAL), True),
    "llama3": (
        turns(
            "'<|start_header_id|>' + role + '<|end_header_id|>\n\n'",
            "'<|eot_id|>'",
            content="m.content | trim",
            start="{{ bos_token }}",
        ),
        True,
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
        "{% else %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}",
        False,
    ),
    "gemma3": (
        turns(
            "'<start_of_turn>' + role + '\n'",
            "'<end_of_turn>\n'",
            role="'model' if m.role == 'assistant' else m.role",
            content="m.content | trim",
            start="{{ bos_token }}",
        ),
        False,
    ),
    "phi3": (turns("'<|' + role + '|>\n'", "'<|end|>\n'"), True),
    "phi4": (turns("'<|im_start|>' + role + '<|im_sep|>'", "'<|im_end|>'"), True),
    "smollm3": (
        turns(CHATML[0] + EMPTY_THOUGHT, CHATML[1], start="<|im_start|>system\nReasoning: off<|im_end|>\n"),
        True,
    ),
    "granite": (turns("'<|start_of_role|>' + role + '<|end_of_role|>'", "'<|end_of_text|>\n'"), True),
    "seed_oss": (turns("'<seed:bos>' + role + '\n'", "'<seed:eos>'"), True),
    "olmo2": (
        turns(
            "'<|' + role + '|>\n'",
            "((eos_token if role == 'assistant' else '') + ('' if loop.last and role == 'assistant' else '\n'))",
            start="{{ bos_token }}",
        ),
        True,
    ),
    "olmo3": (turns(*CHATML), True),
}
TALK = [("user", "Hi, 東京?"), ("assistant", "  Ho \n"), ("user", "user\n"), ("assistant", "")]
TALKS = [
    TALK,
    [("system", "Be brief.\n"), *TALK],
    [("user", "a"), ("assistant", "assistant\nmodel a"), ("user", "a"), ("assistant", "a")],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(place)
    tokenizer = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
    tokenizer.add_special_tokens(TOKENS)
    tokenizer.save(str(place / "tokenizer.json"))
    return place


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_mask_is_that_of_transformers_with_marks_and_without(name, folder):
    template, has_system = TEMPLATES[name]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **NAMES)
    talks = [talk for talk in TALKS if has_system or talk[0][0] != "system"]
    chats = [[{"role": role, "content": text} for role, text in talk] for talk in talks]
    wanted = []
    for chat in chats:
        out = theirs.apply_chat_template(
            chat, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        wanted.append((out["input_ids"], out["assistant_masks"]))
        assert any(out["assistant_masks"])
    plain = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    own = build_tokenizer(TokenizerConfig(path=str(folder)))
    for given in (template, plain):
        encoder = ChatEncoder(own, given, NAMES, DataConfig())
        samples = encoder.encode(Conversation(tuple(chat), None, "a row") for chat in chats)
        found = [(sample.ids.tolist(), sample.is_target.astype(int).tolist()) for sample in samples]
        assert found == wanted, given
