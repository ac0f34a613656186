"""What the guide of the language mode shows can be typed: its Python runs, its flags are known."""

import json
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from ssl_kd.flags import read_settings  # noqa: E402
from ssl_kd.language.presets import PRESETS  # noqa: E402
from ssl_kd.language.settings import LanguageSettings  # noqa: E402
from tests.tiny import sentence  # noqa: E402

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
LANGUAGE = README[README.index("\n## Language models") : README.index("\n## Precision")]
TAKES_SETTINGS = ("scripts/distill.py", "scripts/cache_teacher.py", "distill", "verify")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(kind):
    """Blocks of code of the guide and README, each named by its first line."""
    found = [body for page in (GUIDE, LANGUAGE) for k, body in BLOCK.findall(page) if k == kind]
    return [pytest.param(body, id=body.splitlines()[0][:50]) for body in found]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_of_the_guide_runs(code, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.folder("teacher")
    tiny.folder("student", seed=4)
    texts = [json.dumps({"text": sentence(i)}) for i in range(200)]
    Path("texts.jsonl").write_text("\n".join(texts))
    exec(compile(code, "docs/language.md", "exec"), {"__name__": "guide"})


def commands():
    """The words of every command of ours that takes the settings."""
    for block in blocks("sh"):
        for line in str(block.values[0]).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            program = 1 if words[:1] in (["python"], ["ssl_kd"]) else 0
            if words[:1] == ["torchrun"]:
                program = 3
            if words[program : program + 1] and words[program] in TAKES_SETTINGS:
                yield pytest.param(words[program + 1 :], id=" ".join(words)[:60])


@pytest.mark.parametrize("words", [*commands()])
def test_flags_of_the_guide_are_known(words):
    flags = [word for word in words if word not in ("--help", "...")]
    read_settings(LanguageSettings, flags, Path("none"), prog="guide", presets=PRESETS)
