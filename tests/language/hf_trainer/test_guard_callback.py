import copy
import importlib
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from firstnan.faults import Thresholds
from firstnan.parts import TooFewHealthyParts

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from firstnan.hf import GuardCallback  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.language.hf_trainer.test_distillation import Witness, arguments  # noqa: E402
from tests.ranks import as_torchrun, run_ranks  # noqa: E402

STEPS = 12


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.1, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, max_position_embeddings=8, hidden_size=16, intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=2, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Poisoned(transformers.Trainer):
    """Multiplies the loss of some steps; remembers weights and moments after each."""

    factors: dict[int, float] = {}

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss = super().compute_loss(model, inputs, **kwargs)
        assert isinstance(loss, torch.Tensor)
        return loss * self.factors.get(self.state.global_step, 1.0)


def run(folder, *callbacks, model=None, factors=None, **options):
    """Twelve steps; the trainer, what it held after each step, and how it stopped."""
    witness = Witness()
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 32, (8,), generator=g) for _ in range(64)]
    trainer = Poisoned(
        model=model or gpt2(),
        args=arguments(folder, **{"max_steps": STEPS, **options}),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[*callbacks, witness],
    )
    trainer.factors = factors or {}
    stop = None
    try:
        trainer.train()
    except TooFewHealthyParts as error:
        stop = error
    return trainer, witness.bits, stop


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}, {"max_grad_norm": 0.0}])
def test_a_healthy_run_is_the_same_with_and_without(tmp_path, options):
    plain, bits, _ = run(tmp_path, **options)
    guard = GuardCallback()
    guarded, guarded_bits, _ = run(tmp_path, guard, **options)
    assert all(same(a, b) for a, b in zip(bits, guarded_bits, strict=True)) and len(bits) == STEPS
    assert guard.guard.updates.tolist() == [STEPS] and not guard.guard.events.events
    assert guarded.args.max_grad_norm == plain.args.max_grad_norm
    norms = [[row.get("grad_norm") for row in x.state.log_history] for x in (plain, guarded)]
    assert norms[0] == norms[1]
    assert guarded.state.log_history[0]["guard_updates"] == 1


@pytest.mark.parametrize(
    ("model", "factor", "clip"),
    [(gpt2, math.nan, 1.0), (llama, math.inf, 0.0), (llama, 1e30, 1.0), (gpt2, 1e30, 0.0)],
)
def test_a_poisoned_step_changes_no_weight_and_no_moment(tmp_path, model, factor, clip):
    guard = GuardCallback(events=tmp_path / "events.jsonl")
    options = {"max_grad_norm": clip, "logging_steps": 4}
    trainer, bits, stop = run(tmp_path, guard, model=model(), factors={5: factor}, **options)
    unchanged = [step for step in range(1, STEPS) if same(bits[step - 1], bits[step])]
    assert unchanged == [5] and stop is None
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    *located, event = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert all("outside of the model" in row["reason"] for row in located)
    assert all(row["stage"] == "origin" for row in located)
    assert len(located) == (not math.isfinite(factor))
    assert event.items() >= {"step": 6, "part": "model", "stage": "gradient"}.items()
    logged = [row["guard"] for row in trainer.state.log_history if "guard" in row]
    assert logged == [*located, event]
    assert trainer.state.log_history[-1]["guard_skipped"] == 1


def test_a_spike_is_seen_although_the_trainer_clips(tmp_path):
    guard = GuardCallback()
    _, bits, _ = run(tmp_path, guard, factors={25: 1e5}, max_steps=30, max_grad_norm=1.0)
    assert [(e.step, e.stage) for e in guard.guard.events.events] == [(26, "spike")]
    assert same(bits[24], bits[25]) and not same(bits[25], bits[26])


class Reporter(transformers.TrainerCallback):
    """Keeps the lines as wandb sees them; a Trainer calls it before its user's callbacks."""

    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        assert logs is not None
        self.lines += [dict(logs)] if "loss" in logs else []


def test_reporters_get_left_out_terms_and_no_invented_loss(tmp_path):
    reporter = Reporter()
    trainer, _, _ = run(tmp_path, reporter, GuardCallback(), factors={5: math.nan, 8: math.nan})
    assert [i for i, line in enumerate(reporter.lines) if math.isnan(line["loss"])] == [5, 8]
    left_out = [line.get("guard_left_out", 0) for line in reporter.lines]
    assert left_out == [int(i in (5, 8)) for i in range(12)]
    assert [line["guard_skipped"] for line in reporter.lines] == [0] * 5 + [1] * 3 + [2] * 4
    run(tmp_path, rare := Reporter(), GuardCallback(), factors={5: math.nan}, logging_steps=4)
    assert [line.get("guard_left_out") for line in rare.lines] == [None, 1, None]
    assert all(math.isfinite(line["loss"]) for line in rare.lines)


def test_accumulation_and_bf16(tmp_path):
    guard = GuardCallback()
    options = {"gradient_accumulation_steps": 2, "bf16": True}
    _, bits, _ = run(tmp_path, guard, factors={3: math.nan}, **options)
    assert {e.step for e in guard.guard.events.events} == {4} and same(bits[2], bits[3])
    assert guard.guard.updates.tolist() == [STEPS - 1]


def train_on(rank, folder, factors, thresholds):
    """A rank of a Trainer that averages gradients, as torchrun starts it."""
    as_torchrun(rank, 2)
    guard = GuardCallback(events=folder / "events.jsonl", thresholds=thresholds, snapshot_every=2)
    trainer, bits, stop = run(folder, guard, factors=factors[rank], ddp_backend="gloo")
    lines = [event.line() for event in guard.guard.events.events]
    unchanged = [step for step in range(1, len(bits)) if same(bits[step - 1], bits[step])]
    wrapper = type(trainer.model_wrapped).__name__
    return wrapper, [x.tolist() for x in bits[-1]], lines, unchanged, str(stop)


def test_a_run_that_stays_faulty_goes_back_then_saves_and_stops(tmp_path):
    guard = GuardCallback(thresholds=Thresholds(restore_after=3), snapshot_every=2)
    sick = dict.fromkeys(range(4, 99), math.nan)
    trainer, bits, stop = run(tmp_path, guard, factors=sick, save_strategy="steps", save_steps=50)
    assert len(bits) == 10 and trainer.state.global_step == 10  # 3 to go back, 3 more to stop
    assert same(bits[6], bits[9]) and same(bits[1], bits[6])
    assert "the gradient's norm is not finite" in str(stop) and "What to change" in str(stop)
    assert trainer.args.max_grad_norm == 1.0
    arguments = torch.load(tmp_path / "checkpoint-10" / "training_args.bin", weights_only=False)
    assert arguments.max_grad_norm == 1.0 and type(arguments.max_grad_norm) is float
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-10")
    assert same(bits[1][: len(list(saved.parameters()))], [p.detach() for p in saved.parameters()])
    json.loads((tmp_path / "checkpoint-10" / "trainer_state.json").read_text())


def test_the_next_run_after_an_interruption_clips_as_the_first(tmp_path):
    args = transformers.TrainingArguments(str(tmp_path), max_grad_norm=0.1, report_to="none")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = SimpleNamespace(global_step=0)
    for _ in range(2):  # the first one is interrupted in a step
        guard = GuardCallback()
        guard.on_train_begin(args, state, None, model=model, optimizer=optimizer)
        assert guard.guard.clip_grad == 0.1 == args.max_grad_norm
        guard.on_step_begin(args, state, None)
        assert args.max_grad_norm == math.inf and copy.deepcopy(args).max_grad_norm.replaced == 0.1
    guard.on_pre_optimizer_step(args, state, None)
    assert args.max_grad_norm == 0.1 and type(args.max_grad_norm) is float


def test_without_transformers_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("ssl_kd.language.hf_trainer")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'ssl_kd\[llm\]'"):
        importlib.import_module("ssl_kd.language.hf_trainer")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("deepspeed", "support DeepSpeed or FSDP"),
        ("fsdp", "support DeepSpeed or FSDP"),
        (None, r"is float16, expected float32.*model.float\(\)"),
    ],
)
def test_engines_that_keep_the_gradients_and_float16_weights_are_refused(engine, message):
    # fp16=True itself needs a GPU: this is what the Trainer would call there.
    args = SimpleNamespace(deepspeed=None, fsdp=None, fp16=True, max_grad_norm=1.0)
    setattr(args, engine or "bf16", "on")
    model = gpt2().half()
    models = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises(ValueError, match=message):
        GuardCallback().on_train_begin(args, SimpleNamespace(global_step=0), None, **models)


@pytest.mark.parametrize("lasting", [False, True])
def test_all_ranks_skip_and_stop_together(tmp_path, lasting):
    steps = range(4, 99) if lasting else [5]
    factors = [{}, dict.fromkeys(steps, math.nan)]
    first, second = run_ranks(train_on, 2, tmp_path, factors, Thresholds(restore_after=3))
    wrapper, _, lines, unchanged, stop = first
    assert wrapper == "DistributedDataParallel" and second[:4] == first[:4]
    assert "outside of the model, step " in lines[0] and ", rank 1: " in lines[0]
    assert "on rank 1 of 2" in lines[1]
    if lasting:
        assert any("restored" in line for line in lines) and "What to change" in stop
    else:
        assert unchanged == [5] and stop == "None" == second[4]
        assert (tmp_path / "events.jsonl").read_text() == "".join(f"{line}\n" for line in lines)
