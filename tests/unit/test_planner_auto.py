"""``--parallelism.auto``: the planner's layout for the machine at hand, before anything starts."""

import json
from dataclasses import replace

import pytest
from harness import parse
from test_planner_runs import BIG, GIB

from crius import cli
from crius.config.layout import Layout
from crius.config.run import replace_fields
from crius.config.toml_file import to_toml
from crius.errors import ConfigError, LayoutError
from crius.tools.plan import auto
from crius.tools.plan.hardware import KNOWN
from crius.tools.plan.legal import violations
from crius.tools.plan.memory import memory
from crius.tools.plan.workload import from_config
from crius.train.inputs import describe_model
from crius.train.job import one_layout


def test_auto_fills_a_legal_layout_that_fits_and_leaves_the_batch_and_what_was_given(user_cache):
    config = parse([*BIG, "--training.local_batch_size", "-1", "--activation_checkpoint.mode", "full"])
    given = {"activation_checkpoint.mode", "model.flavor", "training.global_batch_size"}
    config = replace(config, parallelism=replace(config.parallelism, auto=True))
    origin = lambda name: "command line" if name in given else "default"  # noqa: E731
    facts = describe_model(config)
    filled = auto.fill(config, facts, KNOWN["h100-80g"], 16, origin)
    laid_out = replace_fields(config, filled.overrides)
    assert laid_out.parallelism.total_ranks(16) == 16
    assert laid_out.training.global_batch_size == 64
    assert laid_out.activation_checkpoint.mode == "full"
    assert set(filled.overrides) - {auto.FLAG} <= {*auto.FILLED, "training.global_batch_size"}
    assert not violations(laid_out, facts, 16)
    assert memory(from_config(laid_out, facts, 16), KNOWN["h100-80g"]).total < 80 * GIB
    assert "auto = false" in to_toml(laid_out)  # what it writes is read as a layout, not chosen anew
    assert any("tokens/s" in line for line in filled.lines)


@pytest.mark.long
def test_auto_spreads_experts_where_that_is_faster(user_cache):
    sizes = ["--model.name", "qwen3_moe", "--model.flavor", "235b-a22b", "--training.seq_len", "4096"]
    config = parse([*sizes, "--training.mixed_precision_param", "bfloat16", "--training.global_batch_size", "256"])
    facts = describe_model(config)
    filled = auto.fill(config, facts, KNOWN["h100-80g"], 256, lambda name: "default")
    laid_out = replace_fields(config, filled.overrides)
    assert laid_out.parallelism.expert_parallel_degree > 1
    assert not violations(laid_out, facts, 256)


def test_auto_refuses_degrees_and_a_gpu_that_it_does_not_know(monkeypatch, capsys):
    flags = ["config", "show", "--parallelism.auto", "--parallelism.tensor_parallel_degree", "2"]
    assert cli.main([*flags, "--parallelism.context_parallel_degree", "2"]) == 2
    error = capsys.readouterr().err
    assert "--parallelism.tensor_parallel_degree (command line)" in error
    assert "--parallelism.context_parallel_degree (command line)" in error
    monkeypatch.setattr(auto, "gpu_name", lambda: "NVIDIA Unheard 1")
    with pytest.raises(ConfigError, match="NVIDIA Unheard 1") as caught:
        auto.hardware_here(on_gpu=True, num_ranks=8, local_ranks=8, is_dry=False)
    assert "crius bench calibrate" in caught.value.fix
    assert auto.hardware_here(on_gpu=True, num_ranks=8, local_ranks=8, is_dry=True).name == "h100-80g"
    monkeypatch.setattr(auto, "gpu_name", lambda: "NVIDIA H100 80GB HBM3")
    assert auto.hardware_here(on_gpu=True, num_ranks=16, local_ranks=4, is_dry=False).gpus_per_node == 4


def test_config_show_prints_what_auto_found(user_cache, capsys):
    flags = ["--parallelism.auto", "--nproc", "4", "--training.device", "cpu", "--training.local_batch_size", "3"]
    assert cli.main(["config", "show", *flags, "--json"]) == 0
    shown = capsys.readouterr()
    values = json.loads(shown.out)
    assert values["parallelism.auto"] == {"value": False, "origin": "parallelism.auto"}
    assert values["parallelism.data_parallel_shard_degree"]["origin"] == "parallelism.auto"
    assert values["training.global_batch_size"]["value"] == 12
    assert shown.err.startswith("auto: ")


def test_ranks_that_found_other_layouts_are_refused():
    class Ranks:
        def __init__(self, *others):
            self.others = others

        def gather_json(self, value):
            return [value, *map(str, self.others)]

    one, other = Layout(dp_shard=2), Layout(tp=2)
    assert one_layout(one, Ranks(one)) is one
    with pytest.raises(LayoutError, match="differs between ranks"):
        one_layout(one, Ranks(other))
