"""What tokens do not count: data files of the package, and programs in strings."""

import tomllib

import pytest
import tokens
from harness import ROOT


def test_the_data_files_of_a_room_do_not_grow():
    most = tomllib.loads((ROOT / "tests/size.toml").read_text())["words"]
    assert {room: words for room, words in tokens.data_words().items() if words > most.get(room, 0)} == {}


@pytest.mark.full
def test_no_program_stands_in_a_string():
    found = {}
    for path in (ROOT / "crius").rglob("*.py"):
        lines = tokens.code_in_strings(path.read_text())
        if lines:
            found[path.name] = lines
    assert found == {}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('x = """\nimport a\nb = 1\n"""\n', [1]),
        ('def f():\n    run("import a\\nb = 1\\nprint(b)\\n")\n', [2]),
        ('"""\nimport a\nb = 1\n"""\n', []),
        ('x = "some words\\nof a text\\nfor people"\n', []),
        ('x = "import a"\n', []),
    ],
)
def test_a_program_in_a_string_is_found(text, lines):
    assert tokens.code_in_strings(text) == lines


def test_words_of_data_files_are_counted_by_room(tmp_path):
    (tmp_path / "crius/tools/plan").mkdir(parents=True)
    (tmp_path / "crius/tools/plan/a.toml").write_text("a = 1\n# two words\n")
    (tmp_path / "crius/tools/plan/b.html").write_text("<p>one two</p>")
    (tmp_path / "crius/tools/plan/c.css").write_text("not counted")
    assert tokens.data_words(tmp_path) == {"crius/tools/plan": 8}
