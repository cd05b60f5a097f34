"""Forms that save lines and cost readers: ``python tests/forms.py`` prints where they stand, ``--count`` how many.

Lines are free, so none of these saves anything. A file may keep those that ``tests/size.toml`` lists, and no others:

- parallel: two or more values of their own assigned in one statement. A starred target, a swap whose values read a
  target, and the result of a call stay.
- splat: a literal unpacked where its entries could stand, as in ``run(*(a, b), c)``.
- condition: a text that a condition multiplies, selects by index, or joins by ``and`` and ``or``.
- ternary: a conditional expression inside another.
- semicolon: two statements on a line.
"""

import ast
import functools
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LITERALS = (ast.Tuple, ast.List, ast.Set)
COULD_BE = (ast.Assign, ast.Starred, ast.Dict, ast.Call, ast.BinOp, ast.Subscript, ast.BoolOp, ast.IfExp)

tree_of = functools.cache(ast.parse)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements in ``node``, and the clauses that hold some; no expression, so it is faster than ``ast.walk``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield child
            yield from statements(child)


def forms_in(text: str) -> list[tuple[int, str]]:
    """Line and name of each form in a module."""
    tree = tree_of(text)
    found = [(node.lineno, name) for node in ast.walk(tree) if isinstance(node, COULD_BE) for name in _names(node)]
    return sorted([*found, *((line, "semicolon") for line in _shared_lines(tree))])


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Assign) and any(_is_parallel(target, node.value) for target in node.targets):
        yield "parallel"
    if isinstance(node, ast.Starred) and isinstance(node.ctx, ast.Load) and isinstance(node.value, LITERALS):
        yield "splat"
    if isinstance(node, ast.Dict) and any(
        key is None and isinstance(value, ast.Dict) for key, value in zip(node.keys, node.values, strict=True)
    ):
        yield "splat"
    if isinstance(node, ast.Call) and any(
        word.arg is None and isinstance(word.value, ast.Dict) for word in node.keywords
    ):
        yield "splat"
    if _is_condition(node):
        yield "condition"
    if isinstance(node, ast.IfExp) and any(
        isinstance(inner, ast.IfExp) for part in (node.body, node.test, node.orelse) for inner in ast.walk(part)
    ):
        yield "ternary"


def _is_parallel(target: ast.expr, value: ast.expr) -> bool:
    if not (isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List))):
        return False
    if any(isinstance(part, ast.Starred) for part in (*target.elts, *value.elts)):
        return False
    targets = {ast.unparse(part) for part in target.elts}
    read = {ast.unparse(part) for part in ast.walk(value) if isinstance(part, ast.expr)}
    return not targets & read


def _is_text(node: ast.AST) -> bool:
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_constant or isinstance(node, ast.JoinedStr)


def _is_condition(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = (node.left, node.right)
        is_number = any(isinstance(side, ast.Constant) and isinstance(side.value, int) for side in sides)
        is_list = any(isinstance(side, ast.List) for side in sides)
        is_choice = any(isinstance(side, (ast.Compare, ast.BoolOp)) or _is_bool(side) for side in sides)
        return not is_number and (any(_is_text(side) for side in sides) or (is_list and is_choice))
    if isinstance(node, ast.Subscript) and isinstance(node.value, (ast.Tuple, ast.List)):
        return isinstance(node.slice, (ast.Compare, ast.BoolOp)) or _is_bool(node.slice)
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        joined = [value for value in node.values if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.And)]
        return any(_is_text(part) for value in joined for part in value.values)
    return False


def _is_bool(node: ast.AST) -> bool:
    """Whether an expression is a truth value: a negation, or a call of ``bool``."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "bool"


def _shared_lines(tree: ast.AST) -> Iterator[int]:
    """Lines on which a statement begins behind another one of the same block."""
    for node in (tree, *statements(tree)):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                for first, second in zip(block, block[1:], strict=False):
                    if first.end_lineno == second.lineno:
                        yield second.lineno


def counts(root: Path = ROOT) -> dict[str, Counter[str]]:
    """How often each form stands in each file of ``crius`` that has one."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted((root / "crius").rglob("*.py")):
        for _, name in forms_in(path.read_text(encoding="utf-8")):
            found[path.relative_to(root).as_posix()][name] += 1
    return dict(found)


def kept(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """How often each form may stand in each file."""
    table: dict[str, dict[str, int]] = tomllib.loads((root / "tests/size.toml").read_text(encoding="utf-8"))["forms"]
    return table


def main() -> None:
    total: Counter[str] = Counter()
    for file, found in counts().items():
        total += found
        if "--count" in sys.argv:
            names = ", ".join(f"{name} = {number}" for name, number in sorted(found.items()))
            print(f'"{file}" = {{ {names} }}')
            continue
        for line, name in forms_in((ROOT / file).read_text(encoding="utf-8")):
            print(f"{file}:{line}: {name}")
    print("#", dict(total), total.total())


if __name__ == "__main__":
    main()
