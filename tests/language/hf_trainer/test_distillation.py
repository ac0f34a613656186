"""The Trainer that distills: its losses, its guard by term, ranks, checkpoints and teachers."""

import math
import shutil
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from firstnan.faults import Thresholds
from firstnan.parts import TooFewHealthyParts
from ssl_kd.core.errors import InputError, SeveralFaults
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.losses.teacher_output import LinearTeacher, LogitsTeacher
from ssl_kd.language.models.frozen import FrozenTeacher

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ssl_kd.hf_trainer import DistillationTrainer, GuardCallback  # noqa: E402
from ssl_kd.language.hf_trainer import distillation  # noqa: E402
from ssl_kd.language.train.tied_weight import TiedGradient  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.faults.matrix import row as fault  # noqa: E402
from tests.marks import slow  # noqa: E402
from tests.ranks import as_torchrun, run_ranks  # noqa: E402
from tests.tiny import Tiny  # noqa: E402

TINY = Tiny()


def samples(n=8, seed=0, low=3):
    """Rows of different lengths; some labels carry no loss."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(n):
        ids = torch.randint(3, len(TINY.tokenizer), (low + i % 5,), generator=g)
        labels = ids.clone()
        labels[: i % 3] = -100
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def arguments(folder, **options):
    settings = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 2,
        "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False,
    } | options  # fmt: skip
    return transformers.TrainingArguments(**settings)


def teacher_model():
    return TINY.model(seed=2, spread=0.3)


class Moods:
    """A live teacher whose answers to some calls are spoiled."""

    def __init__(self, model, bad=(), value=math.nan):
        self.frozen, self.bad, self.value, self.calls = FrozenTeacher(model), bad, value, 0

    def __call__(self, inputs, rows):
        answer = self.frozen.answer(inputs, rows)
        assert isinstance(answer, LinearTeacher)
        self.calls += 1
        if self.calls - 1 in self.bad:
            return LinearTeacher(answer.hidden * self.value, answer.weight, answer.bias)
        return answer


class Witness(transformers.TrainerCallback):
    """Weights and moments after each step."""

    def __init__(self):
        self.bits, self.logs = [], []

    def on_step_end(self, args, state, control, **kwargs):
        state = kwargs["optimizer"].state
        weights = [p.detach().clone() for p in kwargs["model"].parameters()]
        moments = [
            v.clone() for p in kwargs["model"].parameters() for v in state.get(p, {}).values()
        ]
        self.bits.append(weights + moments)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs or {}))


def trained(folder, teacher=None, student=None, callbacks=(), resume=None, data=None, **options):
    """A trainer after its training, what it held after each step, and what stopped it."""
    own = ("alpha_kd", "alpha_ce", "temperature", "divergence", "eval_dataset", "processing_class")
    given = {name: options.pop(name) for name in own if name in options}
    witness = Witness()
    trainer = DistillationTrainer(
        model=student or TINY.model(seed=1),
        teacher=teacher,
        args=arguments(folder, **options),
        train_dataset=data or samples(32),
        callbacks=[witness, *callbacks],
        **given,
    )
    stop = None
    try:
        trainer.train(resume_from_checkpoint=resume)
    except TooFewHealthyParts as error:
        stop = error
    return trainer, witness, stop


def oracle(student, teacher, rows, temperature=2.0, alpha_kd=0.5, alpha_ce=0.5, without_kd=()):
    """The gradient of the loss of some rows, from whole logits of one row at a time, in float64."""
    student, teacher = student.double(), teacher.double()
    n = sum(label != -100 for row in rows for label in row["labels"][1:])
    loss = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(rows):
        ids = torch.tensor([row["input_ids"]])
        labels = torch.tensor(row["labels"])[1:]
        z = student(input_ids=ids).logits[0, :-1][labels != -100]
        loss = loss + alpha_ce * F.cross_entropy(z, labels[labels != -100], reduction="sum") / n
        if i not in without_kd:
            t = teacher(input_ids=ids).logits[0, :-1][labels != -100].detach()
            p, q = (F.log_softmax(x / temperature, -1) for x in (t, z))
            kl = F.kl_div(q, p, reduction="sum", log_target=True)
            loss = loss + alpha_kd * temperature**2 * kl / n
    return float(loss.detach()), torch.autograd.grad(loss, list(student.parameters()))


def one_step(folder, teacher, rows, batch, accumulation, collator=None, student=None, **options):
    """How a step of plain gradient descent at learning rate 1 moves the weights; the loss."""
    student = student or TINY.model(seed=1)
    before = [p.detach().clone() for p in student.parameters()]
    args = arguments(
        folder, max_steps=1, per_device_train_batch_size=batch, max_grad_norm=0.0,
        gradient_accumulation_steps=accumulation, **options,
    )  # fmt: skip
    sgd = torch.optim.SGD(student.parameters(), lr=1.0)
    flat = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1.0)
    trainer = InOrder(
        student, teacher, args, temperature=2.0, train_dataset=rows, data_collator=collator,
        optimizers=(sgd, flat),
    )  # fmt: skip
    trainer.train()
    moved = [b - p.detach() for b, p in zip(before, student.parameters(), strict=True)]
    return moved, next(row["loss"] for row in trainer.state.log_history if "loss" in row)


class InOrder(DistillationTrainer):
    """Takes the samples as they come."""

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def left(rows):
    """A collator that pads on the left."""
    width = max(len(row["input_ids"]) for row in rows)
    padded = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        n = width - len(row["input_ids"])
        padded["input_ids"].append([2] * n + row["input_ids"])
        padded["labels"].append([-100] * n + row["labels"])
        padded["attention_mask"].append([0] * n + [1] * len(row["input_ids"]))
    return {name: torch.tensor(column) for name, column in padded.items()}


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collator", "batch", "accumulation", "bad"),
    [(None, 8, 1, ()), (left, 8, 1, ()), (left, 2, 4, ()), (None, 2, 4, ()), (None, 4, 2, {1})],
)
def test_a_step_is_the_gradient_of_the_mean_over_all_its_tokens(
    tmp_path, collator, batch, accumulation, bad
):
    """Of a batch whose kd is NaN, the cross-entropy alone."""
    rows = samples()
    teacher = Moods(teacher_model(), bad=bad)
    moved, loss = one_step(tmp_path, teacher, rows, batch, accumulation, collator)
    sick_rows = {i for i in range(len(rows)) if i // batch in bad}
    expected, gradient = oracle(TINY.model(seed=1), teacher_model(), rows, without_kd=sick_rows)
    assert loss == pytest.approx(expected, rel=1e-5)
    for found, exact in zip(moved, gradient, strict=True):
        assert torch.allclose(found.double(), exact, rtol=1e-4, atol=1e-6)


def tied_model():
    return TINY.model(seed=1, tie_word_embeddings=True)


@pytest.mark.parametrize("bad", [(), {1}])
def test_a_tied_weight_has_the_gradient_of_autograd_in_one_tensor(tmp_path, monkeypatch, bad):
    given, rows = [], samples()

    class Noted(TiedGradient):
        def add(self, gradient):
            given.append(gradient.shape)
            super().add(gradient)

    def step():
        return one_step(tmp_path, Moods(teacher_model(), bad=bad), rows, 4, 2, student=tied_model())

    monkeypatch.setattr(distillation, "TiedGradient", Noted)
    (moved, loss), n = step(), len(given)
    assert n == 2 and {*given} == {tied_model().lm_head.weight.shape}
    sick_rows = {4, 5, 6, 7} if bad else ()
    expected, gradient = oracle(tied_model(), teacher_model(), rows, without_kd=sick_rows)
    assert loss == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(distillation, "tied_lookups", lambda *_: nullcontext())
    plain, _ = step()
    assert len(given) == n  # now autograd adds the two up
    for found, other, exact in zip(moved, plain, gradient, strict=True):
        assert torch.allclose(found, other, rtol=1e-5, atol=1e-7)
        assert torch.allclose(found.double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("bf16", [False, True])
@fault(123)
def test_a_nan_in_kd_leaves_a_step_of_cross_entropy_alone_to_the_bit(tmp_path, accumulation, bf16):
    options = {"gradient_accumulation_steps": accumulation, "bf16": bf16}
    sick, one, _ = trained(tmp_path, Moods(teacher_model(), bad=range(99)), **options)
    _, other, _ = trained(tmp_path, None, alpha_kd=0.0, **options)
    assert len(one.bits) == 4 and same(one.bits, other.bits)
    history: list = sick.state.log_history
    events = [row["guard"] for row in history if "guard" in row]
    assert [(e["step"], e["part"], e["action"]) for e in events] == [
        (step, "kd", "cut out") for step in range(1, 5)
    ]
    line = sick.state.log_history[-1]
    assert line["guard_updates"] == 4 and line["guard_skipped"] == 0
    assert all(math.isfinite(row["loss"]) for row in sick.state.log_history if "loss" in row)


@pytest.mark.parametrize("accumulation", [1, 2])
@fault(123)
def test_a_nan_in_both_skips_the_step(tmp_path, accumulation):
    student = TINY.model(seed=1)
    passes = []

    def spoil(module, arguments, output):
        if torch.is_grad_enabled():  # not where the head is probed
            passes.append(1)
        if len(passes) == 2 * accumulation:  # the last batch of the second step
            output.last_hidden_state = output.last_hidden_state * math.nan

    options = {"gradient_accumulation_steps": accumulation}
    trainer, plain, _ = trained(tmp_path, teacher_model(), **options)
    handle = student.base_model.register_forward_hook(spoil)
    trainer, witness, stop = trained(tmp_path, teacher_model(), student, **options)
    handle.remove()
    same_as_before = [i for i in range(1, 4) if same(witness.bits[i - 1], witness.bits[i])]
    assert same_as_before == [1] and stop is None and same(plain.bits[0], witness.bits[0])
    assert trainer.state.log_history[-1]["guard_skipped"] == 1
    assert all(torch.isfinite(p).all() for p in student.parameters())


@fault(123)
def test_a_kd_that_stays_nan_ends_the_run(tmp_path):
    guard = GuardCallback(thresholds=Thresholds(stop_after=3), events=tmp_path / "events.jsonl")
    sick = Moods(teacher_model(), bad=range(99))
    trainer, _, stop = trained(tmp_path, sick, callbacks=[guard], max_steps=9)
    assert trainer.state.global_step == 3 and trainer.guarding is guard
    assert "kd was cut out of each of the last 3 steps" in str(stop)
    assert "kd was cut out" in (tmp_path / "events.jsonl").read_text()


def test_under_a_grad_scaler_a_nan_in_kd_is_cut_out_and_the_scale_stays(tmp_path):
    """What fp16=True does on a GPU: accelerate scales the loss, and shows gradients unscaled."""

    class Scaled(DistillationTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            self.accelerator.native_amp = True
            self.accelerator.state._mixed_precision = "fp16"

    def run(teacher, alpha_kd):
        student, witness = TINY.model(seed=1), Witness()
        trainer = Scaled(
            student, teacher, arguments(tmp_path), alpha_kd=alpha_kd, train_dataset=samples(32),
            callbacks=[witness],
        )  # fmt: skip
        trainer.train()
        return trainer, witness

    try:
        sick, one = run(Moods(teacher_model(), bad=range(99)), 0.5)
        _, other = run(None, 0.0)
    finally:
        sick.accelerator.state._reset_state(reset_partial_state=False)
    assert same(one.bits, other.bits) and sick.accelerator.scaler.get_scale() == 256.0
    assert not same(one.bits[0], one.bits[3])


# --- around it ------------------------------------------------------------------------------------


def test_log_lines_and_evaluation(tmp_path):
    rows = samples(7, seed=3)
    trainer, witness, _ = trained(tmp_path, teacher_model(), eval_dataset=rows, temperature=2.0)
    found = trainer.evaluate()
    ce, _ = oracle(trainer.model, teacher_model(), rows, alpha_kd=0.0, alpha_ce=1.0)
    kd, _ = oracle(trainer.model, teacher_model(), rows, alpha_kd=1.0, alpha_ce=0.0)
    assert found["eval_ce"] == pytest.approx(ce, rel=1e-5)
    assert found["eval_kd"] == pytest.approx(kd, rel=1e-5)
    assert found["eval_loss"] == pytest.approx((ce + kd) / 2, rel=0.2)  # a mean over batches
    # Reporters come before other callbacks, and see what `log` was given.
    lines = [line for line in witness.logs if "loss" in line]
    assert len(lines) == 4 and all(line["guard_updates"] for line in lines)
    for line in lines:
        assert line["loss"] == pytest.approx(0.5 * line["ce"] + 0.5 * line["kd"], rel=1e-4)


def test_records_are_tokenized_and_packed_without_leaks(tmp_path):
    student, losses, known = TINY.model(seed=1), [], TINY.tokenizer
    texts = [example.text for example in TINY.texts(12).examples]
    for text in texts:  # one document at a time
        read = known(text, add_special_tokens=False, return_offsets_mapping=True)
        first = 1 + sum(end <= 9 for _, end in read.offset_mapping)
        row = torch.tensor([0, *read.input_ids, 1])
        logits = student(row[None]).logits[0, first - 1 : -1]
        losses += F.cross_entropy(logits, row[first:], reduction="none").tolist()
    data = [{"prompt": text[:9], "completion": text[9:]} for text in texts]
    for packing in (False, True):
        own = {"processing_class": known, "max_length": 120, "packing": packing, "alpha_kd": 0.0}
        more = {"train_dataset": data, "eval_dataset": {"own": data}, "args": arguments(tmp_path)}
        trainer = DistillationTrainer(student, None, **own, **more)
        assert trainer.evaluate()["eval_own_ce"] == pytest.approx(sum(losses) / len(losses), 1e-6)
        assert (len(trainer.train_dataset) < 12) == packing
    with pytest.raises(InputError, match="no usable record: .* a prompt without a completion"):
        trained(tmp_path, data=[{"prompt": "a"}], processing_class=known, alpha_kd=0.0)
    with pytest.raises(InputError, match="set processing_class to the student's tokenizer"):
        trained(tmp_path, data=data, alpha_kd=0.0)


@pytest.mark.parametrize("named", [False, True])
def test_thoughts_may_be_left_out_of_the_labels(tmp_path, named):
    data = [{"prompt": "2+2?", "completion": "<think>two</think>\nFour."}]
    options = {"processing_class": TINY.tokenizer, "alpha_kd": 0.0, "args": arguments(tmp_path)}
    if named:  # one of several data sets
        options["eval_dataset"] = {"own": data}

    def learned(**choice):
        trainer = DistillationTrainer(TINY.model(), train_dataset=data, **options, **choice)
        rows = trainer.eval_dataset["own"] if named else trainer.train_dataset
        labels = rows[0]["labels"]
        return TINY.tokenizer.decode(labels[labels >= 0], skip_special_tokens=True)

    assert "two" in learned() and "two" in learned(learn_thoughts=True)
    answer = learned(learn_thoughts=False)
    assert "Four." in answer and "two" not in answer and "think" not in answer


def test_logits_for_custom_metrics(tmp_path):
    trainer = DistillationTrainer(
        TINY.model(seed=1), teacher_model(), arguments(tmp_path), eval_dataset=samples(4, low=5),
        compute_metrics=lambda seen: {"shape": list(seen.predictions.shape)},
    )  # fmt: skip
    metrics = trainer.evaluate()
    assert metrics["eval_shape"] == [4, 8, len(TINY.tokenizer)] and metrics["eval_kd"] > 0


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_compiled_student_trains_the_same_up_to_rounding(tmp_path, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor compiles by g++")
    rows = samples()
    compiled = {"torch_compile": True, "torch_compile_backend": backend}
    plain, _ = one_step(tmp_path, teacher_model(), rows, 4, 2)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    moved, _ = one_step(tmp_path, teacher_model(), rows, 4, 2, **compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    for found, exact in zip(moved, plain, strict=True):
        assert torch.allclose(found, exact, rtol=1e-4, atol=1e-6)


# peft 0.20, which asks the hub for the files of a base that has none.
@pytest.mark.filterwarnings("ignore:Could not find a config file in  - will assume")
def test_adapters_learn_and_their_base_stays(tmp_path):
    peft = pytest.importorskip("peft")

    def adapted():
        with warnings.catch_warnings():  # peft asks transformers by names that are deprecated
            warnings.simplefilter("ignore", FutureWarning)
            torch.manual_seed(0)
            return peft.get_peft_model(TINY.model(seed=1), config)

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    student = adapted()
    base = {n: p.detach().clone() for n, p in student.named_parameters() if not p.requires_grad}
    options = {"save_strategy": "steps", "save_steps": 2}
    trainer, witness, _ = trained(tmp_path, teacher_model(), student, **options)
    assert all(torch.equal(p, base[n]) for n, p in student.named_parameters() if n in base)
    assert not same(witness.bits[0], witness.bits[3])
    resumed = str(tmp_path / "checkpoint-2")
    _, rest, _ = trained(tmp_path, teacher_model(), adapted(), resume=resumed)
    assert same(witness.bits[2:], rest.bits)


# --- teachers -------------------------------------------------------------------------------------


def test_several_teachers_count_as_the_mean_of_their_divergences(tmp_path):
    def means(*teachers):
        _, witness, _ = trained(tmp_path, list(teachers), max_steps=1)
        return witness.logs[0]["kd"]

    first, second = teacher_model(), TINY.model(seed=5, spread=0.3)
    both = means(first, FrozenTeacher(second).answer)
    assert both == pytest.approx((means(first) + means(second)) / 2, rel=1e-5)


def test_a_folder_is_a_teacher_and_its_tokenizer_is_compared(tmp_path):
    folder = TINY.folder(tmp_path / "teacher", seed=2)
    given = {"args": arguments(tmp_path), "train_dataset": samples()}
    student = TINY.model(seed=1)
    trainer = DistillationTrainer(student, folder, processing_class=TINY.tokenizer, **given)
    trainer.train()
    assert trainer.state.log_history[0]["kd"] > 0
    with pytest.raises(InputError, match="differs from processing_class"):
        DistillationTrainer(student, folder, processing_class=TINY.other_tokenizer, **given)
    with pytest.raises(SeveralFaults) as refused:  # before any of them is loaded
        names = [str(tmp_path / "nowhere"), folder]
        DistillationTrainer(student, names, processing_class=TINY.other_tokenizer, **given)
    assert "\n- teacher: the folder " in str(refused.value)
    assert "\n- the tokenizer of the teacher" in str(refused.value)


# --- ranks ----------------------------------------------------------------------------------------


def train_on(rank, folder, world, bad, accumulation, tied=False):
    """A rank of a training, as torchrun starts it; or all of it in one process."""
    if world > 1:
        as_torchrun(rank, world)
    options = {"ddp_backend": "gloo"} if world > 1 else {}
    options |= {"optim": "sgd", "learning_rate": 0.1}  # AdamW makes much of what is near 0
    options |= {"per_device_train_batch_size": 4 // world, "max_grad_norm": 0.1}
    options |= {"gradient_accumulation_steps": accumulation, "per_device_eval_batch_size": 2}
    teacher = Moods(teacher_model(), bad=bad[rank])
    options |= {"eval_dataset": samples(8, seed=3), "student": tied_model() if tied else None}
    trainer, witness, stop = trained(folder, teacher, **options)
    teacher.bad = ()
    metrics = trainer.evaluate()
    wrapper = type(trainer.model_wrapped).__name__
    events = [event.line() for event in trainer.guarding.guard.events.events]
    bits = [x.tolist() for x in witness.bits[-1]]
    lines = [line["kd"] for line in witness.logs if "kd" in line]
    return wrapper, bits, [metrics["eval_ce"], metrics["eval_kd"], *lines], events, str(stop)


@pytest.mark.parametrize("accumulation", [slow(1), 2])
def test_two_processes_are_one_to_rounding(tmp_path, accumulation):
    results = run_ranks(train_on, 2, tmp_path, 2, [(), ()], accumulation, True)
    assert results[0] == results[1] and results[0][0] == "DistributedDataParallel", results
    _, alone, numbers, _, _ = train_on(0, tmp_path, 1, [()], accumulation, True)
    for a, b in zip(results[0][1], alone, strict=True):
        assert torch.allclose(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-6)
    assert results[0][2] == pytest.approx(numbers, rel=1e-5)


@fault(123)
def test_a_nan_in_kd_of_one_process_is_cut_out_on_both(tmp_path):
    results = run_ranks(train_on, 2, tmp_path, 2, [(), {2}], 2)
    assert results[0] == results[1], results
    line, again = results[0][3]
    assert "on rank 1 of 2" in line and '"kd"' in line and results[0][4] == "None"
    assert "cut out" in line and "healthy again" in again


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha_kd": 0.5, "teacher": None}, "teacher is None: name a teacher"),
        ({"teacher": 7}, "teacher is of type int"),
        ({"divergence": "kl"}, "divergence is 'kl'"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: set it to 0"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, options, message):
    with pytest.raises((InputError, SettingsError), match=message):
        trained(tmp_path, **{"teacher": teacher_model()} | options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_trained_in_float32_from_given_logits(tmp_path, dtype):
    def uniform(inputs, rows):
        return LogitsTeacher(torch.zeros(len(rows), len(TINY.tokenizer)))

    student = TINY.model(seed=1).to(dtype)
    trainer, _, _ = trained(tmp_path, uniform, student)
    assert {p.dtype for p in student.parameters()} == {torch.float32}
    assert trainer.state.log_history[0]["kd"] > 0
