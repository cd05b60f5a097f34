"""Converts a tokenizer of another library to a tokenizer.json: ``python -m crius.data.tokenizer_conversion``.

It runs in a separate process: transformers takes long to import, and the file may be untrusted. It reads a job from
stdin and prints the result as JSON. transformers converts the file. Then the ids of many texts are compared with those
of the file's own library. If a single text has other ids, the file is refused.
"""

import importlib.metadata
import json
import random
import resource
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crius.data.tokenizer import HuggingFaceTokenizer, spelled
from crius.data.tokenizer_files import ADDED_TOKENS, PACKAGES, SOURCE, TOKENIZER, TOKENIZER_CONFIG, refused
from crius.data.tokenizer_originals import MOST_LENGTH, MOST_TOKENS, Original, read_original
from crius.errors import CriusError, DataError, EnvironmentError
from crius.plugins import REQUIREMENTS, install_line
from crius.strict_json import load_object

MOST_MEMORY = 16 << 30
MOST_SECONDS = 600
MOST_WRITTEN = 1 << 30
"""Limits of address space, CPU time and bytes per written file. Tekken's 19 MB take 1 GB and 15 s."""

CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizer", "TokenizersBackend", "")
"""Supported values of ``tokenizer_class``, without ``Fast``. Other classes number pieces differently from
sentencepiece.
"""

TEXTS = (
    "",
    " ",
    "  ",
    "   ",
    "a",
    " a",
    "a ",
    "  a  b  ",
    "\n",
    "\n\n",
    " \n ",
    "\t",
    "\ta\tb",
    "\r\n",
    " " * 40,
    "\n" * 9,
    "a\r\nb\r\n\r\nc",
    "Hello world",
    "Hello  world",
    "I'm we'll they'D it'S 'ſ 'Ve",
    "x" * 300,
    "ab" * 100,
    "1234567890",
    "3.14159 2,718,281",
    "1 22 333 4444 55555",
    "٣٤٥٦ ①② Ⅷ ½",
    "!!!???...---===>>>",
    "http://a.b/c?d=e&f",
    "Grüße, naïve café",
    "e\u0301 Å ﬁﬀ ＡＢＣ",
    "東京 北京 서울 ひらがな",
    "العربية עברית हिन्दी ไทย",
    "Здравствуй мир",
    "🙂🇫🇷👩‍👩‍👧",
    "\u200b\u00a0\u3000x",
    "a\u2028b\x85c",
    "\x00\x01\x7f",
    "\ufffd\ufeffx",
    "\U0001f9ff\U0010ffff",
    "def f(x):\n    return x ** 2  # 1\n\n\tif x:\r\n",
    "    \n  \n",
    "▁",
    "▁a",
    "a▁b",
    " ▁a",
    "<0x41>",
    "a<0x0A>b",
    "<s>",
    "</s>",
    "<s> hi </s>",
    "<unk>",
    "[INST] hi [/INST]",
    "<|endoftext|>",
    "<|im_start|>user\nhi<|im_end|>",
)
_NUM_TOKENS = 4000
_NUM_RUNS = 1000
_NUM_NAMES = 1500


def convert(file: Path, kind: str, folder: Path) -> dict[str, Any]:
    """Write tokenizer.json and tokenizer_config.json into ``folder``.

    Args:
        file: path that the user gave, for messages.
        kind: sentencepiece, tiktoken or tekken.
        folder: folder with ``source/``, and with copies of the files next to the original.

    Returns:
        Facts about the conversion, for the log.

    Raises:
        CriusError: the file is damaged, or its ids would change.
    """
    original, spec = read_original(file, kind, folder / "source" / SOURCE[kind])
    config = _read(file, folder / TOKENIZER_CONFIG)
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if kind == "sentencepiece" and name not in CLASSES:
        why = f"its tokenizer_config.json has class {name[:60]}, which may give its pieces other ids"
        raise refused(file, why)
    names = _with_added_tokens(original, spec, config, _read(file, folder / ADDED_TOKENS))
    told = {"bos": original.bos, "eos": original.eos, "unk": original.unk}
    told |= {part: spelled(config[f"{part}_token"]) for part in told if f"{part}_token" in config}
    adds_bos = told["bos"] in names and config.get("add_bos_token", original.bos != "") is True
    spec["post_processor"] = _beginning(told["bos"], names) if adds_bos else None
    dropped = ("auto_map", "added_tokens_decoder", "legacy", "sp_model_kwargs", "add_prefix_space", "use_fast")
    written = {
        **{key: value for key, value in config.items() if key not in dropped},
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{part}_token": name for part, name in told.items() if name in names},
        "add_bos_token": adds_bos,
    }
    for to, value in ((TOKENIZER, spec), (TOKENIZER_CONFIG, written)):
        (folder / to).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    # any special token serves as the EOS: a file without a named EOS may be used with --tokenizer.eos_token
    built = HuggingFaceTokenizer(str(folder / TOKENIZER), next(iter(names), ""))
    return {
        "source": str(file),
        "kind": original.kind,
        "ids": built.vocab_size,
        "converter": f"transformers {importlib.metadata.version('transformers')}",
        "library": original.library,
        "texts": compare(original, built, names),
    }


def _read(file: Path, beside: Path) -> dict[str, Any]:
    try:
        return load_object(beside.read_bytes()) if beside.exists() else {}
    except ValueError as error:
        raise refused(file, f"{beside.name} in its folder cannot be read: {error}", "download that again") from None


def _with_added_tokens(
    original: Original, spec: dict[str, Any], config: Mapping[str, Any], extra: Mapping[str, Any]
) -> dict[str, int]:
    """Add special tokens, and tokens that were added to the file, to ``spec``. Returns the ids of all by name."""
    flags: dict[str, Any] = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    rows = {
        number: {"id": number, "content": name, **flags, "special": True} for name, number in original.special.items()
    }
    given = [(number, {"content": name}) for name, number in extra.items()]
    decoder = config.get("added_tokens_decoder")
    given += decoder.items() if isinstance(decoder, dict) else []
    model = spec["model"]
    names = dict(original.special)
    is_bpe = isinstance(model["vocab"], dict)
    pieces = {number: piece for piece, number in model["vocab"].items()} if is_bpe else dict(enumerate(model["vocab"]))
    for key, token in given:
        name = spelled(token)
        number = int(key) if str(key).isdecimal() else -1
        if not 0 <= number < original.size + MOST_TOKENS or not 0 < len(name.encode()) <= MOST_LENGTH:
            raise refused(original.file, f"an added token of it has the id {str(key)[:40]} and no usable name")
        piece = pieces.get(number)
        there = piece if is_bpe or piece is None else piece[0]
        if number < original.size and name not in (there, rows.get(number, {}).get("content")):
            raise refused(original.file, f"an added token of it renames the id {number} to {ascii(name)[:60]}")
        is_special = token.get("special") is True
        if number >= original.size or (is_special and number not in rows):
            kept = {flag: token.get(flag) is True for flag in flags}
            rows[number] = {"id": number, "content": name, **kept, "special": is_special}
            names |= {name: number}
    for number in sorted(rows):
        name = rows[number]["content"]
        if is_bpe and model["vocab"].setdefault(name, number) != number:
            raise refused(original.file, f"the name of a special token, {ascii(name)[:60]}, is also a token of text")
    spec["added_tokens"] = [rows[number] for number in sorted(rows)]
    return names


def _beginning(bos: str, names: Mapping[str, int]) -> dict[str, Any]:
    """A post-processor that puts BOS before a text."""
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    parts = [{"Sequence": {"id": part, "type_id": 0}} for part in "AB"]
    tokens = {bos: {"id": bos, "ids": [names[bos]], "tokens": [bos]}}
    pair = [first, parts[0], first, parts[1]]
    return {"type": "TemplateProcessing", "single": [first, parts[0]], "pair": pair, "special_tokens": tokens}


def compare(original: Original, built: HuggingFaceTokenizer, names: Mapping[str, int]) -> int:
    """Compare the ids of many texts. Returns the number of texts.

    Args:
        original: tokenizer of the file's own library.
        built: converted tokenizer.
        names: ids of special tokens by name.

    Raises:
        DataError: a text has other ids or is decoded differently, or a special token has another id.
    """
    ids = {name: built._model.token_to_id(name) for name in names}
    if wrong := next((name for name in names if ids[name] != names[name]), None):
        raise refused(original.file, f"{ascii(wrong)} would be id {ids[wrong]}, not {names[wrong]}")
    added = [token.content for token in built._model.get_added_tokens_decoder().values() if not token.special]
    # texts with tokens that were added to the file are skipped, since the file's own library does not know these
    texts = [text for text in dict.fromkeys(probes(original)) if not any(name in text for name in added)]
    counts = built.token_bytes()
    for text, found in zip(texts, built.encode_batch(texts), strict=True):
        want = original.encode(text)
        if found.tolist() != want:
            what = f"{ascii(text)[:80]} would become the ids {str(found.tolist())[:80]}, not {str(want)[:80]}"
            raise _other(original, what)
        if original.decode(want) == text != built.decode(want):
            raise _other(original, f"the ids of {ascii(text)[:80]} would decode to {ascii(built.decode(want))[:80]}")
        if original.is_byte_level and counts[found].sum() != len(original.decode(want).encode()):
            raise _other(original, f"the bytes of {ascii(text)[:80]} would be counted as {counts[found].sum()}")
    return len(texts)


def probes(original: Original) -> Iterator[str]:
    """Texts to compare: chosen texts, names of tokens that no text gives, noise, and texts of the vocabulary."""
    yield from TEXTS
    for name in [*original.special, *original.unspoken][:_NUM_NAMES]:
        yield from (name, f"a{name} b")
    draw = random.Random(0)
    # characters that exist since Unicode 3.2, so that the tables of both libraries have them
    blocks = (range(0x20, 0x3000), range(0x3000, 0xA000), range(0xAC00, 0xD7A4), range(0x1F300, 0x1F650))
    letters = [chr(code) for block in blocks for code in block]
    letters = [c for c in letters if unicodedata.ucd_3_2_0.category(c) != "Cn" or ord(c) > 0xFFFF]
    for _ in range(200):
        yield "".join(draw.choice(letters) if draw.random() < 0.7 else draw.choice(" \n1a") for _ in range(30))
    spoken = sorted({*range(original.size)} - {*original.special.values()})
    for number in draw.sample(spoken, min(_NUM_TOKENS, len(spoken))):
        yield _decoded(original, [number])
    for _ in range(_NUM_RUNS):
        yield _decoded(original, draw.choices(spoken, k=12))


def _decoded(original: Original, ids: list[int]) -> str:
    try:
        return original.decode(ids)
    except KeyError:  # tiktoken's error for an id that is not in use
        return ""


def _other(original: Original, what: str) -> DataError:
    newer = f"{install_line(REQUIREMENTS['transformers'])} --upgrade, or the tokenizer.json of this model"
    return refused(original.file, f"{what}, as in {original.library}: a model would be trained on wrong ids", newer)


def _lacking(file: str, kind: str, error: ImportError) -> EnvironmentError:
    """The error for a package that is installed, but needs another package that is missing or has a wrong version."""
    packages = list(PACKAGES[kind])
    if kind == "tekken":
        packages.append("mistral-common")
    fix = install_line(*(REQUIREMENTS[package] for package in packages))
    return EnvironmentError(f"tokenizer {file} cannot be converted: {error}.", where="--tokenizer.path", fix=fix)


def main() -> None:
    """Do the job from stdin."""
    for limit, most in (
        (resource.RLIMIT_AS, MOST_MEMORY),
        (resource.RLIMIT_CPU, MOST_SECONDS),
        (resource.RLIMIT_FSIZE, MOST_WRITTEN),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    job = json.load(sys.stdin)
    try:
        found = convert(Path(job["file"]), job["kind"], Path(job["folder"]))
    except (CriusError, ImportError) as raised:
        error = raised if isinstance(raised, CriusError) else _lacking(job["file"], job["kind"], raised)
        parts = {name: getattr(error, name) for name in ("what", "where", "why", "fix")}
        found = {"problem": {"class": type(error).__name__, **parts}}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
