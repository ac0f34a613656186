"""Tiny random language models of real architectures, with a tokenizer, texts and settings."""

import json
from dataclasses import replace
from functools import cached_property

import pytest
import torch

from ssl_kd.core.precision import Precision
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.teachers.live import Live
from ssl_kd.language.text.blocks import make_blocks
from ssl_kd.language.text.dataset import TextDataset
from ssl_kd.language.text.new_tokenizer import train_tokenizer
from ssl_kd.language.text.records import Example
from ssl_kd.language.train.step import Distiller

WHO = ("the old fox", "a small bird", "Lily", "the tall man", "her brother", "one grey cat")
DOES = ("sees", "follows", "likes", "looks for", "runs from", "sings to")
WHERE = ("in the garden", "by the sea", "at night", "under a tree", "on Sunday", "again")
BLOCK = 24


def sentence(i: int) -> str:
    parts = WHO[i % 6], DOES[i // 6 % 6], WHO[(i // 3 + 1) % 6], WHERE[i * 7 % 6]
    return f"{' '.join(parts)} {i}."


class Tiny:
    """Makes models of two layers and width 32, and their data."""

    precision = Precision.for_device("cpu")

    @staticmethod
    def texts(n=40, start=0, name="tiny") -> TextDataset:
        # One to four sentences: their lengths differ much.
        lines = [" ".join(map(sentence, range(i, i + 1 + i % 4))) for i in range(start, start + n)]
        examples = tuple(Example(f"tiny:{i}", text=line) for i, line in enumerate(lines, 1))
        return TextDataset(name, "train", examples, f"{name} {start} {n}", ())

    @cached_property
    def tokenizer(self):
        return train_tokenizer(self.texts(), 320)

    @cached_property
    def other_tokenizer(self):
        """A tokenizer with another vocabulary, trained on other text."""
        lines = (
            "import os\nfor name in os.listdir(): print(name)\nreturn sea, garden, under",
            "    ",
        )
        examples = tuple(Example("code", text=line) for line in lines * 2)
        return train_tokenizer(TextDataset("code", "train", examples, "", ()), 290)

    def model(self, kind="Llama", seed=0, tokenizer=None, spread=None, **changes):
        """Build a causal LM in evaluation mode; `spread`: standard deviation of its weights."""
        transformers = pytest.importorskip("transformers")
        size = {
            "vocab_size": len(tokenizer or self.tokenizer),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        }
        if kind == "Mixtral":
            size |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        if kind == "GPT2":
            size = {"vocab_size": size["vocab_size"], "n_embd": 32, "n_layer": 2, "n_head": 4}
            size |= {"n_positions": 128, "bos_token_id": 0, "eos_token_id": 1}
        torch.manual_seed(seed)
        config = getattr(transformers, f"{kind}Config")(**{**size, **changes})
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for p in model.parameters() if spread else ():
            if p.ndim > 1:
                torch.nn.init.normal_(p, 0, spread)
        return model

    def folder(self, path, kind="Llama", seed=0, tokenizer=None, **changes) -> str:
        """Save a model with its tokenizer, and return the folder."""
        self.model(kind, seed, tokenizer, spread=0.3, **changes).save_pretrained(path)
        (tokenizer or self.tokenizer).save_pretrained(path)
        return str(path)

    def blocks(self, n=40, packing=False):
        return make_blocks(self.texts(n), self.tokenizer, BLOCK, packing=packing)

    @staticmethod
    def settings(**changes) -> LanguageSettings:
        fast = {
            "learning_rate": 1e-2,
            "temperature": 2.0,
            "batch_size": 4,
            "max_steps": 8,
            "log_every": 1,
        }
        return LanguageSettings(**{**fast, **changes})

    def distiller(self, teacher=None, student=None, precision=None, source=None, **changes):
        """Build a `Distiller`; `teacher` maps a batch to its outputs, as `FrozenTeacher` does."""
        return Distiller(
            self.model(seed=1) if student is None else student,
            self.settings(**changes),
            precision or self.precision,
            Live(teacher) if teacher is not None else source,
        )

    def half(self, dtype=torch.float16) -> Precision:
        return replace(self.precision, student=dtype, teacher=dtype, scale=dtype == torch.float16)


@pytest.fixture(scope="session")
def tiny():
    return Tiny()


@pytest.fixture
def text_file(tmp_path, tiny):
    return save_texts(tiny, tmp_path, 48, 12)


def save_texts(tiny, folder, n_train, n_test):
    """Save a training `.jsonl` with a held-out one beside it; return the path of the first."""
    for name, start, n in (("train", 0, n_train), ("test", 1000, n_test)):
        rows = [{"text": example.text} for example in tiny.texts(n, start).examples]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"tiny_{name}.jsonl").write_text(lines)
    return str(folder / "tiny_train.jsonl")
