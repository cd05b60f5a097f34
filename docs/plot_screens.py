"""Make docs/mask.svg, docs/plan.svg and docs/chat.png: python docs/plot_screens.py MODEL.

MODEL is what ``make smol`` makes. Commands run on a terminal of 106 columns; Rich draws what they print. The page is
opened by playwright in a chromium.
"""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

DOCS = Path(__file__).parent
COLUMNS = 106
TALKS = (
    (
        "system: You are a helpful librarian.",
        "user: Who wrote The Time Machine?",
        "assistant: H. G. Wells wrote it in 1895.",
        "user: Did he write more?",
        "assistant: Yes, among others The War of the Worlds.",
    ),
    ("user: May I take an atlas home?", "assistant: No, atlases stay in the reading room."),
)
PLAN = "plan --model llama3 --flavor 70b --gpus 256 --gpu h100"
QUESTIONS = ("What is the capital of France?", "And of Italy?")


def run_on_terminal(words: list[str]) -> str:
    """What ``crius`` prints on a terminal, with its colours."""
    keeper, terminal = pty.openpty()
    environ = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    process = subprocess.Popen([sys.executable, "-m", "crius", *words], stdout=terminal, stderr=terminal, env=environ)
    os.close(terminal)
    pieces = []
    while True:
        try:
            piece = os.read(keeper, 4096)
        except OSError:  # the other end is closed
            break
        pieces.append(piece)
    process.wait()
    return b"".join(pieces).decode().replace("\r\n", "\n")


def draw(command: str, printed: str, picture: str) -> None:
    """An SVG of a terminal, which loads no font from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)
    console.print(Text.from_ansi(f"\x1b[1m$ crius {command}\x1b[0m\n{printed.rstrip()}"))
    svg = console.export_svg(title="", theme=DIMMED_MONOKAI, unique_id=picture.partition(".")[0])
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    (DOCS / picture).write_text(re.sub(r"Fira Code", "ui-monospace", svg))


def write_talks(path: Path) -> None:
    """A file of conversations, as JSON lines."""
    lines = []
    for talk in TALKS:
        messages = [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in talk]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")


def photograph(model: str) -> None:
    """The chat page after two questions."""
    words = ["chat", model, "--web", "--temperature", "0", "--max_new_tokens", "60"]
    server = subprocess.Popen([sys.executable, "-m", "crius", *words], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 560}, device_scale_factor=2)
        page.goto(address)
        for question in QUESTIONS:
            page.fill("#question", question)
            page.click("#send")
            page.locator("#stop:disabled").wait_for(timeout=120_000)
        page.screenshot(path=DOCS / "chat.png")
        browser.close()
    server.send_signal(signal.SIGINT)
    server.wait()


def main(model: str) -> None:
    """Make the three pictures."""
    draw(PLAN, run_on_terminal(PLAN.split()), "plan.svg")
    with tempfile.TemporaryDirectory() as folder:
        talks = Path(folder, "talks.jsonl")
        write_talks(talks)
        flags = ["--checkpoint.init_from", model, "--training.seq_len", "80", "--training.global_batch_size", "1"]
        shown = run_on_terminal(["data", "show", "--sample", "0", "--data.path", str(talks), *flags])
    draw("data show --sample 0 --data.path talks.jsonl --checkpoint.init_from smol", shown, "mask.svg")
    photograph(model)


if __name__ == "__main__":
    main(*sys.argv[1:])
