"""Tasks of lm-eval: the interface that it asks, and its results. The package is a stand-in here; tests/real has it."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
from tiny_source import save_source

from crius.errors import ConfigError, DataError, EnvironmentError
from crius.interop.weights import open_weights
from crius.plugins import REQUIREMENTS, install_line
from crius.tools.evaluate import lm_eval_tasks
from crius.tools.evaluate.encode import TokenRow
from crius.tools.evaluate.metrics import Figure
from crius.tools.evaluate.run import open_model
from crius.tools.evaluate.score import score
from crius.tools.evaluate.settings import EvaluateSettings
from crius.tools.generate.run import answer
from crius.tools.generate.settings import Prompt
from crius.tools.generate.settings import Settings as Generation

LENGTH = 64


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A small source and its encoder."""
    folder = tmp_path_factory.mktemp("source")
    save_source(folder)
    return open_model(open_weights(str(folder)), EvaluateSettings(max_length=LENGTH))


@pytest.fixture
def package(monkeypatch):
    """The stand-in: it knows one task, and keeps what it was called with."""
    called = SimpleNamespace(results={"results": {}, "n-samples": {}}, error=None)

    def simple_evaluate(**words):
        called.words = words
        if called.error:
            raise called.error
        return called.results

    def manager(include_path):
        called.include_path = include_path
        return SimpleNamespace(all_tasks=["quiz", "mine"])

    modules = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.tasks")}
    modules["lm_eval"].simple_evaluate = simple_evaluate
    modules["lm_eval.tasks"].TaskManager = manager
    modules["lm_eval.api.model"].TemplateLM = object
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(lm_eval_tasks.importlib.util, "find_spec", lambda name: name)
    return called


def results(package, opened, names=("quiz",), **settings):
    return lm_eval_tasks.scorer(names)(*opened, EvaluateSettings(max_length=LENGTH, **settings))


def model(package, opened):
    results(package, opened)
    return package.words["model"]


def test_without_the_package_the_line_that_installs_it_is_said(monkeypatch):
    monkeypatch.setattr(lm_eval_tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentError, match="need the lm-eval package") as error:
        lm_eval_tasks.scorer(["quiz"])
    assert install_line(REQUIREMENTS["lm_eval"]) == error.value.fix


def test_tasks_are_found_by_name_and_by_file(package, opened, tmp_path):
    (tmp_path / "mine.yaml").write_text("task: mine\n")
    results(package, opened, ("quiz", str(tmp_path / "mine.yaml")), limit=3)
    assert package.include_path == [str(tmp_path)]
    told = {"tasks": ["quiz", "mine"], "limit": 3, "bootstrap_iters": 1000, "log_samples": False}
    assert package.words | told == package.words
    results(package, opened)
    assert (package.include_path, package.words["limit"]) == (None, None)
    with pytest.raises(ConfigError, match="lm-eval has no task other, more"):
        lm_eval_tasks.scorer(["other", "quiz", "more"])


def test_results_have_their_counts_and_intervals_and_groups_the_sum_of_their_parts(package, opened):
    metrics = {"alias": "q", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,strict": 0.25, "f1_stderr,strict": "N/A"}
    package.results = {
        "results": {"quiz": metrics, "all": {}},
        "n-samples": {"quiz": {"effective": 3, "original": 7}, "more": {"effective": 2, "original": 5}},
        "groups": {"all": {"acc,none": 0.75, "acc_stderr,none": math.nan}, "empty": {"alias": "e"}},
        "group_subtasks": {"all": ["quiz", "more", "absent"], "empty": ["quiz"]},
    }
    quiz, group = results(package, opened)
    assert (quiz.task, quiz.documents, quiz.total) == ("lm_eval:quiz", 3, 7)
    assert quiz.metrics.keys() == {"acc", "f1 (strict)"}
    assert quiz.metrics["acc"] == pytest.approx((0.5, 0.304, 0.696), abs=1e-3)  # 1.96 standard errors
    assert quiz.metrics["f1 (strict)"] == Figure(0.25, 0.25, 0.25)
    assert (group.task, group.documents, group.total) == ("lm_eval:all", 5, 12)
    assert group.metrics["acc"] == Figure(0.75, 0.75, 0.75)


@pytest.mark.parametrize("offline", ["0", "1"])
@pytest.mark.parametrize(("error", "is_data"), [(OSError("gone"), True), (ValueError("x"), False)])
def test_a_failure_of_the_package_is_one_error_that_names_the_task(
    package, opened, monkeypatch, offline, error, is_data
):
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    package.error = error
    with pytest.raises(DataError, match=f"lm-eval failed: {type(error).__name__}") as caught:
        results(package, opened)
    assert "lm_eval:quiz" in caught.value.where
    assert bool(caught.value.why) == (is_data and offline == "1")
    assert bool(caught.value.fix) == is_data


def test_an_error_of_our_own_is_not_changed(package, opened):
    package.error = DataError("ours")
    with pytest.raises(DataError, match="^DataError: ours"):
        results(package, opened)


def test_texts_have_the_log_probabilities_that_each_has_alone(package, opened, monkeypatch):
    source, encoder = opened
    asked = model(package, opened)
    one, other = (source.tokenizer.encode(text).tolist() for text in ("The sky is", "Two and two are"))
    pairs = [(one, [98, 108]), (one, [103]), (other, [52, 32, 53]), (other, [120])]
    requests = [((f"context {len(context)}", ""), context, targets) for context, targets in pairs]
    alone = [score(source.model, [[encoder.row(*pair, "")]])[0][0] for pair in pairs]
    groups = []
    score_groups = lm_eval_tasks.score_groups
    monkeypatch.setattr(lm_eval_tasks, "score_groups", lambda *a: groups.extend(a[1]) or score_groups(*a))
    found = asked._loglikelihood_tokens(requests)
    assert [len(group) for group in groups] == [2, 2], "a context is read once"
    assert [log_prob for log_prob, _ in found] == pytest.approx([one.log_prob for one in alone], abs=1e-5)
    assert [is_greedy for _, is_greedy in found] == [one.is_greedy for one in alone]

    texts = ["Some text of several windows. " * 5, "short"]
    rolled = asked.loglikelihood_rolling([SimpleNamespace(args=(text,)) for text in texts])
    for text, total in zip(texts, rolled, strict=True):
        rows: list[TokenRow] = list(encoder.windows(encoder.encode(text)))
        want = sum(score(source.model, [[row]])[0][0].log_prob for row in rows)
        assert total == pytest.approx(want, abs=1e-4)


def test_it_tells_the_package_its_tokens_and_sizes(package, opened):
    source, encoder = opened
    asked = model(package, opened)
    assert (asked.eot_token_id, asked.prefix_token_id, asked.max_length) == (
        source.tokenizer.eos_id,
        encoder.prefix,
        LENGTH,
    )
    assert asked.tok_encode("ab") == encoder.encode("ab")
    assert asked.tok_encode("ab", add_special_tokens=False) == source.tokenizer.encode("ab").tolist()


def test_answers_are_those_of_generate_for_each_prompt_alone(package, opened):
    """Settings differ between prompts, and of a prompt that is too long the end is read."""
    source, encoder = opened
    short = {"until": ["\n"], "max_gen_toks": 4}
    prompts = [("abc", short), ("x" * 90, short), ("ab", {"until": "\n", "max_gen_toks": 3}), ("abd", short)]
    found = model(package, opened).generate_until([SimpleNamespace(args=prompt) for prompt in prompts])
    for (prompt, asked), text in zip(prompts, found, strict=True):
        settings = Generation(max_new_tokens=asked["max_gen_toks"], temperature=0.0, stop=("\n",))
        kept = prompt[-(LENGTH - asked["max_gen_toks"]) :]  # a byte is a token
        [want] = answer(source, [Prompt(kept, ())], settings)
        assert text == want.text


SAMPLED = {"do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "max_gen_toks": 62, "until": ["a", "b"]}


@pytest.mark.parametrize(
    ("asked", "want", "kept"),
    [
        ({}, Generation(max_new_tokens=256, temperature=0.0, top_k=0, top_p=1.0), "c"),
        ({"do_sample": True}, Generation(max_new_tokens=256, temperature=1.0, top_k=0, top_p=1.0), "c"),
        (SAMPLED, Generation(max_new_tokens=62, temperature=0.5, top_k=3, top_p=0.9, stop=("a", "b")), "bc"),
    ],
)
def test_a_request_is_answered_with_its_settings_and_has_room_for_the_answer(
    asked, want, kept, package, opened, monkeypatch
):
    def told(source, prompts, settings, *, first):
        assert (settings, [prompt.text for prompt in prompts], first) == (want, [kept], 0)
        return [SimpleNamespace(text="yes")]

    monkeypatch.setattr(lm_eval_tasks, "answer", told)
    assert model(package, opened).generate_until([SimpleNamespace(args=("abc", asked))]) == ["yes"]


@pytest.mark.parametrize(("tokens", "kept"), [(6, "abcdef"), (5, "bcdef")])
def test_a_prompt_that_is_too_long_keeps_its_end(tokens, kept, opened):
    assert lm_eval_tasks._end_of("abcdef", opened[1], tokens) == kept
