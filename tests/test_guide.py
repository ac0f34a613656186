"""Code, commands and flags on the README and the pages work as printed."""

import json
import pkgutil
import re
import shlex
import shutil
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.__main__ import table
from benchmarks.turns import PAGE, with_section
from ssl_kd import cli
from ssl_kd.cli.flags import read_settings
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.settings.presets import PRESETS
from ssl_kd.vision.settings import VisionSettings
from tests.documents import BLOCK, NOTEBOOKS, PAGES, ROOT, blocks, commands, run
from tests.marks import slow
from tests.sweep.test_table import write_run
from tests.tiny import sentence

VISION = {"train.py", "train"}
LANGUAGE = {"scripts/distill.py", "scripts/train_sar_kd_stable.py", "scripts/cache_teacher.py"}
LANGUAGE |= {"distill", "verify"}
OTHER_PROGRAMS = {"tensorboard", "source", "cd", "ls", "open"}
SETTINGS = {field.name for cls in (VisionSettings, LanguageSettings) for field in fields(cls)}
FLAG = re.compile(r"--([a-z][\w-]*)")
OWN_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


DOCUMENTED = sorted(
    name
    for page in (ROOT / "docs" / "api").glob("*.md")
    for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.M)
)
FIXED = ["ssl_kd.guard.Guard", "ssl_kd.losses.LinearTeacher", "ssl_kd.losses.DIVERGENCES"]
"""Names that stay importable and have no entry of their own in the API pages."""


def named(paths):
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


WITH_PYTHON = [path for path in PAGES if blocks(path, "python")]
WITH_COMMANDS = [path for path in PAGES if blocks(path, "sh")]


@pytest.mark.parametrize("name", [*DOCUMENTED, *FIXED])
def test_documented_names_are_importable_as_written(name):
    if name.split(".")[1].startswith("hf"):
        pytest.importorskip("transformers")
    assert pkgutil.resolve_name(name) is not None


LONG = ROOT / "docs" / "python.md"
"""Its examples cluster all digits again and again."""


@pytest.mark.parametrize(
    "path",
    [
        *named(path for path in WITH_PYTHON if path != LONG),
        slow(LONG),
    ],
)
def test_python_of_a_page_runs_with_the_printed_output(path, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "".join(block.body for block in blocks(path, "python"))
    if "transformers" in code or "Distillation" in code:
        pytest.importorskip("transformers")
    if "texts.jsonl" in code:
        tiny = request.getfixturevalue("tiny")
        tiny.folder("teacher")
        tiny.folder("student", seed=4)
        texts = [json.dumps({"text": sentence(i)}) for i in range(200)]
        Path("texts.jsonl").write_text("\n".join(texts))
    if "runs/latest" in code:
        shutil.copytree(request.getfixturevalue("photo_run"), "runs/latest")
    if "runs/losses" in code:
        for i, loss in enumerate(["temi", "scan"] * 2):
            write_run(Path("runs/losses") / f"{i}", LOSS=loss, SEED=i // 2, acc=0.8 + i / 100)
    runs_commands = "runs unchanged in an empty folder" in path.read_text(encoding="utf-8")
    names = {"__name__": "guide"}
    for block in blocks(path, "python", *(["sh"] if runs_commands else [])):
        if block.kind == "python":
            run(block, names)
            continue
        for program, *words in commands(block):
            assert program == "ssl_kd" and cli.main(words) == 0, words


@pytest.mark.slow
@pytest.mark.parametrize("path", named(NOTEBOOKS))
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_a_notebook_runs_from_its_first_cell_to_its_last(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names = {"__name__": "__main__"}
    for block in blocks(path, "python"):
        run(block, names)


@pytest.mark.parametrize("path", named(WITH_COMMANDS))
def test_commands_of_a_page_exist_and_know_their_flags(path):
    for block in blocks(path, "sh"):
        for words in commands(block):
            check(words)


IN_TABLE = re.compile(r"`((?:python|ssl_kd|torchrun|make) [^`]+)`")


@pytest.mark.parametrize("path", named(PAGES))
def test_commands_in_the_tables_of_a_page_parse(path, monkeypatch):
    for work in ("language_model", "nan_issues", "installation"):
        monkeypatch.setattr(f"ssl_kd.doctor.{work}", lambda *_: 0)
    for line in path.read_text(encoding="utf-8").splitlines():
        for command in IN_TABLE.findall(line) if line.startswith("|") else ():
            if "..." in command:
                continue  # not a whole command
            words = shlex.split(command)
            check(words)
            if words[1:3] == ["-m", "ssl_kd.doctor"]:
                assert cli.main(["doctor", *words[3:]]) == 0, words


def check(words: list[str]) -> None:
    """Check that the program of a shell line exists and knows each flag."""
    program, *rest = words
    if program == "make":
        assert f"\n{rest[0]}:" in (ROOT / "Makefile").read_text(), words
    elif program == "pip":
        extras = re.findall(r"\[([\w,]+)\]", " ".join(rest)) or re.findall(r"ssl_kd(\w+)", rest[-1])
        project = (ROOT / "pyproject.toml").read_text()
        assert all(f"\n{extra} = [" in project for extra in ",".join(extras).split(",") if extra), (
            words
        )
    elif program in OTHER_PROGRAMS:
        pass
    elif program == "bash":
        assert (ROOT / rest[0]).is_file(), words
    elif program in ("python", "torchrun", "ssl_kd"):
        check_python(words)
    else:
        raise AssertionError(f"{words}: no program that this test knows")


def check_python(words: list[str]) -> None:
    rest = [word for word in words[1:] if word not in ("--help", "...")]
    if words[0] == "torchrun":
        rest = rest[rest.index("--nproc_per_node") + 2 :]
    name, *flags = rest
    if name in VISION | LANGUAGE:
        dashed = [flag for flag in FLAG.findall(" ".join(flags)) if "-" in flag]
        assert not dashed, f"{words}: write _ in place of - in {dashed}"
    if name in VISION and flags[:1] != ["extract"]:
        read_settings(VisionSettings, flags, Path("none"), prog="guide")
        return
    if name in LANGUAGE:
        read_settings(LanguageSettings, flags, Path("none"), prog="guide", presets=PRESETS)
        return
    source = "".join(file.read_text() for file in sources(name, flags))
    for flag in FLAG.findall(" ".join(flags)):
        assert name == "-m" or "-" not in flag, f"{words}: write --{flag.replace('-', '_')}"
        plain = flag.replace("-", "_")
        known = re.search(rf'["\s](--)?({flag}|{plain})["\s]', source)
        assert known or plain in SETTINGS, f"{words}: --{flag}"


def sources(name: str, flags: list[str]) -> list[Path]:
    """Return the files that declare the flags of a command."""
    if name == "-c":
        return []
    if name == "-m":
        package = flags[0].split(".")
        here = ROOT.joinpath(*package)
        if not (ROOT / package[0]).is_dir():
            assert find_spec(flags[0]) is not None, flags
            return []
        assert here.with_suffix(".py").is_file() or (here / "__main__.py").is_file(), flags
        return [*here.parent.glob("*.py"), *here.glob("*.py")]
    if (ROOT / name).is_file() and flags[:1] != ["extract"]:
        return [ROOT / name]
    assert (ROOT / name).is_file() or name in cli.COMMANDS, f"ssl_kd {name}: no such command"
    packages = (ROOT / "ssl_kd", ROOT / "explore" / "ssl_kd_explore")
    return [file for package in packages for file in (package / "cli").glob("*.py")]


@pytest.mark.parametrize("path", named([*PAGES, *NOTEBOOKS]))
def test_links_of_a_page_lead_somewhere(path):
    for link in OWN_LINK.findall(BLOCK.sub("", path.read_text(encoding="utf-8"))):
        assert (path.parent / link).exists(), f"{path}: {link}"


def test_the_table_of_benchmarks_is_that_of_their_docstrings():
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_section("benchmarks", table(), page), "run: python -m benchmarks --write"
