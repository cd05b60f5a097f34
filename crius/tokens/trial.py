"""Tries an untrusted tokenizer.json in a separate process, with limits on time and memory.

It imports nothing of Crius and is started by ``crius.tokens.tokenizer``. It takes the seconds and the bytes of memory
as arguments and the file from standard input, and encodes 100 texts. It writes JSON: ``{"text"}`` before each text;
after it ``{"characters"}``, their number after each step of the normalizer, and ``{"tokens"}``, the number of these;
``{"end"}`` after the last text. Without an end the library crashed, or took too much.
"""

import json
import resource
import sys
from typing import Any

_EMPTY = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
"""A tokenizer.json without ids."""

_LETTERS = 100
"""Length of a run of one character: a regular expression that tries all ways to split it has no end."""


def _read(content: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The texts to try on a file: what it replaces, words, signs of many scripts, and a run of each character of ASCII.
    Then the steps of its normalizer, which change a text one after the other.
    """
    replaced: list[str] = []

    def noted(node: dict[str, Any]) -> dict[str, Any]:
        replaced.append(str(node.get("String", "")))
        return node

    waiting = [json.loads(content, object_hook=noted).get("normalizer")]
    steps: list[dict[str, Any]] = []
    while waiting:
        step = waiting.pop(0)
        if step and step["type"] == "Sequence":
            waiting = step["normalizers"] + waiting
        elif step:
            steps.append(step)
    scripts = ["".join(map(chr, range(start, start + 0x1F00))) for start in (0xA0, 0x2000, 0xAC00)]
    runs = [chr(code) * _LETTERS + "\u00a4" for code in range(32, 127)]
    words = "Hello, World! It's 1,234.5 \n\n\tdef f(x): return x  "
    return [" ".join(filter(None, replaced))[: 1 << 14], words, *scripts, *runs], steps


def main() -> None:
    """Try the file from standard input."""
    from tokenizers import Tokenizer  # noqa: PLC0415  optional package

    for limit, wanted in zip((resource.RLIMIT_CPU, resource.RLIMIT_AS), map(int, sys.argv[1:]), strict=True):
        _, most = resource.getrlimit(limit)
        resource.setrlimit(limit, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))
    content = sys.stdin.read()
    try:
        model = Tokenizer.from_str(content)
    except Exception:  # the library raises bare Exception; whoever loads the file next says why
        _write(end=True)
        return
    model.no_truncation()
    model.no_padding()
    model.encode_special_tokens = True
    texts, specs = _read(content)
    steps = [Tokenizer.from_str(json.dumps(_EMPTY | {"normalizer": spec})).normalizer for spec in specs]
    for text in texts:
        _write(text=text)
        try:
            normalised = text
            for step in steps:
                normalised = step.normalize_str(normalised)
                _write(characters=len(normalised))
            ids = model.encode(text, add_special_tokens=False).ids
        except Exception:  # it may have no token for the text
            continue
        _write(tokens=len(ids))
        model.decode(ids)
    _write(end=True)


def _write(**answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
