"""``crius generate``: prompts, settings, streams of text, chats, and the command on a small model."""

import io
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from harness import ROOT
from hostile.damage import TEMPLATES
from tiny_source import CHATML, runner, save_source

from crius import cli
from crius.errors import ConfigError, DataError, EnvironmentError
from crius.interop.weights import open_weights
from crius.kernels import choice
from crius.tokens import renderer
from crius.tokens.renderer import render_chats
from crius.tokens.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from crius.tools.generate.settings import Settings, read_prompts
from crius.tools.generate.stream import TextStream

HELLO = [{"role": "user", "content": "Hi"}]


def render_chat(template, messages, tokens):
    return render_chats(template, [messages], tokens, is_dated=True)[0]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    save_source(folder)
    return folder


@pytest.fixture
def generate(capsys, source):
    return runner("generate", capsys, source)


@pytest.fixture
def rows(generate):
    """The JSON lines of a command that works."""

    def run(*argv):
        code, out, err = generate(*argv, "--json")
        assert (code, err) == (0, "")
        return [json.loads(line) for line in out.splitlines()]

    return run


def test_json_has_a_line_for_each_prompt(rows):
    one, two = rows("--prompt", "abc", "--prompt", "a longer one", "--max_new_tokens", 8)
    assert (one["prompt"], two["prompt"]) == ("abc", "a longer one")
    for row in (one, two):
        assert len(row["tokens"]) == len(row["log_probs"]) <= 8 and max(row["log_probs"]) <= 0
        assert max(row["tokens"]) < 259, "rows of the model without a text"
        assert row["finish_reason"] in ("length", "eos") and row["tokens_per_second"] > 0


@pytest.mark.long
def test_the_first_token_waits_for_no_import_of_what_shards_or_compiles(source):
    """They take more time than all the rest of the start; only a fresh interpreter shows them."""
    code = (
        "import sys\n"
        "from crius.cli import main\n"
        "assert main(['generate', sys.argv[1], '--prompt', 'a', '--max_new_tokens', '1']) == 0\n"
        "slow = {'sympy', 'torch._dynamo', 'torch.distributed.tensor', 'torch.distributed.checkpoint'}\n"
        "assert not slow & sys.modules.keys(), slow & sys.modules.keys()\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(source)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=120, env=environ, check=False)
    assert done.returncode == 0, done.stderr


def test_a_run_keeps_the_first_texts_of_each_command_for_its_report(generate, source, tmp_path, capsys):
    run = tmp_path / "run"
    assert cli.main(["import", str(source), str(run)]) == 0
    capsys.readouterr()

    def samples(*flags):
        code, out, err = generate("--prompt", "a", "--max_new_tokens", 4, *flags, src=run)
        assert code == 0 and "warning" not in err
        return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()], out

    [greedy], out = samples()
    assert greedy["prompt"] + greedy["text"] + "\n" == out and greedy["step"] == 0
    [again], _ = samples()
    assert again["text"] == greedy["text"] and again["time"] > greedy["time"]
    found, _ = samples("--temperature", 1, "--seed", 3, "--prompt", "b" * 4001)
    assert [(one["temperature"], len(one["prompt"])) for one in found] == [(0, 1), (1, 1), (1, 4003)]
    found, _ = samples("--batch_size", 16, *(word for number in range(10) for word in ("--prompt", number)))
    assert [one["prompt"] for one in found[2:]] == ["a", *"0123456"]


def test_texts_that_cannot_be_kept_are_a_warning(generate, source, tmp_path):
    run = tmp_path / "run"
    assert cli.main(["import", str(source), str(run)]) == 0
    (run / "samples.jsonl").mkdir()
    code, _, err = generate("--prompt", "a", "--max_new_tokens", 4, src=run)
    assert code == 0 and "samples.jsonl cannot be written (Is a directory): the report will not have this text" in err


def test_a_folder_that_is_no_run_keeps_no_text(generate, source):
    assert generate("--prompt", "a", "--max_new_tokens", 4)[0] == 0 and not (source / "samples.jsonl").exists()


def test_a_batch_answers_as_each_prompt_alone(rows):
    prompts = ["a", "some more", "x" * 20, ""]
    flags = [word for prompt in prompts for word in ("--prompt", prompt)]
    for cut in ([], ["--temperature", 0.9, "--top_p", 0.9, "--seed", 5]):
        together = rows(*flags, "--max_new_tokens", 12, *cut)
        apart = rows(*flags, "--max_new_tokens", 12, "--batch_size", 1, *cut)
        assert [row["tokens"] for row in together] == [row["tokens"] for row in apart]


def test_a_seed_gives_the_same_draws_and_another_seed_others(rows):
    drawn = [
        [row["tokens"] for row in rows("--prompt", "a", "--prompt", "a", "--temperature", 1.5, "--seed", seed)]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1], "each prompt has draws of its own"


def test_text_is_streamed_after_its_prompt_and_ends_before_a_stop_text(generate, rows):
    (row,) = rows("--prompt", "abc", "--max_new_tokens", 30)
    code, out, err = generate("--prompt", "abc", "--max_new_tokens", 30)
    assert (code, out) == (0, f"abc{row['text']}\n") and "30 tokens, ended by length" in err
    stop = row["text"][6:9]
    (stopped,) = rows("--prompt", "abc", "--max_new_tokens", 30, "--stop", stop, "--stop", "never there")
    assert stopped["text"] == row["text"][: row["text"].index(stop)] and stopped["finish_reason"] == "stop"


def test_a_chat_goes_through_the_template_whose_names_are_special_tokens(source):
    tokenizer = HuggingFaceTokenizer(str(source))
    text = render_chat(CHATML, HELLO, {})
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = [int(i) for i in tokenizer.encode_marked(text)]
    assert (ids.count(257), ids.count(258)) == (2, 1) and len(ids) < len(text)
    assert not {257, 258} & {*tokenizer.encode(text).tolist()}, "a text cannot forge them"


def test_a_chat_is_answered_and_other_messages_come_from_a_file(rows, tmp_path):
    file = tmp_path / "chats.jsonl"
    lines = [{"messages": [{"role": "system", "content": "Be brief."}, *HELLO]}, {"prompt": "Hi"}, "Hi"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second, third = rows("--chat", "--prompt_file", file, "--max_new_tokens", 6)
    assert first["prompt"] == second["prompt"] == "Hi"
    assert second["tokens"] == third["tokens"] != first["tokens"]


def test_the_end_of_a_turn_ends_an_answer(source):
    from crius.tools.generate.source import read_source

    with choice.applied(choice.current()):
        assert read_source(open_weights(str(source)), Settings()).ends == {256, 258}


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--max_new_tokens", 0, "--top_p", 0, "--temperature", "nan", "--stop", ""], 2, "4 problems"),
        (["--temperature", "-1"], 2, "--temperature -1.0"),
        (["--top_k", "-1", "--seed", "-1", "--batch_size", 0], 2, "3 problems"),
        (["--parallelism.tensor_parallel_degree", 0], 2, "at least 1"),
        (["--max_new_tokens", 10**12], 1, "keys and values of 1 x 1,000,000,000,001 tokens"),
    ],
)
def test_settings_out_of_range_are_refused_together(generate, flags, code, words):
    got, out, err = generate("--prompt", "a", *flags)
    assert (got, out) == (code, "") and words in err and "fix" in err


def test_a_source_that_is_none_is_refused_by_name(generate, tmp_path, source):
    (tmp_path / "empty").mkdir()
    for src in (tmp_path / "empty", tmp_path / "none"):
        code, out, err = generate("--prompt", "a", src=src)
        assert (code, out) == (2, "") and str(src) in err and "fix" in err
    other = tmp_path / "gpt2"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    code, out, err = generate("--prompt", "a", src=other)
    assert (code, out) == (2, "") and "gpt2" in err.lower()


def test_a_damaged_checkpoint_is_called_damaged_and_an_earlier_one_is_said(generate, tmp_path, source, caplog):
    run = tmp_path / "run"
    assert cli.main(["import", str(source), str(run)]) == 0
    newest = run / "checkpoints" / "step-00000007"
    shutil.copytree(run / "checkpoints" / "step-00000000", newest)  # its manifest has another step
    assert generate("--prompt", "a", "--max_new_tokens", 1, src=run)[0] == 0
    assert "step 0 is used, because newer checkpoints are damaged: step 7: " in caplog.text
    for file in run.glob("checkpoints/step-00000000/*.safetensors"):
        os.truncate(file, 100)
    code, out, err = generate("--prompt", "a", src=run)
    assert (code, out) == (1, "") and "CheckpointError" in err and "has 100 bytes instead of" in err
    assert f"crius checkpoint verify {run}" in err


def test_a_gpu_that_is_missing_is_said_with_the_flag_of_the_verb(generate):
    code, _, err = generate("--prompt", "a", "--device", "cuda")
    assert code == 1 and "from   --device" in err and "--device cpu" in err and "training.device" not in err


def test_a_source_without_a_chat_template_cannot_chat(generate, tmp_path, source):
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(source / name, plain)
    code, out, err = generate("--chat", "--prompt", "a", src=plain)
    assert (code, out) == (2, "") and "no chat template" in err


@pytest.mark.parametrize("what", TEMPLATES)
def test_a_hostile_template_is_refused_in_seconds_and_runs_nothing(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(renderer._LIMITS, "cpu_seconds", 1)
    began = time.monotonic()
    with pytest.raises(DataError, match="cannot be rendered") as caught:
        render_chat(TEMPLATES[what], HELLO, {})
    assert caught.value.why and time.monotonic() - began < 20 and not list(tmp_path.iterdir())


def test_what_templates_of_hugging_face_use_is_there():
    template = (
        "{% for message in messages %}\n    {% if loop.first %}{{ bos_token }}{% endif %}\n"
        "{% generation %}{{ message | tojson }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ undefined_name }}"
    )
    assert render_chat(template, HELLO, {"bos_token": "<s>"}) == '<s>{"role": "user", "content": "Hi"}4'


def test_a_missing_jinja2_is_named_with_an_install_line(monkeypatch):
    monkeypatch.setattr(renderer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentError, match="jinja2") as caught:
        render_chat(CHATML, HELLO, {})
    assert "install" in caught.value.fix


def pieces(text, stops=(), prompt=b""):
    stream = TextStream(ByteTokenizer(), list(prompt), stops)
    given = []
    for byte in text:
        given.append(stream.push(byte))
        if stream.is_stopped:
            break
    given.append(stream.finish())
    assert "".join(given) == stream.text
    return given, stream


def test_characters_come_whole():
    given, stream = pieces("é€🙂a".encode())
    assert [piece for piece in given if piece] == ["é", "€", "🙂", "a"] and stream.text == "é€🙂a"


def test_bytes_that_are_no_character_come_in_the_end():
    given, _ = pieces(b"a\xff\xe2\x82")
    assert "".join(given) == "a��" and given[-1]


@pytest.mark.parametrize(
    ("text", "stops", "want"),
    [
        ("one two three", ["two"], "one "),
        ("one twthree", ["two"], "one twthree"),  # held back, and given when it does not come
        ("one tw", ["two"], "one tw"),
        ("aab", ["ab", "aab"], ""),
        ("aXbY", ["Y", "X"], "a"),
        ("ende", ["€"], "ende"),
        ("a€b", ["€b"], "a"),
        ("\n\nHuman", ["\n\nHuman:"], "\n\nHuman"),
    ],
)
def test_a_stop_text_ends_it_wherever_tokens_begin(text, stops, want):
    given, stream = pieces(text.encode(), stops)
    assert stream.text == want and stream.is_stopped == (want != text)
    assert not any(stop in "".join(given) for stop in stops)


def test_a_stop_text_is_not_sought_in_the_prompt():
    _, stream = pieces(b"op", ["stop"], prompt=b"st")
    assert stream.text == "op" and not stream.is_stopped


def test_prompts_come_from_flags_files_and_standard_input(tmp_path, monkeypatch):
    (tmp_path / "one.txt").write_text("two\nlines\n")
    (tmp_path / "many.jsonl").write_text('"a"\n\n{"prompt": "b"}\n')
    monkeypatch.setattr(sys, "stdin", io.StringIO("typed\n"))
    for file, want in (("one.txt", ["two\nlines"]), ("many.jsonl", ["a", "b"])):
        assert [prompt.text for prompt in read_prompts(["first"], str(tmp_path / file), chat=False)] == ["first", *want]
    assert [prompt.text for prompt in read_prompts([], "-", chat=False)] == ["typed"]


@pytest.mark.parametrize("line", ["{", "{}", "1", '{"messages": []}', '{"messages": [{"role": "user"}]}', "[" * 99999])
def test_a_line_that_is_no_prompt_is_named(line, tmp_path):
    (tmp_path / "many.jsonl").write_text(f'"a"\n{line}\n')
    with pytest.raises(DataError, match="line 2 of"):
        read_prompts([], str(tmp_path / "many.jsonl"), chat=False)


def test_a_conversation_needs_a_chat_template(tmp_path):
    messages = [{"role": role, "content": role} for role in ("system", "user")]
    (tmp_path / "many.jsonl").write_text(f'"a"\n{json.dumps({"messages": messages})}\n')
    with pytest.raises(ConfigError, match=r"line 2 of (.|\n)*fix +--chat"):
        read_prompts([], str(tmp_path / "many.jsonl"), chat=False)
    assert read_prompts([], str(tmp_path / "many.jsonl"), chat=True)[1].messages == tuple(messages)


def test_no_prompt_and_no_file_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="no prompt"):
        read_prompts([], "", chat=False)
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts([], str(tmp_path / "none.txt"), chat=False)
