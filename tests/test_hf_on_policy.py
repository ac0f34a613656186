"""The Trainer whose student writes rows itself: the own loop's steps, whoever deals them."""

import math
import os

import pytest
import torch

from ssl_kd.datasets.blocks import make_blocks
from ssl_kd.errors import InputError
from ssl_kd.language.rollouts import writer
from ssl_kd.language.served import ServedTeacher
from ssl_kd.language.train import rows_of_step
from ssl_kd.language.train import train as take
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.causal import n_ids
from ssl_kd.teachers.frozen import FrozenTeacher
from ssl_kd.teachers.server import CompletionServer
from ssl_kd.training.schedule import learning_rate_at

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ssl_kd.hf_trainer import DistillationTrainer  # noqa: E402
from ssl_kd.hf_trainer.batches import collate  # noqa: E402
from ssl_kd.hf_trainer.writing import written_batches  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.faults.matrix import row as fault  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.served import Server  # noqa: E402
from tests.test_hf_distillation import (  # noqa: E402
    TINY,
    InOrder,
    Moods,
    Witness,
    arguments,
    left,
    samples,
    teacher_model,
    trained,
)

OWN = {"on_policy": 0.5, "prompt_tokens": 4, "rollout_tokens": 6}
SEEN = ("rollout_share", "rollout_tokens", "rollout_ended")


def writing(folder, teacher=None, data=None, **options):
    given = {"processing_class": TINY.tokenizer, "data": data or TINY.blocks(24), **OWN}
    return trained(folder, teacher or teacher_model(), **given | options)


def plain_rows():
    return samples(24, low=6)


@pytest.mark.parametrize(("own", "accumulation"), [
    ({}, 1),
    ({}, 2),
    ({"divergence": "distillm2", "on_policy": 1.0}, 1),
    ({"divergence": "reverse_kl", "on_policy": 1.0, "rollout_temperature": 0.5}, 1),
], ids=str)  # fmt: skip
def test_each_step_is_that_of_the_own_loop_to_the_bit(tmp_path, own, accumulation):
    own, blocks, steps, weights, rows = OWN | own, TINY.blocks(), 4, [], []
    distiller = TINY.distiller(
        FrozenTeacher(teacher_model()), seed=42, gradient_accumulation_steps=accumulation, **own
    )
    student, settings = distiller.student, distiller.settings
    written = writer(distiller, blocks, TINY.tokenizer)
    take(
        distiller, blocks, steps, written=written, on_log=rows.append,
        on_step=lambda *_: weights.append([p.detach().clone() for p in student.parameters()]),
    )  # fmt: skip

    class SameOrder(DistillationTrainer):
        def _get_train_sampler(self, *args, **kwargs):
            n = settings.batch_size * accumulation
            order = [rows_of_step(step, n, len(blocks), 42) for step in range(steps)]
            return torch.cat(order).tolist()

    witness, model = Witness(), TINY.model(seed=1)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=settings.peak_lr, betas=(0.9, 0.95))
    by = settings.peak_lr, settings.warmup_fraction
    rate = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda step: learning_rate_at(min(step, steps - 1), steps, *by) / by[0]
    )
    args = arguments(
        tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=accumulation,
        max_grad_norm=settings.clip_grad or 0.0,
    )  # fmt: skip
    trainer = SameOrder(
        model, teacher_model(), args, temperature=2.0, train_dataset=blocks, callbacks=[witness],
        processing_class=TINY.tokenizer, optimizers=(adam, rate), **own,
    )  # fmt: skip
    trainer.train()
    assert len(weights) == len(witness.bits) == steps
    assert all(same(a, b[: len(a)]) for a, b in zip(weights, witness.bits, strict=True))
    lines = [line for line in trainer.state.log_history if "kd" in line]
    for line, row in zip(lines, rows, strict=True):
        for name in ("kd", "ce", *SEEN):
            own = row[name]
            assert line.get(name) == (own and pytest.approx(own, rel=1e-6)), name
    assert all(0 < line["rollout_share"] <= 1 for line in lines)


def texts_of(folder, data, deal, step=3, collator=collate, **options):
    """What stands in the rows of a step, dealt like that, and whether the student wrote it."""
    own = {name: options.pop(name) for name in OWN if name in options}
    trainer = DistillationTrainer(
        TINY.model(seed=1, spread=0.2), teacher_model(), arguments(folder, **options),
        train_dataset=data, processing_class=TINY.tokenizer, **OWN | own,
    )  # fmt: skip
    given = [collator([trainer.train_dataset[i] for i in some]) for some in deal]
    words = trainer.objective, trainer.train_dataset, given, (), TINY.tokenizer, step
    batches, sums = written_batches(*words)
    assert sums["written"] == sum(batch.written for batch in batches) > 0
    return {
        (i >= len(batch.rows) - batch.written, tuple(ids[real > 0].tolist()))
        for batch in batches
        for i, (ids, real) in enumerate(zip(batch.input_ids, batch.documents, strict=True))
    }


@pytest.mark.parametrize("data", [TINY.blocks(24), plain_rows()], ids=["blocks", "dictionaries"])
def test_what_is_written_depends_on_seed_step_and_row_alone(tmp_path, data):
    def texts(*deal, **options):
        return texts_of(tmp_path, data, deal, **options)

    whole = texts(range(8))
    assert {by_student for by_student, _ in whole} == {True, False}
    assert texts([5, 0], [7, 6, 1], [3, 2, 4]) == whole
    assert texts(range(8), step=4) != whole and texts(range(8), seed=7) != whole
    if isinstance(data, list):
        assert texts(range(4), range(4, 8), collator=left) == whole


def test_the_number_of_a_dictionary_stands_for_its_tokens(tmp_path):
    rows = [{"input_ids": [5, 9, 14, 20, 31], "labels": [-100, -100, -100, 20, 31]}] * 6
    (text,) = texts_of(tmp_path, rows, [range(6)], on_policy=1.0)
    assert text[0] and text[1][:3] == (5, 9, 14) and 4 <= len(text[1]) <= 9
    numbered = [{**row, "rows": i} for i, row in enumerate(rows)]
    assert len(texts_of(tmp_path, numbered, [range(6)], on_policy=1.0)) > 1


@pytest.mark.parametrize("data", [None, plain_rows()], ids=["blocks", "dictionaries"])
def test_resumed_it_goes_on_to_the_bit(tmp_path, data):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "data": data}
    whole, one, _ = writing(tmp_path / "a", **options)
    half = str(tmp_path / "a" / "checkpoint-2")
    rest, two, _ = writing(tmp_path / "b", resume=half, **options)
    assert same(one.bits[2:], two.bits)
    shares = [[x["rollout_share"] for x in t.state.log_history if "kd" in x] for t in (whole, rest)]
    assert shares[0] == shares[1] and 0 < sum(shares[0]) < 5


@fault(123)
def test_a_nan_in_kd_leaves_the_step_of_the_text_to_the_bit(tmp_path):
    class TextAlone(DistillationTrainer):
        def _objective(self):
            objective = super()._objective()
            objective.weights = {"ce": 0.5}
            return objective

    options = {"per_device_train_batch_size": 4}
    sick, one, stop = writing(tmp_path, Moods(teacher_model(), bad=range(99)), **options)
    witness = Witness()
    other = TextAlone(
        TINY.model(seed=1), teacher_model(), arguments(tmp_path, **options), **OWN,
        train_dataset=TINY.blocks(24), processing_class=TINY.tokenizer, callbacks=[witness],
    )  # fmt: skip
    other.train()
    assert stop is None and len(one.bits) == 4 and same(one.bits, witness.bits)
    lines = [line for line in sick.state.log_history if "kd" in line]
    assert all(math.isnan(line["kd"]) and line["guard_updates"] for line in lines)
    assert any(0 < line["rollout_share"] < 1 for line in lines)


def test_a_server_judges_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    options = {"data": plain_rows(), "max_steps": 2, "on_policy": 1.0}
    with Server(teacher_model()) as server:
        client, n = CompletionServer(server.url, server.name), n_ids(TINY.tokenizer)
        served, _, _ = writing(tmp_path, ServedTeacher(client, n, n, rounded=False), **options)
        assert len(server.asked) == 4  # two rows a step
    live, _, _ = writing(tmp_path, **options)
    found = [[x["kd"] for x in t.state.log_history if "kd" in x] for t in (served, live)]
    assert found[0] == pytest.approx(found[1], rel=1e-4) and len(found[0]) == 2


@pytest.mark.parametrize("options", [{"bf16": True}, {"torch_compile": True}], ids=str)
def test_it_writes_under_autocast_and_beside_a_compiled_backbone(tmp_path, options):
    if "torch_compile" in options:
        options = options | {"torch_compile_backend": "eager"}
    trainer, _, _ = writing(tmp_path, **options, on_policy=1.0)
    lines = [line for line in trainer.state.log_history if "kd" in line]
    assert len(lines) == 4 and all(line["rollout_share"] == 1.0 for line in lines)
    assert all("ce" not in line and math.isfinite(line["kd"]) for line in lines)


def test_what_it_cannot_be_with_is_refused(tmp_path):
    from ssl_kd.store.teacher_cache import TeacherFingerprint, identity, write

    packed = make_blocks(TINY.texts(24), TINY.tokenizer, 96, packing=True)
    several = [{"input_ids": [5, 9, 14, 20], "position_ids": [0, 1, 0, 1]}] * 8
    for data in (packed, several):
        with pytest.raises(InputError, match="a row holds several documents: put one"):
            writing(tmp_path, data=data, on_policy=1.0)
    with pytest.raises(InputError, match="give it as processing_class"):
        writing(tmp_path, processing_class=None)
    with pytest.raises(SettingsError, match="ON_POLICY an ALPHA_KD above 0"):
        trained(tmp_path, None, alpha_kd=0.0, **OWN)
    with pytest.raises(SettingsError, match="set ON_POLICY above 0"):
        writing(tmp_path, divergence="distillm2", on_policy=0.0)
    blocks = TINY.blocks(24)
    whose = identity("a", "b", TINY.tokenizer, TINY.texts(24), blocks)
    of = TeacherFingerprint(**whose, dtype="float32", method="hidden", k=None, temperature=None)
    cache = write(FrozenTeacher(teacher_model()), blocks, tmp_path / "cache", of)
    with pytest.raises(SettingsError, match="a teacher at work.*set TEACHER_CACHE to None"):
        writing(tmp_path, cache, data=blocks)


def write_on(rank, folder, world):
    """A rank of a training, as torchrun starts it; or all of it in one process."""
    options = {"optim": "sgd", "learning_rate": 0.1, "per_device_train_batch_size": 4 // world}
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # the group is there already
        options["ddp_backend"] = "gloo"
    witness = Witness()
    trainer = InOrder(
        TINY.model(seed=1), teacher_model(), arguments(folder, max_steps=3, **options), **OWN,
        train_dataset=plain_rows(), processing_class=TINY.tokenizer, callbacks=[witness],
    )  # fmt: skip
    trainer.train()
    lines = [line for line in trainer.state.log_history if "kd" in line]
    numbers = [line.get(name) for line in lines for name in ("kd", "ce", *SEEN)]
    return [x.tolist() for x in witness.bits[-1]], numbers


def test_two_processes_write_what_one_writes(tmp_path):
    told = run_ranks(write_on, 2, tmp_path, 2)
    weights, numbers = write_on(0, tmp_path, 1)
    assert told[0] == told[1] and told[0][1] == pytest.approx(numbers, rel=1e-5), told
    for a, b in zip(told[0][0], weights, strict=True):
        assert torch.allclose(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-6)
