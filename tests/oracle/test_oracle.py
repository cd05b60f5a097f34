"""One device of Crius in float32 beside a plain training loop in float64 that shares no code with it."""

import ast
import functools
import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import sigmoid_moe
import torch
from harness import parse, run_job
from mutations import ON_ONE_DEVICE, forget_rslora_in_an_export, with_fault
from safetensors.torch import load_file
from sft_samples import samples_folder

import oracle
from crius import cli
from crius.models import registry
from oracle.data import packed, windows
from oracle.model import adapter_scale
from oracle.training import train

DOCUMENTS = [f"Chapter {number}. " + "The quick brown fox jumps. " * (number % 4) for number in range(40)]
HELD_OUT = [f"Appendix {number}: " + "a lazy dog, " * (number % 3) for number in range(14)]
LENGTHS = [9, 30, 14, 14, 21, 5, 14, 40, 12, 7, 18, 32, 14, 26, 3, 11, 17, 23]

BASE = {
    "model.name": "llama3",
    "model.num_layers": 2,
    "model.dim": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.ffn_dim": 48,
    "model.vocab_size": 257,
    "model.rope_theta": 1000.0,
    "model.norm_eps": 1e-5,
    "model.attention_mask": "causal",
    "model.tied_embeddings": False,
    "training.steps": 4,
    "training.epochs": -1,
    "training.seq_len": 32,
    "training.global_batch_size": 4,
    "training.local_batch_size": 4,
    "training.max_norm": 0.0,
    "training.mixed_precision_param": "float32",
    "training.device": "cpu",
    "optimizer.name": "adamw",
    "optimizer.lr": 5e-3,
    "optimizer.beta1": 0.8,
    "optimizer.beta2": 0.9,
    "optimizer.eps": 1e-5,
    "optimizer.weight_decay": 0.3,
    "optimizer.decay_1d": False,
    "optimizer.decay_embeddings": False,
    "optimizer.param_groups": [],
    "optimizer.state_dtype": "float32",
    "optimizer.muon_momentum": 0.9,
    "optimizer.muon_nesterov": True,
    "optimizer.muon_adjust_lr": "match_rms_adamw",
    "lr_scheduler.warmup_steps": 2,
    "lr_scheduler.decay_ratio": None,
    "lr_scheduler.decay_type": "linear",
    "lr_scheduler.min_lr_factor": 0.1,
    "data.source": "jsonl",
    "data.add_eos": True,
    "data.shuffle": True,
    "validation.interval": 0,
    "validation.fraction": 0.0,
    "validation.num_samples": 128,
    "metrics.log_interval": 1,
    "debug.seed": 42,
}

DOCUMENT_MASK = {"model.attention_mask": "document"}
QWEN3 = {"model.name": "qwen3"}
EXPERTS = {"model.num_experts": 8, "model.top_k": 2, "model.expert_ffn_dim": 16}
BALANCE = {"moe.aux_loss_coefficient": 0.05, "moe.z_loss_coefficient": 0.02, "moe.bias_update_rate": 0.01}
ROUTING = {"score": "softmax", "route_scale": 1.0, "num_groups": 1, "top_groups": 1}
DEEPSEEK = {"score": "sigmoid", "route_scale": 2.5, "num_groups": 4, "top_groups": 2}
LORA = {"lora.rank": 4, "lora.alpha": 6.0, "lora.rslora": True}
PACKING = {"data.source": "tokens", "data.format": "chat", "model.attention_mask": "document"}

QUICK = {
    "causal": {"training.max_norm": 1.0},
    "documents": {**DOCUMENT_MASK, **QWEN3, "training.local_batch_size": 2, "data.add_eos": False},
}
CASES = QUICK | {
    "packing": PACKING,
    "last_partial_batch": {**PACKING, "training.epochs": 1},
    "three_epochs": {
        **PACKING,
        "training.epochs": 3,
        "training.global_batch_size": 5,
        "training.local_batch_size": 5,
        "lr_scheduler.decay_type": "cosine",
    },
    "in_order": {
        "training.epochs": 2,
        "training.seq_len": 128,
        "training.global_batch_size": 8,
        "data.shuffle": False,
        "lr_scheduler.decay_ratio": 0.5,
    },
    "validation": {"validation.interval": 100, "validation.num_samples": 7, "data.add_eos": False},
    "accumulation": {**PACKING, "training.local_batch_size": 1},
    "clipping": {"training.max_norm": 0.3, "lr_scheduler.decay_type": "sqrt"},
    "head_norms": QWEN3,
    "groups": {
        **QWEN3,
        "optimizer.decay_1d": True,
        "optimizer.decay_embeddings": True,
        "optimizer.param_groups": ["attention.wq: lr_factor=0.5 weight_decay=0.0", "q_norm: weight_decay=0.7"],
    },
    "tied": {"model.tied_embeddings": True},
    "tied_decayed": {"model.tied_embeddings": True, "optimizer.decay_embeddings": True},
    "muon": {**QWEN3, "optimizer.name": "muon"},
    "muon_original": {
        "optimizer.name": "muon",
        "optimizer.muon_adjust_lr": "original",
        "optimizer.muon_nesterov": False,
        "optimizer.param_groups": ["wo: optimizer=adamw"],
    },
    "experts": {"model.name": "qwen3_moe", **EXPERTS, **BALANCE, "training.local_batch_size": 2},
    "sigmoid_experts": {"model.name": "sigmoid_moe", "model.flavor": "small", **EXPERTS, **BALANCE},
    "lora": LORA,
    "8bit": {"model.dim": 64, "optimizer.state_dtype": "8bit", "optimizer.eps": 1e-3},
}


def flags(settings):
    """Settings as a user gives them."""
    found = []
    for name, value in settings.items():
        section, _, leaf = name.partition(".")
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--{section}.no_{leaf}")
        elif value is not None and leaf:
            found += [f"--{name}={text}" for text in (value if isinstance(value, list) else [value])]
    return found


class Recorder:
    """A sink that keeps the records."""

    def __init__(self):
        self.records = []

    def write(self, record):
        self.records.append(asdict(record))

    def close(self):
        pass


def trained(arguments, folder, placement):
    """The records of a run, and its weights before and after. All trained weights begin with numbers that matter."""
    recorder = Recorder()
    kept = {}

    def prepare(loop):
        [model] = loop.state.parts
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.15 * torch.randn(parameter.shape, generator=random)
        kept["model"] = model
        kept["start"] = state_of(model)
        loop.reports.sinks.append(recorder)
        return loop

    run_job(parse(arguments), folder, time.monotonic(), placement, prepare)
    return recorder.records, kept["start"], state_of(kept["model"])


def state_of(model):
    tied = model.output.weight is model.tok_embeddings.weight
    return {name: value.clone() for name, value in model.state_dict().items() if not (tied and name == "output.weight")}


def samples():
    """Ids of conversations, and which of them are to be predicted."""
    found = []
    for number, length in enumerate(LENGTHS):
        ids = [(number * 31 + place * place * 7) % 256 for place in range(length)]
        found.append((ids, [int(place % 5 > number % 3) for place in range(length)]))
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Files of documents, and a folder of samples."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, documents in (("train", DOCUMENTS), ("held_out", HELD_OUT)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    samples_folder(folder / "samples", samples())
    return folder


@pytest.fixture(scope="module")
def ran(workers, corpus, tmp_path_factory, imported_torchao):
    """A run of Crius by its settings, on a standing worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.SPECS, sigmoid_moe.SPEC.name, sigmoid_moe.SPEC)
        patch.setattr(registry, "FLAVORS", {*registry.FLAVORS, *sigmoid_moe.SPEC.flavors})

        def run(settings, *more, plant=None):
            is_packed = settings.get("data.format") == "chat"
            paths = [f"--data.path={corpus / ('samples' if is_packed else 'train.jsonl')}"]
            if settings["validation.interval"]:
                paths.append(f"--validation.path={corpus / 'held_out.jsonl'}")
            folder = tmp_path_factory.mktemp("run")
            work = functools.partial(trained, [*flags(settings), *paths, *more], folder)
            [found] = workers(1).run(functools.partial(plant, work) if plant else work, folder)
            return folder, *found

        yield run


def expected(settings, start):
    """What the oracle makes of the same weights and data."""
    length = settings["training.seq_len"]
    if settings.get("data.format") == "chat":
        sequences = packed(samples(), length, settings["debug.seed"])
    else:
        sequences = windows(DOCUMENTS, length, settings["data.add_eos"])
    held_out = windows(HELD_OUT, length, settings["data.add_eos"]) if settings["validation.interval"] else []
    routing = DEEPSEEK if settings["model.name"] == "sigmoid_moe" else ROUTING
    return train(start, sequences, held_out, settings | routing)


def differences(settings, records, start, end):
    """The largest relative differences of a run from the oracle: of losses, norms, and updates of a weight."""
    curve, weights = expected(settings, start)
    steps = [record for record in records if "loss" in record]
    found = {}
    for name in ("loss", "grad_norm", "lr", "aux_loss"):
        wanted = torch.tensor(getattr(curve, name), dtype=torch.float64)
        found[name] = torch.tensor([record[name] or 0.0 for record in steps], dtype=torch.float64) / wanted - 1
    scored = [record for record in records if "val_loss" in record]
    for name in ("val_loss", "val_bits_per_byte") if settings["validation.interval"] else ():
        found[name] = torch.tensor([record[name] / getattr(curve, name) - 1 for record in scored])
    updates = []
    for name, before in start.items():
        errors = (end[name] - weights[name]).abs().flatten().sort().values
        if settings["optimizer.state_dtype"] == "8bit":  # a number in the middle of two codes may get the other one
            errors = errors[: math.ceil(0.999 * len(errors))]
        updates.append(errors.norm() / (weights[name] - before).norm().clamp(min=1e-30))
    found["update"] = torch.stack(updates)
    if "moe.aux_loss_coefficient" not in settings:
        del found["aux_loss"]
    return {name: values.abs().max().item() for name, values in found.items()}  # NaN where one is


# float32 beside float64, the same sums in another order; the balance loss is counted in units of 2**-32
LIMITS = {"loss": 3e-7, "val_loss": 3e-7, "val_bits_per_byte": 3e-7, "grad_norm": 4e-6, "update": 5e-5}
LIMITS |= {"lr": 1e-12, "aux_loss": 1e-6}


def excess(found):
    """The differences that are above their limits."""
    return {name: number for name, number in found.items() if not number <= LIMITS[name]}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.quick if name in QUICK else ()) for name in CASES]
)
def test_a_run_is_what_a_plain_loop_computes(case, ran):
    settings = BASE | CASES[case]
    found = differences(settings, *ran(settings)[1:])
    assert excess(found) == {}, found


@pytest.mark.matrix
@pytest.mark.parametrize(("mutate", "case"), ON_ONE_DEVICE, ids=[mutate.__name__ for mutate, _ in ON_ONE_DEVICE])
def test_a_planted_fault_is_no_plain_loop(mutate, case, ran):
    settings = BASE | CASES[case]
    assert excess(differences(settings, *ran(settings, plant=functools.partial(with_fault, mutate))[1:]))


@pytest.fixture(scope="module")
def tuned(ran):
    """A run of adapters that a run was the base of, and its last weights."""
    saved = BASE | {"training.steps": 2, "checkpoint.interval": 100}
    base = ran(saved)[0]
    folder, _, _, end = ran(saved | LORA, f"--checkpoint.init_from={base}")
    return folder, end


def exported(folder, target):
    """Scale and tensors of an export, as PEFT reads them: LoraLayer.update_layer and rank-stabilised LoRA."""
    assert cli.main(["export", str(folder), str(target), "--format", "peft"]) == 0
    config = json.loads((target / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    return scale, load_file(target / "adapter_model.safetensors")


def test_an_exported_adapter_is_the_one_that_was_trained(tuned, tmp_path):
    folder, end = tuned
    scale, tensors = exported(folder, tmp_path / "peft")
    assert scale == adapter_scale(LORA)
    for theirs, ours in (("self_attn.q_proj", "attention.wq"), ("mlp.down_proj", "feed_forward.w2")):
        for part in ("lora_A", "lora_B"):
            found = tensors[f"base_model.model.model.layers.1.{theirs}.{part}.weight"]
            assert torch.equal(found, end[f"layers.1.{ours}.{part}"])


def test_an_export_that_forgets_rslora_has_another_scale(tuned, tmp_path, monkeypatch):
    forget_rslora_in_an_export(monkeypatch)
    assert exported(tuned[0], tmp_path / "peft")[0] != adapter_scale(LORA)


def test_the_oracle_imports_nothing_of_crius():
    for path in Path(oracle.__file__).parent.glob("*.py"):
        imported = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        names = {getattr(node, "module", node.names[0].name).split(".")[0] for node in imported}
        assert path.name == "test_oracle.py" or names <= {"dataclasses", "math", "oracle", "torch"}
