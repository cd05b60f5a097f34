"""Reads files of sentencepiece, tiktoken and tekken, each by its own library, and converts them by transformers.

It is used only by ``crius.data.tokenizer_conversion``, a separate process. There is no network, and no untrusted code
runs: transformers sees the file in a folder without other files.
"""

import base64
import binascii
import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from crius.data.tokenizer_files import missing, refused
from crius.strict_json import load_object

MOST_TOKENS = 1 << 20
MOST_LENGTH = 1024
"""Most bytes of a token and of a special token's name. The longest token in use has 256 bytes: spaces."""

_NEVER = -1e5
"""Score of a piece that no text may give: below the score of any other way to spell its name."""
# sentencepiece_model.proto, SentencePiece.Type
_UNKNOWN = 2
_CONTROL = 3
_USER = 4
_UNUSED = 5
_BYTE = 6

_TOKENIZER_JSON = "the tokenizer.json of this model, or --tokenizer.path byte"


@dataclass(frozen=True, kw_only=True)
class Original:
    """A tokenizer, used by its own library.

    Attributes:
        file: path that the user gave.
        kind: kind of the file, for messages.
        library: name and version of the library.
        size: number of ids, without tokens that were added to the tokenizer.
        special: ids of tokens that stand for no text, by name.
        unspoken: names of other tokens that no text gives.
        encode: function from a text to ids, without special tokens.
        decode: function from ids to a text.
        bos: special token that begins a document; empty: none.
        eos: special token that ends a document; empty: none.
        unk: special token for unknown text; empty: none.
        is_byte_level: whether each token stands for bytes of the text.
    """

    file: Path
    kind: str
    library: str
    size: int
    special: Mapping[str, int]
    unspoken: Sequence[str] = field(default=())
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    bos: str = ""
    eos: str = ""
    unk: str = ""
    is_byte_level: bool = True


class _Known(NamedTuple):
    """Facts about a tiktoken file that are not in the file."""

    name: str
    pattern: str
    special: Sequence[str]  # numbered after the last rank
    bos: str
    eos: str
    form: Literal["", "NFC"] = ""  # Unicode form that a text is normalised to


_RESERVED = "<|reserved_special_token_{}|>"
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN = {
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": _Known(
        "Llama 3",  # names of Llama 3.1: github.com/meta-llama/llama-models, models/llama3/tokenizer.py
        _QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            _RESERVED.format(0),
            _RESERVED.format(1),
            "<|finetune_right_pad_id|>",
            _RESERVED.format(2),
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
            *map(_RESERVED.format, range(3, 248)),
        ),
        "<|begin_of_text|>",
        "<|end_of_text|>",
    ),
    "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186": _Known(
        "Qwen",  # huggingface.co/Qwen/Qwen-7B, tokenization_qwen.py; Qwen2 and Qwen3 have the same first three
        _QWEN_PATTERN,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))),
        "",
        "<|endoftext|>",
        "NFC",
    ),
}
"""Known tiktoken files by their sha256. tiktoken itself knows OpenAI's files."""


def read_original(file: Path, kind: str, source: Path) -> tuple[Original, dict[str, Any]]:
    """Read a tokenizer, and convert it by transformers to a tokenizer.json, yet without special tokens.

    Args:
        file: path that the user gave, for messages.
        kind: sentencepiece, tiktoken or tekken.
        source: file to read, alone in its folder.

    Raises:
        DataError: the file is damaged, or of a kind whose conversion is not known to be correct.
    """
    return {"sentencepiece": _sentencepiece, "tiktoken": _tiktoken, "tekken": _tekken}[kind](file, source)


def _sentencepiece(file: Path, source: Path) -> tuple[Original, dict[str, Any]]:
    import sentencepiece  # noqa: PLC0415  optional package
    from sentencepiece import sentencepiece_model_pb2  # noqa: PLC0415  optional package
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  optional package

    proto: Any = vars(sentencepiece_model_pb2)["ModelProto"]()  # the class is created by the import
    try:
        proto.ParseFromString(source.read_bytes())
        model = sentencepiece.SentencePieceProcessor(model_proto=source.read_bytes())
    except Exception as error:  # from protobuf or from the library
        raise refused(file, f"sentencepiece cannot read it: {_said(error)}", "download the file again") from None
    pieces = list(proto.pieces)
    _check(file, [piece.piece.encode() for piece in pieces])
    special = {piece.piece: number for number, piece in enumerate(pieces) if piece.type in (_CONTROL, _UNKNOWN)}
    unspoken = [piece.piece for piece in pieces if piece.type in (_UNUSED, _BYTE)]
    spelled = {
        name: model.id_to_piece(number) if 0 <= number < len(pieces) else ""
        for name in ("bos", "eos", "unk")
        for number in (getattr(model, f"{name}_id")(),)
    }
    original = Original(
        file=file,
        kind=f"sentencepiece, {_algorithm(proto)}",
        library=_version("sentencepiece"),
        size=len(pieces),
        special=special,
        unspoken=unspoken,
        encode=model.encode,
        decode=model.decode,
        is_byte_level=False,
        **spelled,
    )
    converted = PreTrainedTokenizerFast.from_pretrained(source.parent, local_files_only=True, trust_remote_code=False)
    spec = json.loads(converted.backend_tokenizer.to_str())
    if spec["model"]["type"] == "Unigram":
        for row, piece in zip(spec["model"]["vocab"], pieces, strict=True):
            row[1] = row[1] if piece.type in (1, _USER) else _NEVER
    elif spec["model"].get("ignore_merges"):
        _split_names(spec, [*special, *unspoken], model, next(piece.piece for piece in pieces if piece.type == _USER))
    return original, spec


def _algorithm(proto: Any) -> str:
    kinds = {1: "unigram", 2: "BPE", 3: "words", 4: "characters"}
    kind = kinds.get(proto.trainer_spec.model_type, "?")
    return f"{kind} with bytes" if proto.trainer_spec.byte_fallback else kind


def _split_names(spec: dict[str, Any], names: Sequence[str], model: Any, symbol: str) -> None:
    """Split the name of a token that no text gives, when it stands alone between user-defined pieces.

    With ``ignore_merges`` the name would become that token. sentencepiece makes the same split, so nothing else
    changes.
    """
    cuts = []
    for name in names:
        pieces = [(model.id_to_piece(number), model.is_byte(number)) for number in model.encode(symbol + name)]
        spelled = [bytes.fromhex(piece[3:5]) if is_byte else piece.encode() for piece, is_byte in pieces]
        tail = next((spelled[at:] for at in range(len(spelled)) if b"".join(spelled[at:]) == name.encode()), [])
        first = tail[0].decode(errors="replace") if len(tail) > 1 else ""
        if first and name.startswith(first):
            cuts.append(rf"\A{re.escape(first)}(?={re.escape(name[len(first) :])}\z)")
    if cuts:
        split = {"type": "Split", "pattern": {"Regex": "|".join(cuts)}, "behavior": "Isolated", "invert": False}
        before = spec["pre_tokenizer"]
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*before.get("pretokenizers", [before]), split]}


def _tiktoken(file: Path, source: Path) -> tuple[Original, dict[str, Any]]:
    import tiktoken  # noqa: PLC0415  optional package
    from tiktoken.load import load_tiktoken_bpe  # noqa: PLC0415  optional package
    from transformers.convert_slow_tokenizer import TikTokenConverter  # noqa: PLC0415  optional package

    try:
        ranks = load_tiktoken_bpe(str(source))
    except (ValueError, OSError) as error:
        raise refused(
            file, f"tiktoken cannot read it: {_said(error).replace(str(source), 'it')}", "download the file again"
        ) from None
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    if known := _KNOWN.get(digest):
        special = {name: len(ranks) + place for place, name in enumerate(known.special)}
        name, pattern, _, bos, eos, form = known
    elif published := _of_openai(digest, ranks):
        name, pattern, special = (published[key] for key in ("name", "pat_str", "special_tokens"))
        bos = ""
        eos = "<|endoftext|>"
        form = ""
    else:
        why = "the file lacks split pattern and special tokens, and its hash is not one of Llama 3, Qwen or OpenAI"
        raise refused(file, why, _TOKENIZER_JSON)
    _check_ranks(file, ranks)
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=dict(special))
    original = Original(
        file=file,
        kind=f"tiktoken, {name}",
        library=_version("tiktoken"),
        size=1 + max(*ranks.values(), *special.values()),
        special=special,
        encode=lambda text: encoding.encode_ordinary(unicodedata.normalize(form, text) if form else text),
        decode=encoding.decode,
        bos=bos,
        eos=eos,
    )
    spec = json.loads(TikTokenConverter(str(source), pattern=_for_oniguruma(pattern)).converted().to_str())
    return original, {**spec, "normalizer": {"type": form} if form else None}


def _of_openai(digest: str, ranks: dict[bytes, int]) -> dict[str, Any] | None:
    """tiktoken's facts about a file that it knows. Its functions get the ranks at hand instead of a download."""
    public = importlib.import_module("tiktoken_ext.openai_public")

    def load(*args: Any, expected_hash: str = "", **others: Any) -> dict[bytes, int]:
        if expected_hash != digest:
            raise LookupError
        return ranks

    public.load_tiktoken_bpe = public.data_gym_to_mergeable_bpe_ranks = load  # type: ignore[attr-defined]
    for make in public.ENCODING_CONSTRUCTORS.values():
        with contextlib.suppress(LookupError):
            published: dict[str, Any] = make()
            return published
    return None


def _for_oniguruma(pattern: str) -> str:
    """A pattern of tiktoken for the tokenizers library, where ``$`` matches the end of any line and
    ``{1,3}+`` repeats.
    """
    return re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", pattern).replace(r"\s++$", r"\s++\z")


def _tekken(file: Path, source: Path) -> tuple[Original, dict[str, Any]]:
    try:
        spec = load_object(source.read_bytes())
        config = spec["config"]
        rows = spec["vocab"]
        number = config["default_num_special_tokens"]
        ranks = {base64.b64decode(row["token_bytes"]): row["rank"] for row in rows}
        known = max(0, config["default_vocab_size"] - number)
        is_sound = isinstance(config["pattern"], str) and number >= 0 and 0 < known <= len(ranks) == len(rows)
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise refused(file, f"it is not a tekken file: {_said(error)}", "download the file again") from None
    if not is_sound or number > MOST_TOKENS or list(ranks.values()) != list(range(len(ranks))):
        raise refused(
            file, "its tokens are not numbered from 0 on, or their number is wrong", "download the file again"
        )
    if "special_tokens" not in spec and (lacking := missing(("mistral-common",), file)):
        raise lacking  # a file from 2024, whose special tokens are in that package
    ranks = {token: rank for token, rank in ranks.items() if rank < known}
    _check_ranks(file, ranks)
    from transformers.integrations.mistral.tokenizer import MistralConverter  # noqa: PLC0415  optional package

    converter = MistralConverter(str(source))
    special = {str(token): place for place, token in enumerate(converter.additional_special_tokens)}
    library, encode, decode = _mistral(file, source, ranks, config["pattern"], special)
    original = Original(
        file=file,
        kind=f"tekken, {str(config.get('version', '?'))[:20]}",
        library=library,
        size=number + known,
        special=special,
        encode=encode,
        decode=decode,
        bos="<s>" if "<s>" in special else "",
        eos="</s>" if "</s>" in special else "",
        unk="<unk>" if "<unk>" in special else "",
    )
    converter.pattern = _for_oniguruma(config["pattern"])
    return original, json.loads(converter.converted().to_str())


def _mistral(
    file: Path, source: Path, ranks: dict[bytes, int], pattern: str, special: Mapping[str, int]
) -> tuple[str, Callable[[str], list[int]], Callable[[list[int]], str]]:
    """The library of a tekken file, its encoding and its decoding: mistral-common, else the underlying tiktoken."""
    import tiktoken  # noqa: PLC0415  optional package

    with contextlib.suppress(ImportError):
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer  # noqa: PLC0415  optional package

        try:
            tekken = Tekkenizer.from_file(source)
        except Exception as error:  # any error of the library, including assertions
            raise refused(file, f"mistral-common cannot read it: {_said(error)}", "download the file again") from None
        if {name: tekken.get_special_token(name) for name in special} != special:
            raise refused(file, "transformers and mistral-common number its special tokens differently")
        return _version("mistral-common"), partial(tekken.encode, bos=False, eos=False), tekken.decode
    encoding = tiktoken.Encoding("tekken", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    shift = len(special)
    return (
        _version("tiktoken"),
        lambda text: [number + shift for number in encoding.encode_ordinary(text)],
        lambda ids: encoding.decode([number - shift for number in ids if number >= shift]),
    )


def _check_ranks(file: Path, ranks: Mapping[bytes, int]) -> None:
    _check(file, list(ranks))
    if len({*ranks.values()}) < len(ranks) or max(ranks.values()) > 2 * MOST_TOKENS:
        raise refused(file, "two tokens have one rank, or a rank is far too large", "download the file again")
    if lacking := next((byte for byte in range(256) if bytes([byte]) not in ranks), None):
        raise refused(file, f"it has no token for the byte {lacking}", "download the file again")


def _check(file: Path, tokens: Sequence[bytes]) -> None:
    if not 0 < len(tokens) <= MOST_TOKENS:
        raise refused(file, f"it has {len(tokens):,} tokens, but must have 1 to {MOST_TOKENS:,}", _TOKENIZER_JSON)
    if (longest := max(map(len, tokens))) > MOST_LENGTH:
        raise refused(file, f"a token has {longest:,} bytes, but at most {MOST_LENGTH:,} are allowed", _TOKENIZER_JSON)


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _version(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"
