"""Define fixtures with tiny models and texts on disk, and one that runs scripts in this process."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from ssl_kd.language.text.dataset import TextDataset
from ssl_kd.language.text.new_tokenizer import train_tokenizer
from ssl_kd.language.text.records import Example
from tests.tiny import Tiny

SCRIPTS = Path(__file__).parents[2] / "scripts"
WORDS = ("cat", "dog", "sun", "mat", "park", "ball")
STORIES = [
    f"The {a} saw the {b}, and the {b} saw the {a}. It was day {i}. They ran to the park."
    for i, (a, b) in enumerate((a, b) for a in WORDS for b in WORDS)
]
SUMS = [
    {"prompt": f"What is {a} + {b}?\n", "completion": f"<answer>{a + b}</answer>"}
    for a in range(6)
    for b in range(6)
]


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="session")
def house(tmp_path_factory):
    """Save models `dense`, `mixture`, `foreign` (other tokenizer), `sick` (NaN), and two texts."""
    folder = tmp_path_factory.mktemp("house")
    lines(folder / "stories.jsonl", [{"text": text} for text in STORIES])
    lines(folder / "sums.jsonl", SUMS)
    texts = STORIES + [row["prompt"] + row["completion"] for row in SUMS]

    def tokenizer(size, texts):
        examples = tuple(Example(f"t:{i}", text=text) for i, text in enumerate(texts))
        return train_tokenizer(TextDataset("t", "train", examples, "", ()), size)

    own, other = tokenizer(300, texts), tokenizer(280, texts[:3])
    tiny = Tiny()
    for name, tokens in (("dense", own), ("mixture", own), ("foreign", other)):
        kind = "Mixtral" if name == "mixture" else "Llama"
        tiny.folder(folder / name, kind, seed=1, tokenizer=tokens)
    model = tiny.model(seed=2, tokenizer=own)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    model.save_pretrained(folder / "sick")
    own.save_pretrained(folder / "sick")
    return folder


@pytest.fixture
def script(tmp_path, monkeypatch, capfd):
    """Return `script(name, *words)`, which returns the exit code, stdout and stderr of a script."""
    monkeypatch.chdir(tmp_path)  # runs/ and data/ are created in the working directory

    def start(name, *words):
        path = SCRIPTS / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
        return ended.value.code, *capfd.readouterr()

    return start
