"""``crius.run``, ``crius.load_run`` and ``crius.load_model``; a run makes a group, so it is in a process of its own."""

import gc
import json
import logging
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import traceback

import pytest
import torch
from harness import ROOT, TEXT, crius_process

import crius
from crius.api import _error_of, _NewRecords, _train_apart
from crius.config.run import RunConfig, replace_fields
from crius.errors import ConfigError, CriusError, EnvironmentError, NonFiniteError
from crius.kernels import choice

SMALL = {"model.num_layers": 1, "training.seq_len": 32, "training.global_batch_size": 4, "training.steps": 4}
SMALL |= {"data.source": "text", "data.path": [str(TEXT)], "metrics.log_interval": 1, "validation.interval": 4}
SMALL |= {"validation.num_samples": 4}


class Notes:
    """A sink that notes what it gets, and does something at a step."""

    def __init__(self, step=0, act=lambda: None):
        self.records, self.num_closed = [], 0
        self._step, self._act = step, act

    def write(self, record):
        self.records.append(record)
        if record.step == self._step:
            self._act()

    def close(self):
        self.num_closed += 1

    def names(self):
        return [f"{type(record).__name__} {record.step}" for record in self.records]


def in_child(function, *arguments):
    """What ``function`` gives in a forked process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def child():
        try:
            there.send(function(*arguments))
        except BaseException:
            there.send(traceback.format_exc())

    process = context.Process(target=child)
    process.start()
    there.close()
    found = here.recv()
    process.join(30)
    assert not isinstance(found, str), found
    return found


def state_and_losses(folder):
    """Whether a run leaves the state of its process, and its losses in a process whose state is another one."""
    logger, handler = logging.getLogger("crius"), logging.NullHandler()
    logger.addHandler(handler)
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True, warn_only=True)
    refused = []

    def another():
        try:
            crius.run(SMALL | {"job.run_dir": str(folder / "another")})
        except EnvironmentError as error:
            refused.append(error.what)

    def state():
        numbers = random.getstate(), torch.get_rng_state().tolist()
        log = list(logger.handlers), logger.propagate, logger.level
        modes = torch.get_float32_matmul_precision(), torch.is_deterministic_algorithms_warn_only_enabled()
        return numbers, log, dict(os.environ), sys.excepthook, torch.get_default_dtype(), modes

    before = state()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        run = crius.run(SMALL | {"job.run_dir": str(folder / "mine")}, sinks=[Notes(2, another)])
    after = state()
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    logger.removeHandler(handler)
    return before == after, run.metrics["loss"], refused


def exit_of_sink(folder):
    try:
        crius.run(SMALL | {"job.run_dir": str(folder)}, sinks=[Notes(2, lambda: sys.exit(3))])
    except SystemExit as error:
        return error.code


def several_runs(folder):
    """Runs one after the other in one process, as in a notebook: what each left."""
    found, notes = {}, Notes()
    first = crius.run(SMALL | {"job.run_dir": str(folder / "first")}, sinks=[notes])
    found["first"] = first.metrics["loss"], first.state, notes.names(), notes.num_closed, notes.records[0].loss
    found["process"] = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        gc.isenabled(),
        logging.getLogger("crius").handlers,
        torch.get_num_threads(),
    )

    notes = Notes()
    longer = crius.run(SMALL | {"job.run_dir": str(folder / "first"), "training.steps": 6}, sinks=[notes])
    found["longer"] = longer.metrics["step"], notes.names(), len(longer.starts)

    try:
        os.environ["CRIUS_FAULT"] = "nan:step=3,where=grad"
        crius.run(SMALL | {"job.run_dir": str(folder / "nan")})
    except NonFiniteError as error:
        found["nan"] = error.what, crius.load_run(folder / "nan").state
    del os.environ["CRIUS_FAULT"]

    stops = Notes(2, lambda: os.kill(os.getpid(), signal.SIGINT))
    stopped = crius.run(SMALL | {"job.run_dir": str(folder / "stopped"), "training.steps": 50}, sinks=[stops])
    found["stopped"] = stopped.state, stopped.summary["stopped_by"], stopped.summary["steps"], stops.num_closed

    try:
        fails = Notes(2, lambda: 1 / 0)
        crius.run(SMALL | {"job.run_dir": str(folder / "sink")}, sinks=[fails])
    except ZeroDivisionError:
        found["exit"] = exit_of_sink(folder / "exit")
        found["sink"] = fails.num_closed, crius.load_run(folder / "sink").state

    found["state"] = state_and_losses(folder / "state")

    runs = []
    thread = threading.Thread(target=lambda: runs.append(crius.run(SMALL | {"job.run_dir": str(folder / "thread")})))
    thread.start()
    thread.join()
    found["thread"] = runs[0].metrics["loss"]

    config = replace_fields(RunConfig(), {name: tuple(v) if isinstance(v, list) else v for name, v in SMALL.items()})
    config = replace_fields(config, {"job.run_dir": str(folder / "config"), "lr_scheduler.warmup_steps": 1})
    found["config"] = dict(crius.run(config).settings)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def left(folder):
    return in_child(several_runs, folder)


@pytest.mark.long
def test_a_run_in_this_process_is_that_of_the_command_line(left, folder):
    losses, state, names, num_closed, first = left["first"]
    flags = [f"--{name}={value[0] if isinstance(value, list) else value}" for name, value in SMALL.items()]
    done = crius_process("train", *flags, "--job.run_dir", str(folder / "typed"))
    assert done.returncode == 0, done.stderr
    assert losses == crius.load_run(folder / "typed").metrics["loss"]
    assert (state, num_closed, first) == ("finished", 1, losses[0])
    assert names == ["StepMetrics 1", "StepMetrics 2", "StepMetrics 3", "StepMetrics 4", "ValidationMetrics 4"]


@pytest.mark.long
def test_a_run_leaves_the_process_as_it_was(left):
    assert left["process"] == (True, True, [], 1)


@pytest.mark.long
def test_the_state_of_the_process_has_no_effect_and_is_left_alone(left):
    is_same, losses, _ = left["state"]
    assert is_same and losses == left["first"][0]


def test_a_process_trains_one_run_at_a_time(left, tmp_path):
    assert left["state"][2] == ["this process already trains a run."]


@pytest.mark.long
def test_a_run_repeats_another_one_by_its_file(left, folder):
    longer = crius.load_run(folder / "first").path / "run.toml"
    assert crius.run({"config": longer, "job.run_dir": str(folder / "again"), "layout": "fsdp2"}).state == "finished"


@pytest.mark.parametrize(
    ("config", "sinks", "said"),
    [
        ([1], (), r"config is \[1\], and not settings"),
        (RunConfig, (), "and not settings"),
        ({"": 1}, (), "'' is not the name of a setting"),
        ({"optimizer.lr": [1, 2]}, (), r"optimizer.lr = \[1, 2\] is a list, and the setting takes a number"),
        ({"training.steps": True}, (), "training.steps = true is true or false, and the setting takes an integer"),
        ({"dry_run": True}, (), "dry_run is an option of crius train, not a setting"),
        ({"help": True}, (), "help is an option"),
        ({"training.foo": None}, (), "unknown setting training.foo"),
        ({"nproc": 2}, (), "nproc is an option.*give the degrees"),
        ({"lr": (1e-3, 2e-3)}, (), "lr = .* is a list, and the setting takes a number"),
        ({"model": {"num_layers": 1}}, (), 'model is a section.*"model.name"'),
        ({}, None, "None is not a list of sinks"),
        ({}, [object()], "is not a sink.*write"),
        (
            replace_fields(RunConfig(), {"optimizer.name": "x"}),
            (),
            r"name x is not one of adamw, muon.\n.*\(crius.run\)",
        ),
    ],
)
def test_arguments_of_another_type_are_config_errors(config, sinks, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.compile(said, re.DOTALL)):
        crius.run(config, sinks=sinks)
    assert list(tmp_path.iterdir()) == []


def test_a_run_in_the_same_folder_continues(left):
    steps, names, num_starts = left["longer"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert names[0] == "StepMetrics 5" and num_starts == 2


def test_a_failure_is_an_exception_and_the_next_run_works(left):
    what, state = left["nan"]
    assert what.startswith("step 3: loss") and state == "failed"


def test_an_interrupt_saves_and_gives_the_run_that_was_stopped(left, folder):
    state, by, steps, num_closed = left["stopped"]
    assert (state, by, num_closed) == ("stopped", "SIGINT", 1)
    assert 2 <= steps < 50
    assert (folder / "stopped" / "checkpoints" / f"step-{steps:08d}").is_dir()


def test_the_error_of_a_sink_ends_the_run(left):
    assert left["sink"] == (1, "failed") and left["exit"] == 3


def test_a_thread_can_train(left):
    assert left["thread"] == left["first"][0]


def test_a_whole_config_is_what_is_trained(left):
    settings = left["config"]
    assert (settings["lr_scheduler.warmup_steps"], settings["training.steps"]) == (1, 4)
    assert settings["optimizer.lr"] == RunConfig().optimizer.lr  # no recipe below it


def test_wrong_settings_are_one_exception(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"2 problems[\s\S]*no flavor 7b[\s\S]*\"training.seq_len\": 99"):
        crius.run({"training.seq_len": 100, "parallelism.tensor_parallel_degree": 3, "model.flavor": "7b"})
    with pytest.raises(ConfigError, match="unknown key training.stesp, did you mean training.steps"):
        crius.run({"training.stesp": 3})
    with pytest.raises(ConfigError, match="no recipe is called llama4"):
        crius.run(recipe="llama4")
    with pytest.raises(ConfigError, match="excludes a whole RunConfig"):
        crius.run(RunConfig(), recipe="llama3_8b")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RANK", "0")
    for name, value in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"), ("MASTER_ADDR", "x")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="starts its ranks itself"):
        crius.run()


@pytest.mark.long
def test_two_ranks_train_in_a_child_and_each_record_comes_once_though_a_restart_repeats_steps(
    left, folder, monkeypatch, capsys
):
    monkeypatch.setenv("CRIUS_FAULT", "kill:step=4,rank=1")
    notes = Notes()
    more = {"layout": "fsdp2", "checkpoint.interval": 2, "job.run_dir": str(folder / "two")}
    run = crius.run(SMALL | more, sinks=[notes])
    assert "restarting from the newest checkpoint" in capsys.readouterr().out
    assert notes.names() == ["StepMetrics 1", "StepMetrics 2", "StepMetrics 3", "StepMetrics 4", "ValidationMetrics 4"]
    assert run.metrics["loss"] == [record.loss for record in notes.records[:4]]
    assert run.metrics["loss"] == pytest.approx(left["first"][0], rel=1e-6)
    assert (run.state, notes.num_closed, len(run.starts)) == ("finished", 1, 2)


STUBBORN = """import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (sys.stdout.write("x" * 200_000), sys.exit(0)))
print("go", flush=True)
time.sleep(100)
"""


@pytest.mark.timeout(60)
def test_a_child_that_prints_more_than_a_pipe_holds_while_it_stops_ends(tmp_path, monkeypatch):
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: start([sys.executable, "-c", STUBBORN], **more))
    monkeypatch.setattr(_NewRecords, "give", lambda self, sinks: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _train_apart([], tmp_path, [Notes()])


TALKATIVE = """import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit("stopped"))
while True:
    print("step", flush=True)
    time.sleep(0.01)
"""


@pytest.mark.timeout(60)
def test_an_interrupt_while_a_line_is_printed_stops_the_child_alone(tmp_path, monkeypatch):
    start, given = subprocess.Popen, []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: start([sys.executable, "-c", TALKATIVE], **more))
    monkeypatch.setattr(
        _NewRecords, "give", lambda self, sinks: given or given.append(os.kill(os.getpid(), signal.SIGINT))
    )
    with pytest.raises(CriusError, match="stopped"):
        _train_apart([], tmp_path, [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_last_error_that_a_child_prints_is_raised(tmp_path):
    text = "step 1\nDataError: old\n  fix    x\nlog\nNonFiniteError: step 3: nan.\n  why    so\nrun folder: runs/a\n"
    error = _error_of(text, tmp_path, 1)
    assert type(error) is NonFiniteError and error.what == "step 3: nan.\n  why    so"
    error = _error_of("FAILED rank 1 step 3: killed by SIGKILL\n  phase  forward\n", tmp_path, 1)
    assert type(error) is CriusError and error.what == "rank 1 step 3: killed by SIGKILL\n  phase  forward"
    assert _error_of("nothing\n", tmp_path, 7).what.endswith("ended with exit code 7.")


def test_records_of_before_are_not_given(tmp_path):
    record = {"grad_norm": 1.0, "lr": 0.1, "tokens": 8, "tokens_per_second": 1.0, "tokens_per_second_per_rank": 1.0}
    record |= {"mfu": None, "tflops": 0.0, "step_seconds": 0.1, "data_seconds": 0.0, "memory_gib": 0.1, "later": 1}
    metrics, starts, notes = tmp_path / "metrics.jsonl", tmp_path / "starts.jsonl", Notes()

    def add(path, told):
        with path.open("a") as file:
            file.write(json.dumps(told) + "\n")

    add(starts, {"step": 0})
    add(metrics, record | {"step": 1, "loss": 3.0})
    records = _NewRecords(tmp_path)
    records.give([notes])
    assert notes.records == []
    add(starts, {"step": 1})
    with metrics.open("a") as file:
        file.write('{"step": 2, "lo')
    records.give([notes])
    assert notes.records == []
    metrics.write_text('damaged\n{"step": "2", "loss": 1}\n[]\n')  # such lines are left out
    for step, loss in ((1, 3.0), (2, None), (2, 9.0)):
        add(metrics, record | {"step": step, "loss": loss})
    records.give([notes])
    assert notes.names() == ["StepMetrics 2"] and math.isnan(notes.records[0].loss)


def test_a_loaded_model_has_the_weights_of_its_step(left, folder):
    tokens_BT = torch.tensor([[1, 2, 3], [4, 5, 6]])
    model, earlier = crius.load_model(folder / "first"), crius.load_model(folder / "first", step=4)
    assert isinstance(model, torch.nn.Module) and not model.training
    logits_BTV = model(tokens_BT)
    assert logits_BTV.shape == (2, 3, model.config.vocab_size) and logits_BTV.dtype == torch.float32
    logits_BTV.sum().backward()
    assert model.tok_embeddings.weight.grad is not None
    assert not torch.equal(earlier(tokens_BT), logits_BTV)
    again = crius.load_model(folder / "first" / "checkpoints" / "step-00000004", dtype=torch.bfloat16)
    assert torch.equal(again.norm.weight, earlier.norm.weight.bfloat16())
    with pytest.raises(ConfigError, match="no checkpoint of step 5"):
        crius.load_model(folder / "first", step=5)
    with pytest.raises(ConfigError, match="step '4' is not an integer"):
        crius.load_model(folder / "first", step="4")
    for wrong in ("int8", torch.float8_e4m3fn):
        with pytest.raises(ConfigError, match="cannot compute"):
            crius.load_model(folder / "first", dtype=wrong)
    with pytest.raises(ConfigError, match="device nowhere cannot be used"):
        crius.load_model(folder / "first", device="nowhere")
    with pytest.raises(ConfigError, match="is not a folder"):
        crius.load_model(folder / "nowhere")


@pytest.mark.long
def test_an_exported_model_is_the_same_one(left, folder):
    from crius import cli

    assert cli.main(["export", str(folder / "first"), str(folder / "hf")]) == 0
    tokens_BT = torch.tensor([[1, 2, 3]])
    there = crius.load_model(folder / "hf")(tokens_BT)
    own = crius.load_model(folder / "first")(tokens_BT)
    # an export is read with transformers' rotary frequencies, which are rounded to float32
    torch.testing.assert_close(there, own, rtol=0, atol=1e-5 * own.abs().max().item())


def test_a_run_on_bytes_is_imported_with_its_tokenizer(left, folder, capsys):
    from crius import cli

    assert cli.main(["import", str(folder / "first"), str(folder / "imported")]) == 0
    with choice.applied(choice.current()):
        assert cli.main(["generate", str(folder / "imported"), "--prompt", "a", "--max_new_tokens", "2"]) == 0
    assert crius.load_run(folder / "imported").settings["tokenizer.path"] == "byte"


def test_a_run_is_read_without_torch(left, folder):
    code = (
        "import sys, crius; run = crius.load_run(sys.argv[1])\n"
        "print(run, run.validations[''] ['step'], run.settings['training.steps'], run.incidents)\n"
        "assert 'torch' not in sys.modules\n"
        "try: crius.nothing\n"
        "except AttributeError: pass\n"
    )
    command = [sys.executable, "-c", code, str(folder / "first")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Run('{folder / 'first'}', finished, 6 reported steps) [4, 6] 6 {{}}\n"


def test_metrics_are_a_table_of_pandas(left, folder):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(crius.load_run(folder / "first").metrics)
    assert list(table["step"]) == [1, 2, 3, 4, 5, 6] and table["mfu"].isna().all()
