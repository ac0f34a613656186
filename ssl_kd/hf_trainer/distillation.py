"""A Hugging Face Trainer that distils: its loop, our losses, teachers and guard by loss term."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from ssl_kd.datasets.aligned import AlignedBatch, AlignedBlocks
from ssl_kd.datasets.blocks import Batch, Blocks, isolates_documents
from ssl_kd.datasets.picture_blocks import image_tokens
from ssl_kd.errors import InputError
from ssl_kd.guard.precision import Precision
from ssl_kd.hf_trainer.arguments import check_arguments, sharding
from ssl_kd.hf_trainer.batches import BlockRows, batch_of, collate, inputs_of_model
from ssl_kd.hf_trainer.guarding import GuardCallback
from ssl_kd.hf_trainer.inside import inside
from ssl_kd.hf_trainer.resuming import load_seeing
from ssl_kd.hf_trainer.teachers import Teacher, asked
from ssl_kd.hf_trainer.writing import check_rows, written_batches
from ssl_kd.language.objective import Objective, student_side
from ssl_kd.language.rollouts import seen_of
from ssl_kd.language.routed import Routed, fixed
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.sick_rows import FirstPass
from ssl_kd.settings.arguments import named_as_arguments
from ssl_kd.store.teacher_cache import TeacherCache
from ssl_kd.teachers.causal import without_adapters
from ssl_kd.training.together import Team

_BATCH = "batch"  # of ours, among the inputs of a step


class DistillationTrainer(Trainer):
    """A `transformers.Trainer` whose student learns from its text and from a teacher.

    The loss is `alpha_ce * ce + alpha_kd * T^2 * divergence`, both means over all tokens of the
    step, however many batches and processes it is made of. It is computed from hidden states, a
    chunk of tokens at a time: no logits of a whole batch exist, neither the student's nor the
    teacher's.

    The two terms fail alone, row by row: rows in which one is not finite are left out of it. A NaN
    in all rows of one leaves a step that is to the bit that of the other; one in both is skipped;
    see `GuardCallback`, which is there by itself. Log lines have `ce` and `kd`, nats a token;
    `evaluate` gives `eval_loss` (cross-entropy), `eval_perplexity` and, but for a cache, `eval_kd`.

    Everything else is the Trainer's: datasets, collators, schedules, optimizers, PEFT, mixed
    precision (`bf16`, `fp16`), accumulation, DDP by `torchrun` or `accelerate launch`, resuming,
    `report_to`. `torch_compile` compiles the student's backbone; the loss stays as it is. `fsdp`
    (version 2, in float32 or `bf16`) keeps a piece of each of the student's weights on each GPU;
    `evaluate` comes after `train` there, as in any Trainer.

    Args:
        model: the student, a causal language model of transformers, with or without PEFT's
            adapters; trainable weights become float32. Or give `model_init`.
        teacher: a folder or a name on the Hub (loaded in the dtype that suits the device), a model
            (frozen in place, in its own dtype), `TeacherCache.open(folder)`, any `Answer` or
            `Source`, a `Routed` mixture of experts; or several, whose divergences count as their
            mean. Its tokenizer is the student's, but for `align`. None: cross-entropy alone.
        args: as of a Trainer.
        divergence: a name in `ssl_kd.divergences.DIVERGENCES`.
        temperature: of both softmaxes in the divergence, in [0.05, 100].
        alpha_kd: weight of the divergence, at least 0.
        alpha_ce: weight of the cross-entropy, at least 0.
        loss_mean: what both are a mean over: `tokens` of a step, or `sequences`, rows of one
            document, of each its own mean. An evaluation's are means over tokens.
        align: for a teacher with another tokenizer: `chunks` or `uld`, with `aligned_blocks(...)`
            as datasets. A dictionary of token ids alone cannot be aligned: it holds no text.
        schedule: which of `temperature`, `alpha_kd` and `alpha_ce` move over the training, each
            from its own value to `NAME:END` or `NAME:END:cosine`, as in "temperature:1,
            alpha_kd:0.1:cosine"; log lines have what moves. None: nothing.
        on_policy: share of the rows, in [0, 1], whose continuation the student writes itself, anew
            in each step, and the teacher judges token by token, without cross-entropy (GKD's
            lambda), by `args.seed`, step and row alone; 0: none. Takes one text a row, a teacher at
            work and `processing_class`; the prompt is what comes before the first label that
            counts. `divergence` may be `distillm2`: skew KL on text, skew reverse KL on what was
            written. Log lines have `rollout_share`, `rollout_tokens` and `rollout_ended` (a text).
        prompt_tokens: tokens of a text without labels of -100 that are its prompt, its first
            included, at least 1.
        rollout_tokens: most tokens of a continuation, its end included, at least 1.
        rollout_temperature: that it is sampled at, in [0, 100]; 0: the likeliest tokens.
        rollout_top_p: sampled from the likeliest tokens of this much probability, in (0, 1].
        train_dataset: samples with `input_ids`, and perhaps `labels` (-100 where there is no loss;
            not shifted), `attention_mask` and `position_ids` (which restart from 0 where a row
            holds several documents), and what a processor makes of images (`pixel_values`, ...);
            or `make_blocks(...)` or `make_picture_blocks(...)`, which a cache needs.
        eval_dataset: the same, or several by name.
        processing_class: the tokenizer; compared with that of a teacher loaded by name.
        data_collator: by default samples of different lengths are padded at the end.
        callbacks: a `GuardCallback` among them takes the place of the default one.
        **options: as of a Trainer.

    Raises:
        InputError: student, teacher, datasets and arguments do not fit.
        SettingsError: a number is out of range.

    Attributes:
        guarding: the `GuardCallback`.
        objective: the student's loss terms.

    References:
        Hinton et al., Distilling the Knowledge in a Neural Network, 2015; Agarwal et al. (GKD),
        ICLR 2024; Ko et al. (DistiLLM-2), ICML 2025.
    """

    @named_as_arguments(LanguageSettings)
    def __init__(
        self,
        model: PreTrainedModel | nn.Module | None = None,
        teacher: Teacher | Sequence[Teacher] | None = None,
        args: TrainingArguments | None = None,
        *,
        divergence: str = "forward_kl",
        temperature: float = 1.0,
        alpha_kd: float = 0.5,
        alpha_ce: float = 0.5,
        loss_mean: str = "tokens",
        align: str = "auto",
        schedule: str | None = None,
        on_policy: float = 0.0,
        prompt_tokens: int = 16,
        rollout_tokens: int = 128,
        rollout_temperature: float = 1.0,
        rollout_top_p: float = 1.0,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        **options: Any,
    ) -> None:
        self._by_row = loss_mean == "sequences"
        self._settings = LanguageSettings(
            divergence=divergence,
            temperature=temperature,
            alpha_kd=alpha_kd,
            alpha_ce=alpha_ce,
            loss_mean=loss_mean,
            packing=not self._by_row,
            align=align,
            schedule=schedule,
            on_policy=on_policy,
            prompt_tokens=prompt_tokens,
            rollout_tokens=rollout_tokens,
            rollout_temperature=rollout_temperature,
            rollout_top_p=rollout_top_p,
        )
        if options.get("compute_loss_func") is not None:
            raise InputError("compute_loss_func: this Trainer has losses of its own; leave it out")
        if teacher is None and alpha_kd:
            raise InputError(
                f"alpha_kd is {alpha_kd} and teacher is None: name a teacher, or set alpha_kd to 0"
            )
        given = [c for c in callbacks or [] if isinstance(c, GuardCallback)]
        self.guarding = given[0] if given else GuardCallback()
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or collate,
            train_dataset=_samples(train_dataset),
            eval_dataset=_samples(eval_dataset),
            processing_class=processing_class,
            callbacks=[*(callbacks or []), *([] if given else [self.guarding])],
            **options,
        )
        self._begin(teacher, train_dataset)

    def _begin(self, teacher: Teacher | Sequence[Teacher] | None, train_dataset: Any) -> None:
        """Check what was given, and load the teacher."""
        check_arguments(self.args, self.accelerator)
        if (plugin := sharding(self.accelerator)) is not None:
            self._settings = self._settings.replace(shard=True)
            if (policy := plugin.mixed_precision_policy) is not None:  # sums over many tokens
                plugin.mixed_precision_policy = replace(policy, output_dtype=None)
        if self._settings.on_policy:
            check_rows(self.train_dataset, self.processing_class, self.model)
        given_to = self._settings, self.args.device, self.processing_class
        self._sources = asked(teacher, train_dataset, *given_to)
        if isinstance(source := self._sources[0], Routed):
            if self._settings.shard:
                raise InputError("a teacher's router learns from a whole student: leave fsdp out")
            self.guarding.beside = source
        self._packs = False  # that it may was not asked yet
        self._begin_logging()
        self.objective = self._objective()

    def _objective(self) -> Objective:
        """The losses of the student as it is now; a search over hyperparameters makes new ones."""
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}
        student = half.get(self.accelerator.mixed_precision, torch.float32)
        assert self.model is not None
        precision = Precision(
            self.args.device, student, student, student == torch.float16, "as the Trainer says"
        )
        source, aligned = self._sources
        rows = self.args.per_device_train_batch_size
        settings = self._settings.replace(seed=self.args.seed, batch_size=rows)
        objective = Objective(self.model, settings, precision, source, aligned)
        plugin = getattr(self.accelerator.state, "dynamo_plugin", None)
        if self.args.torch_compile and plugin is not None:
            without_adapters(self.model).base_model.compile(**plugin.to_kwargs())
        return objective

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As of a Trainer; trained weights are float32 before."""
        if self.objective.student is not self.model:
            self.objective = self._objective()
        return super().create_optimizer(*args, **kwargs)

    # -- batches ----------------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = [*dict.fromkeys([*self._signature_columns, "rows"])]

    def get_train_dataloader(self) -> Any:
        """As of a Trainer, but batches stay on the CPU until they were looked at."""
        loader = super().get_train_dataloader()
        if isinstance(loader, DataLoaderShard):
            loader.device = None
        return loader

    def _batch(self, inputs: Mapping[str, Any], dataset: Any) -> Batch | AlignedBatch:
        if isinstance(dataset, BlockRows) and dataset.hold_more:
            return dataset.blocks.batch(inputs["rows"].cpu(), self.args.device)
        return batch_of(inputs, self.args.device, self._images())

    def _images(self) -> Sequence[int]:
        return image_tokens(without_adapters(self.model).config)

    def _batches(self, samples: Sequence[Mapping[str, Any]]) -> Sequence[Batch | AlignedBatch]:
        """Those of a step, of which the student may write some rows."""
        data = self.train_dataset
        if not self._settings.on_policy:
            return [self._batch(inputs, data) for inputs in samples]
        given_to = self._images(), self.processing_class, self.state.global_step
        batches, sums = written_batches(self.objective, data, samples, *given_to)
        for name, pair in seen_of(sums).items():
            self._add(name, torch.tensor(pair, dtype=torch.float64, device=self.args.device))
        return batches

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The batches of a step, and over how much of all processes its loss is a mean."""
        if not (samples := [*islice(epoch_iterator, num_batches)]):
            return samples, None
        self.objective.follow(self.state.global_step, self.state.max_steps)
        batches = self._batches(samples)
        here = self._counts(batches)
        world = self.accelerator.num_processes  # gradients are averaged over them
        counts = torch.tensor([list(here.values())], device=device if world > 1 else None)
        gathered: Any = self.accelerator.gather(counts)
        whole = gathered.sum(0).tolist()
        self._sizes = {name: max(n, 1) / world for name, n in zip(here, whole, strict=True)}
        if any(b.packed for b in batches if isinstance(b, Batch)) and not self._packs:
            self._check_packing()
        self._begin_step(batches)
        return [{**s, _BATCH: b} for s, b in zip(samples, batches, strict=True)], whole[0]

    def _counts(self, batches: Sequence[Batch | AlignedBatch]) -> dict[str, int]:
        """What each term is a mean over, as `Objective.counts`, or sequences."""
        found, rows = self.objective.counts(batches), [student_side(b).sequences for b in batches]
        return dict.fromkeys(found, sum(rows)) if self._by_row else found

    def _check_packing(self) -> None:
        """Refuse rows of several documents where a row is one, or a model would mix them."""
        live = [self.model, getattr(self.objective.source, "model", None)]
        mixing = [m for m in live if m is not None and not isolates_documents(m)]
        why = [f"{type(model).__name__} does not keep apart by position_ids" for model in mixing]
        if why := ["loss_mean='sequences' takes for one"] * self._by_row + why:
            raise InputError(
                f"a row holds several documents, which {why[0]}: put one document in a row "
                "(packing=False)"
            )
        self._packs = True

    def _begin_step(self, batches: Sequence[Batch | AlignedBatch]) -> None:
        """Let a teacher's router move once by all batches of a step, and a server see them all."""
        self._step, self._left = contextlib.ExitStack(), len(batches)
        source, objective = self.objective.source, self.objective
        if (ask_ahead := getattr(source, "ask_ahead", None)) is not None:
            ask_ahead(batches)
        alone = len(batches) == self.accelerator.num_processes == 1
        if isinstance(source, Routed) and not alone:
            objective.student.train()
            autocast = objective.precision.autocast
            moved: Any = source.moved_once(batches, objective.answer, autocast)  # pyright: ignore
            self._step.enter_context(moved)

    # -- the step ---------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Forward and backward pass of one batch, by terms; `num_items_in_batch` is known.

        Returns:
            What the batch adds to the loss of the step, of the terms that are finite; NaN of none.
        """
        model.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            train()  # a schedule-free optimizer
        batch = inputs[_BATCH]
        late: list[Tensor] = []
        lost: dict[str, int] = {}
        first = FirstPass.of(batch, self.args.device)
        objective, guard = self.objective, self.guarding.guard

        def losses() -> dict[str, Tensor]:
            terms, scaler = self._weighted(sums), self.accelerator.scaler
            return terms if scaler is None else {n: scaler.scale(x) for n, x in terms.items()}

        def again() -> dict[str, Tensor]:
            late.clear()
            second = self._forward(model, lambda: objective.without_sick_rows(first, late))
            team = Team(self.args.device)
            left, events, here = first.again(team, guard.steps, sums, second, objective.lost)
            sums.update(left)
            lost.update(here)
            guard.events.extend(events)
            return losses()

        sums = self._forward(model, lambda: objective.terms(batch, late, first))
        guard.backward(losses(), again=again)
        sums = {name: value.detach() for name, value in sums.items()}
        if late:
            sums["kd"] = sums["kd"] + torch.stack(late).sum()
        found = torch.stack([*self._weighted(sums).values()])
        text = student_side(batch)
        of_text = text.text_sequences if self._by_row else text.text_tokens
        seen = self._counts([batch]) | {"ce": of_text}
        seen |= {name: seen[name] - n for name, n in lost.items()}
        if not self._settings.learns_text:
            del sums["ce"]
        self._remember(sums, seen)
        self._left -= 1
        if not self._left:
            self._step.close()
            self._fetch_router_events()
        finite = found.isfinite()
        return torch.where(finite.any(), found.where(finite, 0.0).sum(), torch.nan)

    def _weighted(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.objective.weighted({n: x / self._sizes[n] for n, x in sums.items()})

    def _forward(
        self, model: nn.Module, work: Callable[[], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        return inside(model, self.objective.student, work)

    def _fetch_router_events(self) -> None:
        source, guard = self.objective.source, self.guarding.guard
        if isinstance(source, Routed):
            events, source.events = source.events, []
            guard.events.extend([replace(event, step=guard.steps) for event in events])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.guarding.resumed_from = None if checkpoint is None else Path(checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not load_seeing(self.model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    # -- log lines --------------------------------------------------------------------------------

    def _begin_logging(self) -> None:
        self._seen: dict[str, Tensor] = {}

    def _remember(self, sums: Mapping[str, Tensor], counts: Mapping[str, int]) -> None:
        """Add what is finite of a batch to the sums and counts of each term, `[2]`."""
        for name, value in sums.items():
            value = value.detach()
            pair = torch.stack([value, torch.full_like(value, counts[name])])
            self._add(name, pair.where(value.isfinite(), 0.0).double())

    def _add(self, name: str, pair: Tensor) -> None:
        self._seen[name] = self._seen[name] + pair if name in self._seen else pair

    def _means(self) -> dict[str, float]:
        """The mean of each term and of what was written since the last call, of all processes."""
        names, pairs = [*self._seen], [*self._seen.values()]
        self._begin_logging()
        if not names:
            return {}
        whole: Any = self.accelerator.reduce(torch.stack(pairs), "sum")
        empty = {*names} - {"kd"} if self._settings.on_policy else ()  # for a while, perhaps
        return {
            name: total / n if n else math.nan
            for name, (total, n) in zip(names, whole.tolist(), strict=True)
            if n or name not in empty
        }

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As of a Trainer, with `ce`, `kd`, the guard's counters and what a router did."""
        if "loss" in logs:
            objective = self.objective
            moved = {name: getattr(objective.settings, name) for name in objective.moves}
            logs |= self._means() | moved
            source = objective.source
            if isinstance(source, Routed) and (seen := source.record) is not None:
                logs |= {"router": seen.loss, "router_drift": seen.drift}
        super().log({**logs, **self.guarding.counters()}, *args, **kwargs)

    # -- evaluation -------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As of a Trainer; losses are means over tokens, not over batches."""
        before, self._seen = self._seen, {}
        try:
            options = prediction_loss_only, ignore_keys, metric_key_prefix
            output = super().evaluation_loop(dataloader, description, *options)
            means = self._means()
        finally:
            self._seen = before
        metrics: Any = output.metrics
        if "ce" in means:
            metrics[f"{metric_key_prefix}_loss"] = ce = means["ce"]
            perplexity = math.exp(ce) if not ce > 700 else math.inf
            metrics[f"{metric_key_prefix}_perplexity"] = perplexity
        if "kd" in means:
            metrics[f"{metric_key_prefix}_kd"] = means["kd"]
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """As of a Trainer: the cross-entropy, and logits where somebody asks for them."""
        dataset = getattr(self.callback_handler.eval_dataloader, "dataset", None)
        batch = self._batch(inputs, dataset)
        if isinstance(batch, Batch):
            batch = self._without_repeated(batch)
        with torch.no_grad(), fixed(self.objective.source), self._judging():
            sums = self._forward(model, lambda: self.objective.terms(batch))
        counts = self.objective.counts([batch])
        self._remember(sums, counts)
        loss = sums["ce"] / max(counts["ce"], 1)
        if prediction_loss_only:
            return loss, None, None
        own = inputs_of_model(inputs, batch)
        _, logits, labels = super().prediction_step(model, own, False, ignore_keys)
        return loss, logits, labels

    @contextlib.contextmanager
    def _judging(self) -> Iterator[None]:
        """By tokens; a cache knows the rows of the training alone: no `kd` of others."""
        objective = self.objective
        source, settings = objective.source, objective.settings
        if any(isinstance(answer, TeacherCache) for answer in getattr(source, "answers", ())):
            objective.source = None
        objective.settings = replace(settings, loss_mean="tokens")
        try:
            yield
        finally:
            objective.source, objective.settings = source, settings

    def _without_repeated(self, batch: Batch) -> Batch:
        """Let rows not count that processes get once more, so that all have equally many."""
        state, n = self.accelerator.gradient_state, len(batch.counts)
        if self.accelerator.num_processes == 1 or not state.end_of_dataloader:
            return batch
        if state.remainder <= 0:
            return batch
        kept = min(max(state.remainder - self.accelerator.process_index * n, 0), n)
        counts = batch.counts.clone()
        counts[kept:] = False
        return replace(batch, counts=counts)


def _samples(data: Any) -> Any:
    if isinstance(data, dict):  # several by name
        return {name: _samples(one) for name, one in data.items()}
    return BlockRows(data) if isinstance(data, Blocks | AlignedBlocks) else data
