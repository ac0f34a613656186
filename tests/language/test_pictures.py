"""Distillation of image-text models: tokens with loss, trained weights, and whole runs."""

import copy
import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForImageTextToText, AutoProcessor  # noqa: E402

from ssl_kd import Distillation  # noqa: E402
from ssl_kd.core.errors import InputError  # noqa: E402
from ssl_kd.core.settings import SettingsError  # noqa: E402
from ssl_kd.core.shards import FingerprintMismatch  # noqa: E402
from ssl_kd.language.models.frozen import FrozenTeacher  # noqa: E402
from ssl_kd.language.models.student import add_lora, freeze_tower  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.settings import LanguageSettings  # noqa: E402
from ssl_kd.language.teachers.caching import cache_teacher  # noqa: E402
from ssl_kd.language.teachers.live import Live  # noqa: E402
from ssl_kd.language.text.dataset import open_text  # noqa: E402
from ssl_kd.language.text.picture_blocks import make_picture_blocks  # noqa: E402
from ssl_kd.language.text.rows import check_ranks_see  # noqa: E402
from ssl_kd.language.train.objective import Objective  # noqa: E402
from ssl_kd.language.train.replay import replay  # noqa: E402
from ssl_kd.language.train.step import Distiller  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.faults.matrix import row as fault  # noqa: E402
from tests.language.conftest import FAST  # noqa: E402
from tests.language.test_ranks import by, metrics  # noqa: E402
from tests.language.train.test_step import Sick  # noqa: E402
from tests.marks import slow  # noqa: E402
from tests.oracles import token_objectives  # noqa: E402
from tests.tiny_vlm import (  # noqa: E402
    draw,
    folder_of,
    model_of,
    processor_of,
    records,
    write_records,
)

TOWER = {"llava": "vision_tower", "qwen2_5_vl": "visual"}
PROJECTOR = {"llava": "multi_modal_projector", "qwen2_5_vl": "merger"}
ROWS = 6


class Read:
    """Records as a processor of one kind reads them, with a teacher and a student of this kind."""

    def __init__(self, kind, folder):
        self.kind, self.folder = kind, folder
        self.processor, self.records = processor_of(kind), records(folder, ROWS)
        texts = open_text(write_records(folder / "a.jsonl", self.records), "all")
        self.blocks = make_picture_blocks(texts, self.processor, 96)

    def model(self, seed=1, layers=2):
        return model_of(self.kind, self.processor, seed, layers=layers)

    def teacher(self):
        return FrozenTeacher(self.model(seed=2, layers=3))

    def objective(self, tiny, student, teacher, images=True, **changes):
        freeze_tower(student, images=images)
        settings = tiny.settings(temperature=2.0, **changes)
        source = None if teacher is None else Live(teacher)
        return Objective(student.eval(), settings, tiny.precision, source)


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl"])
def read(request, tmp_path_factory):
    return Read(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return Read("llava", tmp_path_factory.mktemp("one"))


def is_tower(name, kind):
    return TOWER[kind] in name.split(".") and PROJECTOR[kind] not in name


def by_hand(read, student, teacher, temperature, kind):
    """Sums of ce and kd, and their number, in float64: a row at a time, as the processor gives it.

    The prompt is what the template makes without the answer; whatever comes after it is learned.
    """
    ce, kd, n = torch.zeros(()).double(), torch.zeros(()).double(), 0
    for record in read.records:
        messages = record["messages"]
        images = [
            draw(read.folder / part["path"], int(part["path"][0]) + int(part["path"][2]))
            for part in messages[0]["content"]
            if part["type"] == "image"
        ]
        texts = [
            read.processor.tokenizer.apply_chat_template(
                some, chat_template=read.processor.chat_template, tokenize=False, **options
            )
            for some, options in ((messages[:1], {"add_generation_prompt": True}), (messages, {}))
        ]
        asked, whole = (
            read.processor(
                text=[text], images=images or None, add_special_tokens=False, return_tensors="pt"
            )
            for text in texts
        )
        first, ids = asked["input_ids"].shape[1], whole["input_ids"][0]
        own, theirs = (m(**whole, use_cache=False).logits[0] for m in (student, teacher))
        for place in range(first, len(ids)):
            z, t = own[place - 1], theirs[place - 1].detach()
            ce = ce - z.log_softmax(-1)[ids[place]]
            log_p, log_q = ((x / temperature).log_softmax(-1) for x in (t, z))
            kd = kd + temperature**2 * token_objectives.divergence_of(kind, log_p, log_q)
            n += 1
    return ce, kd, n


# --- the numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_losses_and_gradients_equal_those_by_hand_in_float64(read, tiny, divergence):
    student, teacher = read.model(), read.teacher()
    objective = read.objective(tiny, student, teacher, divergence=divergence)
    copies = (copy.deepcopy(student).double(), copy.deepcopy(teacher.model).double())
    ce, kd, n = by_hand(read, *copies, 2.0, divergence)
    batch = read.blocks.batch(range(ROWS))
    terms = objective.terms(batch)
    assert objective.counts([batch]) == {"ce": n, "kd": n}
    assert terms["ce"].item() == pytest.approx(ce.item(), rel=1e-5)
    assert terms["kd"].item() == pytest.approx(kd.item(), rel=1e-4)
    (terms["ce"] + terms["kd"]).backward()
    (ce + kd).backward()
    wanted = {name: p.grad for name, p in copies[0].named_parameters()}
    largest = max(g.abs().max() for g in wanted.values() if g is not None)
    for name, p in student.named_parameters():
        if wanted[name] is None:
            assert p.grad is None or not p.grad.any(), name
            continue
        torch.testing.assert_close(
            p.grad.double(), wanted[name], rtol=1e-3, atol=float(1e-5 * largest), msg=name
        )


def test_the_projector_learns_and_the_tower_is_frozen(read, tiny):
    student = read.model()
    objective = read.objective(tiny, student, read.teacher())
    objective.terms(read.blocks.batch(range(ROWS)))["kd"].backward()
    moved = {name for name, p in student.named_parameters() if p.grad is not None and p.grad.any()}
    assert any(PROJECTOR[read.kind] in name for name in moved)
    assert any("language_model" in name for name in moved) and any("lm_head" in n for n in moved)
    assert not any(is_tower(name, read.kind) for name in moved)
    blind = read.model()
    freeze_tower(blind, images=False)
    trained = [name for name, p in blind.named_parameters() if p.requires_grad]
    assert trained and not any("language_model" not in n and "lm_head" not in n for n in trained)


@fault(141)
def test_a_nan_of_the_teacher_leaves_a_step_of_cross_entropy_alone(read, tiny):
    def stepped(source, **changes):
        student = read.model()
        freeze_tower(student, images=True)
        distiller = Distiller(student, tiny.settings(**changes), tiny.precision, source)
        batches = [read.blocks.batch(rows) for rows in ([0, 1, 2], [3, 4, 5])]
        result = distiller.step(batches, 1e-2)
        return result, [p.detach().clone() for p in student.parameters()]

    sick, ours = stepped(Live(Sick(read.teacher())))
    alone, theirs = stepped(None, alpha_kd=0.0)
    assert sick.updated and math.isnan(sick.kd) and same(ours, theirs)
    assert not same(ours, [*read.model().parameters()]) and sick.ce == alone.ce


# --- students -------------------------------------------------------------------------------------


def test_adapters_leave_the_tower_alone(read):
    student = read.model()
    freeze_tower(student, images=True)
    names = [n for n, p in add_lora(student, 2).named_parameters() if p.requires_grad]
    assert any("language_model" in name for name in names)
    assert any(PROJECTOR[read.kind] in name for name in names)
    assert not any(is_tower(name, read.kind) or "lm_head" in name for name in names)


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A teacher of each kind, and one that reads text alone, made when they are asked for."""
    root = tmp_path_factory.mktemp("seeing")

    def get(kind, **changes):
        path = root / "-".join([kind, *map(str, changes.values())])
        return str(path) if path.exists() else folder_of(path, kind, **changes)

    return get


@pytest.fixture
def settings(tmp_path, folders):
    records(tmp_path, 36)
    data = write_records(tmp_path / "images.jsonl", records(tmp_path, 36))

    def change(kind="llava", **changes):
        own = {"data_path": data, "runs_dir": str(tmp_path / "runs"), "run_name": "a"}
        own |= {"teacher_model": folders(kind), "student_model": "layers:1", "block_size": 96}
        own |= {"max_steps": 4, "eval_every": 2}
        return LanguageSettings(**{**FAST, **own, **changes})

    return change


def weights(path):
    return load_file(path / "student" / "model.safetensors")


@pytest.mark.parametrize("kind", ["llava", slow("qwen2_5_vl")])
def test_a_run_by_the_command_line_and_its_student_is_a_model_with_a_processor(
    kind, tmp_path, folders, monkeypatch
):
    from ssl_kd.cli import main

    write_records(tmp_path / "images.jsonl", records(tmp_path, 24))
    monkeypatch.chdir(tmp_path)
    flags = "distill --student_model layers:2 --data_path images.jsonl --block_size 96 --max_steps"
    flags += " 4 --batch_size 4 --eval_every 2 --generations 1 --max_new_tokens 3 --run_name a"
    assert main([*flags.split(), "--teacher_model", folders(kind)]) in (0, None)
    path = tmp_path / "runs" / "a"
    row = {r["name"]: r for r in metrics(path)["table"]}
    assert row["student"]["kl"] is not None and metrics(path)["learned_from"] == {"ce": 4, "kd": 4}

    student: Any = AutoModelForImageTextToText.from_pretrained(path / "student").eval()
    processor = AutoProcessor.from_pretrained(path / "student")
    messages = records(tmp_path, 3)[2]["messages"][:1]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images = [draw(tmp_path / f"2-{k}.png", 2 + k) for k in range(2)]
    inputs = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
    out = student.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert out.shape[1] > inputs["input_ids"].shape[1]
    assert "image-text-to-text" in (path / "student" / "README.md").read_text()
    teacher, ours = load_file(Path(folders(kind)) / "model.safetensors"), weights(path)
    for name, value in ours.items():
        if is_tower(name, kind):
            assert torch.equal(value, teacher[name]), name
    assert any(PROJECTOR[kind] in n and not torch.equal(v, teacher[n]) for n, v in ours.items())


@fault(140)
def test_other_images_are_refused_on_a_resume(settings, tmp_path):
    from ssl_kd.core.runs.folder import RunFolderError

    run(settings(max_steps=2))
    draw(tmp_path / "1-0.png", 4)
    with pytest.raises(RunFolderError):
        run(settings(resume=True))


def test_a_cache_stands_in_for_the_teacher_and_knows_its_images(settings, tmp_path):
    cached = {"teacher_cache": str(tmp_path / "cache"), "cache_method": "hidden"}
    live = run(settings(run_name="live"))
    cache_teacher(settings(**cached))
    path = run(settings(**cached))
    for one, other in zip(metrics(path)["table"], metrics(live)["table"], strict=True):
        assert one["nll"] == pytest.approx(other["nll"], abs=1e-3), one["name"]
    assert metrics(path)["learned_from"] == {"ce": 4, "kd": 4}
    draw(tmp_path / "1-0.png", 4)
    with pytest.raises(FingerprintMismatch):
        run(settings(**cached, run_name="other"))


def test_from_python_with_images_in_memory(tmp_path, monkeypatch, llava):
    monkeypatch.chdir(tmp_path)
    texts = [
        {"prompt": f"What is {i}?", "completion": " a fox", "image": draw(tmp_path / "x.png", i)}
        for i in range(24)
    ]
    pair = llava.model(seed=2), llava.processor
    options = {**FAST, "block_size": 64, "max_steps": 2, "eval_every": 2}
    made = Distillation(pair, "layers:1", texts, **options).run()
    assert made.processor.image_token == "<image>"
    kept = [*Path("data/texts/images").glob("*.png")]
    assert len(kept) > 6 and all(file.read_bytes()[1:4] == b"PNG" for file in kept)


def test_a_fault_is_replayed_with_its_images(settings, monkeypatch, folders, tmp_path):
    folder = Path(shutil.copytree(folders("llava"), tmp_path / "sick"))
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("projector.linear_2.weight"))
    tensors[name][3] = math.nan  # no row without an image meets it
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    judged = "ssl_kd.language.run.judge_teachers"
    monkeypatch.setattr(
        judged, lambda task: (task, [{"name": "teacher"}], {"teacher": ["unheard"]})
    )
    student = folders("llava", seed=3)
    path = run(settings(teacher_model=str(folder), student_model=student, max_steps=1))
    report = replay(next((path / "faults").glob("kd-*.safetensors")))
    assert report.reproduced and "projector" in str(report)


@pytest.mark.slow
def test_two_processes_learn_what_one_does(settings, tmp_path, llava):
    every = write_records(
        tmp_path / "every.jsonl", records(tmp_path, 24, images=lambda i: 1 + i % 2)
    )
    one, two = (by(world, settings(data_path=every, run_name=str(world))) for world in (1, 2))
    for ours, theirs in zip(metrics(one)["table"], metrics(two)["table"], strict=True):
        assert ours["nll"] == pytest.approx(theirs["nll"], rel=1e-5)
    with pytest.raises(SettingsError, match="some records have no image"):
        check_ranks_see(llava.blocks, 2)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"teacher_model": "train"}, "images, first in images.jsonl:.*TEACHER_MODEL is 'train'"),
        ({"student_model": "fresh:1x16"}, "reads only text: set it to layers:N"),
        ({"align": "chunks"}, "ALIGN is 'chunks': set it to 'auto'"),
        ({"on_policy": 0.5}, "ON_POLICY supports only text: set it to 0"),
        ({"teacher_text": 0.5}, "TEACHER_TEXT supports only text: set it to 0"),
    ],
)
def test_settings_that_do_not_go_with_images_are_refused(settings, changes, words):
    with pytest.raises(SettingsError, match=words):
        run(settings(**changes))
    assert not Path(settings().runs_dir, "a").exists()


@fault(140)
def test_models_that_do_not_see_the_same_are_refused(settings, folders, tiny, tmp_path):
    text = tiny.folder(tmp_path / "text", tokenizer=processor_of("llava").tokenizer)
    with pytest.raises(InputError, match=f"the student {text} reads only text: use a model"):
        run(settings(student_model=text))
    with pytest.raises(SettingsError, match=f"the teacher {text} reads only text"):
        run(settings(teacher_model=text, student_model=folders("llava")))
    other = Path(shutil.copytree(folders("llava"), tmp_path / "other"))
    processor = processor_of("llava")
    processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    processor.save_pretrained(other)
    with pytest.raises(SettingsError, match=r"prepare images differently \(image_mean"):
        run(settings(student_model=str(other)))
    bare = Path(shutil.copytree(folders("llava"), tmp_path / "bare"))
    (bare / "processor_config.json").unlink()
    with pytest.raises(SettingsError, match="has no readable processor"):
        run(settings(student_model=str(bare)))


@fault(139)
def test_bad_images_are_logged_and_the_run_continues(settings, tmp_path, caplog):
    (tmp_path / "1-0.png").write_bytes(b"no image")
    (tmp_path / "2-0.png").unlink()
    with caplog.at_level(logging.INFO):
        path = run(settings(max_steps=2))
    left_out = json.loads((path / "config.json").read_text())["data"]["left_out"]
    text = "\n".join(left_out)
    assert "images.jsonl:3: the image 2-0.png cannot be read" in text or "images.jsonl:2" in text
    assert "left out" in caplog.text
