"""The size of the code as a reader meets it: ``python tests/tokens.py`` prints the tokens of each room and its limit.

A token is a name, a number, a string or an operator. Docstrings and comments are free, and so are lines: only saying
less makes a file smaller. An f-string is one token and what its braces compute, whatever the version of Python. Data
files of the package, such as recipes and the page of a report, are counted by words.
"""

import ast
import io
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from forms import tree_of

ROOT = Path(__file__).parent.parent
DATA = ("*.toml", "*.json", "*.js", "*.html")
COUNTED = {tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP}
# Python 3.12 and newer split an f-string into tokens; older ones have no such kinds
F_START = getattr(tokenize, "FSTRING_START", -1)
F_END = getattr(tokenize, "FSTRING_END", -1)


def tokens_of(text: str) -> int:
    """Number of tokens of a module."""
    tree = tree_of(text)
    inside = (node.value for node in ast.walk(tree) if isinstance(node, ast.FormattedValue))
    return _plain(text, _docstring_lines(tree)) + sum(_plain(ast.unparse(value), set()) for value in inside)


def _docstring_lines(tree: ast.AST) -> set[int]:
    """Lines of the strings that stand alone, as docstrings of modules, classes, functions and attributes do."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _plain(text: str, skipped: set[int]) -> int:
    """Tokens outside of the lines ``skipped``; an f-string counts as one."""
    count = 0
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == F_START:
            depth += 1
        starts_string = token.type == F_START and depth == 1
        is_counted = starts_string or (token.type in COUNTED and depth == 0)
        if token.type == F_END:
            depth -= 1
        if is_counted and token.start[0] not in skipped:
            count += 1
    return count


def room_of(path: str) -> str:
    """The room of a file: a folder of ``crius``, a tool, or a whole folder beside ``crius``."""
    folder, *names = path.split("/")
    if folder != "crius":
        return folder
    if len(names) == 1:
        return "crius/(top)"
    if names[0] == "tools":
        return f"crius/tools/{names[1]}" if len(names) > 2 else "crius/tools/(top)"
    return f"crius/{names[0]}"


def modules(root: Path = ROOT) -> Iterator[Path]:
    """The modules that are counted."""
    for folder in ("crius", "tests", "benchmarks"):
        yield from sorted((root / folder).rglob("*.py"))


def rooms(root: Path = ROOT) -> Counter[str]:
    """Tokens of each room below ``root``."""
    found: Counter[str] = Counter()
    for path in modules(root):
        found[room_of(path.relative_to(root).as_posix())] += tokens_of(path.read_text(encoding="utf-8"))
    return found


def data_words(root: Path = ROOT) -> Counter[str]:
    """Words of the data files in each room of the package."""
    found: Counter[str] = Counter()
    for path in (path for pattern in DATA for path in (root / "crius").rglob(pattern)):
        found[room_of(path.relative_to(root).as_posix())] += len(path.read_text(encoding="utf-8").split())
    return found


def code_in_strings(text: str) -> list[int]:
    """Lines where a string begins that is a program of several statements, and no docstring."""
    tree = tree_of(text)
    docstrings = _docstring_lines(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.lineno not in docstrings:
            if node.value.count("\n") >= 2 and _is_program(node.value):
                found.append(node.lineno)
    return found


def _is_program(text: str) -> bool:
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    return len(body) > 1 and not all(isinstance(node, ast.Expr) for node in body)


def limits(root: Path = ROOT) -> Counter[str]:
    """The most tokens of each room: those that it had, and those that issues have stated since."""
    table = tomllib.loads((root / "tests/size.toml").read_text(encoding="utf-8"))
    most = Counter(table["tokens"])
    for stated in table["stated"].values():
        most.update(stated)
    return most


def main() -> None:
    most = limits()
    found = rooms()
    for room, count in found.most_common():
        print(f"{count:9,} of {most[room]:9,}  {room}")
    product = [room for room in found if room.startswith("crius")]
    print(f"{sum(found[room] for room in product):9,} of {sum(most[room] for room in product):9,}  crius, all")


if __name__ == "__main__":
    main()
