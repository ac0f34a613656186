"""The Trainer whose student writes rows itself: the own loop's steps, whoever deals them."""

import math

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
from tests import test_hf_distillation as hf  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.faults.matrix import row as fault  # noqa: E402
from tests.ranks import as_torchrun, run_ranks  # noqa: E402
from tests.served import Server  # noqa: E402
from tests.test_hf_distillation import TINY, Witness, arguments, samples, teacher_model  # noqa: E402

OWN = {"on_policy": 0.5, "prompt_tokens": 4, "rollout_tokens": 6}
SEEN = ("rollout_share", "rollout_tokens", "rollout_ended")
PLAIN = samples(24, low=6)


def writing(folder, teacher=None, data=None, **options):
    given = {"processing_class": TINY.tokenizer, "data": data or TINY.blocks(24), **OWN}
    return hf.trained(folder, teacher or teacher_model(), **given | options)


def made(
    folder, data, of=DistillationTrainer, model=None, callbacks=(), optimizers=None, **options
):
    own = OWN | {name: options.pop(name) for name in (*OWN, "divergence") if name in options}
    return of(
        model or TINY.model(seed=1), teacher_model(), arguments(folder, **options),
        train_dataset=data, processing_class=TINY.tokenizer, callbacks=[*callbacks],
        optimizers=optimizers or (None, None), **own,
    )  # fmt: skip


def lines_of(trainer):
    return [line for line in trainer.state.log_history if "kd" in line]


@pytest.mark.parametrize(("own", "accumulation"), [
    ({}, 2),
    ({"divergence": "distillm2", "on_policy": 1.0}, 1),
    ({"divergence": "reverse_kl", "on_policy": 1.0}, 1),
], ids=str)  # fmt: skip
def test_each_step_is_that_of_the_own_loop_to_the_bit(tmp_path, own, accumulation):
    blocks, steps, weights, rows = TINY.blocks(), 4, [], []
    options = {"gradient_accumulation_steps": accumulation, "seed": 42, "temperature": 1.0}
    one, two = (
        TINY.distiller(FrozenTeacher(teacher_model()), **options, **OWN | own) for _ in "ab"
    )
    take(
        one, blocks, steps, written=writer(one, blocks, TINY.tokenizer), on_log=rows.append,
        on_step=lambda *_: weights.append([p.detach().clone() for p in one.student.parameters()]),
    )  # fmt: skip

    class SameOrder(DistillationTrainer):
        def _get_train_sampler(self, *args, **kwargs):
            order = [rows_of_step(step, 4 * accumulation, len(blocks), 42) for step in range(steps)]
            return torch.cat(order).tolist()

    peak, witness = one.settings.peak_lr, Witness()
    for group in two.optimizer.param_groups:
        group["lr"] = peak
    rate = torch.optim.lr_scheduler.LambdaLR(two.optimizer, lambda step: learning_rate_at(
        min(step, steps - 1), steps, peak, one.settings.warmup_fraction) / peak)  # fmt: skip
    trainer = made(
        tmp_path, blocks, SameOrder, two.student, [witness], (two.optimizer, rate), **own,
        max_grad_norm=one.settings.clip_grad or 0.0, per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    trainer.train()
    assert len(weights) == len(witness.bits) == steps
    assert all(same(a, b[: len(a)]) for a, b in zip(weights, witness.bits, strict=True))
    for line, row in zip(lines_of(trainer), rows, strict=True):
        assert 0 < line["rollout_share"] <= 1
        for name in ("kd", "ce", *SEEN):
            assert line.get(name) == (row[name] and pytest.approx(row[name], rel=1e-6)), name


def texts_of(folder, data, *deal, step=3, collator=collate, **options):
    """What stands in the rows of a step, dealt like that, and whether the student wrote it."""
    trainer = made(folder, data, model=TINY.model(seed=1, spread=0.2), **options)
    given = [collator([trainer.train_dataset[i] for i in some]) for some in deal]
    words = trainer.objective, trainer.train_dataset, given, (), TINY.tokenizer, step
    batches, sums = written_batches(*words)
    assert sums["written"] == sum(batch.written for batch in batches) > 0
    return {
        (i >= len(batch.rows) - batch.written, tuple(ids[real > 0].tolist()))
        for batch in batches
        for i, (ids, real) in enumerate(zip(batch.input_ids, batch.documents, strict=True))
    }


@pytest.mark.parametrize("data", [TINY.blocks(24), PLAIN], ids=["blocks", "dictionaries"])
def test_what_is_written_depends_on_seed_step_and_row_alone(tmp_path, data):
    whole = texts_of(tmp_path, data, range(8))
    assert {by_student for by_student, _ in whole} == {True, False}
    assert texts_of(tmp_path, data, [5, 0], [7, 6, 1], [3, 2, 4]) == whole
    assert texts_of(tmp_path, data, range(8), step=4) != whole
    assert texts_of(tmp_path, data, range(8), seed=7) != whole
    if isinstance(data, list):
        assert texts_of(tmp_path, data, range(4), range(4, 8), collator=hf.left) == whole


def test_the_number_of_a_dictionary_stands_for_its_tokens(tmp_path):
    rows = [{"input_ids": [5, 9, 14, 20, 31], "labels": [-100, -100, -100, 20, 31]}] * 6
    (text,) = texts_of(tmp_path, rows, range(6), on_policy=1.0)
    assert text[0] and text[1][:3] == (5, 9, 14) and 4 <= len(text[1]) <= 9
    numbered = [{**row, "rows": i} for i, row in enumerate(rows)]
    assert len(texts_of(tmp_path, numbered, range(6), on_policy=1.0)) > 1


@pytest.mark.parametrize("options", [
    {}, {"data": PLAIN, "bf16": True}, {"torch_compile": True, "torch_compile_backend": "eager"},
], ids=["blocks", "dictionaries", "compiled"])  # fmt: skip
def test_resumed_it_goes_on_to_the_bit(tmp_path, options):
    options = options | {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    whole, one, _ = writing(tmp_path / "a", **options)
    half = str(tmp_path / "a" / "checkpoint-2")
    rest, two, _ = writing(tmp_path / "b", resume=half, **options)
    assert same(one.bits[2:], two.bits)
    shares = [[line["rollout_share"] for line in lines_of(t)] for t in (whole, rest)]
    assert shares[0] == shares[1] and 0 < sum(shares[0]) < 5


@fault(123)
def test_a_nan_in_kd_leaves_the_step_of_the_text_to_the_bit(tmp_path):
    options = {"per_device_train_batch_size": 4}
    bad = hf.Moods(teacher_model(), bad=range(99))
    sick, one, _ = writing(tmp_path, bad, **options)
    other = made(tmp_path, TINY.blocks(24), callbacks=[witness := Witness()], **options)
    other.objective.weights = {"ce": 0.5}
    other.train()
    assert len(one.bits) == 4 and same(one.bits, witness.bits)
    assert all(math.isnan(line["kd"]) and line["guard_updates"] for line in lines_of(sick))
    assert any(0 < line["rollout_share"] < 1 for line in lines_of(sick))


def test_a_server_judges_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    options = {"data": PLAIN, "max_steps": 2, "on_policy": 1.0}
    with Server(teacher_model()) as server:
        client, n = CompletionServer(server.url, server.name), n_ids(TINY.tokenizer)
        served, _, _ = writing(tmp_path, ServedTeacher(client, n, n, rounded=False), **options)
        assert len(server.asked) == 4  # two rows a step
    live, _, _ = writing(tmp_path, **options)
    found = [[line["kd"] for line in lines_of(trainer)] for trainer in (served, live)]
    assert found[0] == pytest.approx(found[1], rel=1e-4) and len(found[0]) == 2
    assert not any("ce" in line for line in lines_of(live))  # there was no text


def test_what_it_cannot_be_with_is_refused(tmp_path):
    packed = make_blocks(TINY.texts(24), TINY.tokenizer, 96, packing=True)
    several = [{"input_ids": [5, 9, 14, 20], "position_ids": [0, 1, 0, 1]}] * 8
    cache = hf.cached(tmp_path, TINY.blocks(24), **hf.HIDDEN)
    for options, said in (
        ({"data": packed}, "a row holds several documents: put one"),
        ({"data": several}, "a row holds several documents: put one"),
        ({"processing_class": None}, "give it as processing_class"),
        ({"processing_class": "tokens"}, "names no token that ends a text"),
        ({"divergence": "distillm2", "on_policy": 0.0}, "set on_policy above 0"),
        ({"alpha_kd": 0.0}, "on_policy an alpha_kd above 0"),
        ({"teacher": cache}, "a teacher at work.*set teacher_cache to None"),
    ):
        with pytest.raises((InputError, SettingsError), match=said):
            writing(tmp_path, **options)


def write_on(rank, folder, world):
    """A rank of a training, as torchrun starts it; or all of it in one process."""
    options = {"optim": "sgd", "learning_rate": 0.1, "per_device_train_batch_size": 4 // world}
    if world > 1:
        as_torchrun(rank, world)
        options["ddp_backend"] = "gloo"
    trainer = made(folder, PLAIN, hf.InOrder, callbacks=[w := Witness()], max_steps=3, **options)
    trainer.train()
    numbers = [line.get(name) for line in lines_of(trainer) for name in ("kd", "ce", *SEEN)]
    return [x.tolist() for x in w.bits[-1]], numbers


def test_two_processes_write_what_one_writes(tmp_path):
    told = run_ranks(write_on, 2, tmp_path, 2)
    weights, numbers = write_on(0, tmp_path, 1)
    assert told[0] == told[1] and told[0][1] == pytest.approx(numbers, rel=1e-5), told
    for a, b in zip(told[0][0], weights, strict=True):
        assert torch.allclose(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-6)
