"""The language mode from Python: `Distillation(teacher, student, texts).run()`."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ssl_kd.errors import InputError
from ssl_kd.files import atomic_write_bytes
from ssl_kd.language.foreign_names import IN_MEMORY
from ssl_kd.language.prepare import InMemoryModels
from ssl_kd.language.presets import PRESETS
from ssl_kd.language.run import run
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.report.results import RunResults
from ssl_kd.report.tables import language_table
from ssl_kd.report.write import reported
from ssl_kd.settings import SettingsError, nearest
from ssl_kd.settings.arguments import named_as_arguments
from ssl_kd.teachers.causal import CausalLM, load_causal_lm
from ssl_kd.training.clock import Progress, no_progress
from ssl_kd.training.ranks import following, follows

TEXTS = Path("data") / "texts"
# Settings that are arguments of `Distillation` under other names.
_ARGUMENTS = {
    "teacher_model": "teacher",
    "student_model": "student",
    "data_path": "texts",
    "eval_path": "eval_texts",
}
_NAMING = partial(named_as_arguments, LanguageSettings, **_ARGUMENTS)

Texts = str | os.PathLike[str] | Iterable[str | Mapping[str, Any]]
Model = str | os.PathLike[str] | tuple[Any, Any]


class Distillation:
    """Distil a teacher into a student language model, as `scripts/distill.py` does.

    Args:
        teacher: folder or Hub name of a causal language model; a model of transformers with its
            tokenizer, `(model, tokenizer)`, or its processor if it reads images; `train`, to train
            a small one on the text first; or `none`, for cross-entropy alone. A model in memory is
            moved to the run's device and dtype.
        student: the same, or a value of STUDENT_MODEL: `layers:N`, `fresh:LAYERSxDIM`,
            `llama:LAYERSxDIM`. A model in memory is trained in place.
        texts: a value of DATA_PATH; or texts in memory: strings, or records such as
            `{"prompt": ..., "completion": ...}` and `{"messages": [...]}`, as a list, a
            `datasets.Dataset` or a data frame. They are saved in `data/texts`, with PIL images
            next to them, under a name made of their content.
        eval_texts: held-out text, in the same forms; None: a part of `texts`.
        preset: one of `ssl_kd.language.presets.PRESETS`.
        **settings: the settings of `scripts/config.py` in lower case: `temperature=2.0`,
            `max_steps=500`.

    Raises:
        SettingsError: a setting is unknown or out of range.
        InputError: texts are empty or of another type.

    Attributes:
        settings: all of them.

    >>> texts = [f"{n} and {n} are {2 * n}" for n in range(500)]
    >>> distillation = Distillation("train", "fresh:1x32", texts, max_steps=100)  # doctest: +SKIP
    >>> distillation.run().scores["perplexity"]["student"]  # doctest: +SKIP
    """

    @_NAMING()
    def __init__(
        self,
        teacher: Model = "train",
        student: Model = "fresh:2x128",
        texts: Texts = "stdlib",
        *,
        eval_texts: Texts | None = None,
        preset: str | None = None,
        **settings: Any,
    ) -> None:
        values = LanguageSettings.canonical(settings)
        for name, argument in _ARGUMENTS.items():
            if name in values:
                raise SettingsError(f"give {name} as the argument {argument}")
        if preset is not None and preset not in PRESETS:
            known = ", ".join(PRESETS)
            raise SettingsError(f"preset is {preset!r}, not {known}.{nearest(preset, PRESETS)}")
        teacher_model, teacher_in_memory = _model("teacher", teacher)
        student_model, student_in_memory = _model("student", student)
        self._models, self._naming = InMemoryModels(teacher_in_memory, student_in_memory), _NAMING
        checked = LanguageSettings(
            **{**PRESETS.get(preset or "", {}), **values},
            teacher_model=teacher_model,
            student_model=student_model,
        )
        self.settings = checked.replace(  # only now are texts written
            data_path=_place("texts", texts),
            eval_path=None if eval_texts is None else _place("eval_texts", eval_texts),
        )

    @classmethod
    def of(cls, settings: LanguageSettings) -> Distillation:
        """Return the distillation of a settings object, as the command line has one."""
        distillation = cls.__new__(cls)
        distillation.settings, distillation._models = settings, InMemoryModels()
        distillation._naming = contextlib.nullcontext
        return distillation

    def run(self, *, progress: Progress = no_progress) -> DistilledRun:
        """Train the student, evaluate it and its teacher, and write a run folder with a report.

        With torchrun, each process calls this, and all train one student.

        Args:
            progress: called as `progress(stage, done, total, info)`.

        Raises:
            SettingsError: teacher, student and text do not fit together.
            InputError: the teacher or the student has weights that are not finite.
            Interrupted: Ctrl-C or SIGTERM; `resume()` continues the run.
            TooFewHealthyParts: the guard gave the student up; the message says why.
        """
        with self._naming():
            if follows():  # the first process reports
                with following():
                    return DistilledRun(run(self.settings, models=self._models))

            def start(progress: Progress) -> tuple[Path, None]:
                return run(self.settings, progress=progress, models=self._models), None

            return DistilledRun(reported(start, lambda path: None, progress))

    def resume(self, *, progress: Progress = no_progress) -> DistilledRun:
        """Continue the last interrupted run; otherwise like `run`."""
        resumed = copy.copy(self)
        resumed.settings = self.settings.replace(resume=True)
        return resumed.run(progress=progress)


class DistilledRun:
    """A finished run of the language mode: `DistilledRun("runs/latest")`.

    Raises:
        FileNotFoundError: the path is no run folder.

    Attributes:
        path: its folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise FileNotFoundError(f"{path} is not a run folder: it has no config.json")

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The content of `metrics.json`."""
        return json.loads((self.path / "metrics.json").read_text(encoding="utf-8"))

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`: one mapping for each logged step or evaluation."""
        return RunResults.read(self.path).steps

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """Scores on held-out text, `{score: {model: value}}`; `pandas.DataFrame` accepts it.

        Models are `teacher`, `student before` and `student`; scores are `nll` (nats per token),
        `perplexity`, `bits_per_character`, `agreement` and `kl` with the teacher, and others that
        apply.
        """
        rows = self.metrics["table"]
        names = list(dict.fromkeys(name for row in rows for name in row if name != "name"))
        return {
            name: {row["name"]: row[name] for row in rows if isinstance(row.get(name), int | float)}
            for name in names
            if any(isinstance(row.get(name), int | float) for row in rows)
        }

    @property
    def report(self) -> Path:
        """The path of the report page."""
        return self.path / "report.html"

    @property
    def student(self) -> Any:
        """The transformers model with the best held-out likelihood; adapters are merged."""
        return self._saved.model

    @property
    def tokenizer(self) -> Any:
        """The student's tokenizer."""
        return self._saved.tokenizer

    @property
    def processor(self) -> Any:
        """The processor of a student of images and text; None for a student of text."""
        return self._saved.processor

    @cached_property
    def _saved(self) -> CausalLM:
        return load_causal_lm(self.path / "student")

    def __repr__(self) -> str:
        return f"DistilledRun({str(self.path)!r})"

    def _repr_mimebundle_(self, include: Any = (), exclude: Any = ()) -> Any:
        return language_table(self.metrics)._repr_mimebundle_(include, exclude)


def _model(who: str, model: Model) -> tuple[str, CausalLM | None]:
    """Return the value of the setting, and the model if it is in memory."""
    if isinstance(model, str | os.PathLike):
        return os.fspath(model), None
    lm, tokenizer = model if isinstance(model, tuple) and len(model) == 2 else (model, None)
    processor = tokenizer if hasattr(tokenizer, "image_processor") else None
    tokenizer = tokenizer if processor is None else processor.tokenizer
    if not hasattr(lm, "get_output_embeddings") or not hasattr(tokenizer, "get_vocab"):
        raise InputError(
            f"{who} is {type(model).__name__}, expected a folder, a name on the Hub, or a "
            "transformers model with its tokenizer: (model, tokenizer)"
        )
    return IN_MEMORY, CausalLM.of(lm, tokenizer, f"{type(lm).__name__} in memory", processor)


def _place(argument: str, texts: Texts) -> str:
    """Return the path or name of the texts; write those in memory, named by their content."""
    if isinstance(texts, str | os.PathLike):
        return os.fspath(texts)
    if hasattr(texts, "to_dict") and hasattr(texts, "columns"):  # a data frame
        texts = texts.to_dict("records")  # type: ignore[attr-defined]
    if isinstance(texts, Mapping) or not isinstance(texts, Iterable):
        raise InputError(
            f"{argument} is {type(texts).__name__}, expected a path or name, or a list, a "
            "datasets.Dataset or a data frame of strings or records; pass the splits of a mapping "
            "as texts and eval_texts"
        )
    content = b"".join(_line(argument, i, text) for i, text in enumerate(texts))
    if not content:
        raise InputError(f"{argument} is empty: expected one text or more")
    return str(_write_once(TEXTS / f"{hashlib.sha256(content).hexdigest()[:16]}.jsonl", content))


def _write_once(path: Path, content: bytes) -> Path:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, content)
    return path


def _line(argument: str, number: int, text: str | Mapping[str, Any]) -> bytes:
    record = {"text": text} if isinstance(text, str) else text
    if not isinstance(record, Mapping):
        raise InputError(
            f"{argument}[{number}] is {type(text).__name__}, expected a string or a record such as "
            '{"prompt": ..., "completion": ...}'
        )
    try:
        return json.dumps(dict(record), ensure_ascii=False, default=_image).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise InputError(f"{argument}[{number}] cannot be written as JSON: {error}") from error


def _image(value: Any) -> str:
    """Write a PIL image, or the bytes of an image file, and return its path next to the texts."""
    from PIL import Image

    content, kind = value, "image"
    if isinstance(value, Image.Image):
        buffer = io.BytesIO()
        value.save(buffer, kind := "png")
        content = buffer.getvalue()
    if not isinstance(content, bytes):
        raise TypeError(f"it contains a {type(value).__name__}, neither JSON nor a PIL image")
    name = f"images/{hashlib.sha256(content).hexdigest()[:32]}.{kind}"
    _write_once(TEXTS / name, content)
    return name
