"""The ratchet of lines: a room may lose some and gain none."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 brought it")

ROOT = Path(__file__).parents[2]
PROJECT = """[tool.lines]
file = 5
files = { "ssl_kd/explore/page.js" = 6 }

[tool.lines.rooms]
# A note that stays.
explore = 9
firstnan = 3
gone = 4
top = 2

[tool.other]
top = 7
"""


@pytest.fixture
def lines():
    spec = importlib.util.spec_from_file_location("lines", ROOT / ".ci" / "lines.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(tmp_path):
    """A package of two rooms, written by `fill(path, lines)`."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)

    def fill(path, n):
        file = tmp_path / ("" if path.startswith("firstnan") else "ssl_kd") / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("line\n" * n)
        return tmp_path

    fill("explore/page.js", 6)
    fill("explore/vendor/others.js", 900)
    fill("explore/notes.md", 900)
    fill("run.py", 2)
    fill("firstnan/loop.py", 3)
    fill("firstnan/tests/test_loop.py", 900)
    return fill


def test_rooms_within_their_lines_pass(lines, repository, capsys):
    root = repository("explore/server.py", 3)
    assert lines.main([], root) == 0
    assert "explore 9  firstnan 3  top 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "n", "fault"),
    [
        ("explore/server.py", 4, "explore has 10 lines, 1 more than it may: take some out"),
        ("firstnan/a.py", 1, "firstnan has 4 lines, 1 more"),
        ("new/a.py", 1, "new is a new room: give it a number"),
        ("explore/page.js", 7, "ssl_kd/explore/page.js has 7 lines; expected at most 6"),
    ],
)
def test_what_has_grown_is_named(lines, repository, capsys, path, n, fault):
    assert lines.main([], repository(path, n)) == 1
    assert fault in capsys.readouterr().err


def test_numbers_only_fall(lines, repository):
    root = repository("run.py", 3)
    assert lines.main(["--lower"], root) == 1  # the top level has grown
    text = (root / "pyproject.toml").read_text()
    limits = tomllib.loads(text)["tool"]
    assert limits["lines"]["rooms"] == {"explore": 6, "firstnan": 3, "top": 2}
    assert limits["other"] == {"top": 7}
    assert "# A note that stays." in text
    assert lines.main([], repository("run.py", 2)) == 0


def test_a_number_is_raised_with_its_reason_in_the_changelog(lines, repository, capsys):
    root = repository("run.py", 2)
    (root / "CHANGELOG.md").write_text("# Changelog\n")
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    repository("run.py", 3)
    project = root / "pyproject.toml"
    project.write_text(project.read_text().replace("top = 2", "top = 3", 1))
    assert lines.main([], root) == 1
    assert "top may have more lines than on main" in capsys.readouterr().err
    (root / "CHANGELOG.md").write_text("# Changelog\n\n- One more command.\n")
    assert lines.main([], root) == 0
