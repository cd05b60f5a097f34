"""A report as one HTML file that loads nothing. Torch-free."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crius.errors import EnvironmentError
from crius.redact import printable
from crius.run_file import write_whole
from crius.tools.report.history import RunHistory
from crius.tools.report.payload import payload
from crius.untrusted import open_named, text_named

REPORT = "report.html"
"""Name of the report in a run folder."""

_TITLE = " - Crius report</title>"
_HEAD = 1 << 13
"""End of the title of a report, and the number of first bytes of the file that have it."""


def page(shown: Mapping[str, Any]) -> str:
    """The HTML of a report.

    Data of a run is in two places: escaped in the title, and as JSON in a script element that is not executed. The JSON
    has no ``<``. The script writes all data as text. The policy in the head allows the script and the style of Crius,
    by their hashes. It allows nothing else: no network, and no script from the data of a run.

    Args:
        shown: data of the report; see ``crius.tools.report.payload.payload``.
    """
    library = f"/*! uPlot 1.6.32\n{_asset('uPlot.LICENSE')}*/"
    script = "\n".join([library, *map(_asset, ("locale.js", "uPlot.iife.min.js", "report.js"))])
    style = _asset("uPlot.min.css") + _asset("report.css")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(printable(", ".join(run["name"] for run in shown["runs"]))[:500]),
        "style": style,
        "data": json.dumps(shown, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "script": script,
    }
    return re.sub(r"<!--(\w+)-->", lambda mark: parts[mark[1]], _asset("report.html"))


def is_report(path: Path) -> bool:
    """Whether ``path`` is a report of Crius."""
    if not path.is_file():
        return False
    try:
        with open_named(path) as file:
            return _TITLE.encode() in file.read(_HEAD)
    except OSError:
        return False


def write_report(runs: Sequence[RunHistory], out: Path, origins: Mapping[str, str] | None = None) -> None:
    """Write the report of ``runs``. Only its owner can read a report with texts of incidents.

    Args:
        runs: one run or more; all are compared with the first one.
        out: the file.
        origins: origin of each value, by the name of the setting; None: unknown.

    Raises:
        EnvironmentError: the file cannot be written.
    """
    text = page(payload(runs, origins))
    try:
        write_whole(out, text, is_private=any(run.incidents for run in runs), is_durable=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise EnvironmentError(
            f"the report {out} cannot be written: {why}.", fix="give another file, e.g. --out ~/report.html"
        ) from None


def _asset(name: str) -> str:
    return text_named(Path(__file__).with_name("assets") / name)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
