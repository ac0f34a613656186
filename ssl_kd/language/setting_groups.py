"""The settings of the language mode in groups, each with the checks that concern it alone.

A function takes the group that it depends on; `LanguageSettings` is all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from typing_extensions import Self

from ssl_kd.divergences import DIVERGENCES, JS_BETA
from ssl_kd.language.schedules import Move, moves_of
from ssl_kd.settings import RunSettings, Settings, SettingsError, setting

KA_DRAWS = 2
"""Draws of experts for each batch in ROUTER_MODE ka."""


@dataclass(frozen=True)
class StudentSettings(Settings):
    """Which student is trained, and which of its weights."""

    student_model: str = setting(
        "fresh:2x128",
        "folder, or name on the Hub | layers:N (cut from the teacher's layers) | fresh:LAYERSxDIM"
        " (new weights of the teacher's architecture) | llama:LAYERSxDIM (of a Llama, whatever the"
        " teacher is)",
        section="Student",
    )
    lora_rank: int = setting(
        0, "train low-rank adapters of this rank in place of all weights; 0: all weights", low=0
    )
    lora_alpha: float = setting(
        16.0, "LoRA alpha; the adapters are scaled by LORA_ALPHA / LORA_RANK", above=0
    )
    gradient_checkpointing: bool = setting(
        False, "recompute activations in the backward pass: less memory, more time"
    )
    learning_rate: float | None = setting(
        None,
        "peak learning rate of AdamW; None: 3e-3 for new weights, 5e-4 for what is cut from a"
        " teacher, 2e-4 for adapters, 2e-5 for a pretrained model",
        low=0,
        high=100,
    )

    @property
    def peak_lr(self) -> float:
        """LEARNING_RATE, decided where it is None."""
        return self.usual_lr if self.learning_rate is None else self.learning_rate

    @property
    def usual_lr(self) -> float:
        """What LEARNING_RATE is where it is None: a rate that is sane for this kind of student."""
        kind = "lora" if self.lora_rank else self.student_model.partition(":")[0]
        rates = {"fresh": 3e-3, "llama": 3e-3, "layers": 5e-4, "lora": 2e-4}
        return rates.get(kind, 2e-5)


@dataclass(frozen=True)
class TextSettings(Settings):
    """What text is learned from, and how it is laid out in rows."""

    data_path: str = setting(
        "stdlib",
        "text to learn from: .jsonl .json .csv .parquet (messages | conversations | prompt,"
        " completion | question, answer | instruction, output | text) | .txt | a folder of them, or"
        " by save_to_disk | hf:NAME | stdlib (the source of Python's standard library)",
        section="Text",
    )
    eval_path: str | None = setting(
        None,
        "held-out text; None: the data's own test split, or a tenth of the data, left out of"
        " training",
    )
    text_field: str | None = setting(
        None,
        "field of the records whose text is learned; None: the first form that a record has, as in"
        " DATA_PATH",
    )
    block_size: int = setting(
        256, "tokens in a row", "Longer: more context, more memory.", low=8, high=1_048_576
    )
    packing: bool = setting(
        True,
        "several documents in a row, where the model keeps them apart; off: one document per row,"
        " padded",
    )


@dataclass(frozen=True)
class LossSettings(Settings):
    """What a student learns from its text and its teacher."""

    divergence: str = setting(
        "auto",
        f"divergence between teacher and student: {' | '.join(DIVERGENCES)} | js:BETA (GKD's, BETA"
        " between 0 and 1) | distillm2 (with ON_POLICY: skew_kl on text, skew_reverse_kl on what"
        " the student writes after the same prompts) | auto (forward_kl, or reverse_kl where"
        " ROUTER_MODE is all, ka or sar, as in the paper)",
        choices=("auto", *DIVERGENCES, "distillm2"),
        forms=(("js:BETA", JS_BETA),),
        section="Loss",
    )
    temperature: float = setting(
        1.0,
        "temperature of teacher and student in the divergence",
        "Higher: more weight on unlikely tokens.",
        low=0.05,
        high=100,
    )
    alpha_kd: float = setting(
        0.5, "weight of the divergence; it is multiplied by the temperature squared", low=0
    )
    alpha_ce: float = setting(0.5, "weight of the cross-entropy with the text", low=0)
    alpha_hidden: float = setting(
        0.0,
        "weight of the distance between hidden states of student and teacher, layer by layer; 0:"
        " not compared",
        "For a live teacher with the student's tokenizer.",
        low=0,
    )
    layer_map: str = setting(
        "last",
        "which layers ALPHA_HIDDEN compares: last | uniform (all of the"
        " student's, at equal shares of the teacher's) | STUDENT:TEACHER,... (from 0, as in"
        ' "0:1,1:3")',
        choices=("last", "uniform"),
        forms=(("STUDENT:TEACHER,...", r"\d+:\d+(,\d+:\d+)*"),),
    )
    schedule: str | None = setting(
        None,
        "what of TEMPERATURE and the ALPHAs moves over the run, each from its own value to"
        ' NAME:END or NAME:END:cosine, as in "temperature:1, alpha_hidden:0.1:cosine"; None:'
        " nothing",
    )
    legacy_clamp: str | None = setting(
        None,
        'the clamps of older scripts, to see what they cost: "2.5" (logits) or "2.5:0.1:5.0"'
        " (logits, and a window for the losses); None: no clamp",
        "float32 arithmetic needs none.",
    )
    align: str = setting(
        "auto",
        "how a teacher with another tokenizer is aligned: auto (the tokenizers are the same) |"
        " hidden (states, at common boundaries) | uld (sorted probabilities) | chunks (of text)",
        choices=("auto", "hidden", "uld", "chunks"),
    )

    @property
    def is_contrastive(self) -> bool:
        """Whether rows that the student continues are learned from as text, too, for a contrast."""
        return self.divergence == "distillm2"

    @property
    def moves(self) -> list[Move]:
        """What SCHEDULE moves, and where to."""
        return moves_of(self.schedule, self.parse)

    def at_step(self, step: int, steps: int) -> Self:
        """Return the settings as they are in a step of `steps`, from 0, without SCHEDULE itself."""
        values = {m.name: m.at(getattr(self, m.name), step, steps) for m in self.moves}
        return self.replace(schedule=None, **values)

    def check_together(self) -> None:
        """Raise SettingsError where the terms of the loss do not fit together."""
        super().check_together()
        if self.alpha_kd == self.alpha_ce == 0:
            raise SettingsError("ALPHA_KD and ALPHA_CE are both 0, so there is nothing to learn.")
        if self.align == "hidden" and self.alpha_ce == 0:
            raise SettingsError(
                "ALIGN 'hidden' matches hidden states alone, which leaves the output head"
                " untrained: set ALPHA_CE above 0."
            )
        for move in self.moves:
            if not getattr(self, move.name):
                raise SettingsError(
                    f"SCHEDULE moves {move.name.upper()}, which begins at 0, and so is not in"
                    " the loss: begin it above 0, for example at 0.001, or leave it out."
                )
        if self.schedule is not None:
            self.at_step(1, 2)
        if self.legacy_clamp is not None:
            self._check_clamp(self.legacy_clamp)

    def _check_clamp(self, clamp: str) -> None:
        from ssl_kd.losses.legacy_clamp import LegacyClamp  # --help does without torch

        try:
            LegacyClamp.parse(clamp)
        except ValueError as error:
            raise SettingsError(f"LEGACY_CLAMP: {error}.") from error
        if self.align != "auto":
            raise SettingsError(
                "LEGACY_CLAMP holds logits token by token, as older scripts did: ALIGN must be"
                " 'auto'."
            )


@dataclass(frozen=True)
class RolloutSettings(Settings):
    """Text that a student or a teacher writes."""

    on_policy: float = setting(
        0.0,
        "share of the rows whose continuation the student writes itself, anew in each step, and the"
        " teacher judges token by token; 0: none",
        "With it, and with TEACHER_TEXT, a row holds one document.",
        low=0,
        high=1,
        section="Text that a model writes",
    )
    teacher_text: float = setting(
        0.0,
        "share of the rows whose continuation the teacher writes, once, in the place of the text"
        " (sequence-level distillation); 0: none",
        low=0,
        high=1,
    )
    rollout_temperature: float = setting(
        1.0, "temperature of a continuation; 0: the likeliest tokens", low=0, high=100
    )
    generations: int = setting(4, "prompts whose answers the report shows", low=0, high=100)
    max_new_tokens: int = setting(
        128,
        "maximum tokens of a continuation with its end, and of an answer in the report",
        "BLOCK_SIZE holds the prompt of a continuation too.",
        low=1,
    )


@dataclass(frozen=True)
class RouterSettings(Settings):
    """Experts and router of a mixture-of-experts teacher."""

    router_mode: str = setting(
        "native",
        "experts of a mixture-of-experts teacher: native (unchanged) | all | ka (all but one, some"
        " sampled) | sar (all, with a router that learns from the student) | auto (sar for"
        " a mixture, native for a dense teacher; the presets use this)",
        choices=("native", "all", "ka", "sar", "auto"),
        section="Routers of mixtures",
    )
    router_lr: float = setting(1e-5, "learning rate of the router in sar", low=0, high=100)
    router_weights: str | None = setting(
        None,
        "router file of an earlier run (router.safetensors), for the teacher; None: its own router",
    )

    @property
    def is_routed(self) -> bool:
        """Whether the teacher's experts or router differ from the unchanged model."""
        return self.router_mode != "native" or self.router_weights is not None

    @property
    def draws(self) -> int:
        """How often a teacher is asked about a batch."""
        return KA_DRAWS if self.router_mode == "ka" else 1


@dataclass(frozen=True)
class TrainingSettings(RunSettings):
    """Optimizer, guard, devices, evaluation and log of a run."""

    max_steps: int = setting(
        500,
        "optimizer steps",
        "A finished run goes on with RESUME, RUN_NAME and more of them; its learning rates are then"
        " those of a run of so many steps.",
        low=1,
        section="Optimization",
    )
    epochs: float | None = setting(
        None, "passes over the data; None: MAX_STEPS decides", above=0, high=1_000_000
    )
    batch_size: int = setting(
        8,
        "rows per forward pass, of all processes together; a step has GRADIENT_ACCUMULATION_STEPS"
        " times as many",
        "torchrun's processes share them. If memory runs out, lower it and raise"
        " GRADIENT_ACCUMULATION_STEPS.",
        low=1,
    )
    gradient_accumulation_steps: int = setting(
        1, "forward passes per step; the loss is the mean over all their tokens", low=1
    )
    lr_schedule: str = setting(
        "cosine",
        "learning rate after the warm-up: cosine (to zero) | linear (to zero) |"
        " constant_with_warmup | constant (without a warm-up)",
        choices=("cosine", "linear", "constant_with_warmup", "constant"),
    )
    warmup_fraction: float = setting(
        0.1, "fraction of the steps that warm up; LR_SCHEDULE follows", low=0, below=1
    )
    weight_decay: float = setting(0.01, "decoupled weight decay of AdamW", low=0, high=10)
    clip_grad: float | None = setting(
        1.0, "largest norm of the gradient; None: no clipping", above=0
    )
    spike_factor: float = setting(
        100.0,
        "skip a step whose gradient norm is this many times its running median",
        above=1,
        section="Guard",
    )
    grad_norm_threshold: float | None = setting(
        None,
        "skip a step whose gradient norm is above this; None: SPIKE_FACTOR alone decides",
        "Older scripts had it at 2.0; new weights have larger norms than that for many steps.",
        above=0,
    )
    stop_after: int | None = setting(
        10,
        "bad steps in a row that end the run; None: after 20 the student goes back to its last good"
        " state with a fresh optimizer, and 20 more end the run",
        low=1,
    )
    model_dtype: str = setting(
        "auto",
        "precision of matrix products: auto (what suits the device) | float32 | bfloat16 | float16",
        "Trainable weights and losses are always float32. A dtype that is slow on the device is"
        " not used, and the log says so.",
        choices=("auto", "float32", "bfloat16", "float16"),
        section="Devices",
    )
    shard: bool = setting(
        False,
        "with torchrun: keep a piece of each weight of student and teacher on each GPU (FSDP2), for"
        " models that are too large for one; off: all of them on each (DDP)",
    )
    eval_every: int = setting(
        100,
        "steps between two evaluations on held-out text; the best of them, step 0 included, is the"
        " student that is saved",
        low=1,
        section="Evaluation",
    )
    eval_rows: int = setting(
        200,
        "maximum held-out rows of each of two parts: one to choose the best student by, and one,"
        " which no choice is made on, for the table",
        low=1,
    )
    baseline: bool = setting(
        False,
        "also train the same student by cross-entropy alone, on an equal budget, to see whether"
        " distilling pays",
    )
    log_every: int = setting(
        10,
        "steps between two lines of metrics.jsonl",
        low=1,
        section="Run",
    )
    checkpoint_every: int = setting(
        100,
        "steps between two checkpoints",
        "An interruption loses at most this many steps.",
        low=1,
    )
    dry_run: bool = setting(
        False, "five steps with evaluation and saving, to see whether everything fits"
    )
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

    def n_steps(self, rows: int) -> int:
        """Return the optimizer steps: EPOCHS over the rows if that is set, else MAX_STEPS."""
        if self.epochs is None:
            return self.max_steps
        per_step = self.batch_size * self.gradient_accumulation_steps
        return max(1, math.ceil(self.epochs * rows / per_step))
