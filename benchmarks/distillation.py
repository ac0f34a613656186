"""Does distilling pay? One student by cross-entropy alone, distilled, and by the older presets.

python -m benchmarks.distillation --teacher_model FOLDER --data_path FILE.jsonl --seeds 3

Each row is a whole run on the same steps, batches and start; the held-out perplexity is of the best
look at held-out text. `clamp` rows hold the logits as older scripts did, to show what that costs.
Without flags a teacher is trained on the standard library first.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from ssl_kd.datasets.aligned import aligned_blocks
from ssl_kd.datasets.blocks import make_blocks
from ssl_kd.datasets.text import TextDataset
from ssl_kd.language.presets import PRESETS
from ssl_kd.language.run import run
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.step import precision_of
from ssl_kd.language.teacher import trained_teacher
from ssl_kd.language.texts import texts_of
from ssl_kd.teachers.causal import tokenizer_id

ALONE = {"alpha_ce": 1.0, "alpha_kd": 0.0}


def old(name: str) -> dict[str, Any]:
    """What a preset says of learning; rows and their length stay those of the others."""
    kept = ("learning_rate", "temperature", "alpha_kd", "alpha_ce", "clip_grad")
    return {key: value for key, value in PRESETS[name].items() if key in kept}


VARIANTS: dict[str, dict[str, Any]] = {
    "CE alone": ALONE,
    "distilled": {},
    "preset balanced": old("balanced"),
    "preset stable": old("stable"),
    "preset ultra_stable": old("ultra_stable"),
    "distilled, clamp 5": {"legacy_clamp": "5"},
    "distilled, clamp 2.5": {"legacy_clamp": "2.5"},
}


def add_settings(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Settings as flags, with the library's defaults but for those given here."""
    for name in (*names, *defaults):
        default = defaults.get(name, getattr(LanguageSettings, name))
        kind = partial(LanguageSettings.parse, name)
        parser.add_argument(f"--{name}", default=default, type=kind)


def spread(values: Iterable[float], form: str = ".3f") -> str:
    """`median (lowest to highest)`."""
    found = sorted(values)
    return f"{median(found):{form}} ({found[0]:{form}} to {found[-1]:{form}})"


def training_text(settings: LanguageSettings) -> TextDataset:
    """What a run of these settings learns from."""
    return texts_of(settings)[0]


def with_teacher(settings: LanguageSettings) -> LanguageSettings:
    """A teacher that is to be trained is trained now, once for all runs and seeds."""
    if settings.teacher_model != "train":
        return settings
    folder = trained_teacher(
        settings, training_text(settings), precision_of(settings), lambda *progress: None
    )
    return settings.replace(teacher_model=str(folder))


_LAID_OUT: dict[Any, Any] = {}


def once(lay_out: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of a text and tokenizers, which keeps what it made for the next run."""

    def kept(text: TextDataset, *rest: Any, **options: Any) -> Any:
        names = [tokenizer_id(r) if hasattr(r, "get_vocab") else r for r in rest]
        key = (lay_out, text.digest, *names, *options.values())
        if key not in _LAID_OUT:
            _LAID_OUT[key] = lay_out(text, *rest, **options)
        return _LAID_OUT[key]

    return kept


def measure(
    settings: LanguageSettings, look: Callable[[Path], dict[str, Any]] = lambda folder: {}
) -> dict[str, Any]:
    """One run; the student's row, what it began with, and what `look` sees in the run folder."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("ssl_kd.language.texts.make_blocks", once(make_blocks)),
        patch("ssl_kd.language.texts.aligned_blocks", once(aligned_blocks)),
    ):
        path = run(settings.replace(runs_dir=folder))
        metrics = json.loads((path / "metrics.json").read_text())
        seen = look(path)
    rows = {row["name"]: row for row in metrics["table"]}
    return (
        rows["student"]
        | seen
        | {
            "before": rows["student before"]["perplexity"],
            "before_bits": rows["student before"]["bits_per_character"],
            "teacher": rows.get("teacher", {}).get("perplexity"),
            "success_rate": metrics["success_rate"],
            "seconds": metrics["seconds"]["train"],
        }
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    add_settings(
        parser,
        *("teacher_model", "data_path", "eval_path"),
        *("max_steps", "batch_size", "block_size", "eval_rows"),
        *("learning_rate", "temperature", "alpha_kd", "alpha_ce"),
        student_model="fresh:2x96",
    )
    given = vars(parser.parse_args())
    seeds, first, only = (given.pop(name) for name in ("seeds", "first_seed", "only"))
    logging.basicConfig(level=logging.ERROR)
    settings = LanguageSettings(
        **given, eval_every=max(1, given["max_steps"] // 5), generations=0, answer_prompts=0
    )
    print(
        "| run | held-out perplexity | agreement with the teacher | KL to the teacher | seconds |"
    )
    print("|---|---|---|---|---|")
    for name in only:
        rows = [
            measure(settings.replace(**VARIANTS[name], seed=seed))
            for seed in range(first, first + seeds)
        ]
        if name == only[0]:
            print(f"| teacher | {rows[0]['teacher']:.3f} | | | |")
            print(f"| student, as it begins | {median(r['before'] for r in rows):.1f} | | | |")
        cells = [
            spread(row["perplexity"] for row in rows),
            f"{median(100 * row['agreement'] for row in rows):.1f} %",
            f"{median(row['kl'] for row in rows):.3f}",
            f"{median(row['seconds'] for row in rows):.0f}",
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
