"""Removes secrets from text before it leaves: logs, ``run.toml``, manifests, error reports, messages on the screen.

Secrets are found by name (``api_key = ...``), by form (``hf_...``, a URL's password), and by value: the value of an
environment variable with a secret's name is removed wherever it appears. A secret of unknown form under a harmless name
is not found.
"""

import functools
import os
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
"""Text that replaces a secret."""

MIN_VALUE = 8
"""Length of the shortest value of an environment variable that is searched for; shorter ones appear by accident."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ALWAYS = {"secret", "secrets", "password", "passwd", "passphrase", "passcode", "credential", "credentials", "apikey"}
# words before "token" or "key" that make it a secret; "eos_token" and "sort_key" are ordinary
_OF_ACCESS = {
    "access",
    "api",
    "auth",
    "authentication",
    "authorization",
    "bearer",
    "bot",
    "client",
    "deploy",
    "encryption",
    "gh",
    "git",
    "github",
    "gitlab",
    "hf",
    "hub",
    "huggingface",
    "id",
    "identity",
    "jwt",
    "oauth",
    "openai",
    "personal",
    "private",
    "refresh",
    "registry",
    "secret",
    "security",
    "service",
    "session",
    "signing",
    "ssh",
    "user",
    "wandb",
    "write",
}

# words that make an uppercase name ordinary: EOS_TOKEN, PRIMARY_KEY
_ORDINARY = {"bos", "cls", "eos", "foreign", "mask", "pad", "primary", "public", "sep", "sort", "start", "stop", "unk"}

_FORMS = re.compile(
    "|".join(
        (
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
            r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}",  # Hugging Face
            r"\b(?:AKIA|ASIA)[A-Z0-9]{16}(?:[\s:,;|/]{1,3}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+]))?",  # AWS: id, or both
            r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?",  # JSON web tokens
            r"\bsk-(?=[\w-]*\d)[A-Za-z0-9_-]{16,}",  # OpenAI, Anthropic
            r"\b(?:gh[oprsu]_|glpat-|npm_)[A-Za-z0-9_-]{16,}",
            r"\bgithub_pat_[A-Za-z0-9_]{20,}",
            r"\bpypi-[A-Za-z0-9_-]{40,}",
            r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",  # Slack
            r"\bAIza[A-Za-z0-9_-]{35}",  # Google
            r"\bwandb_v1_[A-Za-z0-9_]{16,}",
            r"(?<=://)[^\s/?#\"'<>]+(?=@)",  # user and password of a URL
        )
    )
)
# the text before the secret stays
_AFTER = re.compile(
    "|".join(
        (
            r"(?i:wandb|api[ _-]?key)[^\n]{0,40}?\b(?=[0-9a-f]{40}\b)",  # 40 hex digits alone may be a commit
            r"(?i:authorization)[\"']?\s*[:=]\s*[\"']?(?:\w+\s+)?(?=\S{8})",
            r"\b[Bb]earer\s+(?=\S*\d)(?=\S{16})",
        )
    )
)
_REST = re.compile(r"[^\s\"',;]+")
_QUERY = re.compile(
    r"(?i)([?&](?:x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential)|(?:access_|auth_)?token"
    r"|sig|signature|api_?key|key|secret|password)=)[^&\s\"'#]+"
)
# name=value, name: value, "name": "value", --name value; is_secret_name judges the name
_VALUE = r"""(?P<value>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[^\s"'&]+)"""
_NAMED = re.compile(r"""(?<![\w.-])(?P<name>[A-Za-z_][\w.-]*)(?P<between>["']?\s*(?:=|:(?!//))\s*)""" + _VALUE)
_FLAG = re.compile(r"(?<![\w-])(?P<name>--[A-Za-z][\w.-]*)(?P<between>\s+)(?!-)" + _VALUE)
_HARMLESS = re.compile(r"(?i)(?:none|null|true|false|\*+|[\d.,_+-]+)?")
_OPAQUE = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w.~+/=-]{16,}")


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether ``name`` is the name of a secret: ``HF_TOKEN``, ``aws_secret_access_key``, ``db.password``; not
    ``eos_token``, ``num_tokens`` or ``sort_key``.
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return False
    last = words[-1] if not words[-1].isdigit() or len(words) == 1 else words[-2]
    if last in _ALWAYS or name.lower() in ("token", "auth_token", "x-amz-signature", "x-amz-credential"):
        return True
    before = set(words[:-1])
    if last in ("token", "key"):
        is_variable = len(words) > 1 and name.isupper() and not before & _ORDINARY  # HF_TOKEN, MY_KEY
        return is_variable or bool(before & _OF_ACCESS) or (last == "key" and bool(before & _ALWAYS))
    return False


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """``text`` with ``***`` in place of secrets.

    Args:
        text: text to print or write.
        environ: variables of this process; a variable with a secret's name has a secret value.
    """
    for value in _values(environ):
        text = text.replace(value, HIDDEN)
    text = _FORMS.sub(HIDDEN, text)
    text = _after(text)
    text = _QUERY.sub(rf"\1{HIDDEN}", text)
    text = _NAMED.sub(_hide_named, text)
    return _FLAG.sub(_hide_named, text)


def printable(text: str) -> str:
    """``text`` with escapes such as ``\\x1b`` in place of characters that act on a terminal; lines and tabs stay.

    These are control, format and surrogate characters, and Unicode's own line ends. Wide and unbroken spaces stay,
    because a printed path must be the path.
    """
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(ascii(char)[1:-1] if _acts(char) else char for char in text)


def _acts(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and char not in "\n\t"


def _after(text: str) -> str:
    """``text`` without the word that follows each match of ``_AFTER``."""
    kept = []
    at = 0
    for match in _AFTER.finditer(text):
        if match.end() >= at and (rest := _REST.match(text, match.end())):
            kept += [text[at : match.end()], HIDDEN]
            at = rest.end()
    return "".join([*kept, text[at:]])


def _values(environ: Mapping[str, str]) -> list[str]:
    """Values that are secrets, the longest first, so that none is found in part. Paths are not secrets."""
    found = {
        value
        for name, value in environ.items()
        if len(value) >= MIN_VALUE and is_secret_name(name) and value[0] not in "/.~"
    }
    return sorted(found, key=len, reverse=True)


def _hide_named(match: re.Match[str]) -> str:
    name = match["name"].lstrip("-")
    value = match["value"].strip("\"'")
    if not is_secret_name(name) or _HARMLESS.fullmatch(value.rstrip(".,;:)]}")):
        return match[0]
    if name.lower() == "token" and not _OPAQUE.fullmatch(value):  # a token of a text
        return match[0]
    quote = match["value"][0] if match["value"][0] in "\"'" else ""
    return f"{match['name']}{match['between']}{quote}{HIDDEN}{quote}"


def redact_value(name: str, value: Any) -> Any:
    """``value`` of ``name`` without its secrets; tables, lists and tuples item by item.

    Numbers, flags and None are unchanged.
    """
    if isinstance(value, str):
        return HIDDEN if value and is_secret_name(name) else redact(value)
    if isinstance(value, Mapping):
        return {key: redact_value(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(redact_value(name, item) for item in value)
    return value
