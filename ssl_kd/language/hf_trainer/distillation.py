"""Distill a teacher into a student with the Trainer of Hugging Face."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from firstnan.hf import GuardCallback
from ssl_kd.core.errors import Faults, InputError
from ssl_kd.core.precision import Precision, promote_to_fp32
from ssl_kd.core.settings.arguments import named_as_arguments
from ssl_kd.language.hf_trainer.records import tokenized
from ssl_kd.language.losses.teacher_output import TeacherOutput
from ssl_kd.language.losses.token_distillation import distillation_terms, next_token_targets
from ssl_kd.language.models.causal import (
    CausalLM,
    load_causal_lm,
    outline_causal_lm,
    tokenizer_id,
    without_adapters,
)
from ssl_kd.language.models.frozen import FrozenTeacher, linear_head
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.train.tied_weight import TiedGradient, tied_lookups

NO_LOSS = -100  # the label of a token without loss, as in all of transformers

Answer: TypeAlias = Callable[[Mapping[str, Any], Tensor], TeacherOutput]
"""Takes a model's inputs and `n` of the `batch * token` positions; returns its outputs there."""

Teacher: TypeAlias = str | os.PathLike[str] | PreTrainedModel | Answer


class DistillationTrainer(Trainer):
    """Train a student on text and on the output of one or several teachers.

    The loss is `alpha_ce * ce + alpha_kd * T^2 * divergence`. Both terms are means over all tokens
    of a step, over all batches and processes. They are computed from hidden states for a chunk of
    tokens at a time, so the logits of a whole batch are never stored.

    The terms fail separately: a step with a NaN in one of them has the same bits as a step of the
    other term alone, and a step with a NaN in both is skipped (see `GuardCallback`, which is added
    by default). Log lines contain `ce` and `kd` in nats per token, evaluations `eval_ce` and
    `eval_kd`. `kd_left_out` (also `ce_...`, `eval_...`) is the number of batches since the last log
    line in which the term was not finite, which `logging_nan_inf_filter` would hide. All other
    features of the Trainer work as usual: data sets, schedules, optimizers, PEFT, mixed precision,
    accumulation, compilation, DDP and checkpoints.

    Args:
        model: the student, a causal language model of transformers, with or without PEFT adapters.
            Trainable weights are cast to float32.
        teacher: a folder or a name on the Hub (loaded in the dtype that suits the device), a model
            (frozen in place, in its own dtype), or a callable of type `Answer`; or a list of these,
            whose divergences are averaged. Teachers must have the student's tokenizer. None means
            cross-entropy alone.
        args: arguments of the Trainer.
        divergence: a name in `ssl_kd.losses.DIVERGENCES`.
        temperature: divides the logits of student and teacher in the divergence, in [0.05, 100].
        alpha_kd: weight of the divergence, at least 0.
        alpha_ce: weight of the cross-entropy, at least 0.
        processing_class: the tokenizer; compared with that of a teacher loaded by name.
        data_collator: makes batches with `labels`. The default one, `collate`, pads samples of
            `input_ids` and optional `labels` (not shifted, -100 for tokens without loss). Samples
            of text, in the forms of `as_example`, are first tokenized with `processing_class`.
        max_length: maximum tokens of a row of samples of text.
        packing: put several samples of text in a row, if the student can keep them apart.
        learn_thoughts: whether labels of samples of text cover the reasoning in assistant turns.
        callbacks: a `GuardCallback` among them replaces the default one.
        **options: other arguments of the Trainer.

    Raises:
        InputError: student, teacher and arguments do not fit together.
        SettingsError: a number is out of range.

    Attributes:
        guarding: the `GuardCallback` of this trainer.

    References:
        Hinton et al., Distilling the Knowledge in a Neural Network, 2015.
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
        processing_class: Any = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        max_length: int = 1024,
        packing: bool = False,
        learn_thoughts: bool = True,
        callbacks: Sequence[TrainerCallback] = (),
        **options: Any,
    ) -> None:
        settings = LanguageSettings(
            divergence=divergence, temperature=temperature, alpha_kd=alpha_kd, alpha_ce=alpha_ce
        )
        if teacher is None and alpha_kd:
            raise InputError(
                f"alpha_kd is {alpha_kd} but teacher is None: name a teacher, or set alpha_kd to 0"
            )
        if options.get("compute_loss_func") is not None:
            raise InputError(
                "compute_loss_func is set, but DistillationTrainer computes its own loss: leave"
                " compute_loss_func out"
            )
        self._tokenizer: Any = getattr(processing_class, "tokenizer", processing_class)
        teachers: Sequence[Any] = teacher if isinstance(teacher, list | tuple) else [teacher]
        self._check_before_loading(teachers)
        if data_collator is None:
            how = self._tokenizer, model, max_length, packing, learn_thoughts
            for name in ("train_dataset", "eval_dataset"):
                options[name] = tokenized(name, options.get(name), *how)
        guards = [callback for callback in callbacks if isinstance(callback, GuardCallback)]
        if not guards:
            guards = [GuardCallback()]
            callbacks = [*callbacks, *guards]
        self.guarding = guards[0]
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or collate,
            processing_class=processing_class,
            callbacks=list(callbacks),
            **options,
        )
        for name, is_set, fix in (
            ("label_smoothing_factor", self.args.label_smoothing_factor, "set it to 0"),
            ("several GPUs in one process", self.args.n_gpu > 1, "torchrun --nproc_per_node N"),
            ("FSDP", self.is_fsdp_enabled, "start plain processes with torchrun"),
            ("DeepSpeed", self.is_deepspeed_enabled, "start plain processes with torchrun"),
        ):
            if is_set:
                raise InputError(f"DistillationTrainer does not support {name}: {fix}")
        self._weights = {"ce": settings.alpha_ce, "kd": settings.alpha_kd}
        self._temperature, self._divergence = temperature, settings.kind_of_divergence
        self.teachers = [self._answer(one) for one in teachers if one is not None]
        self._student: Any = None
        self._sums: dict[str, Tensor] = {}
        self._tied = TiedGradient()  # of the last forward pass

    def _check_before_loading(self, teachers: Sequence[Any]) -> None:
        """Check names and tokenizers before text is tokenized or a teacher is loaded."""
        faults = Faults()
        for teacher in teachers:
            if isinstance(teacher, str | os.PathLike):
                with faults.of("teacher"):
                    self._check_tokenizer(outline_causal_lm(teacher))
        faults.raise_all("nothing was tokenized or loaded")

    def _check_tokenizer(self, lm: CausalLM) -> None:
        tokenizer = self._tokenizer
        if tokenizer is not None and tokenizer_id(lm.tokenizer) != tokenizer_id(tokenizer):
            raise InputError(
                f"the tokenizer of the teacher {lm.name} ({len(lm.tokenizer)} tokens) differs"
                f" from processing_class ({len(tokenizer)} tokens): use a teacher with the"
                " student's tokenizer, or `ssl_kd distill --align chunks`"
            )

    def _answer(self, teacher: Any) -> Any:
        if isinstance(teacher, str | os.PathLike):
            dtype = Precision.for_device(self.args.device).teacher
            teacher = load_causal_lm(teacher, dtype=dtype).model
        if isinstance(teacher, nn.Module) and hasattr(teacher, "get_output_embeddings"):
            return FrozenTeacher(teacher, device=self.args.device).answer
        if not callable(teacher):
            raise InputError(
                f"teacher is of type {type(teacher).__name__}; expected a folder or Hub name, a "
                "causal language model, or a callable with the arguments (inputs, rows)"
            )
        return teacher

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Cast trainable weights to float32, then create the Trainer's optimizer."""
        assert self.model is not None
        promote_to_fp32(self.model)
        return super().create_optimizer(*args, **kwargs)

    # -- the loss ---------------------------------------------------------------------------------

    def terms(
        self, model: nn.Module, inputs: Mapping[str, Any], *, all_logits: bool = False
    ) -> tuple[dict[str, Tensor], Any]:
        """Return the sums of `ce` and `kd` over the targets of a batch, and the model's output.

        There is no `kd` without a teacher.

        Args:
            model: the student, as wrapped by the Trainer.
            inputs: the inputs of the model, with `labels`.
            all_logits: whether the model's output must contain the logits of all positions.
        """
        rows, targets = next_token_targets(inputs["labels"], _counts(inputs))
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        self._prepare_student()
        self._tied = TiedGradient()
        with self.accelerator.autocast():
            options = {} if all_logits else self._fewest_logits
            with self._tied_lookups():
                outputs = model(**inputs, **options, use_cache=False)
            answers = [answer(inputs, rows) for answer in self.teachers]
            weight = bias = None
            x = outputs.logits
            if self._linear:
                head = without_adapters(self.model).get_output_embeddings()
                x = self._hidden.pop()
                weight = head.weight
                bias = head.bias
            ce, kd = distillation_terms(
                x.flatten(0, 1)[rows],
                weight,
                bias,
                targets,
                answers,
                temperature=self._temperature,
                divergence=self._divergence,
                weights=(self._weights["ce"], self._weights["kd"]),
                give_weight_gradient=self._tied.add if self._tied.is_looked_up else None,
            )
        sums = {"ce": ce, "kd": kd} if answers else {"ce": ce}
        for name, term in sums.items():  # for log lines: sum, tokens, and whether it is left out
            finite = term.detach().isfinite()
            row = torch.stack([term.detach().where(finite, 0.0), finite * len(rows), ~finite])
            self._sums[name] = self._sums.get(name, 0.0) + row.double()
        return sums, outputs

    def _prepare_student(self) -> None:
        """Detect once per model whether its logits are linear; if so, record its hidden states."""
        if self._student is self.model:
            return
        self._student = self.model
        self._hidden: list[Tensor] = []  # of the last forward pass
        self._linear = linear_head(self.model) is not None
        causal: Any = without_adapters(self.model)
        has_option = "logits_to_keep" in inspect.signature(causal.forward).parameters
        self._fewest_logits = {"logits_to_keep": 1} if self._linear and has_option else {}
        if self._linear:
            hidden = self._hidden

            def keep(module: nn.Module, arguments: Any, output: Any) -> None:
                hidden[:] = [output.last_hidden_state]

            causal.base_model.register_forward_hook(keep)

    def _tied_lookups(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass in which a tied weight gets a single gradient."""
        causal: Any = without_adapters(self.model)
        head = causal.get_output_embeddings()
        # What is compiled is left to autograd.
        if not self._linear or self.args.torch_compile:
            return nullcontext()
        return tied_lookups(causal.get_input_embeddings(), head.weight, self._tied)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the weighted sum of the terms; with `return_outputs` also the model's output."""
        sums, outputs = self.terms(model, inputs, all_logits=return_outputs)
        loss = torch.stack(list(self._weighted(sums, inputs, num_items_in_batch).values())).sum()
        return (loss, outputs) if return_outputs else loss

    def _weighted(
        self, sums: Mapping[str, Tensor], inputs: Mapping[str, Any], tokens: Any
    ) -> dict[str, Tensor]:
        """Weight the terms of a batch and divide them by `tokens`, the target count of the step."""
        if tokens is None:  # divide by the target count of the batch
            share = 1 / _counts(inputs)[:, 1:].sum().clamp(min=1)
        else:  # gradients are averaged over the processes
            share = self.accelerator.num_processes / tokens.clamp(min=1)
        used = {name: weight for name, weight in self._weights.items() if weight and name in sums}
        return {name: weight * sums[name] * share for name, weight in used.items()}

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the batches of a step, and the number of target tokens in all processes."""
        samples = list(islice(epoch_iterator, num_batches))
        tokens = sum(int(_counts(batch)[:, 1:].sum()) for batch in samples)
        counts: Any = self.accelerator.gather(torch.tensor([tokens], device=device))
        return samples, counts.sum()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run forward and backward pass of a batch; return the sum of the finite terms, or NaN."""
        model.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            train()  # a schedule-free optimizer
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            sums, _ = self.terms(model, inputs)
            losses = self._weighted(sums, inputs, num_items_in_batch)
        scaler = self.accelerator.scaler
        scaled = losses if scaler is None else {n: scaler.scale(x) for n, x in losses.items()}
        self.guarding.guard.backward(scaled)
        self._tied.check()
        values = torch.stack([x.detach() for x in losses.values()])
        finite = values.isfinite()
        return torch.where(finite.any(), values.where(finite, 0.0).sum(), torch.nan)

    # -- log lines and evaluation -----------------------------------------------------------------

    def _means(self, prefix: str = "") -> dict[str, float]:
        """Return each term's mean per token, and in how many batches it was not finite.

        Both are over all processes and since the last call; the mean is over the other batches.
        """
        sums, self._sums = self._sums, {}
        totals: dict[str, Any] = {n: self.accelerator.reduce(x, "sum") for n, x in sums.items()}
        means = {f"{prefix}{name}": float(total / n) for name, (total, n, _) in totals.items()}
        return means | {f"{prefix}{name}_left_out": int(x[2]) for name, x in totals.items()}

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log a line with `ce`, `kd` and the guard's counters added."""
        if "loss" in logs:
            logs |= self._means()
        super().log({**logs, **self.guarding.counters()}, *args, **kwargs)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Run the Trainer's evaluation and add the mean of each term per token."""
        before, self._sums = self._sums, {}
        output: Any = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        output.metrics.update(self._means(f"{metric_key_prefix}_"))
        self._sums = before
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Return loss, logits and labels of a batch; logits and labels may be None."""
        if not prediction_loss_only:
            return super().prediction_step(model, inputs, False, ignore_keys)
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)), None, None


def _counts(inputs: Mapping[str, Any]) -> Tensor:
    """Return a mask `[batch, token]` of the target tokens, without the first after left padding."""
    counts = inputs["labels"] != NO_LOSS
    if (mask := inputs.get("attention_mask")) is not None:
        counts[:, 1:] &= mask[:, :-1] > 0
    return counts


def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Pad samples of different lengths at the end and stack them to a batch.

    Samples have `input_ids` and optional columns, each a number or `[token]`. `attention_mask` and
    `labels` are added if the samples do not have them; rows with `position_ids` need no mask.
    """
    columns: dict[str, Tensor] = {}
    for name in samples[0]:
        values = [torch.as_tensor(sample[name]) for sample in samples]
        fill = NO_LOSS if name == "labels" else 0
        ragged = values[0].ndim == 1
        columns[name] = pad_sequence(values, True, fill) if ragged else torch.stack(values)
    ones = [torch.ones(len(sample["input_ids"]), dtype=torch.int64) for sample in samples]
    mask = columns.get("attention_mask", pad_sequence(ones, batch_first=True))
    if "position_ids" not in columns:
        columns["attention_mask"] = mask
    columns.setdefault("labels", columns["input_ids"].masked_fill(mask == 0, NO_LOSS))
    return columns
