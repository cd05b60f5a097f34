"""Converts Mistral's tekken.json to a tokenizer.json: ``python -m crius.tokens.conversion``.

It runs in a separate process: transformers takes long to import, and the file may be untrusted. It reads a job from
stdin and prints the result as JSON. transformers converts the file. Then the ids of many texts are compared with those
of tiktoken, on which Mistral's own library stands. If a single text has other ids, the file is refused.
"""

import base64
import binascii
import importlib.metadata
import json
import random
import re
import resource
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crius.errors import CriusError, DataError, EnvironmentError
from crius.plugins import REQUIREMENTS, install_line
from crius.strict_json import load_object
from crius.tokens.files import ADDED_TOKENS, PACKAGES, TEKKEN, TOKENIZER, TOKENIZER_CONFIG, missing, refused
from crius.tokens.tokenizer import HuggingFaceTokenizer, spelled
from crius.untrusted import HUGE, parse_json, read_named

MOST_MEMORY = 16 << 30
MOST_SECONDS = 600
MOST_WRITTEN = 1 << 30
"""Limits of address space, CPU time and bytes per written file. A file of 19 MB takes 1 GB and 15 s."""

MOST_TOKENS = 1 << 20
MOST_LENGTH = 1024
"""Most bytes of a token. The longest token in use has 256 bytes: spaces."""

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
    "<s>",
    "</s>",
    "<s> hi </s>",
    "<unk>",
    "[INST] hi [/INST]",
    "<|im_start|>user\nhi<|im_end|>",
)
_NUM_TOKENS = 4000
_NUM_RUNS = 1000
_NUM_NAMES = 1500
_DAMAGED = "download the file again"


@dataclass(frozen=True, kw_only=True)
class Tekken:
    """A tekken.json, used by tiktoken.

    Attributes:
        file: path that the user gave.
        version: version that the file has.
        special: ids of tokens that stand for no text, by name: the first ids.
        encoding: the ``tiktoken.Encoding`` of the other tokens.
    """

    file: Path
    version: str
    special: Mapping[str, int]
    encoding: Any

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return [number + len(self.special) for number in self.encoding.encode_ordinary(text)]

    def decode(self, ids: list[int]) -> str:
        """Text of ids that are not special tokens."""
        return str(self.encoding.decode([number - len(self.special) for number in ids]))


def convert(file: Path, folder: Path) -> dict[str, Any]:
    """Write tokenizer.json and tokenizer_config.json into ``folder``.

    Args:
        file: path that the user gave, for messages.
        folder: folder with copies of the tekken.json and of the files next to it.

    Returns:
        Facts about the conversion, for the log.

    Raises:
        CriusError: the file is damaged, or its ids would change.
    """
    tekken, spec = read_tekken(file, folder / TEKKEN)
    config = _read(file, folder / TOKENIZER_CONFIG)
    _check_added_tokens(tekken, config, _read(file, folder / ADDED_TOKENS))
    names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}
    names |= {part: spelled(config[f"{part}_token"]) for part in names if f"{part}_token" in config}
    adds_bos = names["bos"] in tekken.special and config.get("add_bos_token", True) is True
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"] = [
        {"id": number, "content": name, **flags, "special": True} for name, number in tekken.special.items()
    ]
    spec["post_processor"] = beginning(names["bos"], tekken.special) if adds_bos else None
    dropped = ("auto_map", "added_tokens_decoder", "legacy", "sp_model_kwargs", "add_prefix_space", "use_fast")
    written = {
        **{key: value for key, value in config.items() if key not in dropped},
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{part}_token": name for part, name in names.items() if name in tekken.special},
        "add_bos_token": adds_bos,
    }
    for to, value in ((TOKENIZER, spec), (TOKENIZER_CONFIG, written)):
        (folder / to).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    # any special token serves as the EOS: a file without a named EOS may be used with --tokenizer.eos_token
    built = HuggingFaceTokenizer(str(folder / TOKENIZER), next(iter(tekken.special), ""))
    return {
        "source": str(file),
        "kind": f"tekken, {tekken.version}",
        "ids": built.vocab_size,
        "converter": f"transformers {importlib.metadata.version('transformers')}",
        "library": f"tiktoken {importlib.metadata.version('tiktoken')}",
        "texts": compare(tekken, built),
    }


def read_tekken(file: Path, source: Path) -> tuple[Tekken, dict[str, Any]]:
    """Read a tekken.json, and convert it by transformers to a tokenizer.json.

    Args:
        file: path that the user gave, for messages.
        source: file to read.

    Raises:
        DataError: the file is damaged.
        EnvironmentError: a package is missing.
    """
    try:
        spec = load_object(read_named(source, HUGE))
        config = spec["config"]
        rows = spec["vocab"]
        number = config["default_num_special_tokens"]
        ranks = {base64.b64decode(row["token_bytes"]): row["rank"] for row in rows}
        known = max(0, config["default_vocab_size"] - number)
        is_sound = isinstance(config["pattern"], str) and number >= 0 and 0 < known <= len(ranks) == len(rows)
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise refused(file, f"it is not a tekken file: {said}", _DAMAGED) from None
    if not is_sound or number > MOST_TOKENS or list(ranks.values()) != list(range(len(ranks))):
        raise refused(file, "its tokens are not numbered from 0 on, or their number is wrong", _DAMAGED)
    if "special_tokens" not in spec and (lacking := missing(("mistral-common",), file)):
        raise lacking  # a file from 2024, whose special tokens are in that package
    ranks = {token: rank for token, rank in ranks.items() if rank < known}
    _check_ranks(file, ranks)
    import tiktoken  # noqa: PLC0415  optional package
    from transformers.integrations.mistral.tokenizer import MistralConverter  # noqa: PLC0415  optional package

    converter = MistralConverter(str(source))
    tekken = Tekken(
        file=file,
        version=str(config.get("version", "?"))[:20],
        special={str(token): place for place, token in enumerate(converter.additional_special_tokens)},
        encoding=tiktoken.Encoding("tekken", pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={}),
    )
    if len(tekken.special) != number:
        raise refused(file, f"it has {len(tekken.special):,} special tokens, not {number:,}", _DAMAGED)
    converter.pattern = _for_oniguruma(config["pattern"])
    return tekken, parse_json(converter.converted().to_str())


def _for_oniguruma(pattern: str) -> str:
    """A pattern of tiktoken for the tokenizers library, where ``$`` matches the end of any line and
    ``{1,3}+`` repeats.
    """
    return re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", pattern).replace(r"\s++$", r"\s++\z")


def _check_ranks(file: Path, ranks: Mapping[bytes, int]) -> None:
    if len(ranks) > MOST_TOKENS:
        raise refused(file, f"it has {len(ranks):,} tokens, but at most {MOST_TOKENS:,} are allowed")
    if (longest := max(map(len, ranks))) > MOST_LENGTH:
        raise refused(file, f"a token has {longest:,} bytes, but at most {MOST_LENGTH:,} are allowed")
    if lacking := next((byte for byte in range(256) if bytes([byte]) not in ranks), None):
        raise refused(file, f"it has no token for the byte {lacking}", _DAMAGED)


def _read(file: Path, beside: Path) -> dict[str, Any]:
    try:
        return load_object(read_named(beside)) if beside.exists() else {}
    except ValueError as error:
        raise refused(file, f"{beside.name} in its folder cannot be read: {error}", "download that again") from None


def _check_added_tokens(tekken: Tekken, config: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Refuse tokens that files next to the tekken.json add: the file has all tokens of its model."""
    decoder = config.get("added_tokens_decoder")
    listed = decoder.items() if isinstance(decoder, dict) else ()
    given = [(name, str(number)) for name, number in extra.items()]
    given += [(spelled(token), number) for number, token in listed]
    for name, number in given:
        if str(tekken.special.get(name)) != number:
            what = f"the token {ascii(name)[:60]} with the id {number[:40]}, which is added next to it, is not its own"
            raise refused(tekken.file, what)


def beginning(bos: str, special: Mapping[str, int]) -> dict[str, Any]:
    """A post-processor of tokenizer.json that puts a token before a text.

    Args:
        bos: the token.
        special: ids of tokens, by name.
    """
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    parts = [{"Sequence": {"id": part, "type_id": 0}} for part in "AB"]
    tokens = {bos: {"id": bos, "ids": [special[bos]], "tokens": [bos]}}
    pair = [first, parts[0], first, parts[1]]
    return {"type": "TemplateProcessing", "single": [first, parts[0]], "pair": pair, "special_tokens": tokens}


def compare(tekken: Tekken, built: HuggingFaceTokenizer) -> int:
    """Compare the ids of many texts. Returns the number of texts.

    Args:
        tekken: the file, used by tiktoken.
        built: converted tokenizer.

    Raises:
        DataError: a text has other ids or is decoded differently, or a special token has another id.
    """
    ids = {name: built._model.token_to_id(name) for name in tekken.special}
    if wrong := next((name for name in ids if ids[name] != tekken.special[name]), None):
        raise refused(tekken.file, f"{ascii(wrong)} would be id {ids[wrong]}, not {tekken.special[wrong]}")
    texts = list(dict.fromkeys(probes(tekken)))
    counts = built.token_bytes()
    for text, found in zip(texts, built.encode_batch(texts), strict=True):
        want = tekken.encode(text)
        if found.tolist() != want:
            what = f"{ascii(text)[:80]} would become the ids {str(found.tolist())[:80]}, not {str(want)[:80]}"
            raise _other(tekken, what)
        if tekken.decode(want) == text != built.decode(want):
            raise _other(tekken, f"the ids of {ascii(text)[:80]} would decode to {ascii(built.decode(want))[:80]}")
        if counts[found].sum() != len(tekken.decode(want).encode()):
            raise _other(tekken, f"the bytes of {ascii(text)[:80]} would be counted as {counts[found].sum()}")
    return len(texts)


def probes(tekken: Tekken) -> Iterator[str]:
    """Texts to compare: chosen texts, names of special tokens, noise, and texts of the vocabulary."""
    yield from TEXTS
    for name in [*tekken.special][:_NUM_NAMES]:
        yield from (name, f"a{name} b")
    draw = random.Random(0)
    # characters that exist since Unicode 3.2, so that the tables of both libraries have them
    blocks = (range(0x20, 0x3000), range(0x3000, 0xA000), range(0xAC00, 0xD7A4), range(0x1F300, 0x1F650))
    letters = [chr(code) for block in blocks for code in block]
    letters = [c for c in letters if unicodedata.ucd_3_2_0.category(c) != "Cn" or ord(c) > 0xFFFF]
    for _ in range(200):
        yield "".join(draw.choice(letters) if draw.random() < 0.7 else draw.choice(" \n1a") for _ in range(30))
    first = len(tekken.special)
    spoken = range(first, first + tekken.encoding.n_vocab)
    for number in draw.sample(spoken, min(_NUM_TOKENS, len(spoken))):
        yield tekken.decode([number])
    for _ in range(_NUM_RUNS):
        yield tekken.decode(draw.choices(spoken, k=12))


def _other(tekken: Tekken, what: str) -> DataError:
    newer = f"{install_line(REQUIREMENTS['transformers'])} --upgrade, or the tokenizer.json of this model"
    return refused(tekken.file, f"{what}, as in tiktoken: a model would be trained on wrong ids", newer)


def _lacking(file: str, error: ImportError) -> EnvironmentError:
    """The error for a package that is installed, but needs another package that is missing or has a wrong version."""
    fix = install_line(*(REQUIREMENTS[package] for package in (*PACKAGES, "mistral-common")))
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
    job = parse_json(sys.stdin.read())
    try:
        found = convert(Path(job["file"]), Path(job["folder"]))
    except (CriusError, ImportError) as raised:
        error = raised if isinstance(raised, CriusError) else _lacking(job["file"], raised)
        parts = {name: getattr(error, name) for name in ("what", "where", "why", "fix")}
        found = {"problem": {"class": type(error).__name__, **parts}}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
