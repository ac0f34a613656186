"""The Trainer that distils with a piece of each weight on each process (FSDP2)."""

import json
import re

import pytest
import torch

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers.training_args import ParallelMode  # noqa: E402

from ssl_kd.errors import InputError  # noqa: E402
from ssl_kd.guard.norms import is_sharded  # noqa: E402
from ssl_kd.language.routed import Routed  # noqa: E402
from ssl_kd.settings import SettingsError  # noqa: E402
from ssl_kd.teachers.frozen import FrozenTeacher  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.faults.matrix import row as fault  # noqa: E402
from tests.ranks import as_torchrun, in_pieces, run_ranks  # noqa: E402
from tests.test_hf_distillation import (  # noqa: E402
    TINY,
    InOrder,
    Moods,
    arguments,
    samples,
    teacher_model,
)

FSDP = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
SET = 'set fsdp_config={"version": 2}, on GPUs'


class InPieces(InOrder):
    """Has accelerate do on CPUs what it does on GPUs alone: there it leaves FSDP out.

    From here on all of it is accelerate's own: what is sharded how, clipping and checkpoints.
    """

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if not self.args.fsdp:
            return
        state = self.accelerator.state
        plugin: dict = self.args.fsdp_plugin_args  # pyright: ignore[reportAssignmentType]
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**plugin)
        if self.args.bf16:
            state.fsdp_plugin.set_mixed_precision("bf16")
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.is_fsdp_enabled = True


def train(folder, world=1, bad=(), resume=None, **options):
    """A training: its numbers, the weights, what the guard saw, and an evaluation."""
    own = {"learning_rate": 1e-3, "per_device_train_batch_size": 4 // world}
    own |= {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "max_steps": 4}
    trainer = InPieces(
        TINY.model(seed=1), Moods(teacher_model(), bad=bad), arguments(folder, **own | options),
        train_dataset=samples(32), eval_dataset=samples(7, seed=3), temperature=2.0,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    weights = dict(trainer.model.named_parameters())
    assert all(map(is_sharded, weights.values())) == bool(trainer.args.fsdp)
    weights = {n: p.full_tensor() if is_sharded(p) else p for n, p in weights.items()}
    lines = [line for line in trainer.state.log_history if "kd" in line]
    numbers = [line[name] for line in lines for name in ("loss", "ce", "kd", "grad_norm")]
    found = trainer.evaluate()
    events = [event.line() for event in trainer.guarding.guard.events.events]
    weights = {name: p.detach().tolist() for name, p in weights.items()}
    return [*numbers, found["eval_loss"], found["eval_kd"]], weights, events


def shard(rank, folder):
    """A rank, as torchrun starts it: a training, its second half again, and others."""
    as_torchrun(rank, 2)
    ddp = {"world": 2, "ddp_backend": "gloo"}
    pieces = {**ddp, "fsdp": True, "fsdp_config": FSDP}
    whole = train(folder, **pieces, save_strategy="steps", save_steps=2)
    rest = train(folder, **pieces, resume=str(folder / "checkpoint-2"))
    sick = [train(folder, **kind, bad={2} if rank else ()) for kind in (pieces, ddp)]
    return whole, rest, *sick, train(folder, **pieces, bf16=True, max_steps=1)


def near(one, two):
    assert one[0] == pytest.approx(two[0], rel=1e-6)
    for name, p in one[1].items():
        assert torch.allclose(torch.tensor(p), torch.tensor(two[1][name]), rtol=0, atol=1e-6), name


@in_pieces
@fault(123)
def test_in_pieces_it_is_one_process_to_rounding_and_judges_and_resumes_alike(tmp_path):
    told = run_ranks(shard, 2, tmp_path)
    assert told[0] == told[1] and isinstance(told[0], tuple), told
    whole, rest, sick, sick_ddp, half = told[0]
    alone = train(tmp_path / "alone")
    near(whole, alone)
    assert rest == whole
    near(sick, sick_ddp)
    (cut,) = map(json.loads, sick[2])
    assert (cut["step"], cut["part"], cut["action"]) == (1, "kd", "rows left out")
    assert "on rank 1 of 2" in cut["reason"]
    assert half[0][:4] == pytest.approx(alone[0][:4], rel=2e-3)
    assert half[0][0] != float(torch.tensor(half[0][0]).bfloat16())  # float32, as of many tokens

    saved = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert same({n: torch.tensor(p) for n, p in whole[1].items()}, saved)
    kept = torch.load(tmp_path / "checkpoint-4" / "guard.pt")  # one rank's pieces serve nobody
    assert kept["guard"]["parts"] == {"model": {"good": None, "due": 0}}


@pytest.fixture
def distributed(monkeypatch):
    monkeypatch.setattr(transformers.TrainingArguments, "parallel_mode", ParallelMode.DISTRIBUTED)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(("of", "options", "said"), [
    (InPieces, {"fsdp_config": FSDP | {"version": 1, "sync_module_states": False}}, SET),
    (InOrder, {}, SET),  # accelerate left it out
    (InPieces, {"torch_compile": True}, "torch_compile under FSDP: leave one of them out"),
    (InPieces, {"on_policy": 0.5}, "whole models"),
    (InPieces, {"router": True}, "a teacher's router learns from a whole student"),
], ids=str)  # fmt: skip
def test_what_fsdp_cannot_do_is_refused(tmp_path, distributed, of, options, said):
    teacher, options = teacher_model(), {"fsdp": True, "fsdp_config": FSDP} | options
    if options.pop("router", False):
        teacher = Routed(FrozenTeacher(TINY.model("Mixtral")), TINY.settings(router_mode="sar"))
    own = {name: options.pop(name) for name in ("on_policy",) if name in options}
    with pytest.raises((InputError, SettingsError), match=re.escape(said)):
        of(TINY.model(), teacher, arguments(tmp_path, **options), train_dataset=samples(), **own)
