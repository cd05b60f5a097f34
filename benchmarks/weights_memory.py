"""Anonymous memory of ``crius import`` and ``crius export`` over a synthetic folder.

    python benchmarks/weights_memory.py --folder DIR

The folder is that of a Llama, with ``--experts`` of a Qwen3-MoE, in bfloat16, in shards of 1 GB whose tensors are
holes, so that it takes no disk; the run and the export that are made of it do. Each verb runs in a process of its own,
whose RssAnon is read every few milliseconds. The comparison of logits at the end of an export is left out: another
process makes it.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from crius.models.huggingface import config_of, rows_of
from crius.models.registry import SPECS

GB = 10**9
SHARD = GB
SAMPLE_SECONDS = 0.002

_CHILD = """
import sys
from dataclasses import replace
from crius.tools.convert import exporting, importing
exporting.find_spec = lambda name: None  # no logits
verb, source, target = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
if verb == "import":
    importing.import_model(source, target)
else:
    exporting.export_model(replace(exporting.open_source(source, -1), has_tokenizer=False), target)
"""


def describe(gigabytes: float, dim: int, rows: int, experts: int = 0):
    """A Llama, or a Qwen3-MoE, of about so many bytes: as many layers as are needed."""
    sizes = {"dim": dim, "num_heads": dim // 64, "num_kv_heads": dim // 256, "ffn_dim": 4 * dim, "vocab_size": rows}
    sizes |= {"num_experts": experts, "expert_ffn_dim": dim // 2} if experts else {}
    spec = SPECS["qwen3_moe" if experts else "llama3"]
    facts = [spec.describe("debug", **sizes, num_layers=layers) for layers in (1, 2)]
    first, second = (of.num_parameters * 2 for of in facts)
    layers = max(1, 1 + round((gigabytes * GB - first) / (second - first)))
    return spec.describe("debug", **sizes, num_layers=layers)


def write(folder: Path, facts) -> int:
    """A folder of Hugging Face, all of whose numbers are 0; returns the bytes of the largest tensor."""
    folder.mkdir(parents=True)
    family = SPECS[facts.name.partition("/")[0]].hf
    config = config_of(family, vars(facts.config) | {"rope_scaling": "none"})
    (folder / "config.json").write_text(json.dumps(config))
    shards, begin, largest = [{}], 0, 0
    for name, whole in facts.parameter_shapes.items():
        largest = max(largest, 2 * math.prod(whole))
        for key, shape in rows_of(family.translated(name), whole).items():
            size = 2 * math.prod(shape)
            if begin and begin + size > SHARD:
                shards.append({})
                begin = 0
            shards[-1][key] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, begin + size]}
            begin += size
    where = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header = json.dumps(shard).encode()
        with (folder / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + max(entry["data_offsets"][1] for entry in shard.values()))
        where |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return largest


def anonymous(pid: int) -> int:
    """Bytes of anonymous memory of a process; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


def measure(verb: str, source: Path, target: Path) -> dict:
    """Run a verb; bytes at the start and at the peak, and CPU seconds."""
    command = [sys.executable, "-c", _CHILD, verb, str(source), str(target)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdin
    assert process.stdout.readline() == "ready\n"
    start = peak = anonymous(process.pid)
    process.stdin.write("\n")
    process.stdin.flush()
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(SAMPLE_SECONDS)
    assert process.returncode == 0, f"{verb} failed"
    return {"start": start, "peak": peak, "above": peak - start}


def run(folder: Path, gigabytes: float, dim: int, rows: int, experts: int = 0) -> dict:
    """Both verbs over a folder of this size."""
    facts = describe(gigabytes, dim, rows, experts)
    largest = write(folder / "hf", facts)
    size = sum(file.stat().st_size for file in (folder / "hf").glob("*.safetensors"))
    found = {"bytes": size, "largest_tensor": largest, "num_layers": facts.num_layers}
    found["import"] = measure("import", folder / "hf", folder / "run")
    return {**found, "export": measure("export", folder / "run", folder / "back")}


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=128_256)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--folder", help="for 2 times as many bytes; a temporary one otherwise")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        found = run(Path(folder), flags.gigabytes, flags.dim, flags.rows, flags.experts)
    mib = {verb: {name: round(value / 2**20) for name, value in found[verb].items()} for verb in ("import", "export")}
    print(f"{found['bytes'] / GB:.2f} GB in bfloat16, largest tensor {found['largest_tensor'] / 2**20:.0f} MiB")
    for verb, of in mib.items():
        print(f"{verb}: {of['start']} MiB at the start, {of['peak']} MiB at the peak: {of['above']} MiB above")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
