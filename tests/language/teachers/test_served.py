"""A teacher on a real HTTP server gives the same student as a live one, and faults are named."""

import json
import shutil

import pytest
import torch

transformers = pytest.importorskip("transformers")

from ssl_kd.core.settings import SettingsError  # noqa: E402
from ssl_kd.core.shards import FingerprintMismatch  # noqa: E402
from ssl_kd.language.losses.teacher_output import logits_of  # noqa: E402
from ssl_kd.language.losses.token_distillation import next_token_targets  # noqa: E402
from ssl_kd.language.models.causal import n_ids  # noqa: E402
from ssl_kd.language.models.frozen import FrozenTeacher  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.teachers import caching  # noqa: E402
from ssl_kd.language.teachers.cache import TeacherFingerprint, write  # noqa: E402
from ssl_kd.language.teachers.caching import cache_teacher  # noqa: E402
from ssl_kd.language.teachers.served import ServedTeacher  # noqa: E402
from ssl_kd.language.teachers.server import CompletionServer, ServerFailed  # noqa: E402
from ssl_kd.language.train.step import Distiller  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.faults.matrix import row as fault  # noqa: E402
from tests.language.test_ranks import assert_near, by  # noqa: E402
from tests.language.test_run import config, log_lines, table, weights  # noqa: E402
from tests.tiny import save_texts  # noqa: E402

K = 8


@pytest.fixture
def text_file(tmp_path, tiny):
    """A short text, since each document is a request."""
    return save_texts(tiny, tmp_path, 12, 6)


@pytest.fixture
def tokenizer_alone(models, tmp_path):
    """A folder with the teacher's tokenizer, and none of its weights."""
    folder = tmp_path / "tokenizer"
    files = shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json")
    shutil.copytree(models("teacher"), folder, ignore=files)
    return str(folder)


@pytest.fixture
def served(settings, server, tokenizer_alone):
    """Settings of a run that asks the server; with changes."""

    def change(**changes):
        own = {"teacher_url": server.url, "teacher_served_as": "teacher", "temperature": 1.0}
        own |= {"teacher_model": tokenizer_alone, "cache_method": f"topk:{K}"}
        return settings(**{**own, "student_model": "llama:1x32", **changes})

    return change


def teacher_at(server, tiny, k=K, **options):
    client = CompletionServer(server.url, server.name, timeout=60, patience=0.2)
    return ServedTeacher(client, k, n_ids(tiny.tokenizer), **options)


def positions(batch):
    return next_token_targets(batch.input_ids, batch.counts)[0]


# --- the answers are the teacher's ----------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_its_answers_are_the_live_teachers(tiny, server, packing):
    blocks = tiny.blocks(packing=packing)
    batch = blocks.batch(range(5))
    assert batch.packed == packing
    rows = positions(batch)
    ours = teacher_at(server, tiny, rounded=False)(batch, rows)
    log_p = logits_of(FrozenTeacher(server.model)(batch, rows)).log_softmax(-1)
    values, tokens = log_p.topk(K)
    assert torch.equal(ours.indices, tokens)
    torch.testing.assert_close(ours.log_probs, values, atol=1e-5, rtol=1e-5)
    rest = log_p.scatter(-1, tokens, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(ours.log_tail, rest, atol=1e-4, rtol=1e-4)
    masses = ours.log_probs.exp().sum(-1) + ours.log_tail.exp()
    torch.testing.assert_close(masses, torch.ones_like(masses))


def test_a_tail_that_rounding_ate_is_not_0(tiny, server):
    server.change = lambda logits: logits * 12
    batch = tiny.blocks().batch(range(8))
    rows = positions(batch)
    answer = teacher_at(server, tiny)(batch, rows)
    log_p = (12 * logits_of(FrozenTeacher(server.model)(batch, rows)).double()).log_softmax(-1)
    rest = log_p.scatter(-1, log_p.topk(K).indices, -torch.inf).logsumexp(-1)
    assert rest.min() < -30  # 1 less the sum of the others says nothing there
    assert answer.log_tail.isfinite().all()
    torch.testing.assert_close(answer.log_tail.exp(), rest.exp().float(), atol=1e-6, rtol=1e-4)


@fault(116)
def test_a_teacher_whose_vocabulary_was_padded(tiny, server):
    batch = tiny.blocks().batch(range(4))
    rows, teacher = positions(batch), teacher_at(server, tiny)
    expected = teacher(batch, rows)
    server.change = lambda logits: torch.nn.functional.pad(logits, (0, 64), value=-20.0)
    padded = teacher(batch, rows)
    assert torch.equal(padded.indices, expected.indices)
    torch.testing.assert_close(padded.log_probs, expected.log_probs)
    server.change = lambda logits: torch.nn.functional.pad(logits, (0, 64), value=20.0)
    with pytest.raises(ServerFailed, match="returns the token 3.., .* padding of its vocabulary"):
        teacher(batch, rows)


def test_training_from_it_is_training_from_its_cache_to_the_bit(tiny, server, tmp_path):
    blocks = tiny.blocks(packing=True)
    given = TeacherFingerprint(
        "t", "w", "tok", "text", 24, True, blocks.digest, "served", "topk", K, 1.0
    )
    kept = write(teacher_at(server, tiny, rounded=False), blocks, tmp_path, given, vocabulary=320)
    results = []
    for teacher in (teacher_at(server, tiny), kept):
        distiller = tiny.distiller(teacher, temperature=1.0, divergence="reverse_kl")
        steps = [distiller.step([blocks.batch(range(4 * i, 4 * i + 4))], 1e-2) for i in range(3)]
        results.append((steps, dict(distiller.student.named_parameters())))
    assert results[0][0] == results[1][0] and same(results[0][1], results[1][1])
    facts = kept.facts()
    assert 0 < facts["tail_mass"] < 1 and 0 < facts["fidelity_kl"] < 3


def test_prefetched_answers_are_requested_once_and_fail_on_use(tiny, server):
    blocks = tiny.blocks(packing=True)
    first, second = blocks.batch(range(4)), blocks.batch(range(2, 6))
    teacher = teacher_at(server, tiny)
    expected = [teacher(batch, positions(batch)) for batch in (first, second)]
    alone, n = len(server.asked), len(server.asked) // 2
    server.asked.clear()
    teacher.prefetch([first, second])
    found = [teacher(batch, positions(batch)) for batch in (first, second)]
    for a, b in zip(expected, found, strict=True):
        assert same(vars(a), vars(b))
    assert n < len(server.asked) <= alone and not teacher._prefetched
    server.fault = lambda handler, asked, number: handler.answer(b"<html>") or True
    teacher.prefetch([first])
    with pytest.raises(ServerFailed, match="not JSON"):
        teacher(first, positions(first))


def test_requests_for_a_step_overlap_with_the_previous_step(served, server, monkeypatch):
    whole = weights(run(served(run_name="whole")))
    ahead, step = [], Distiller.step

    def record(self, batches, rate):
        ahead.append({tuple(ids) for ids in self.teacher.server._prefetched})
        return step(self, batches, rate)

    monkeypatch.setattr(Distiller, "step", record)
    assert weights(run(served())) == whole
    assert len(ahead) == 6 and all(a & b for a, b in zip(ahead, ahead[1:], strict=False))
    assert len(ahead[-1]) < len(ahead[0])  # nothing follows the last step


# --- runs -----------------------------------------------------------------------------------------


def test_a_run_needs_no_weights_of_its_teacher(served, settings, models):
    path = run(served())
    row = table(path)["teacher"]
    live = run(settings(temperature=1.0, run_name="live", student_model="llama:1x32"))
    for name in ("nll", "perplexity", "bits_per_byte", "ece"):
        assert row[name] == pytest.approx(table(live)["teacher"][name], rel=1e-4)
    assert config(path)["teacher"] == {"name": "teacher"}
    assert all(line["kd"] > 0 for line in log_lines(path) if "eval" not in line)
    assert table(path)["student"]["perplexity"] < table(path)["student before"]["perplexity"]


def test_its_cache_stands_in_when_it_is_gone(served, server, tmp_path):
    path = run(served(run_name="asked"))
    cached = served(teacher_cache=str(tmp_path / "cache"), run_name="cached")
    with pytest.raises(SettingsError, match="run cache_teacher.py"):
        run(cached)
    cache = cache_teacher(cached)
    assert cache.facts()["method"] == "topk" and cache.fingerprint.dtype == "served"
    server.asked.clear()
    server.fault = lambda *_: pytest.fail("the server was asked")
    assert weights(run(cached)) == weights(path) and not server.asked
    assert "teacher" not in table(tmp_path / "runs" / "cached")
    server.name = "other"  # the name is all that is known of a served teacher
    with pytest.raises(FingerprintMismatch, match="'served teacher'.*'served other'"):
        run(cached.replace(teacher_served_as="other", run_name="of_another"))


@fault(112)
def test_a_killed_cache_requests_only_missing_rows(served, server, tmp_path, monkeypatch):
    monkeypatch.setattr(caching, "SERVED_TOKENS", 4 * 24)
    cached = served(teacher_cache=str(tmp_path / "cache"), packing=False)
    n, dies = len(cache_teacher(cached).manifest["shards"]), 10
    asked, files = len(server.asked), sorted((tmp_path / "cache").glob("*.pt"))
    expected = [file.read_bytes() for file in files]
    assert n > 5
    shutil.rmtree(tmp_path / "cache")
    server.asked.clear()
    server.fault = lambda handler, body, number: (
        number > dies and (handler.answer(b"", 503) or True)
    )
    with pytest.raises(ServerFailed, match="503"):
        cache_teacher(cached)
    server.asked.clear()
    server.fault = None
    cache_teacher(cached)
    assert len(server.asked) <= asked - dies + 4 + 1  # a shard of four rows, and the first look
    assert [file.read_bytes() for file in files] == expected


def dies(server, work):
    """Do the work; when it is done again, the server dies four requests before its end."""
    server.asked.clear()
    done, last = work(), len(server.asked) - 4

    def fault(handler, asked, number):
        if number >= last:
            handler.answer(b"", 503)
        return number >= last

    server.asked.clear()
    server.fault = fault
    return done


@fault(112)
def test_a_server_that_dies_stops_the_run_and_a_resume_ends_with_the_same_bits(served, server):
    whole = dies(server, lambda: run(served(run_name="whole")))
    with pytest.raises(
        ServerFailed, match=f"^the teacher's server {server.url} responds with 503"
    ) as at:
        run(served())
    assert "\n" not in str(at.value) and "--resume" in str(at.value)
    folder = whole.parent / "a"
    assert not (folder / "metrics.json").exists() and list((folder / "checkpoint").glob("step_*"))
    server.fault = None
    assert weights(run(served(resume=True))) == weights(whole)
    assert log_lines(folder) == log_lines(whole)


@pytest.mark.slow
def test_two_processes_are_as_one(served, server):
    one, two = (by(world, served(run_name=f"of_{world}", eval_every=6)) for world in (1, 2))
    assert_near(one, two)


@fault(115)
def test_another_model_or_none_is_refused_before_the_first_step(served, server, tiny):
    with pytest.raises(ServerFailed, match="does not have the model 'b'; it has"):
        run(served(teacher_served_as="b"))
    server.room = 20
    with pytest.raises(ServerFailed, match="set BLOCK_SIZE to 19 or less"):
        run(served())
    assert not server.asked


@fault(115)
def test_another_tokenizer_is_found_by_its_ids(served, server, tiny):
    server.model = tiny.model(spread=0.3, vocab_size=400)
    with pytest.raises(
        ServerFailed, match="the tokenizer has 320 tokens: the server uses another tokenizer"
    ):
        run(served())


def test_a_key_is_sent_and_kept_nowhere(served, server, monkeypatch):
    monkeypatch.setenv("TEACHER_API_KEY", "secret-key")
    path = run(served(max_steps=1, eval_every=1))
    assert {asked["authorization"] for asked in server.asked} == {"Bearer secret-key"}
    assert "secret-key" not in json.dumps(config(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_url": "localhost:8000"}, "expected an address such as http://host:8000/v1"),
        (
            {"teacher_model": "none", "temperature": 1.0},
            "TEACHER_MODEL is 'none', but TEACHER_URL needs",
        ),
        ({"teacher_model": "train"}, "TEACHER_MODEL is 'train'"),
        ({"temperature": 2.0}, "TEMPERATURE is 2, but the server"),
        ({"student_model": "layers:1"}, "'layers:1', which is cut from the teacher"),
        ({"align": "uld"}, "set ALIGN to 'auto'"),
        ({"router_mode": "ka"}, "ROUTER_MODE to 'native'"),
        ({"legacy_clamp": "2.5"}, "LEGACY_CLAMP to None"),
    ],
)
def test_settings_that_do_not_go_with_a_server(served, changes, message):
    with pytest.raises(SettingsError, match=message):
        served(**changes)
