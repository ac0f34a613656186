"""Continuations by the student or the teacher: sampling, targets, and faults."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from firstnan import TooFewHealthyParts  # noqa: E402
from ssl_kd.core.errors import InputError  # noqa: E402
from ssl_kd.core.settings import SettingsError  # noqa: E402
from ssl_kd.language import rollouts as rollouts_module  # noqa: E402
from ssl_kd.language.models.frozen import FrozenTeacher  # noqa: E402
from ssl_kd.language.prepare import prepare  # noqa: E402
from ssl_kd.language.rollouts import Sampler, prompt_length, rollout_batches  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.text.blocks import Blocks  # noqa: E402
from ssl_kd.language.train.loop import train  # noqa: E402
from ssl_kd.language.train.replay import replay  # noqa: E402
from ssl_kd.language.train.step import precision_of  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.faults.matrix import row as fault  # noqa: E402
from tests.oracles import token_objectives as oracle  # noqa: E402

CPU = torch.device("cpu")
END = 1


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch):
    """Rows are short."""
    monkeypatch.setattr("ssl_kd.language.rollouts.PROMPT_TOKENS", 4)


@pytest.fixture
def model(tiny):
    """A model whose next token is far from certain, and depends on the prompt."""
    return tiny.model(spread=0.3)


@pytest.fixture
def make(tiny):
    """A distiller with a live teacher, and who writes its batches."""

    def get(student=None, **changes):
        options = {"on_policy": 0.5, "max_new_tokens": 6, **changes}
        teacher = FrozenTeacher(tiny.model(spread=0.3))
        distiller = tiny.distiller(teacher, student, **options)
        return distiller, rollout_batches(distiller, tiny.blocks(), tiny.tokenizer)

    return get


class FixedRollouts:
    """Rollouts that are given, in the order of the prompts."""

    def __init__(self, *texts):
        self.texts = texts

    def __call__(self, prompts, rooms, seeds):
        return [list(text)[:room] for text, room in zip(self.texts, rooms, strict=False)]


class EmptyRollouts:
    """Rollouts without a token."""

    def __call__(self, prompts, rooms, seeds):
        return [[] for _ in prompts]


# --- what is drawn --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_token_frequencies_match_the_model(model, temperature):
    n, prompt = 2000, [5, 9, 14]
    draw = Sampler(model, [END], temperature=temperature, batch_size=500)
    found = torch.tensor([row[0] for row in draw([prompt] * n, [1] * n, list(range(n)))])
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1].double()
    p = (logits / temperature).softmax(-1)
    seen = torch.bincount(found, minlength=len(p)) / n
    error = (p * (1 - p) / n).sqrt()
    assert p.max() < 0.9 and bool(((seen - p).abs() <= 5 * error + 1 / n).all())


def test_temperature_0_takes_the_likeliest(model):
    prompts = [[5, 9, 14], [7], [3, 3]]
    found = Sampler(model, [END], temperature=0)(prompts, [5, 5, 2], [1, 2, 3])
    for prompt, new in zip(prompts, found, strict=True):
        ids = list(prompt)
        for token in new:
            with torch.no_grad():
                assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
    assert len(found[2]) <= 2


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_a_row_is_the_same_in_any_company(tiny, kind):
    """Padded on the left, with absolute positions, and beside rows of another room."""
    model = tiny.model(kind, seed=2, spread=0.2)
    prompts = [[5, 9, 14, 20, 31], [7], list(range(3, 120)), [40, 41]]
    rooms, seeds = [10, 12, 11, 3], [11, 12, 13, 14]
    together = Sampler(model, [END], batch_size=4)(prompts, rooms, seeds)
    alone = Sampler(model, [END], batch_size=1)
    for i, new in enumerate(together):
        assert alone([prompts[i]], [rooms[i]], [seeds[i]]) == [new]
        assert 1 <= len(new) <= rooms[i] and END not in new[:-1]
    assert Sampler(model, [END])(prompts, rooms, [s + 100 for s in seeds]) != together


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_the_vocabulary_is_never_drawn(tiny, make, temperature):
    """A student of another padding than its teacher must not say what that cannot read."""
    student = tiny.model(seed=1, vocab_size=400)
    bias = torch.zeros(400)
    bias[320:] = 50.0
    student.lm_head = _Biased(student.lm_head, bias)
    distiller, written = make(student, on_policy=1.0, rollout_temperature=temperature)
    batches, sums = written.batches(0, [torch.arange(4)], CPU)
    assert int(batches[0].input_ids.max()) < 320 and sums["tokens"] >= 4
    assert math.isfinite(distiller.step(batches, 1e-3).kd)


class _Biased(nn.Module):
    def __init__(self, head, bias):
        super().__init__()
        self.head, self.bias, self.weight = head, bias, head.weight

    def forward(self, x):
        return self.head(x) + self.bias


def test_sampling_ignores_generation_settings_and_global_generators(model):
    plain = Sampler(model, [END])([[5, 9]], [8], [3])
    config = model.generation_config
    config.repetition_penalty, config.top_k, config.do_sample = 9.0, 1, True
    model.train()
    dice = torch.get_rng_state()
    assert Sampler(model, [END])([[5, 9]], [8], [3]) == plain
    assert torch.equal(dice, torch.get_rng_state())
    assert model.generation_config is config and model.training


# --- which rows, and what of them counts ----------------------------------------------------------


def test_the_prompt_is_the_part_without_loss(tiny, monkeypatch):
    blocks = tiny.blocks()
    length = int((blocks.documents[0] > 0).sum())
    assert prompt_length(blocks, 0) == 4
    monkeypatch.setattr("ssl_kd.language.rollouts.PROMPT_TOKENS", 1000)
    assert prompt_length(blocks, 0) == length - 1
    counts = blocks.counts.clone()
    counts[0, :7] = False
    assert prompt_length(replace(blocks, counts=counts), 0) == 7
    counts[0] = False  # a prompt alone
    assert prompt_length(replace(blocks, counts=counts), 0) == length


def test_a_batch_is_text_first_and_of_the_rest_the_continuations_alone_count(make, tiny):
    distiller, written = make()
    rows = torch.arange(16)
    (batch,), sums = written.batches(3, [rows], CPU)
    mine = [row for row in range(16) if written.chosen(3, row)]
    text = [row for row in range(16) if row not in mine]
    assert 0 < len(mine) == batch.written < 16 and batch.rows.tolist() == text + mine
    plain = tiny.blocks().batch(text)
    width = plain.input_ids.shape[1]
    assert torch.equal(batch.input_ids[: len(text), :width], plain.input_ids)
    assert torch.equal(batch.counts[: len(text), :width], plain.counts)
    assert not batch.counts[: len(text), width:].any()
    new = batch.counts[len(text) :]
    assert not new[:, :4].any() and bool(new[:, 4].all()) and int(new.sum()) == sums["tokens"]
    assert int(new.sum(1).max()) <= 6
    prompts = tiny.blocks().ids[mine, :4]
    assert torch.equal(batch.input_ids[len(text) :, :4], prompts)
    assert sums["rows"] == 16 and sums["written"] == len(mine) and sums["ended"] <= len(mine)


def test_rollouts_depend_on_step_and_row_only(make):
    _, written = make(on_policy=1.0)
    (whole,), _ = written.batches(2, [torch.arange(6)], CPU)
    dealt, _ = written.batches(2, [torch.tensor([4, 1]), torch.tensor([3])], CPU)
    for batch in dealt:
        for i, row in enumerate(batch.rows.tolist()):
            n = int((batch.documents[i] > 0).sum())
            assert torch.equal(batch.input_ids[i, :n], whole.input_ids[row, :n])
    (later,), _ = written.batches(3, [torch.arange(6)], CPU)
    assert not torch.equal(later.input_ids, whole.input_ids)


def test_a_row_has_num_generations_continuations_whatever_the_other_rows(make, tiny):
    def texts(rows, n):
        student = tiny.model(seed=3, spread=0.3)
        distiller, written = make(student, on_policy=1.0, num_generations=n)
        (batch,), sums = written.batches(2, [torch.tensor(rows)], CPU)
        assert batch.rows.tolist() == [row for row in rows for _ in range(n)]
        assert sums["written"] == sums["rows"] and distiller.step([batch], 1e-3).learned("kd")
        return [tuple(batch.input_ids[i][batch.counts[i]].tolist()) for i in range(batch.written)]

    both = texts([4, 1], 3)
    assert len({*both}) == 6 and texts([1], 2) == both[3:5] and texts([1], 1) == both[3:4]


def test_a_prompt_that_leaves_no_room_is_refused(make):
    _, written = make(on_policy=1.0)
    blocks = written.blocks
    full = torch.ones_like(blocks.documents)
    written.blocks = replace(blocks, counts=torch.zeros_like(blocks.counts), documents=full)
    with pytest.raises(
        InputError, match="the prompt of row 3 fills all 24 tokens .*shorten the prompt"
    ):
        written.batches(0, [torch.tensor([3])], CPU)


# --- the numbers of a step ------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    {"divergence": "reverse_kl"},
    {"divergence": "js:0.2"},
    {"divergence": "distillm2"},
    {"divergence": "distillm2", "on_policy": 1.0},
    {"divergence": "reverse_kl", "on_policy": 1.0, "alpha_kd": 0.7},
], ids=str)  # fmt: skip
def test_a_step_equals_the_same_step_by_hand_in_float64(make, changes):
    distiller, written = make(temperature=1.5, clip_grad=None, **changes)
    (batch,), _ = written.batches(1, [torch.arange(4, 9)], CPU)
    text = len(batch.rows) - batch.written
    assert batch.written and (text or changes.get("on_policy") == 1.0)
    is_contrastive = changes["divergence"] == "distillm2"
    assert len(batch.rows) == 5 + (batch.written if is_contrastive else 0)
    models = distiller.student, distiller.teacher.models["teacher"]
    exact, ce, kd, n = oracle.step(*models, batch, distiller.settings, text)

    distiller._count([batch])
    terms = distiller.terms(batch)
    divisor = distiller.counts([batch])["kd"]
    loss = sum(distiller.weighted(terms).values()) / divisor
    loss.backward()
    assert divisor == n and terms["kd"].item() / n == pytest.approx(kd, rel=1e-4)
    assert terms["ce"].item() / n == pytest.approx(ce, rel=1e-5)
    for p, wanted in zip(distiller.student.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), wanted.grad, rtol=1e-3, atol=2e-6)
    distiller.optimizer.zero_grad()
    result = distiller.step([batch], 1e-3)
    assert result.updated and result.tokens == n
    if text:
        of_text = batch.text_tokens / n
        assert result.ce == pytest.approx(ce / of_text, rel=1e-4)
    else:
        assert result.ce is None and "ce" not in distiller.weights
    assert result.kd == pytest.approx(kd, rel=1e-4)


# --- nothing, and what is sick --------------------------------------------------------------------


@fault(117)
def test_a_row_that_ends_at_once_teaches_its_end(make):
    distiller, written = make(on_policy=1.0)
    written.sample = FixedRollouts([END], [END])
    batches, sums = written.batches(0, [torch.tensor([0, 1])], CPU)
    assert sums["tokens"] == sums["ended"] == 2
    result = distiller.step(batches, 1e-3)
    assert result.updated and result.tokens == 2 and math.isfinite(result.kd) and result.kd > 0


@fault(117)
def test_a_step_without_a_token_is_skipped_and_logged(make):
    distiller, written = make(on_policy=1.0)
    distiller.step(written.batches(0, [torch.arange(4)], CPU)[0], 1e-2)  # there are moments now
    before = copy.deepcopy((distiller.student.state_dict(), distiller.optimizer.state_dict()))
    written.sample = EmptyRollouts()
    result = distiller.step(written.batches(1, [torch.arange(4)], CPU)[0], 1e-2)
    assert not result.updated and result.tokens == 0 and result.ce is None and result.kd is None
    after = distiller.student.state_dict(), distiller.optimizer.state_dict()
    before[1]["param_groups"] = after[1]["param_groups"]
    assert same(before[0], dict(after[0])) and same(before[1]["state"], after[1]["state"])
    (event,) = distiller.guard.events.events
    assert (event.step, event.reason, event.action) == (2, "no target token", "skipped")
    assert distiller.guard.steps == 2 and distiller.learned == {"kd": 1}


@fault(117)
def test_a_run_whose_rollouts_are_all_empty_fails(make, tiny):
    distiller, written = make(on_policy=1.0)
    written.sample, rows = EmptyRollouts(), []
    with pytest.raises(TooFewHealthyParts, match="none of the 3 steps changed the student"):
        train(distiller, tiny.blocks(), 3, rollouts=written, on_log=rows.append)
    assert [row["kd"] for row in rows] == [None] * 3
    assert all(json.dumps(row, allow_nan=False) for row in rows)
    assert [row["rollout_tokens"] for row in rows] == [0.0] * 3


@fault(118)
def test_a_student_of_nan_logits_is_found_by_the_guard_and_stops_the_run(make, tiny):
    distiller, written = make(on_policy=1.0, stop_after=3, student=tiny.model(seed=1))
    distiller.student.model.norm.register_forward_hook(lambda m, args, out: out * math.nan)
    with pytest.raises(TooFewHealthyParts):
        train(distiller, tiny.blocks(), 9, rollouts=written)
    events = distiller.guard.events.events
    assert distiller.guard.steps == 3 and not any(distiller.learned.values())
    assert written.sample.sick == 3 * distiller.settings.batch_size
    assert any(event.part == "kd" and event.stage == "loss" for event in events), events
    event = next(e for e in events if e.action == "explained")
    assert "student" in event.reason or "norm" in event.reason, event


# --- whole runs -----------------------------------------------------------------------------------

OWN = {"on_policy": 0.5, "max_new_tokens": 6}


def test_a_stopped_run_resumes_with_the_same_numbers(make, tiny):
    stop, blocks, steps, rows = (
        4,
        tiny.blocks(),
        {"whole": [], "part": []},
        {"whole": [], "part": []},
    )

    def student():
        return tiny.model("GPT2", seed=1, resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)

    def calls(name):
        return {
            "on_step": lambda step, result: steps[name].append((step, result)),
            "on_log": lambda row: rows[name].append({**row, "tokens_per_second": 0}),
        }

    one, written = make(student(), log_every=3, num_generations=2)
    train(one, blocks, 6, rollouts=written, **calls("whole"))
    two, written = make(student(), log_every=3, num_generations=2)
    stops = {"should_stop": lambda: len(steps["part"]) == stop, **calls("part")}
    train(two, blocks, 6, rollouts=written, **stops)
    three, written = make(student(), log_every=3, num_generations=2)
    three.load(copy.deepcopy(two.state()))
    torch.manual_seed(99)
    train(three, blocks, 6, start=stop, rollouts=written, **calls("part"))
    assert same(one.student.state_dict(), three.student.state_dict())
    assert steps["part"] == steps["whole"] and rows["part"] == rows["whole"]
    assert 0 < rows["whole"][0]["rollout_share"] < 1
    assert 1 <= rows["whole"][0]["rollout_tokens"] <= 6


def lines(path, name):
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


@pytest.mark.parametrize("changes", [
    {"lora_rank": 2, "student_model": "layers:1", "gradient_accumulation_steps": 2},
    {"divergence": "distillm2", "on_policy": 1.0, "teacher_text": 1.0},
    {"model_dtype": "float16", "gradient_checkpointing": True},
    {"on_policy": 1.0, "teacher_model": "mixture", "router_mode": "sar", "router_lr": 1e-2},
], ids=lambda changes: " ".join(changes))  # fmt: skip
def test_a_run_learns_from_rollouts(settings, models, tmp_path, monkeypatch, float16_here, changes):
    monkeypatch.chdir(tmp_path)
    if "teacher_model" in changes:
        changes = changes | {"teacher_model": models(changes["teacher_model"])}
    path = run(settings(**{**OWN, "max_steps": 3, **changes}))
    metrics = json.loads((path / "metrics.json").read_text())
    assert metrics["success_rate"] == 1.0 and not lines(path, "events.jsonl")
    own = changes.get("on_policy", 0.5)
    for row in lines(path, "metrics.jsonl"):
        if "eval" not in row:
            assert math.isfinite(row["kd"]) and ("rollout_share" in row) == bool(own)
            assert (row["ce"] is None) == (own == 1.0 and "divergence" not in changes)
    if own == 1.0 and "divergence" not in changes:  # the last, whatever the text says
        assert metrics["best_step"] == 3
    students = [row for row in metrics["table"] if row["name"] == "student"]
    assert math.isfinite(students[0]["perplexity"])


def test_the_teachers_text_is_written_once_found_again_and_no_further_than_needed(
    settings, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ssl_kd.language.rollouts.PART", 16)
    prompts = []
    generate = rollouts_module.Sampler._generate

    def record(self, batch, *rest):
        prompts.extend(batch)
        return generate(self, batch, *rest)

    monkeypatch.setattr(rollouts_module.Sampler, "_generate", record)

    def digest(max_steps):
        own = settings(**OWN | {"on_policy": 0.0, "teacher_text": 0.5, "max_steps": max_steps})
        return prepare(own, precision_of(own), _silent).digest

    first = digest(2)  # 8 of 115 rows, about 4 of these the teacher's
    texts = tmp_path / "data" / "teacher_text"
    files = {path: path.read_bytes() for path in texts.rglob("*.pt")}
    assert len(files) == 1 and len(prompts) == 16
    assert digest(2) == first and len(prompts) == 16
    digest(12)  # 48 rows
    parts = sorted(texts.rglob("*.pt"))
    assert len(parts) == 2 and len(prompts) == 32
    parts[0].unlink()
    digest(2)
    assert len(prompts) == 48 and parts[0].read_bytes() == files[parts[0]]


def test_teacher_text_replaces_the_text(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {**OWN, "on_policy": 0.0, "rollout_temperature": 0.0}
    own = settings(**options, teacher_text=0.5)
    plain, task = (prepare(s, precision_of(s), _silent) for s in (settings(packing=False), own))
    before, after = plain.blocks, task.blocks
    assert isinstance(before, Blocks) and isinstance(after, Blocks)
    changed = (before.counts != after.counts).any(1).nonzero().flatten().tolist()
    assert len(changed) == round(0.5 * len(after)) and task.digest != plain.digest
    row = changed[0]
    prompt, new = after.ids[row, :4], after.ids[row][after.counts[row]]
    assert torch.equal(prompt, before.ids[row, :4]) and 1 <= len(new) <= 6
    teacher = task.teacher.frozen[0].model
    with torch.no_grad():
        logits = teacher(torch.cat([prompt, new])[None]).logits[0, 3:-1]
    assert torch.equal(logits.argmax(-1), new)


def _silent(stage, done, total, info):
    pass


@fault(118)
def test_a_teacher_that_writes_nan_is_refused_before_anything_is_kept(
    settings, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    draw, broken = rollouts_module._Draw.__call__, math.nan
    monkeypatch.setattr(rollouts_module._Draw, "__call__", lambda a, b, c: draw(a, b, c * broken))
    changes = {**OWN, "on_policy": 0.0, "teacher_text": 1.0, "rollout_temperature": 0.0}
    with pytest.raises(InputError, match=r"are not finite in 115 of 115 rows that it continues"):
        run(settings(**changes))
    assert not [*(tmp_path / "data").rglob("*.pt")]


@fault(118)
@pytest.mark.parametrize("generated", ["on_policy", "student_text"])
def test_a_fault_that_text_never_meets_is_found_cut_out_and_replayed(
    settings, models, tiny, tmp_path, monkeypatch, generated
):
    """The teacher's embeddings of tokens that no text holds are NaN."""
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    own = settings(max_new_tokens=6, teacher_model=str(tmp_path / "teacher"), **{generated: 0.5})
    texts = [*tiny.texts(48).examples, *tiny.texts(12, 1000).examples]
    used = {t for example in texts for t in tiny.tokenizer(example.text).input_ids} | {0, 1, 2}
    model = AutoModelForCausalLM.from_pretrained(models("teacher"))
    with torch.no_grad():
        for token in range(320):
            if token not in used:
                model.model.embed_tokens.weight[token] = math.nan
    model.save_pretrained(own.teacher_model)
    tiny.tokenizer.save_pretrained(own.teacher_model)
    path = run(own)
    metrics = json.loads((path / "metrics.json").read_text())
    assert metrics["learned_from"] == {"ce": 6, "kd": 6}  # from the other rows
    events = map(json.loads, (path / "events.jsonl").read_text().splitlines())
    assert "rows left out" in {event["action"] for event in events if event["part"] == "kd"}
    (bundle,) = (path / "faults").glob("kd-*.safetensors")
    found = replay(bundle)
    assert found.fault is not None and "embed_tokens" in str(found), found


@pytest.mark.parametrize(("changes", "message"), [
    ({"on_policy": 1.5}, "ON_POLICY is 1.5, but must be a finite number, at least 0, at most 1"),
    ({"on_policy": 0.5, "teacher_model": "none"}, "ON_POLICY is above 0, which needs a teacher"),
    ({"on_policy": 0.5, "alpha_kd": 0.0}, "ON_POLICY is above 0, but ALPHA_KD is 0, and"),
    ({"teacher_text": 1.0, "teacher_cache": "c"}, "TEACHER_TEXT is 1.0, which needs a live"),
    ({"on_policy": 0.5, "align": "chunks"}, "but ALIGN is 'chunks': set ALIGN to 'auto'"),
    ({"on_policy": 0.5, "teacher_text": 0.1, "align": "uld"}, "ON_POLICY and TEACHER_TEXT"),
    ({"student_text": 0.5, "on_policy": 0.5}, "STUDENT_TEXT cannot be combined with other"),
    ({"student_text": 0.5, "alpha_kd": 0.0}, "the student's text: set ALPHA_KD above 0."),
    ({"teacher_model": "self", "teacher_cache": "c"}, "process: set TEACHER_CACHE to None."),
    ({"teacher_model": "self", "teacher_text": 0.5}, "TEACHER_TEXT is 0.5, but TEACHER_MODEL is"),
    ({"teacher_model": "self", "router_mode": "auto"}, "process: set ROUTER_MODE to 'native'."),
    ({"teacher_prompt_template": "{prompt}"}, ": add {prompt}, {privileged_context}"),
    ({"divergence": "distillm2"}, "DIVERGENCE 'distillm2' contrasts text with the student's"),
    ({"divergence": "js:1.0"}, "DIVERGENCE is 'js:1.0'"),
    ({"rollout_url": "http://a", "on_policy": 0.5}, "'fresh:1x16', but the server at ROLLOUT_URL"),
    ({"rollout_url": "http://a", "student_model": "a"}, "ON_POLICY is 0, so nothing is sampled"),
    ({"rollout_url": "http://me:word@host"}, "ROLLOUT_URL contains a user name"),
], ids=str)  # fmt: skip
def test_conflicting_settings_are_refused(settings, changes, message):
    with pytest.raises(SettingsError) as refused:
        settings(**changes)
    assert message in str(refused.value)
