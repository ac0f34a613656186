"""The language mode from Python: teacher, student and text in; student, scores and folder out."""

from __future__ import annotations

import contextlib
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
    """A student language model that learns from a teacher, as `scripts/distill.py` has it learn.

    Args:
        teacher: folder or Hub name of a causal language model; a model of transformers with its
            tokenizer, `(model, tokenizer)`, or its processor where it reads images; `train`, a
            small one is trained on the text first; or `none`, for cross-entropy alone. A model in
            memory is moved to the run's device and dtype.
        student: the same, or what STUDENT_MODEL may be: `layers:N`, `fresh:LAYERSxDIM`,
            `llama:LAYERSxDIM`. A model in memory is trained in place.
        texts: what DATA_PATH may be; or texts in memory: strings, or records such as
            `{"prompt": ..., "completion": ...}` and `{"messages": [...]}`, as a list, a
            `datasets.Dataset` or a data frame. These are kept in `data/texts`, by their content;
            images of PIL in them, beside them.
        eval_texts: held-out text, in the same forms; None: a part of `texts`.
        preset: one of `ssl_kd.language.presets.PRESETS`.
        **settings: the settings of `scripts/config.py` in lower case, with their meaning, range and
            default: `temperature=2.0`, `max_steps=500`.

    Raises:
        SettingsError: a setting that there is not, or cannot be so.
        InputError: texts that are empty or hold something else.

    Attributes:
        settings: all of them.

    >>> texts = [f"{n} and {n} are {2 * n}" for n in range(500)]
    >>> made = Distillation("train", "fresh:1x32", texts, max_steps=100)  # doctest: +SKIP
    >>> made.run().scores["perplexity"]["student"]  # doctest: +SKIP
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
        teacher_model, its = _model("teacher", teacher)
        student_model, own = _model("student", student)
        self._given, self._naming = InMemoryModels(its, own), _NAMING
        chosen = LanguageSettings(
            **{**PRESETS.get(preset or "", {}), **values},
            teacher_model=teacher_model,
            student_model=student_model,
        )
        self.settings = chosen.replace(  # the others were checked: nothing is written in vain
            data_path=_place("texts", texts),
            eval_path=None if eval_texts is None else _place("eval_texts", eval_texts),
        )

    @classmethod
    def of(cls, settings: LanguageSettings) -> Distillation:
        """What a settings object asks for, as the command line has one."""
        made = cls.__new__(cls)
        made.settings, made._given = settings, InMemoryModels()
        made._naming = contextlib.nullcontext
        return made

    def run(self, *, progress: Progress = no_progress) -> DistilledRun:
        """Train the student, judge it beside its teacher, and leave a run folder with a report.

        Processes that torchrun started each call this, and train one student.

        Args:
            progress: called as `progress(stage, done, total, info)`.

        Raises:
            SettingsError: teacher, student and text do not fit.
            InputError: teacher or student are not finite before step 0.
            Interrupted: told to stop by Ctrl-C or SIGTERM; `resume()` goes on.
            TooFewHealthyParts: the student does not become healthy any more; says why.
        """
        with self._naming():
            if follows():  # the first process reports
                with following():
                    return DistilledRun(run(self.settings, models=self._given))

            def start(tell: Progress) -> tuple[Path, None]:
                return run(self.settings, progress=tell, models=self._given), None

            return DistilledRun(reported(start, lambda path: None, progress))

    def resume(self, *, progress: Progress = no_progress) -> DistilledRun:
        """Go on with the last run that was interrupted, as `run` does."""
        again = Distillation.of(self.settings.replace(resume=True))
        again._given, again._naming = self._given, self._naming
        return again.run(progress=progress)


class DistilledRun:
    """A finished run of the language mode.

    Args:
        path: its folder.

    Raises:
        FileNotFoundError: there is none.

    Attributes:
        path: of the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise FileNotFoundError(f"{path} is no run folder: it holds no config.json")

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """What `metrics.json` says."""
        return json.loads((self.path / "metrics.json").read_text(encoding="utf-8"))

    @property
    def history(self) -> list[dict[str, Any]]:
        """One mapping a logged step or evaluation, of `metrics.jsonl`."""
        return RunResults.read(self.path).steps

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """Score -> who -> value on held-out text; a data frame takes it as it is.

        Who is `teacher`, `student before` and `student`; the scores are `nll` (nats per token),
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
        """The page that says what was done, how well and how fast."""
        return self.path / "report.html"

    @property
    def student(self) -> Any:
        """The model of transformers with the best held-out likelihood; adapters are merged."""
        return self._saved.model

    @property
    def tokenizer(self) -> Any:
        """The student's."""
        return self._saved.tokenizer

    @property
    def processor(self) -> Any:
        """That of a student of images and text; None of others."""
        return self._saved.processor

    @cached_property
    def _saved(self) -> CausalLM:
        return load_causal_lm(self.path / "student")

    def __repr__(self) -> str:
        return f"DistilledRun({str(self.path)!r})"

    def _repr_mimebundle_(self, include: Any = (), exclude: Any = ()) -> Any:
        return language_table(self.metrics)._repr_mimebundle_(include, exclude)


def _model(who: str, model: Model) -> tuple[str, CausalLM | None]:
    """What the settings say of a model, and the model itself where it is in memory."""
    if isinstance(model, str | os.PathLike):
        return os.fspath(model), None
    lm, tokenizer = model if isinstance(model, tuple) and len(model) == 2 else (model, None)
    processor = tokenizer if hasattr(tokenizer, "image_processor") else None
    tokenizer = tokenizer if processor is None else processor.tokenizer
    if not hasattr(lm, "get_output_embeddings") or not hasattr(tokenizer, "get_vocab"):
        raise InputError(
            f"{who} is {type(model).__name__}, expected a folder, a name on the Hub, or a model of "
            "transformers with its tokenizer: (model, tokenizer)"
        )
    return IN_MEMORY, CausalLM.of(lm, tokenizer, f"{type(lm).__name__} in memory", processor)


def _place(argument: str, texts: Texts) -> str:
    """Where the texts are; those in memory are first written, under a name of their content."""
    if isinstance(texts, str | os.PathLike):
        return os.fspath(texts)
    if hasattr(texts, "to_dict") and hasattr(texts, "columns"):  # a data frame
        texts = texts.to_dict("records")  # type: ignore[attr-defined]
    if isinstance(texts, Mapping) or not isinstance(texts, Iterable):
        raise InputError(
            f"{argument} is {type(texts).__name__}, expected a path or name, or a list, a "
            "datasets.Dataset or a data frame of strings or records; hand over the splits of a "
            "mapping as texts and eval_texts"
        )
    content = b"".join(_line(argument, i, text) for i, text in enumerate(texts))
    if not content:
        raise InputError(f"{argument} is empty: expected one text or more")
    path = TEXTS / f"{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, content)
    return str(path)


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
    """The path of an image of PIL, or of the bytes of one, that is written beside the texts.

    Raises:
        TypeError: it is none.
    """
    from PIL import Image

    content, kind = value, "image"
    if isinstance(value, Image.Image):
        buffer = io.BytesIO()
        value.save(buffer, kind := "png")
        content = buffer.getvalue()
    if not isinstance(content, bytes):
        raise TypeError(f"it holds a {type(value).__name__}, neither JSON nor an image of PIL")
    path = TEXTS / "images" / f"{hashlib.sha256(content).hexdigest()[:32]}.{kind}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, content)
    return f"images/{path.name}"
