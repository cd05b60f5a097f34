"""The sink of W&B, with a module in its place: one identity, all records, and nothing that W&B does ends a run."""

import importlib
import json
import logging
import sys
import threading
import time
import types

import pytest
from test_metrics import STEP, VALIDATION

import crius.metrics
from crius.config.operation import MetricsConfig
from crius.metrics.sinks import build_sinks


class Service:
    """What W&B is asked to do."""

    def __init__(self):
        self.settings, self.started, self.logged, self.finished = [], [], [], 0
        self.fails_at, self.waits = "", threading.Event()
        self.waits.set()

    def do(self, what):
        self.waits.wait(30)
        if what == self.fails_at:
            raise SystemExit(f"{what} failed")  # as wandb does where a run is not allowed

    def module(self):
        def init(**given):
            self.do("init")
            self.started.append(given)
            return types.SimpleNamespace(
                url=None,
                id=given["id"],
                settings=types.SimpleNamespace(mode="offline"),
                define_metric=lambda *names, **more: self.settings.append((*names, *more.values())),
                log=self.log,
                finish=self.finish,
            )

        return types.SimpleNamespace(
            setup=lambda settings: self.settings.append(settings), Settings=lambda **given: given, init=init
        )

    def log(self, row):
        self.do("log")
        self.logged.append(row)

    def finish(self):
        self.do("finish")
        self.finished += 1


@pytest.fixture
def service(monkeypatch):
    found = Service()
    monkeypatch.setitem(sys.modules, "wandb", found.module())
    monkeypatch.delitem(sys.modules, "crius.metrics.wandb", raising=False)
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    yield found
    sys.modules.pop("crius.metrics.wandb", None)
    vars(crius.metrics).pop("wandb", None)


def sinks(folder, resumed_step=0, **settings):
    return build_sinks(MetricsConfig(enable_wandb=True), folder, 120, 80.0, resumed_step, settings)


def report(built, *records):
    for sink in built:
        for record in records:
            sink.write(record)
        sink.close()


def test_wandb_gets_the_settings_and_every_record_by_step(service, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    report(sinks(tmp_path, **{"optimizer.lr": 3e-4}), STEP, VALIDATION)
    [started] = service.started
    assert started["config"] == {"optimizer.lr": 3e-4} and started["project"] == "ours"
    assert (started["name"], started["dir"], started["resume"]) == (tmp_path.name, tmp_path, "allow")
    assert service.settings == [{"silent": True}, ("*", "step")]
    step, validation = service.logged
    assert (step["step"], step["loss_metrics/global_avg_loss"], step["mfu(%)"]) == (120, STEP.loss, 100 * STEP.mfu)
    assert validation["step"] == 120 and validation["validation_metrics/loss"] == VALIDATION.val_loss
    assert service.finished == 1


def test_starts_and_resumes_in_a_folder_are_one_run_until_it_has_ended(service, tmp_path):
    for resumed_step in (0, 0, 20):  # the second start: the first saved no checkpoint
        report(sinks(tmp_path, resumed_step))
    assert len({started["id"] for started in service.started}) == 1
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 120}))
    report(sinks(tmp_path, 120))  # more steps of the same run
    report(sinks(tmp_path))  # another run
    ids = [started["id"] for started in service.started]
    assert ids[3] == ids[0] != ids[4]


@pytest.mark.parametrize("fails_at", ["init", "log", "finish"])
def test_wandb_that_fails_is_warned_of_and_the_run_goes_on(fails_at, service, tmp_path, caplog):
    service.fails_at = fails_at
    with caplog.at_level(logging.WARNING, logger="crius.metrics"):
        report(sinks(tmp_path), STEP, VALIDATION)
    assert caplog.messages == [f"W&B failed and gets no more records: SystemExit: {fails_at} failed"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(("number", "waits"), [(10_001, False), (1, True)])
def test_wandb_that_hangs_holds_up_neither_a_record_nor_the_end(number, waits, service, tmp_path, monkeypatch, caplog):
    service.waits.clear()
    module = importlib.import_module("crius.metrics.wandb")
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    monkeypatch.setattr(module, "_SILENT", 0.1)
    started = time.monotonic()
    with caplog.at_level(logging.INFO, logger="crius.metrics"):
        report(sinks(tmp_path), *([STEP] * number))
    assert time.monotonic() - started < 20
    assert [message for message in caplog.messages if "W&B" in message] == [
        *["waiting up to 0 s for W&B to take the remaining records"] * waits,
        "W&B did not take all records in 0 s: wandb sync sends them",
    ]
    service.waits.set()
