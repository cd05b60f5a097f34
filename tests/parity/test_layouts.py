"""Every layout computes what one device computes, and each planted fault is found: rows of ``crius verify parity``."""

import functools
import json

import pytest
import sigmoid_moe
from harness import SMALL, TEXT, TIED, layout_flags, parse, skip_what_torch_lacks, train
from mutations import (
    MUTATIONS,
    NAMES,
    ONE_KEY_VALUE_HEAD,
    QWEN3_MOE,
    SIGMOID_MOE,
    count_tokens_where_they_are_recomputed,
    planted,
    with_fault,
)
from workers import RowFailed

from crius.cli.app import facts_of
from crius.config.layout import apply_layout, parse_layout
from crius.config.low_precision import is_enabled
from crius.config.pipeline import num_stages
from crius.config.run import RunConfig
from crius.models import registry
from crius.tools.verify import matrix, worker
from crius.tools.verify.compare import NUDGE, judge, judge_nudged, task_of
from crius.tools.verify.parameters import Shards

# gradients are clipped in each step, so that a wrong factor shows
FLAGS = [
    *("--recipe", "verify", "--training.seq_len", "16", "--training.max_norm", "0.5"),
    *("--data.source", "text", "--data.path", str(TEXT)),
]
VALIDATED = [*SMALL, "--model.num_layers", "2", "--training.steps", "2", "--validation.interval", "2"]

# what make test runs: each axis of a mesh, and three of them together
QUICK = {
    "llama3": ("ddp4", "fsdp2", "hsdp2x2_accum4+deferred", "tp4", "pp2+1f1b", "cp2", "fsdp2_tp2"),
    "qwen3_moe": ("fsdp2_ep2",),
    "smollm3": ("tp2",),
}
# norms of heads: as many ranks as query heads, fewer key/value heads than ranks, heads dealt out over a sequence
QWEN3 = ("tp8", "fsdp2_tp2", "pp2_tp2", "cp2+ulysses", "fsdp2+full")
# what the matrix lacks: a rank with fewer rows than the others, the other modes, microbatches of a pipeline with shards
MORE = ("fsdp3", "accum4+deferred", "ddp2_accum2+auto", "fsdp2_accum2+always", "pp2_tp2_accum2")
# every word of a decoder in three models, on each axis of a mesh, and with windows in documents
WORDS = ("fsdp2", "tp2", "pp2", "cp2", "fsdp2_tp2", "cp2+document", "cp2+ulysses+document")
WITH_WORDS = ("tp2+full", "fsdp2_tp2+lora", "tp2+float8", "fsdp2_tp2+float8_rowwise", "fsdp2+compile")
NEAR = json.dumps({"pattern": [{"window": 5, "rope_theta": 1e4, "stretched": False}, {}]})
LAYOUTS = {
    "llama3": (*matrix.PARITY, *MORE),
    "qwen3": (*matrix.PARITY, *MORE),
    "qwen3_moe": matrix.EXPERTS,  # softmax
    "sigmoid_moe": matrix.EXPERTS,  # sigmoids, bias and groups
    # windows, two ropes, norms on both sides, 1 + w, GeGLU; as many key/value heads as ranks have halves of
    "gemma3": (*WORDS, *WITH_WORDS),
    # norms behind, all heads normalised together, YaRN
    "olmo3": (*WORDS, *WITH_WORDS),
    # biases everywhere, multipliers, scale, layers without positions, few rotary dims, exact GELU
    "smollm3": (*WORDS, *WITH_WORDS),
    # bounded scores and logits
    "gemma2": ("fsdp2", "tp2", "pp2", "cp2+document", "cp2+ulysses", *WITH_WORDS),
}
EVERY_WORD = {
    "pattern": [{}, {"positions": False, "window": 9}],
    "rotary_share": 0.5,
    "rotary_pairs": True,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "attention_scale": 0.3,
    "activation": "gelu",
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "logits_divisor": 6.0,
}
OF_MODELS = {
    "sigmoid_moe": SIGMOID_MOE,
    "gemma3": ("--model.name", "gemma3", "--model.num_kv_heads", "1", "--model.words", NEAR),
    "gemma2": ("--model.name", "gemma2"),
    "olmo3": ("--model.name", "olmo3", "--model.words", NEAR),
    "smollm3": ("--model.name", "smollm3", "--model.words", json.dumps(EVERY_WORD)),
}


def rows():
    """Models and layouts as parameters of a test."""
    for model, layouts in LAYOUTS.items():
        for row in dict.fromkeys(layouts):
            mark = pytest.mark.matrix
            if row in QUICK.get(model, ()):
                mark = pytest.mark.quick
            elif "compile" in row:  # minutes; test_compile.py has some
                mark = pytest.mark.slow
            elif model == "qwen3" and row not in QWEN3:
                mark = pytest.mark.slow
            yield pytest.param(model, row, marks=mark, id=f"{model} {row}")


class Rows:
    """Trains layouts, and once each what they are compared with.

    Args:
        workers: number of ranks to standing workers.
        folder: of logs and parameters.
    """

    def __init__(self, workers, folder):
        self.workers, self.folder, self.references = workers, folder, {}

    def row(self, text, flags=(), plant=None):
        """What ``crius verify parity`` says of a layout: its values, a note, and whether it is wrong.

        Args:
            text: the layout.
            flags: of the layout and its reference.
            plant: calls the work of a rank of the layout, with a fault.
        """
        *results, own = self.results(text, flags, plant)
        return judge(*results, own=own)

    def results(self, text, flags=(), plant=None, steps=3):
        """A layout, what its reference found in so many steps, what it found, and how far the reference is from itself
        once its products in low precision are nudged."""
        skip_what_torch_lacks(text)
        layout = parse_layout(text)
        layers = max(2, num_stages(apply_layout(RunConfig(), layout).parallelism))
        facts = facts_of(parse([*FLAGS, "--model.num_layers", str(layers), *flags]), 0, None)
        config = matrix.fixed(facts.config, [layout], steps)
        case, alone = (matrix.case(facts, config, one) for one in (layout, matrix.reference_of(layout)))
        assert case.config, case.refusal
        key = alone.layout, layers, config.training.global_batch_size, flags, steps
        if key not in self.references:
            shards = Shards(self.folder / f"shards-{len(self.references)}", is_whole=True)
            shards.folder.mkdir()
            expected = self._train(alone, shards, is_reference=True)
            own = {}
            if is_enabled(alone.config.quantize.dense):
                own, _, _ = judge_nudged(alone, expected, self._train(alone, shards, nudge=NUDGE))
            self.references[key] = shards, expected, own
        shards, expected, own = self.references[key]
        return case, expected, self._train(case, shards, plant=plant), own

    def _train(self, case, shards, is_reference=False, plant=None, nudge=0.0):
        folder = self.folder / str(len(list(self.folder.iterdir())))
        task = task_of(case.layout, folder, 250, shards, is_reference, case.config, nudge=nudge)
        work = functools.partial(worker.train, task)
        self.workers(case.layout.num_ranks).run(functools.partial(plant, work) if plant else work, task.run_dir, 280)
        return json.loads((task.run_dir / worker.RESULT).read_text())


@pytest.fixture(scope="module")
def known_model():
    """A model that is no part of Crius, for this process and the workers that it forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.SPECS, sigmoid_moe.SPEC.name, sigmoid_moe.SPEC)
        patch.setattr(registry, "FLAVORS", {*registry.FLAVORS, *sigmoid_moe.SPEC.flavors})
        yield


@pytest.fixture(scope="module")
def trained(workers, tmp_path_factory, imported_torchao, known_model):
    return Rows(workers, tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def row(trained):
    return trained.row


@pytest.mark.parametrize(("model", "layout"), list(rows()))
def test_every_layout_computes_what_one_device_computes(model, layout, row):
    """Loss and gradient norm of three steps, the parameters after them, and the update of each parameter."""
    values, note, is_wrong = row(layout, OF_MODELS.get(model, ("--model.name", model)))
    assert not is_wrong, (values, note)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2_ep2", "tp2_ep2", "pp2_fsdp2_ep2"])
@pytest.mark.parametrize("model", [QWEN3_MOE, SIGMOID_MOE], ids=["qwen3_moe", "sigmoid_moe"])
def test_a_run_with_experts_stays_that_of_one_device(model, layout, trained):
    """20 steps; parameters and bias after them within what three steps may differ by."""
    case, expected, got, _ = trained.results(layout, (*model, "--model.num_layers", "4"), steps=20)
    for name, first, last in (("loss", 1e-7, 1e-5), ("grad_norm", 1e-6, 1e-4)):
        assert len(got[name]) == 20
        assert got[name][0] == pytest.approx(expected[name][0], rel=first, abs=0)
        assert got[name][-1] == pytest.approx(expected[name][-1], rel=last, abs=0)
    values, note, is_wrong = judge(case, expected, got)
    assert not is_wrong, (values, note)
    assert not any(set(bias) <= set(worker.BIASES) for bias in got["buffers"].values())  # they moved


def test_fewer_key_value_heads_than_ranks_compute_the_same(row):
    values, note, is_wrong = row("tp2", ONE_KEY_VALUE_HEAD)
    assert not is_wrong, (values, note)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout",
    [
        *("fsdp2", "pp2", "pp4+interleave_1f1b", "pp2_tp2", "hsdp2x1_pp2", "pp2_fsdp3"),
        *("pp2+interleave_zero_bubble", "pp2+zbv_zero_bubble", "pp2+offload"),
    ],
)
def test_tied_embeddings_are_one_weight_on_every_layout(layout, row):
    """Under a pipeline two stages have a copy each, in a V one rank has both; 257 rows of it split unevenly."""
    values, note, is_wrong = row(layout, (*TIED, "--model.vocab_size", "257"))
    assert not is_wrong, (values, note)


@pytest.mark.matrix
@pytest.mark.parametrize("number", range(len(MUTATIONS)), ids=NAMES)
def test_a_planted_fault_fails_its_row(number, row):
    _, layout, flags = MUTATIONS[number]
    values, note, is_wrong = row(layout, flags, functools.partial(planted, number))
    assert is_wrong, (values, note)
    assert values  # it ran to its end and was measured


def test_a_row_whose_tokens_count_twice_is_at_its_end(row):
    fault = functools.partial(with_fault, count_tokens_where_they_are_recomputed)
    with pytest.raises(RowFailed, match="the experts' counts differ from the tokens"):
        row("fsdp2+full", QWEN3_MOE, fault)


@pytest.fixture(scope="module")
def validated_alone(tmp_path_factory):
    return train([*VALIDATED, *layout_flags("1")], tmp_path_factory.mktemp("one"))[-1]


@pytest.mark.long
@pytest.mark.parametrize("layout", ["fsdp2_cp2", "pp2", "tp2"])
def test_validation_scores_what_one_device_scores(layout, validated_alone, tmp_path):
    got = train([*VALIDATED, *layout_flags(layout)], tmp_path)[-1]
    for name in ("val_loss", "val_bits_per_byte"):
        assert got[name] == pytest.approx(validated_alone[name], rel=1e-6, abs=0)
    assert got["val_samples"] == validated_alone["val_samples"] == 20


@pytest.mark.long
def test_each_validation_set_is_scored_alike_by_every_layout(tmp_path):
    (tmp_path / "other.txt").write_text("0123456789" * 400)
    sets = ["--validation.path", f"play={TEXT}", "--validation.path", f"digits={tmp_path / 'other.txt'}"]
    runs = {}
    for layout in ("1", "fsdp2", "pp2"):
        records = train([*VALIDATED, *sets, *layout_flags(layout)], tmp_path / layout)
        runs[layout] = {record["val_set"]: record for record in records if "val_loss" in record}
        assert list(runs[layout]) == ["play", "digits"]
        summary = json.loads((tmp_path / layout / "summary.json").read_text())
        for name, record in runs[layout].items():
            assert summary["validation_sets"][name]["val_loss"] == record["val_loss"]
            assert record["val_loss"] == pytest.approx(runs["1"][name]["val_loss"], rel=1e-6, abs=0)
        assert summary["val_loss"] == runs[layout]["play"]["val_loss"] != runs[layout]["digits"]["val_loss"]
