"""``crius chat``: keys and values that are kept between turns, a full context, sessions in a pipe and on a terminal."""

import io
import json
import os
import pty
import re
import select
import sys
import time

import pytest
import torch
from chat_samples import FORGETS, save_talker
from tiny_source import CHATML, runner

from crius import cli
from crius.cli import chat as verb
from crius.errors import DataError
from crius.interop.weights import open_weights
from crius.kernels import choice
from crius.tokens.render import Template
from crius.tools.generate import source as source_module
from crius.tools.generate.chat import Stopped, chatting
from crius.tools.generate.settings import Settings
from crius.tools.generate.source import read_source

SETTINGS = Settings(chat=True, max_new_tokens=12)
SYSTEM = {"role": "system", "content": "Be brief."}
MODELS = {
    "full": {},
    "earlier_turns_change": {"template": FORGETS},
    "window_and_earlier_turns_change": {"window": 16, "template": FORGETS},
}


@pytest.fixture(autouse=True)
def rendered_here(monkeypatch):
    """A process for each turn would take most of the time of these tests; test_chat_page.py starts it."""

    def render_chats(template, chats, tokens, *, is_dated):
        made = Template({"template": template, "tokens": tokens, "special": [], "date": None})
        return [made.text(chat, None, prompt=True) for chat in chats]

    monkeypatch.setattr(source_module, "render_chats", render_chats)


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """The folder of a model."""
    return save_talker(tmp_path_factory.mktemp("models") / "talker")


@pytest.fixture
def session(capsys, talker, monkeypatch):
    """Runs a session with lines from a pipe; gives exit code, stdout and stderr."""

    def run(*lines, src=talker, flags=("--max_new_tokens", 12)):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return runner("chat", capsys, src)(*flags)

    return run


def read(folder):
    with choice.applied(choice.current()):
        return read_source(open_weights(str(folder)), SETTINGS)


def asked(*texts):
    """A conversation: question, answer, question, ..."""
    return [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]


def ignored(text):
    pass


@pytest.mark.parametrize("name", MODELS)
def test_a_turn_computes_only_its_new_tokens_and_answers_as_if_it_computed_all(name, tmp_path):
    source = read(save_talker(tmp_path / "model", **MODELS[name]))
    computed = []
    source.model.tok_embeddings.register_forward_hook(lambda module, args, out: computed.append(args[0].shape[1]))
    said = []
    before = []
    with chatting(source) as chat:
        for question in ("Hello, model", "And then?", "Why?"):
            said.append(question)
            del computed[:]
            turn = chat.answer(asked(*said), SETTINGS, ignored)
            ids = chat._tokens[: -turn.num_tokens]
            shared = len(os.path.commonprefix([before, ids]))
            assert computed == [len(ids) - shared, *[1] * 11] and turn.num_read == len(ids) - shared
            if before:
                assert shared == len(before) or (name.endswith("change") and 5 < shared < len(before))
            said.append(turn.text)
            before = [*ids, *source.tokenizer.encode(turn.text).tolist()[:-1]]
    assert len(set(said[1::2])) == 3, "answers that differ"
    with chatting(source) as chat:
        fresh = chat.answer(asked(*said[:-1]), SETTINGS, ignored)
        assert fresh.num_kept == 0 and fresh.text == said[-1]


def test_an_answer_that_is_stopped_keeps_what_was_said_and_the_next_turn_continues_from_it(talker):
    source = read(talker)
    for stop in (Stopped, KeyboardInterrupt):
        given = []

        def on_text(text, stop=stop, given=given):
            given.append(text)
            if len(given) == 5:
                raise stop

        with chatting(source) as chat:
            turn = chat.answer(asked("Hello"), SETTINGS, on_text)
            assert (turn.finish_reason, turn.text) == ("stopped", "".join(given)) and len(turn.text) == 5
            after = chat.answer(asked("Hello", turn.text, "Go on"), SETTINGS, ignored)
            assert after.num_kept == turn.num_read + 4
        with chatting(source) as chat:
            assert chat.answer(asked("Hello", turn.text, "Go on"), SETTINGS, ignored).text == after.text


def test_the_oldest_turns_leave_a_full_context_and_the_system_message_stays(tmp_path):
    source = read(save_talker(tmp_path / "model", context=150))
    said = asked("a" * 20, "b", "c" * 20, "d", "e" * 20)
    with chatting(source) as fresh:
        left = fresh.answer([SYSTEM, *said[2:]], SETTINGS, ignored)
    with chatting(source) as chat:
        turn = chat.answer([SYSTEM, *said], SETTINGS, ignored)
        assert turn.num_left == 2 and "oldest 2 messages were left out" in turn.lines
        assert (left.num_left, left.text) == (0, turn.text)
        [without] = source.encode_chats([said[2:]])
        assert turn.num_read > len(without), "the system message was read"
        with pytest.raises(DataError, match=r"the question has \d+ tokens with its template, and .* reads 150\."):
            chat.answer([SYSTEM, *asked("a", "b", "c" * 150)], SETTINGS, ignored)
        long = chat.answer(asked("a" * 20), Settings(chat=True, max_new_tokens=1000), ignored)
        assert long.num_tokens == 150 - long.num_read - long.num_kept, "an answer ends where the context ends"


def test_each_line_of_a_pipe_is_a_turn_and_a_question_that_is_too_long_is_one_line(session, tmp_path):
    folder = save_talker(tmp_path / "model", context=150)
    code, out, err = session("Hello", "x" * 300, "  ", "And then?", src=folder)
    assert code == 1 and re.fullmatch(r"([a-z]{12}\n){2}", out)
    first, error, second = err.splitlines()
    assert "12 tokens, ended by length" in first and "0 kept" in first
    assert error.startswith("error: DataError: the question has ") and " fix a shorter question" in error
    assert " 0 kept" not in second
    assert session("Hello", src=folder)[:2] == (0, out.splitlines(keepends=True)[0])


def test_commands_change_the_session_and_a_wrong_one_is_one_line(session, tmp_path):
    files = [tmp_path / f"{number}.jsonl" for number in range(3)]
    code, out, err = session(
        *("/system Be brief.", "Hello", f"/save {files[0]}", f"/save {files[0]}", "/reset", f"/save {files[1]}"),
        *("/system", "Hello", "/temp 3", "/temp hot", "/temp -1", "/nothing", "/help", f"/save {files[2]}"),
        *("/quit", "never read"),
    )
    first, second = out.splitlines()
    saved = [json.loads(file.read_text())["messages"] for file in files]
    assert saved == [[SYSTEM, *asked("Hello", first)], [SYSTEM], asked("Hello", second)]
    assert code == 1 and first != second
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    told = ["File exists", "hot is not a number", "-1.0 is out of", "no command /nothing"]
    assert all(part in line and " fix " in line for line, part in zip(errors, told, strict=True))
    assert "/temp NUMBER" in err
    hot = session("/temp 3", "Hello")[1]
    assert hot == session("Hello", flags=("--max_new_tokens", 12, "--temperature", 3))[1] != f"{second}\n"


def test_a_model_that_cannot_chat_is_refused_before_torch_is_needed(session, talker, tmp_path, monkeypatch):
    def need_torch():
        raise AssertionError("torch was needed")

    monkeypatch.setattr(verb, "need_torch", need_torch)
    code, out, err = session(src=save_talker(tmp_path / "model", template=""))
    assert (code, out) == (2, "") and "has no chat template" in err and "fix    crius generate" in err
    code, _, err = session(flags=("--against", talker))
    assert code == 2 and "fix    --web" in err
    assert session(flags=("--temperature", "-1"))[0] == 2


def test_on_a_terminal_ctrl_c_stops_an_answer_and_twice_ends_and_no_escape_comes_through(tmp_path):
    folder = save_talker(tmp_path / "model", says="\x1b", template=CHATML)
    saved = tmp_path / "saved.jsonl"
    child, terminal = pty.fork()
    if not child:
        on_this_terminal("chat", str(folder), "--max_new_tokens", "1000000")
    try:
        until(terminal, r"Ctrl-D ends\.\s+.*> ")
        os.write(terminal, b"Hello\r")
        text = until(terminal, r"(\\x1b){9}")
        os.write(terminal, b"\x03")
        text += until(terminal, r"ended by stopped; \d+ tokens read, 0 kept\)[^>]*again ends\)\s+.*> ")
        assert "\x1b\x1b" not in text
        os.write(terminal, f"/save {saved}\r".encode())
        until(terminal, r"jsonl\s+.*> ")
        interrupt(terminal, lambda: "again ends" in text_of(terminal))
        ended = []
        interrupt(terminal, lambda: ended.append(os.waitpid(child, os.WNOHANG)) or ended[-1][0])
        child = 0
        assert os.waitstatus_to_exitcode(ended[-1][1]) == 130
    finally:
        if child:
            os.kill(child, 9)
            os.waitpid(child, 0)
        os.close(terminal)
    [question, answer] = json.loads(saved.read_text())["messages"]
    assert question["content"] == "Hello" and set(answer["content"]) == {"\x1b"}


def on_this_terminal(*words):
    """Run a command in this process, which was forked, and end it."""
    code = 99
    try:
        for number, mode in enumerate("rww"):
            setattr(sys, ("stdin", "stdout", "stderr")[number], open(number, mode, closefd=False))
        torch.set_num_threads(1)
        code = cli.main(list(words))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def interrupt(terminal, is_done):
    """Press Ctrl-C; again after seconds, since readline sees one that comes just before it waits only with a key."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        os.write(terminal, b"\x03")
        again = time.monotonic() + 3
        while time.monotonic() < again:
            if is_done():
                return
            time.sleep(0.02)
    raise AssertionError("Ctrl-C does nothing")


def text_of(terminal, seconds=0.1):
    """What the terminal prints now."""
    return os.read(terminal, 65536).decode(errors="replace") if select.select([terminal], [], [], seconds)[0] else ""


def until(terminal, pattern):
    """What the terminal prints until it matches, for at most 30 s."""
    text = ""
    end = time.monotonic() + 30
    while not re.search(pattern, text):
        text += text_of(terminal, 1)
        assert time.monotonic() < end, text[-500:]
    return text
