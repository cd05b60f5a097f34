"""Small faults that a seed draws: what is changed, what is left alone, and where they are planted."""

import pytest
from harness import ROOT
from mutants import changes_in, drawn, planted
from rooms import ROOMS

CHANGES = [
    ("constant", "x = a[-1]\n", "x = a[-2]\n"),
    ("constant", "x: float = 0.5\n", "x: float = 1.0\n"),
    ("comparison", "x = a < 1\n", "x = a >= 1\n"),
    ("comparison", "x = a < 1\n", "x = a <= 1\n"),
    ("term", "x = é * (a + b)\n", "x = é * ((a))\n"),
    ("detach", "x = f(a).detach().b\n", "x = f(a).b\n"),
    ("swap", "x = a.sum(1)\n", "x = a.mean(1)\n"),
    ("swap", "x = min(a, b)\n", "x = max(a, b)\n"),
    ("dim", "x = a.amax(dim=0)\n", "x = a.amax(dim=1)\n"),
    ("dim", "x = a.softmax(-1)\n", "x = a.softmax(0)\n"),
    ("return", "def f() -> None:\n    g()\n    h()\n", "def f() -> None:\n    g()\n    return\n"),
]


@pytest.mark.parametrize(("kind", "text", "changed"), CHANGES)
def test_a_change_replaces_one_text(kind, text, changed):
    assert changed in [planted(text, change) for change in changes_in(text) if change.kind == kind]


@pytest.mark.parametrize(
    "text",
    [
        'raise ValueError(f"{a + 1}")\n',
        'log.info("%d", a + 1)\n',
        "def f(x: Literal[1]) -> int: ...\n",
        '"1 < 2"\n',
        'def f() -> None:\n    """1."""\n    log.info("done")\n',
        "f(timeout=1)\n",
        "POLL_SECONDS = 0.1\n",
        "_BLOCK = 1 << 18\n",
    ],
)
def test_what_no_result_depends_on_is_left_alone(text):
    assert changes_in(text) == []


def test_a_seed_always_draws_the_same_faults():
    first = drawn("optim", 1, 5)
    assert first == drawn("optim", 1, 5)
    assert len(set(first)) == 5
    assert first != drawn("optim", 2, 5)


def test_every_room_has_code_and_tests():
    assert len(ROOMS) == 13
    for room, tests in ROOMS.items():
        files = [path.relative_to(ROOT / "crius" / room).as_posix() for path in (ROOT / "crius" / room).rglob("*.py")]
        assert files
        for start, words in tests.items():
            assert any(file.startswith(start) for file in files), f"no file of {room} begins with {start}"
            paths = [word if "/" in word else f"tests/unit/{word}.py" for word in words if not word.startswith("--")]
            assert [path for path in paths if not (ROOT / path.split("::")[0]).exists()] == []


def test_no_place_that_a_room_names_hides_a_longer_one():
    for tests in ROOMS.values():
        starts = list(tests)
        assert starts[-1] == ""
        assert not [(a, b) for number, a in enumerate(starts) for b in starts[number + 1 :] if b.startswith(a)]
