"""How a run of the language mode goes, whatever it learns: a part of its settings."""

from __future__ import annotations

from dataclasses import dataclass

from ssl_kd.settings import RunSettings, setting


@dataclass(frozen=True)
class LoopSettings(RunSettings):
    """The settings of guard, memory, evaluation and run folder; `LanguageSettings` has all."""

    spike_factor: float = setting(
        100.0,
        "skip a step whose gradient norm is this many times its running median",
        section="Guard",
        above=1,
    )
    grad_norm_threshold: float | None = setting(
        None,
        "skip a step whose gradient norm is above this; None: SPIKE_FACTOR alone decides",
        "Older scripts had it at 2.0; new weights have larger norms than that for many steps.",
        above=0,
    )
    stop_after: int | None = setting(
        10, "bad steps in a row that end the run; None: restore first, see RESTORE_AFTER", low=1
    )
    restore_after: int = setting(
        20,
        "bad steps in a row before the student goes back to its last good state with a fresh"
        " optimizer; as many again end the run",
        low=1,
    )

    teacher_offload: bool = setting(
        False, "keep the teacher in the host's memory between forward passes", section="Memory"
    )
    shard: bool = setting(
        False,
        "with torchrun: keep a piece of each weight of student and teacher on each GPU (FSDP2), for"
        " models that are too large for one; off: all of them on each (DDP)",
    )
    gradient_checkpointing: bool = setting(
        False, "recompute activations in the backward pass: less memory, more time"
    )

    eval_every: int = setting(
        100,
        "steps between two evaluations on held-out text; the best of them, step 0 included, is the"
        " student that is saved",
        section="Evaluation",
        low=1,
    )
    eval_rows: int = setting(
        200,
        "maximum held-out rows of each of two parts: one to choose the best student by, and one,"
        " which no choice is made on, for the table",
        low=1,
    )
    patience: int | None = setting(
        None,
        "evaluations in a row without a better held-out score that end the training; None: it runs"
        " to its last step",
        "The learning rate still falls as if it went on to MAX_STEPS.",
        low=1,
    )
    baseline: bool = setting(
        False,
        "also train the same student by cross-entropy alone, on an equal budget, to see whether"
        " distilling pays",
    )
    generations: int = setting(4, "prompts whose answers the report shows", low=0, high=100)
    max_new_tokens: int = setting(64, "maximum tokens of an answer; not of ON_POLICY's", low=1)
    answer_prompts: int = setting(
        100,
        "maximum held-out prompts with reference answers that the student is asked; 0: none",
        low=0,
    )

    log_every: int = setting(10, "steps between two lines of metrics.jsonl", section="Run", low=1)
    checkpoint_every: int = setting(
        100,
        "steps between two checkpoints",
        "An interruption loses at most this many steps.",
        low=1,
    )
    dry_run: bool = setting(
        False, "five steps with evaluation and saving, to see whether everything fits"
    )
    force_recompute: bool = setting(
        False, "ask the teacher about everything anew, whatever TEACHER_CACHE holds"
    )
    rebuild_damaged: bool = setting(False, "write the damaged files of a teacher's cache again")
    report_to: str = setting(
        "none",
        "who draws the curves, beside metrics.jsonl: none | tensorboard (files in the run folder) |"
        " wandb | trackio (through their own packages)",
        choices=("none", "tensorboard", "wandb", "trackio"),
    )

    @property
    def boards(self) -> set[str]:
        """What REPORT_TO names."""
        return {self.report_to} - {"none"}
