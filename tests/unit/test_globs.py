"""``**`` in a pattern: each folder once, whatever links there are."""

import os

import pytest

from crius.config.data import DataConfig
from crius.data.documents import find_files, matches
from crius.errors import DataError


@pytest.fixture
def tree(tmp_path):
    for name in ("a.txt", "sub/b.txt", "sub/deep/c.txt", ".hidden/d.txt", "sub/e.md"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text("x")
    return tmp_path / "tree"


def names(tree, pattern):
    return sorted(str(path.relative_to(tree)) for path in matches(tree / pattern))


@pytest.mark.parametrize("pattern", ["**/*.txt", "**", "*/**/*.txt", "**/deep/**/*", "**/**/*.txt", "sub/*", "**/none"])
def test_without_links_a_pattern_finds_what_glob_finds(tree, pattern):
    import glob

    want = {name.rstrip("/") for name in glob.glob(str(tree / pattern), recursive=True)}
    assert sorted(names(tree, pattern)) == sorted(os.path.relpath(name, tree) for name in want)


def test_links_to_a_parent_end_and_each_file_counts_once(tree):
    """With plain glob one link gives each file 41 times, and two do not end."""
    (tree / "sub" / "up").symlink_to(tree)
    (tree / "sub" / "deep" / "up2").symlink_to(tree / "sub")
    assert names(tree, "**/*.txt") == ["a.txt", "sub/b.txt", "sub/deep/c.txt"]
    files = find_files(DataConfig(source="text", path=(str(tree / "**" / "*.txt"),)))
    assert len(files) == 3


@pytest.mark.parametrize("pattern", ["**/**/*/**/*.txt", "*/**/*.txt", "**/*/**/*.txt", "**/sub/**/*.txt"])
def test_links_to_a_parent_multiply_nothing_under_several_stars(tree, pattern):
    (tree / "sub" / "up").symlink_to(tree)
    (tree / "sub" / "deep" / "up2").symlink_to(tree / "sub")
    found = names(tree, pattern)
    assert sorted(os.path.realpath(tree / name) for name in found) == sorted(
        str(tree / name) for name in ("a.txt", "sub/b.txt", "sub/deep/c.txt")
    )
    assert "sub/deep/c.txt" in found  # the shortest path


def test_a_file_counts_under_each_name_that_someone_gave_it(tree):
    (tree / "sub" / "hard.txt").hardlink_to(tree / "a.txt")
    (tree / "soft.txt").symlink_to(tree / "a.txt")
    assert names(tree, "**/*.txt") == ["a.txt", "soft.txt", "sub/b.txt", "sub/deep/c.txt", "sub/hard.txt"]


def test_a_folder_elsewhere_is_found_through_its_link_once(tree, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "f.txt").write_text("x")
    (tree / "one").symlink_to(tmp_path / "other")
    (tree / "two").symlink_to(tmp_path / "other")
    assert names(tree, "**/f.txt") == ["one/f.txt"]


def test_a_relative_pattern_is_looked_for_here(tree, monkeypatch):
    monkeypatch.chdir(tree)
    found = find_files(DataConfig(source="text", path=("**/*.txt",)))
    assert [str(file) for file in found] == ["a.txt", "sub/b.txt", "sub/deep/c.txt"]


def test_a_file_whose_name_is_not_utf8_is_named(tree):
    (tree / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    with pytest.raises(DataError, match="is not UTF-8"):
        find_files(DataConfig(source="text", path=(str(tree / "*.txt"),)))
