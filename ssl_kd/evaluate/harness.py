"""Tasks of EleutherAI's lm-evaluation-harness, asked of a model that is in memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ssl_kd.errors import InputError, MissingPackage
from ssl_kd.settings import nearest
from ssl_kd.teachers.causal import evaluating

logger = logging.getLogger(__name__)


class Tasks:
    """Tasks that models are asked.

    Args:
        names: tasks, groups or tags of lm-evaluation-harness, or of `include_path`.
        include_path: a folder of task files of one's own; only its tasks are known where it has
            all that is asked for, since the harness's own 14,000 take long to list.

    Raises:
        MissingPackage: lm-evaluation-harness is not installed.
        InputError: there is no such folder or task.
    """

    def __init__(self, names: Sequence[str], include_path: str | Path | None = None) -> None:
        try:
            TaskManager = import_module("lm_eval.tasks").TaskManager
        except ImportError as error:
            raise MissingPackage(
                f"--tasks needs lm-evaluation-harness, which does not load ({error}): "
                "pip install 'ssl_kd[llm,judge]'"
            ) from error
        if include_path is not None and not Path(include_path).is_dir():
            raise InputError(f"--include_path: there is no folder {include_path}")
        own = None if include_path is None else str(include_path)
        manager = own and TaskManager(include_path=own, include_defaults=False)
        if not manager or not set(names) <= set(manager.all_tasks):
            manager = TaskManager(include_path=own)
        if unknown := [name for name in names if name not in manager.all_tasks]:
            near = nearest(unknown[0], manager.all_tasks)
            where = "" if own is None else f" and {own}"
            raise InputError(
                f"--tasks: {unknown[0]!r} is no task of lm-evaluation-harness{where}.{near}"
            )
        self.names, self._manager = list(names), manager

    def ask(
        self, model: Any, tokenizer: Any, *, batch_size: int = 8, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """What a model scores in the tasks.

        Args:
            model: a causal language model of transformers, on its device.
            tokenizer: its tokenizer.
            batch_size: requests at once.
            limit: samples of each task at most, the first ones; None for all.

        Returns:
            A row for each task and metric: `task`, `metric`, `value` and `stderr`, None where the
            task has none; `n` samples, `higher_is_better`.

        Raises:
            OSError, ValueError: the task's data cannot be read; the harness says why.
        """
        HFLM = import_module("lm_eval.models.huggingface").HFLM
        with evaluating(model):
            found = import_module("lm_eval").simple_evaluate(
                HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
                tasks=self.names,
                task_manager=self._manager,
                limit=limit,
                log_samples=False,
            )
        return list(_rows(found))


def _rows(found: Any) -> Iterable[dict[str, Any]]:
    """The harness's results, `{"acc,none": 0.5, "acc_stderr,none": 0.1}` a task, as rows."""
    for task, scores in found["results"].items():
        for key, value in scores.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = scores.get(f"{metric}_stderr,{filtered}")
            known = isinstance(error, (int, float)) and math.isfinite(error)
            yield {
                "task": task,
                "metric": metric if filtered == "none" else f"{metric} ({filtered})",
                "value": float(value) if math.isfinite(value) else None,
                "stderr": float(error) if known else None,
                "n": found["n-samples"].get(task, {}).get("effective"),
                "higher_is_better": found["higher_is_better"].get(task, {}).get(metric),
            }
