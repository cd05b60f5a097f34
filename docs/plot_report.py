"""Make docs/report.png, report_top.png and report_overlay.png: python docs/plot_report.py FOLDER [FLAG ...].

Trains the runs that they show into FOLDER, unless they are there: a run with experts and two validation sets that was
killed, hung, spiked, met a NaN and generated texts half-way (it gets the flags too), and one configuration on three
layouts. Needs playwright and a chromium, and takes 5 minutes on 2 cores.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

from playwright.sync_api import Page, sync_playwright

DOCS = Path(__file__).parent
SHORT = ("--training.seq_len", "128", "--batch", "8", "--metrics.log_interval", "1", "--validation.interval", "25")
EXPERTS = (
    *("--model.name", "qwen3_moe", "--model.flavor", "debug", "--layout", "fsdp2_ep2"),
    *("--checkpoint.interval", "40", "--stability.nonfinite", "skip", "--watchdog.limit_seconds", "20", *SHORT),
    *("--data.source", "text", "--data.path", "text/train"),
    *("--validation.path", "code=text/code", "--validation.path", "english=text/english"),
)
EARLY, LATE = "kill:step=97,rank=1;nan:step=141", "spike:step=205,factor=4;hang:step=233,rank=1"
SAMPLE = ("--prompt", "def main(", "--prompt", "The while statement", "--temperature", "0.7", "--max_new_tokens", "120")
LAYOUTS = ("1", "fsdp2", "tp2")


def crius(folder: Path, *words: str, faults: str = "", must: bool = True) -> None:
    """Run a command in ``folder``, with caches of its own: a calibration there is not that of this user."""
    environ = {"PYTHONPATH": str(DOCS.parent), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    fault = {"CRIUS_FAULT": faults} if faults else {}
    command = [sys.executable, "-m", "crius", *words]
    subprocess.run(command, cwd=folder, check=must, env={**os.environ, **environ, **fault})


def train(folder: Path, name: str, *flags: str, faults: str = "") -> None:
    """Train the run ``name``, which writes its report; of one that has ended already only the report is written."""
    if (folder / name / "summary.json").exists():
        crius(folder, "report", name)
    else:
        crius(folder, "train", *flags, "--job.run_dir", name, faults=faults)


def write_texts(folder: Path) -> None:
    """Text that every Python brings along: modules to train on, other modules and the language reference to score."""
    modules = sorted(path for path in Path(os.__file__).parent.glob("*.py") if path.stat().st_size > 4000)
    texts = {
        "train": {path.stem: path.read_text(encoding="utf-8") for path in modules[10:]},
        "code": {path.stem: path.read_text(encoding="utf-8") for path in modules[:10]},
        "english": topics,
    }
    for name, files in texts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for stem, text in files.items():
            (folder / name / f"{stem}.txt").write_text(text, encoding="utf-8")


def shot(page: Page, report: Path, picture: str, last: str) -> None:
    """A picture of a report, down to the end of the element ``last``."""
    page.goto(report.as_uri())
    page.wait_for_selector("footer")
    end = page.locator(last).bounding_box()
    assert end is not None
    size = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": end["y"] + end["height"] + 24}
    page.screenshot(path=DOCS / picture, clip=size, full_page=True)


def main(place: str, *flags: str) -> None:
    """Train, write the reports, take the pictures."""
    folder = Path(place).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "cache" / "crius" / "hardware.toml").exists():
        crius(folder, "bench", "calibrate", must=False)  # a busy machine cannot be measured: then no speed is planned
    write_texts(folder / "text")
    if not (folder / "experts" / "samples.jsonl").exists():
        train(folder, "experts", *EXPERTS, *flags, "--training.steps", "150", faults=EARLY)
        crius(folder, "generate", "experts", *SAMPLE)
        (folder / "experts" / "summary.json").unlink()
    train(folder, "experts", *EXPERTS, *flags, "--training.steps", "300", faults=LATE)
    for layout in LAYOUTS:
        train(folder, layout, "--layout", layout, "--training.steps", "150", "--checkpoint.no_enable", *SHORT)
    crius(folder, "report", *LAYOUTS, "--out", "overlay.html")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme, report, picture, last in (
            ("light", "experts/report.html", "report.png", "footer"),
            ("light", "experts/report.html", "report_top.png", "[data-chart=grad_norm]"),
            ("dark", "overlay.html", "report_overlay.png", "[data-chart=apart]"),
        ):
            page = browser.new_page(color_scheme=scheme, viewport={"width": 1240, "height": 900})
            shot(page, folder / report, picture, last)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
