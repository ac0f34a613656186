"""The settings of the language mode: each a type, a range and a meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ssl_kd.divergences import DIVERGENCES, JS_BETA
from ssl_kd.language.names import ALIASES, FIRST, FREE_ON_RESUME, HEADING, INSTEAD, PER_PROCESS
from ssl_kd.settings import RunSettings, setting


@dataclass(frozen=True)
class LanguageFields(RunSettings):
    """Every setting of `scripts/distill.py`, each checked alone; see `LanguageSettings`."""

    free_on_resume: ClassVar[frozenset[str]] = FREE_ON_RESUME
    extended_by: ClassVar[str | None] = "max_steps"
    aliases: ClassVar[Mapping[str, str]] = ALIASES
    per_process: ClassVar[frozenset[str]] = PER_PROCESS
    instead: ClassVar[Mapping[str, str]] = INSTEAD
    first: ClassVar[tuple[str, ...]] = FIRST
    file_heading: ClassVar[str] = HEADING

    teacher_model: str = setting(
        "train",
        "folder written by save_pretrained, or name on the Hugging Face Hub | train (a small one is"
        " trained on the data first) | none (no teacher: cross-entropy alone)",
        "Several with the same tokenizer, separated by commas: the mean of their divergences.",
        section="Models",
    )
    teacher_weights: str | None = setting(
        None,
        'weights of several teachers in that mean, such as "0.7,0.3", made to sum to 1; None: all'
        " alike",
    )
    student_model: str = setting(
        "fresh:2x128",
        "folder, or name on the Hub | layers:N (cut from the teacher's layers) | fresh:LAYERSxDIM"
        " (new weights of the teacher's architecture) | llama:LAYERSxDIM (of a Llama, whatever the"
        " teacher is)",
    )
    teacher_cache: str | None = setting(
        None,
        "folder that scripts/cache_teacher.py wrote; None: the teacher runs live",
        "With a cache, the teacher takes no memory in training.",
    )
    teacher_url: str | None = setting(
        None,
        "a server that answers for the teacher, such as http://host:8000/v1 of vLLM; None: it runs"
        " here",
        "TEACHER_MODEL is then where its tokenizer is. A key is taken from the environment variable"
        " TEACHER_API_KEY.",
    )
    teacher_served_as: str | None = setting(
        None, "name that the server knows the teacher by; None: TEACHER_MODEL"
    )
    teacher_top_k: int = setting(
        20,
        "likeliest tokens that a server is asked for at each position, and that a cache of its"
        " answers keeps (as topk)",
        "vLLM gives as many as its --max-logprobs, by default 20.",
        low=1,
        high=65_535,
    )
    cache_method: str = setting(
        "sample",
        "what cache_teacher.py keeps: sample (tokens drawn from the teacher: unbiased, for"
        " forward_kl) | topk (its likeliest tokens and the mass of the rest: for every divergence)"
        " | hidden (what its output head gets, and the head once: exact, for every divergence and"
        " temperature)",
        choices=("sample", "topk", "hidden"),
    )
    cache_k: int = setting(
        128,
        "tokens kept at each position of a cache of CACHE_METHOD sample or topk",
        "More: closer to the teacher, and a proportionally larger cache.",
        low=1,
        high=65_535,
    )
    model_dtype: str = setting(
        "auto",
        "precision of matrix products: auto (what suits the device) | float32 | bfloat16 | float16",
        "Trainable weights and losses are always float32. A dtype that is slow on the device is"
        " not used, and the log says so.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    teacher_quantization: str | None = setting(
        None,
        "keep the linear layers of a frozen teacher in fewer bits, by bitsandbytes: nf4 (4 bits);"
        " None: in MODEL_DTYPE",
        "For a GPU's memory: on a CPU neither time nor memory is saved.",
        choices=("nf4",),
    )
    trust_remote_code: bool = setting(
        False, "run Python files that come with a model, where it needs them; read them first"
    )
    attn_implementation: str | None = setting(
        None,
        "attention of student and teacher, as transformers names it: eager | sdpa | flex_attention;"
        " None: what transformers takes",
        choices=("eager", "sdpa", "flex_attention"),
    )
    train_vision: bool = setting(
        False, "train a student's vision tower, too, beside its projector and language part"
    )
    save_dtype: str = setting(
        "float32",
        "dtype of the saved student's weights: float32 | bfloat16 | float16",
        "It is trained in float32 in any case.",
        choices=("float32", "bfloat16", "float16"),
    )
    teacher_steps: int = setting(
        800, "training steps of a teacher that is trained here (TEACHER_MODEL train)", low=1
    )
    teacher_size: str = setting(
        "4x192", "LAYERSxDIM of a teacher that is trained here", forms=(("LAYERSxDIM", r"\d+x\d+"),)
    )

    data_path: str = setting(
        "stdlib",
        "text to learn from: .jsonl .json .csv .parquet (messages | conversations | prompt,"
        " completion | question, answer | instruction, output | text) | .txt | a folder of them, or"
        " by save_to_disk | hf:NAME | stdlib (the source of Python's standard library)",
        section="Data",
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
    max_megabytes: float | None = setting(
        None, "read at most this many megabytes of a text; None: all of it", above=0
    )
    block_size: int = setting(
        256, "tokens in a row", "Longer: more context, more memory.", low=8, high=1_048_576
    )
    packing: bool = setting(
        True,
        "several documents in a row, where the model keeps them apart; off: one document per row,"
        " padded",
    )

    divergence: str = setting(
        "auto",
        f"divergence between teacher and student: {' | '.join(DIVERGENCES)} | js:BETA (GKD's, BETA"
        " between 0 and 1) | distillm2 (with ON_POLICY: skew_kl on text, skew_reverse_kl on what"
        " the student writes after the same prompts) | auto (forward_kl, or reverse_kl where"
        " ROUTER_MODE is all, ka or sar, as in the paper)",
        section="Loss",
        choices=("auto", *DIVERGENCES, "distillm2"),
        forms=(("js:BETA", JS_BETA),),
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
    loss_mean: str = setting(
        "tokens",
        "what cross-entropy and divergence are a mean over: tokens (those of a step count alike) |"
        " sequences (of each row its own mean, one document a row: GKD's length-normalised form)",
        choices=("tokens", "sequences"),
    )
    alpha_hidden: float = setting(
        0.0,
        "weight of the distance between hidden states of student and teacher, layer by layer; 0:"
        " not compared",
        "For a live teacher with the student's tokenizer.",
        low=0,
    )
    alpha_attention: float = setting(
        0.0,
        "weight of the divergence between attention's relations (MiniLMv2: queries, keys and"
        " values) of student and teacher; 0: not compared",
        low=0,
    )
    layer_map: str = setting(
        "last",
        "which layers ALPHA_HIDDEN and ALPHA_ATTENTION compare: last | uniform (all of the"
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

    on_policy: float = setting(
        0.0,
        "share of the rows whose continuation the student writes itself, anew in each step, and the"
        " teacher judges token by token; 0: none",
        "With it, and with TEACHER_TEXT, a row holds one document.",
        section="On-policy",
        low=0,
        high=1,
    )
    teacher_text: float = setting(
        0.0,
        "share of the rows whose continuation the teacher writes, once, in the place of the text"
        " (sequence-level distillation); 0: none",
        low=0,
        high=1,
    )
    prompt_tokens: int = setting(
        16,
        "tokens of a plain text that are the prompt, its start token included; of other text the"
        " prompt is what carries no loss",
        low=1,
    )
    rollout_tokens: int = setting(
        128, "maximum tokens of a continuation with its end; BLOCK_SIZE holds the prompt too", low=1
    )
    rollout_temperature: float = setting(
        1.0, "temperature of a continuation; 0: the likeliest tokens", low=0, high=100
    )
    rollout_top_p: float = setting(
        1.0,
        "sample from the likeliest tokens alone that have this much probability; 1: from all",
        above=0,
        high=1,
    )

    align: str = setting(
        "auto",
        "how a teacher with another tokenizer is aligned: auto (the tokenizers are the same) |"
        " hidden (states, at common boundaries) | uld (sorted probabilities) | chunks (of text)",
        section="Experts, routers and other tokenizers",
        choices=("auto", "hidden", "uld", "chunks"),
    )
    router_mode: str = setting(
        "native",
        "experts of a mixture-of-experts teacher: native (unchanged) | all | ka (all but one, some"
        " sampled) | sar (all, with a router that learns from the student) | auto (sar for"
        " a mixture, native for a dense teacher; the presets use this)",
        choices=("native", "all", "ka", "sar", "auto"),
    )
    router_lr: float = setting(1e-5, "learning rate of the router in sar", low=0, high=100)
    router_beta: float = setting(0.01, "weight of the load balance in sar", low=0)
    router_drift: float = setting(
        0.5,
        "KL from the original gate, in nats, at which the router stops learning",
        "A router that drifts further may merely imitate the student.",
        above=0,
    )
    router_weights: str | None = setting(
        None,
        "router file of an earlier run (router.safetensors), for the teacher; None: its own router",
    )
    ka_lambda: float = setting(
        0.05, "probability that a token's experts are sampled in ka", low=0, high=1
    )

    max_steps: int = setting(
        500,
        "optimizer steps",
        "A finished run goes on with RESUME, RUN_NAME and more of them; its learning rates are then"
        " those of a run of so many steps.",
        section="Optimisation",
        low=1,
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
    learning_rate: float | None = setting(
        None,
        "peak learning rate of AdamW; None: 3e-3 for new weights, 5e-4 for what is cut from a"
        " teacher, 2e-4 for adapters, 2e-5 for a pretrained model",
        low=0,
        high=100,
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
    lora_rank: int = setting(
        0, "train low-rank adapters of this rank in place of all weights; 0: all weights", low=0
    )
    lora_alpha: float = setting(
        16.0, "LoRA alpha; the adapters are scaled by LORA_ALPHA / LORA_RANK", above=0
    )
    lora_quantization: str | None = setting(
        None,
        "keep the linear layers of the adapters' frozen base in fewer bits, as QLoRA does, by"
        " bitsandbytes: nf4 (4 bits); None: in MODEL_DTYPE",
        choices=("nf4",),
    )
    lora_merge: bool = setting(False, "save adapters merged into their base, as one plain model")

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
    def peak_lr(self) -> float:
        """LEARNING_RATE, decided where it is None."""
        return self.usual_lr if self.learning_rate is None else self.learning_rate

    @property
    def usual_lr(self) -> float:
        """What LEARNING_RATE is where it is None: a rate that is sane for this kind of student."""
        kind = "lora" if self.lora_rank else self.student_model.partition(":")[0]
        rates = {"fresh": 3e-3, "llama": 3e-3, "layers": 5e-4, "lora": 2e-4}
        return rates.get(kind, 2e-5)

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """Those of TEACHER_MODEL: a folder's own name may have commas in it."""
        name = self.teacher_model
        if self.teacher_url is not None or "," not in name or Path(name).expanduser().is_dir():
            return (name,)
        return tuple(part.strip() for part in name.split(","))

    @property
    def teacher_shares(self) -> tuple[float, ...] | None:
        """TEACHER_WEIGHTS as numbers; None where they are all alike."""
        given = self.teacher_weights
        return None if given is None else tuple(map(float, given.split(",")))

    @property
    def kind_of_divergence(self) -> Any:
        """DIVERGENCE of text, decided where it is `auto`."""
        if self.divergence != "auto":
            return "skew_kl" if self.is_contrastive else self.divergence
        return "forward_kl" if self.router_mode == "native" else "reverse_kl"

    @property
    def kind_on_policy(self) -> Any:
        """DIVERGENCE of what the student writes."""
        return "skew_reverse_kl" if self.is_contrastive else self.kind_of_divergence

    @property
    def is_contrastive(self) -> bool:
        """Whether rows that the student continues are learned from as text, too, for a contrast."""
        return self.divergence == "distillm2"

    @property
    def learns_text(self) -> bool:
        """Whether there are rows that the student does not write."""
        return self.on_policy < 1 or self.is_contrastive

    @property
    def boards(self) -> set[str]:
        """What REPORT_TO names."""
        return {self.report_to} - {"none"}
