"""Distill language models from Python: `Distillation(teacher, student, texts).run()`."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ssl_kd.core.errors import InputError
from ssl_kd.core.files import atomic_write_bytes
from ssl_kd.core.pages.run_files import RunFiles
from ssl_kd.core.pages.write import reported
from ssl_kd.core.runs.clock import Progress, no_progress
from ssl_kd.core.runs.ranks import following, follows
from ssl_kd.core.settings import SettingsError, nearest
from ssl_kd.core.settings.arguments import named_as_arguments
from ssl_kd.language.models.causal import CausalLM, load_causal_lm
from ssl_kd.language.models.hub import files_of, upload
from ssl_kd.language.report.page import write_report
from ssl_kd.language.report.tables import language_table
from ssl_kd.language.run import run
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.settings.foreign_names import IN_MEMORY
from ssl_kd.language.settings.presets import PRESETS
from ssl_kd.language.teachers.load import NO_MODELS, InMemoryModels

TEXTS = Path("data") / "texts"
# Settings that are arguments of `Distillation` under other names.
_ARGUMENTS = {"teacher_model": "teacher", "student_model": "student"}
_ARGUMENTS |= {"data_path": "texts", "eval_path": "eval_texts"}
_NAMING = partial(named_as_arguments, LanguageSettings, **_ARGUMENTS)

Texts = str | os.PathLike[str] | Iterable[str | Mapping[str, Any]]
Model = str | os.PathLike[str] | tuple[Any, Any]


class Distillation:
    """Distill a teacher into a student language model, as `scripts/distill.py` does.

    Args:
        teacher: folder or Hub name of a causal language model; a transformers model in memory as
            `(model, tokenizer)`, or `(model, processor)` if it reads images; `train`, to train a
            small teacher on the text first; or `none`, for cross-entropy alone. A model in memory
            is moved to the device and dtype of the run.
        student: folder, Hub name or model in memory; or `layers:N`, `fresh:LAYERSxDIM` or
            `llama:LAYERSxDIM`, see STUDENT_MODEL. A model in memory is trained in place.
        texts: a path or name as for DATA_PATH; or a list, `datasets.Dataset` or data frame of
            strings or of records such as `{"prompt": ..., "completion": ...}` and
            `{"messages": [...]}`. Texts in memory are saved in `data/texts`, with their PIL images,
            under a name that is a hash of their content.
        eval_texts: held-out text in the same forms; None holds out a part of `texts`.
        preset: a name in `ssl_kd.language.settings.presets.PRESETS`.
        **settings: settings of `scripts/config.py` in lower case, such as `temperature=2.0`; those
            that `recipe` names are overridden by the others, and by `teacher`, `student`, `texts`.

    Raises:
        SettingsError: a setting is unknown or out of range.
        InputError: texts are empty or of an unsupported type.

    Attributes:
        settings: the resulting `LanguageSettings`.

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
                raise SettingsError(f"{name} is not accepted here: use the argument {argument}")
        if preset is not None and preset not in PRESETS:
            known = ", ".join(PRESETS)
            hint = nearest(preset, PRESETS)
            raise SettingsError(f"preset is {preset!r}; expected one of {known}.{hint}")
        if preset is not None and "recipe" in values:
            raise SettingsError(
                f"preset is {preset!r}, and recipe is {values['recipe']!r}; expected one of them"
            )
        teacher_model, teacher_in_memory = _model("teacher", teacher)
        student_model, student_in_memory = _model("student", student)
        self._models = InMemoryModels(teacher_in_memory, student_in_memory)
        models = {"teacher_model": teacher_model, "student_model": student_model}
        checked = LanguageSettings(
            **{**PRESETS.get(preset or "", {}), **LanguageSettings.following(values), **models}
        )
        self.settings = checked.replace(  # only now are texts written
            data_path=_place("texts", texts),
            eval_path=None if eval_texts is None else _place("eval_texts", eval_texts),
        )
        self.settings.check_recipe("distill")

    def run(self, *, progress: Progress = no_progress) -> DistilledRun:
        """Train the student, score student and teacher, and write a run folder with a report.

        With torchrun, each process must call this; together they train one student.

        Args:
            progress: called as `progress(stage, done, total, info)`.

        Raises:
            InputError: teacher, student, text and settings do not fit together, or the teacher or
                the student outputs NaN or infinity before training.
            Interrupted: Ctrl-C or SIGTERM stopped the run; `resume()` continues it.
            TooFewHealthyParts: the student did not recover from its faults; the message names them.
        """
        with _NAMING():
            return distilled(self.settings, self._models, progress)

    def resume(self, *, progress: Progress = no_progress) -> DistilledRun:
        """Continue the last interrupted run; see `run` for arguments and errors."""
        resumed = copy.copy(self)
        resumed.settings = self.settings.replace(resume=True)
        return resumed.run(progress=progress)


def distilled(
    settings: LanguageSettings, models: InMemoryModels = NO_MODELS, progress: Progress = no_progress
) -> DistilledRun:
    """Train and score a student; the first process writes the report and pushes the student."""
    if follows():
        with following():
            return DistilledRun(run(settings, models=models))
    if settings.hub_model_id is not None:  # before training: a token may be missing
        upload({}, settings.hub_model_id, private=settings.hub_private_repo)
    finished = DistilledRun(reported(partial(run, settings, models=models), progress, write_report))
    if settings.hub_model_id is not None:
        finished.push_to_hub(settings.hub_model_id, private=settings.hub_private_repo)
    return finished


class DistilledRun:
    """Read a finished run of the language mode: `DistilledRun("runs/latest")`.

    Raises:
        FileNotFoundError: `path` is not a run folder.

    Attributes:
        path: the run folder.
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
        """The lines of `metrics.jsonl`, a mapping for each logged step or evaluation."""
        return RunFiles.read(self.path).steps

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """The scores on held-out text as `{score: {model: value}}`, for `pandas.DataFrame`.

        The models are `teacher`, `student before` and `student`. The scores include `nll` (nats per
        token), `perplexity`, `bits_per_byte`, and `agreement` and `kl` with the teacher.
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
        """The saved student as a transformers model, with merged adapters."""
        return self._saved.model

    @property
    def tokenizer(self) -> Any:
        """The student's tokenizer."""
        return self._saved.tokenizer

    @property
    def processor(self) -> Any:
        """The processor of a student that reads images; None if it reads only text."""
        return self._saved.processor

    def push_to_hub(self, name: str, *, private: bool = True) -> str:
        """Upload the saved student with its model card; return the address of the repository.

        Args:
            name: the repository, `user/name`; it is created if it does not exist.
            private: create it as private, and refuse a public one. False publishes the student.

        Raises:
            InputError: the Hub refuses (`hf auth login`), or the adapters' base is a local folder.
        """
        return upload(files_of(self.path / "student", name), name, private=private)

    @cached_property
    def _saved(self) -> CausalLM:
        return load_causal_lm(self.path / "student")

    def __repr__(self) -> str:
        return f"DistilledRun({str(self.path)!r})"

    def _repr_mimebundle_(self, include: Any = (), exclude: Any = ()) -> Any:
        return language_table(self.metrics)._repr_mimebundle_(include, exclude)


def _model(who: str, model: Model) -> tuple[str, CausalLM | None]:
    """Return the value of the setting TEACHER_MODEL or STUDENT_MODEL, and a model in memory."""
    if isinstance(model, str | os.PathLike):
        return os.fspath(model), None
    lm, tokenizer = model if isinstance(model, tuple) and len(model) == 2 else (model, None)
    processor = tokenizer if hasattr(tokenizer, "image_processor") else None
    tokenizer = tokenizer if processor is None else processor.tokenizer
    if not hasattr(lm, "get_output_embeddings") or not hasattr(tokenizer, "get_vocab"):
        raise InputError(
            f"{who} is of type {type(model).__name__}; expected a folder, a name on the Hub, or a "
            "transformers model with its tokenizer: (model, tokenizer)"
        )
    return IN_MEMORY, CausalLM.of(lm, tokenizer, f"{type(lm).__name__} in memory", processor)


def _place(argument: str, texts: Texts) -> str:
    """Return the path or name of the texts; save texts in memory first."""
    if isinstance(texts, str | os.PathLike):
        return os.fspath(texts)
    if hasattr(texts, "to_dict") and hasattr(texts, "columns"):  # a data frame
        texts = texts.to_dict("records")  # type: ignore[attr-defined]
    if isinstance(texts, Mapping) or not isinstance(texts, Iterable):
        raise InputError(
            f"{argument} is of type {type(texts).__name__}; expected a path or name, or a list, a "
            "datasets.Dataset or a data frame of strings or records. If you have a mapping of "
            "splits, pass one split as texts and another as eval_texts"
        )
    content = b"".join(_line(argument, i, text) for i, text in enumerate(texts))
    if not content:
        raise InputError(f"{argument} is empty; expected one text or more")
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
            f"{argument}[{number}] is of type {type(text).__name__}; expected a string or a record"
            ' such as {"prompt": ..., "completion": ...}'
        )
    try:
        return json.dumps(dict(record), ensure_ascii=False, default=_image).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise InputError(f"{argument}[{number}] cannot be written as JSON: {error}") from error


def _image(value: Any) -> str:
    """Save a PIL image, or the bytes of an image file; return its path relative to the texts."""
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
