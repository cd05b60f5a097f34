"""Secrets leave a run nowhere, and ordinary text stays as it is."""

import dataclasses
import json
import os
import stat
import subprocess
import sys
import tomllib

import pytest
from harness import ROOT, TEXT, crius, parse

from crius.config.run import RunConfig
from crius.config.toml_file import flatten, to_toml
from crius.errors import DataError, HangError
from crius.launch.report import report_of, write_report
from crius.launch.watchdog import Hang
from crius.redact import HIDDEN, is_secret_name, redact, redact_value

HEX40 = "0123456789abcdef0123456789abcdef01234567"
SECRETS = {
    "HF_TOKEN": "hf_" + "AbCdEfGhIj" * 4,
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "AWS_SESSION_TOKEN": "FwoGZXIvYXdzEBYaDExampleSessionTokenValue0123",
    "WANDB_API_KEY": HEX40,
    "OPENAI_API_KEY": "sk-proj-abcdefgh12345678ABCDEFGH",
    "GITHUB_TOKEN": "ghp_abcdefghij0123456789ABCDEFGHIJ012345",
    "SERVICE_JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.SflKxwRJSMeKKF2QT4fwpMeJf36POk6yJV_adQssw5c",
    "DB_PASSWORD": "correct horse battery staple",
    "MY_APP_SECRET": "plainwordsonly",
}
FORMS = {
    "hf": "cannot load: 401 for hf_AbCdEfGhIjAbCdEfGhIjAbCdEfGhIj of user",
    "aws": "credentials AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "aws_temporary": "id ASIAIOSFODNN7EXAMPLE",
    "jwt": f"header {SECRETS['SERVICE_JWT']}",
    "openai": "key sk-abcdefgh12345678ABCDEFGH",
    "github": "git clone with ghp_abcdefghij0123456789ABCDEFGHIJ012345",
    "github_fine": "github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuvwxyz",
    "wandb": f"wandb login --relogin {HEX40}",
    "wandb_v1": "wandb_v1_abcdefghijklmnop_qrstuvwxyz0123456789",
    "url": "s3fs cannot read https://user:p%40ss@host.example/x",
    "signed": "GET https://b.s3.amazonaws.com/k?X-Amz-Date=2026&X-Amz-Signature=deadbeef01234567&X-Amz-Expires=9",
    "query": "https://host/data?token=abcdef123456&part=1",
    "bearer": "Authorization: Bearer abcdef1234567890abcdef",
    "json": json.dumps({"api_key": "abc123def456", "steps": 3}),
    "escaped": 'password = "ab\\"cd1234"',
    "flag": "python run.py --hub_token abcdef123456 --steps 3",
    "assignment": "client_secret=abcdef123456 and more",
    "private_key": "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\ndef\n-----END RSA PRIVATE KEY-----",
}
PARTS = ("AbCdEfGhIj", "wJalr", "ASIAI", "Sflk", "sk-abc", "ghp_", "github_pat_11", HEX40, "wandb_v1_abc", "p%40ss")
PARTS += ("deadbeef", "abcdef123", "abc123def", "cd1234", "MIIE")

ORDINARY = [
    "num_tokens=12,082,528 tokens: 5 max_token_id: 300",
    "tokenizer.path = \"byte\"  eos_token = '</s>'  pad_token: <pad>  PAD_TOKEN=<|endoftext|>",
    "unknown token: foo; the token '<eos>' is missing; next token = 17",
    "a key: layers.0.attention.wk.weight, sort_key=name, key 'x' is there twice",
    "commit 0123456789abcdef0123456789abcdef01234567, xxh3-128:0123456789abcdef0123456789abcdef",
    "/home/me/.cache/crius/tokens/e3b516888ab27ffac45d5d7f75d22f2b https://host.example:8080/a@b?part=1#x",
    "s3://bucket/run/checkpoints meta-llama/Llama-3.1-8B num_kv_heads=8 tp:4 store tcp://10.0.0.1:29500",
    "basic understanding of authorization and of passwords in general; secrets: none; password: None",
    "task-oriented risk-averse desk-something-very-long-indeed-without-digits",
    "step   1/100  loss 6.3691  grad_norm 2.335  lr 5.0e-04  tokens/s/rank 3,346  mfu n/a  mem 0.55 GiB  data 2.1%",
]


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_a_secret_of_a_known_form_or_name_is_hidden(text):
    shown = redact(text, {})
    assert HIDDEN in shown and not any(part in shown for part in PARTS), shown
    assert redact(shown, {}) == shown


def test_what_is_around_a_secret_stays():
    assert redact(FORMS["url"], {}) == "s3fs cannot read https://***@host.example/x"
    assert redact(FORMS["signed"], {}).endswith("?X-Amz-Date=2026&X-Amz-Signature=***&X-Amz-Expires=9")
    assert redact(FORMS["json"], {}) == '{"api_key": "***", "steps": 3}'
    assert redact(FORMS["flag"], {}) == "python run.py --hub_token *** --steps 3"


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_the_value_of_a_variable_with_a_secret_name_is_hidden_anywhere(secret):
    environ = {**SECRETS, "PATH": "/usr/bin", "GOOGLE_APPLICATION_CREDENTIALS": "/home/me/key.json", "A_KEY": "short"}
    assert redact(f"it said:{secret}, twice {secret}.", environ) == "it said:***, twice ***."
    assert redact("/usr/bin /home/me/key.json short", environ) == "/usr/bin /home/me/key.json short"


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_stays(text):
    assert redact(text, {}) == text


def test_the_settings_of_a_run_have_no_secret_names_and_stay():
    names = flatten(RunConfig())
    assert [name for name in names if is_secret_name(name)] == []
    assert {name: redact_value(name, value) for name, value in names.items()} == names
    tree = dataclasses.asdict(RunConfig())
    text = to_toml(RunConfig())
    assert redact(text, {}) == text and HIDDEN not in text
    assert tomllib.loads(text).keys() == tree.keys() - {"job"}


def test_a_run_toml_leaves_a_secret_out_and_says_so():
    text = to_toml(parse(["--data.source", "jsonl", "--data.path", "https://me:pa55word@host/a.jsonl"]))
    assert "pa55word" not in text and "https://***@host/a.jsonl" in text and text.startswith("# ***")


def test_values_are_redacted_item_by_item():
    value = {
        "api_key": "abc",
        "path": ("https://u:p@h/x", "plain"),
        "steps": 3,
        "nested": {"password": "x", "on": True},
    }
    assert redact_value("", value) == {
        "api_key": HIDDEN,
        "path": ("https://***@h/x", "plain"),
        "steps": 3,
        "nested": {"password": HIDDEN, "on": True},
    }


def test_an_error_report_has_no_secrets_and_is_for_its_owner_alone(tmp_path):
    def login(password):
        raise DataError(
            f"login with {password} failed", where="https://u:pa55word@host", fix="--hub_token abcdef123456"
        )

    try:
        login("hf_AbCdEfGhIjAbCdEfGhIjAbCdEfGhIj")
    except DataError as error:
        report = report_of(error, 0)
    write_report(report, tmp_path)
    [file] = tmp_path.iterdir()
    assert not any(part in file.read_text() for part in ("AbCd", "pa55word", "abcdef123456"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_report_of_a_hang_is_for_its_owner_alone(tmp_path):
    Hang(HangError("rank 0 makes no progress."), [], tmp_path).publish(tmp_path / "incidents")
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "incidents").iterdir()}
    assert modes == {"hang-0.txt": 0o600, "hang-0.json": 0o600}


FAILING = """
import logging, os, sys
from crius import cli
from crius.train import job

real = job.run

def run(*arguments, **named):
    real(*arguments, **named)
    logging.getLogger("crius.train").warning("environment %s", dict(os.environ))
    raise RuntimeError(f"cannot log in: {dict(os.environ)} {sys.argv}")

job.run = run
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_no_secret_is_in_what_a_failing_run_prints_or_writes(ranks, tmp_path, tmp_path_factory):
    corpus = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    corpus.write_text(json.dumps({SECRETS["HF_TOKEN"]: TEXT.read_text()}) + "\n")
    flags = [
        *("--model.num_layers", "1", "--training.steps", "2", "--training.seq_len", "32", "--validation.interval", "0"),
        *("--data.source", "jsonl", "--data.path", str(corpus), "--data.text_field", SECRETS["HF_TOKEN"]),
        *("--job.run_dir", str(tmp_path / "run"), "--training.global_batch_size", "4"),
        *("--parallelism.data_parallel_shard_degree", str(ranks)),
        *(("--checkpoint.enable", "--launch.max_restarts", "0") if ranks > 1 else ()),
    ]
    environ = {**os.environ, **SECRETS, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FAILING, "train", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environ,
        check=False,
    )
    assert done.returncode == 1 and "cannot log in" in done.stderr and "step 2/2" in done.stdout, done.stderr
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    texts = {"stdout": done.stdout, "stderr": done.stderr} | {
        str(file): file.read_bytes().decode(errors="replace") for file in files
    }
    assert {"run.toml", "metrics.jsonl", "rank-0.log", "rank-0.error.json"} <= {file.name for file in files}
    assert ranks == 1 or {"manifest.json", "state.json"} <= {file.name for file in files}
    assert [(name, place) for place, text in texts.items() for name, secret in SECRETS.items() if secret in text] == []
    assert "environment" in texts[str(tmp_path / "run" / "logs" / "rank-0.log")]


def test_no_secret_is_in_a_refusal(tmp_path):
    flags = ["--data.source", "jsonl", "--data.path", "https://me:pa55word@host/a.jsonl"]
    done = crius("train", *flags, cwd=tmp_path)
    shown = crius("config", "show", "--data.path", "https://me:pa55word@host/a.jsonl")
    assert done.returncode != 0 and "***@host" in done.stderr and shown.returncode == 0
    assert "pa55word" not in done.stdout + done.stderr + shown.stdout
