"""A cache of a teacher's answers returns the teacher's distribution, or an error."""

import errno
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ssl_kd.core.files import CorruptFileError, save_tensors, sha256_file
from ssl_kd.core.shards import FingerprintMismatch, NonFiniteRow
from ssl_kd.core.shards.shards import read_manifest, write_manifest
from ssl_kd.language.losses.token_distillation import next_token_targets
from ssl_kd.language.teachers import cache_methods
from ssl_kd.language.teachers.cache import TeacherCache, TeacherFingerprint, write
from ssl_kd.language.teachers.packed_tokens import pack, unpack
from ssl_kd.language.text.blocks import Batch, Blocks
from ssl_kd.losses import (
    LinearTeacher,
    LogitsTeacher,
    SampledTeacher,
    TopKTeacher,
    logits_distillation,
)
from tests.faults.matrix import row as fault  # noqa: E402
from tests.marks import slow  # noqa: E402

N, T, V, DIM = 11, 9, 40, 6
METHODS = ["topk", "sample", "hidden"]
FINGERPRINT = TeacherFingerprint(
    "tiny", "w", "tok", "text", T, False, "blocks", "float32", "topk", 5, 2.0
)


def make_blocks(n=N) -> Blocks:
    """Rows of different lengths; half of the tokens of odd rows do not count."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V, (n, T), generator=g)
    documents = torch.ones(n, T, dtype=torch.int32)
    for row in range(n):
        documents[row, T - row % 4 :] = 0
    counts = documents > 0
    counts[:, 0] = False
    counts[1::2, : T // 2] = False
    return Blocks(ids, counts, documents, torch.ones(n, dtype=torch.int64), (), "blocks")


@dataclass
class Teacher:
    """Returns another answer after every token, at every position."""

    vocabulary: int = V
    linear: bool = True
    device: torch.device = torch.device("cpu")
    asked: int = 0

    def answer(self, batch: Batch, rows: Tensor) -> LinearTeacher:
        g = torch.Generator().manual_seed(3)
        embedding = torch.randn(V, DIM, generator=g)
        places = torch.randn(T, DIM, generator=g)
        weight = torch.randn(self.vocabulary, DIM, generator=g)
        hidden = embedding[batch.input_ids] + places[: batch.input_ids.shape[1]]
        bias = torch.linspace(-1, 1, self.vocabulary)
        return LinearTeacher(hidden.flatten(0, 1)[rows], weight, bias)

    def logits(self, batch: Batch, rows: Tensor) -> Tensor:
        answer = self.answer(batch, rows)
        assert answer.bias is not None
        return answer.hidden @ answer.weight.T + answer.bias

    def __call__(self, batch: Batch, rows: Tensor) -> LinearTeacher | LogitsTeacher:
        self.asked += len(batch.rows)
        if self.linear:
            return self.answer(batch, rows)
        return LogitsTeacher(self.logits(batch, rows))


def real(batch: Batch) -> Tensor:
    return next_token_targets(batch.input_ids, batch.counts)[0]


def make(
    folder,
    model=None,
    rows=None,
    batch_size=3,
    shard_rows=4,
    force=False,
    rebuild=False,
    **fields,
):
    return write(
        model or Teacher(),
        rows or make_blocks(),
        folder,
        replace(FINGERPRINT, **fields),
        batch_size=batch_size,
        shard_rows=shard_rows,
        force=force,
        rebuild=rebuild,
    )


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.name: path.read_bytes() for path in files if path.suffix != ".lock"}


def probabilities(blocks: Blocks, temperature: float) -> Tensor:
    """Of all real positions, in order, by the definition in float64."""
    batch = blocks.batch(range(len(blocks)))
    logits = Teacher().logits(batch, real(batch)).double()
    return (logits / temperature).softmax(-1)


# What comes back


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("rows", [[4], [10, 0, 3], [3, 7]])  # the last two are narrower than T
def test_top_k_returns_the_teachers_logits(tmp_path, rows, linear):
    store, blocks = make(tmp_path, Teacher(linear=linear)), make_blocks()
    batch = blocks.batch(rows)
    answer = store(batch, real(batch))
    assert isinstance(answer, TopKTeacher)
    p = (Teacher().logits(batch, real(batch)).double() / 2).softmax(-1)
    expected, tokens = p.topk(5)
    assert torch.equal(answer.indices, tokens)
    torch.testing.assert_close(answer.log_probs.double(), expected.log(), rtol=0, atol=2e-3)
    torch.testing.assert_close(
        answer.log_tail.double(), (1 - expected.sum(-1)).log(), rtol=0, atol=1e-5
    )
    masses = answer.log_probs.exp().sum(-1) + answer.log_tail.exp()
    torch.testing.assert_close(masses, torch.ones_like(masses), rtol=0, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [200, 300, 40_000, 70_000])
def test_tokens_survive_every_width_they_are_stored_in(tmp_path, vocabulary):
    teacher = Teacher(vocabulary)
    store, blocks = make(tmp_path, teacher, make_blocks(2)), make_blocks(2)
    batch = blocks.batch([0, 1])
    answer = store(batch, real(batch))
    expected = teacher.logits(batch, real(batch)).topk(5).indices
    assert isinstance(answer, TopKTeacher) and torch.equal(answer.indices, expected)
    assert expected.max() > 0.9 * vocabulary or vocabulary < 40_000


def test_ids_beyond_the_tokenizer_get_no_mass(tmp_path):
    for linear in (True, False):
        teacher, blocks = Teacher(V + 24, linear), make_blocks()
        store = write(teacher, blocks, tmp_path / str(linear), FINGERPRINT, vocabulary=V)
        batch = blocks.batch(range(N))
        answer = store(batch, real(batch))
        p = (teacher.logits(batch, real(batch))[:, :V].double() / 2).softmax(-1)
        assert isinstance(answer, TopKTeacher) and torch.equal(answer.indices, p.topk(5).indices)
        tail = 1 - p.topk(5).values.sum(-1)
        torch.testing.assert_close(answer.log_tail.double().exp(), tail, rtol=1e-4, atol=0)


@pytest.mark.parametrize("method", ["topk", "sample"])
def test_logits_exist_a_chunk_at_a_time(tmp_path, monkeypatch, method):
    whole = make(tmp_path / "whole", method=method)
    seen, linear = [], torch.nn.functional.linear

    def watched(*arguments):
        seen.append(linear(*arguments))
        return seen[-1]

    monkeypatch.setattr(cache_methods.F, "linear", watched)
    monkeypatch.setattr(cache_methods, "CHUNK_BYTES", 3 * 4 * V)
    chunked = make(tmp_path / "chunked", method=method)
    assert max(len(logits) for logits in seen) == 3 and len(seen) > 20
    batch = make_blocks().batch(range(N))
    mine, other = (vars(store(batch, real(batch))) for store in (chunked, whole))
    errors = (store.take("error", torch.arange(N)) for store in (chunked, whole))
    for a, b in [*zip(mine.values(), other.values(), strict=True), tuple(errors)]:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=0)


def test_logits_that_overflowed_and_tokens_outside_the_vocabulary(tmp_path):
    class Overflowing(Teacher):
        def __call__(self, batch, rows):
            logits = self.logits(batch, rows)
            logits[:, 7], logits[::2, 3] = -torch.inf, torch.inf
            return LogitsTeacher(logits)

    store, blocks = make(tmp_path, Overflowing(), k=V, temperature=0.5), make_blocks()
    batch = blocks.batch(range(N))
    answer = store(batch, real(batch))
    assert isinstance(answer, TopKTeacher)
    p = torch.zeros(len(answer.indices), V).scatter(1, answer.indices, answer.log_probs.exp())
    assert p.isfinite().all() and (p[:, 7] == 0).all() and (p[::2, 3] == 1).all()
    assert store.facts()["fidelity_kl"] < 1e-5


# Draws


@pytest.mark.parametrize("k", [2, 7, V - 1, V])
def test_draws_share_the_mass_outside_the_likeliest_tokens(tmp_path, k):
    store, blocks = make(tmp_path, method="sample", k=k), make_blocks()
    batch = blocks.batch([2, 9])
    answer = store(batch, real(batch))
    assert isinstance(answer, SampledTeacher) and answer.indices.shape[1] == k
    torch.testing.assert_close(answer.weights.sum(-1), torch.ones(len(answer.weights)))
    p = (Teacher().logits(batch, real(batch)).double() / 2).softmax(-1)
    m = max(1, k // 4)  # tokens that are not drawn
    top, tokens = p.topk(m)
    assert torch.equal(answer.indices[:, :m].sort().values, tokens.sort().values)
    for own, indices, weights in zip(p, answer.indices, answer.weights.double(), strict=True):
        step = 2048 ** (1 / 254) - 1  # of the values to which probabilities are rounded
        kept = own[indices[1:m]]
        torch.testing.assert_close(weights[1:m], kept, rtol=step, atol=1 / 4096)
        assert abs(weights[0] - own.max()) <= step * own.topk(2).values[1] + 1e-6
        share = (1 - own.topk(m).values.sum()) / (k - m)
        torch.testing.assert_close(weights[m:], share.expand(k - m), rtol=1e-5, atol=0)
        times = torch.bincount(indices[m:], minlength=V)
        expected = own.index_fill(0, indices[:m], 0) / share
        assert (times - expected).abs().max() < 1
    entropy = torch.special.entr(p).sum(-1)
    torch.testing.assert_close(answer.entropy.double(), entropy, rtol=1e-5, atol=0)


FLAT, NONE = torch.zeros(5000), torch.full((5000,), -torch.inf)
ODD_LOGITS = {
    "one token": NONE.index_fill(0, torch.tensor([4999]), 3.0),
    "two tokens": NONE.index_fill(0, torch.tensor([0, 4999]), 3.0),
    "as many as are kept": NONE.index_fill(0, torch.arange(11), 0.0),
    "flat": FLAT,
    "flat, half of it excluded": FLAT.index_fill(0, torch.arange(0, 5000, 2), -torch.inf),
    "a tiny tail": (FLAT - 14).index_fill(0, torch.arange(20, 31), 0.0),
    "Zipf": -(torch.arange(5000) + 1.0).log().flip(0),
    "geometric": -0.7 * torch.arange(5000.0),
    "extreme": FLAT.index_fill(0, torch.tensor([7]), torch.inf),
}


QUICK = ("one token", "a tiny tail", "Zipf", "extreme")


@pytest.mark.parametrize("kind", [kind if kind in QUICK else slow(kind) for kind in ODD_LOGITS])
def test_weights_have_the_mean_of_any_distribution(kind):
    """Over 2,000 draws, compared with plain softmax within five standard errors."""
    n, size, logits = 2000, 5000, ODD_LOGITS[kind]
    batch = make_blocks(1).batch([0])
    batch = replace(batch, input_ids=torch.zeros(n, 1, dtype=torch.long), rows=torch.arange(n))
    sampled = cache_methods.Sampled(48, 1.0, size)
    content = sampled.content(LogitsTeacher(logits.expand(n, size)), batch, torch.arange(n))
    answer = sampled.answer(lambda name: content[name].to(sampled.columns[name][1]))
    assert (answer.weights >= 0).all() and (answer.weights.sum(-1) - 1).abs().max() < 1e-6
    p = logits.clamp(max=1e4).double().softmax(-1)
    drawn = torch.zeros(n, size).scatter_add_(1, answer.indices, answer.weights).double()
    mean = drawn.mean(0)
    share = content["share"].max()  # rare tokens are drawn about a Poisson number of times
    rare = (p * share / n).sqrt() + share / n
    error = torch.where(p < share, rare, drawn.std(0) / n**0.5) + 1e-7
    assert ((mean - p).abs() < 5 * error).all() and (mean[p == 0] == 0).all()
    assert (mean - p).sum().abs() < 1e-6


@pytest.mark.parametrize("vocabulary", [48, 4096, 32_000, 151_936, 262_144])
def test_packed_ids_come_back_and_fit_into_the_bytes_that_the_guide_names(vocabulary):
    g = torch.Generator().manual_seed(0)
    for k in (0, 1, 2, 11, 36, 48):
        ids = torch.randint(vocabulary, (50, k), generator=g).sort(-1).values
        ids[0], ids[1] = 0, vocabulary - 1
        packed = pack(ids, vocabulary)
        assert torch.equal(unpack(packed, k, vocabulary), ids)
        assert not unpack(torch.zeros_like(packed), k, vocabulary).any()
    columns = cache_methods.Sampled(48, 1.0, vocabulary).columns.values()
    assert sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in columns) <= 113


def test_a_cache_of_the_older_layout_is_refused(tmp_path):
    make(tmp_path, method="sample")
    manifest = read_manifest(tmp_path / "teacher.json")
    del manifest["layout"]
    write_manifest(tmp_path / "teacher.json", manifest)
    for attempt in (lambda: TeacherCache.open(tmp_path), lambda: make(tmp_path, method="sample")):
        with pytest.raises(CorruptFileError, match="another version .*layout.*--force_recompute"):
            attempt()
    make(tmp_path, method="sample", force=True)
    TeacherCache.open(tmp_path)


def test_the_gradient_of_the_draws_is_unbiased(tmp_path):
    """Rows that are alike draw each for themselves: their mean gradient is the full one."""
    n = 4000
    one = make_blocks(1)
    blocks = replace(
        one,
        ids=one.ids[:, :3].repeat(n, 1),
        counts=one.counts[:, :3].repeat(n, 1),
        documents=one.documents[:, :3].repeat(n, 1),
        row_bytes=one.row_bytes.repeat(n),
    )
    store = make(
        tmp_path, rows=blocks, batch_size=500, shard_rows=None, method="sample", k=3, block_size=3
    )
    batch = blocks.batch(range(n))
    answer = store(batch, real(batch))
    student = torch.randn(V, generator=torch.Generator().manual_seed(5)).repeat(2 * n, 1)
    found = []
    for teacher in (LogitsTeacher(Teacher().logits(batch, real(batch))), answer):
        logits = student.clone().requires_grad_()
        value = logits_distillation(logits, None, [teacher], temperature=2.0)[1]
        value.backward()
        found.append((value.detach() / len(student), logits.grad.view(n, 2, V)))
    (full_value, full), (value, drawn) = found
    # Independent draws, T / 3 of the gradient each, would have this deviation of their mean.
    p = (Teacher().logits(batch, real(batch))[:2].double() / 2).softmax(-1)
    error = 2 * (p * (1 - p) / (3 * n)).sqrt()
    assert ((drawn.mean(0) - full[0]).abs() <= 4 * error + 2 / (3 * n)).all()
    assert (drawn.std(0) < 2 * (p * (1 - p) / 3).sqrt() + 0.02).all()
    assert (drawn[0] - full[0]).abs().max() > 20 * (drawn.mean(0) - full[0]).abs().max()
    torch.testing.assert_close(value, full_value, rtol=0, atol=0.02)
    assert drawn[0].ne(drawn[1]).any()


# Hidden states


@pytest.mark.parametrize("rows", [[3, 4, 5], [9, 10]])  # batches it was written in
def test_hidden_states_come_back_to_the_bit(tmp_path, rows):
    store, blocks = make(tmp_path, method="hidden"), make_blocks()
    batch = blocks.batch(rows)
    answer, live = store(batch, real(batch)), Teacher().answer(batch, real(batch))
    assert isinstance(answer, LinearTeacher)
    for mine, other in zip(vars(answer).values(), vars(live).values(), strict=True):
        assert mine.dtype == other.dtype and torch.equal(mine, other)
    facts = store.facts()
    assert (facts["method"], facts["stored"], facts["dim"]) == ("hidden", "float32", DIM)
    assert facts["head_bytes"] == V * (DIM + 1) * 4
    assert facts["tail_mass"] == facts["fidelity_kl"] == 0


class SickHead(Teacher):
    def __call__(self, batch, rows):
        answer = self.answer(batch, rows)
        return replace(answer, weight=answer.weight.index_fill(0, torch.tensor(7), torch.nan))


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (Teacher(linear=False), "expected 'topk' or 'sample', because the teacher 'tiny' caps or"),
        (SickHead(), "output head of the teacher 'tiny' holds NaN"),
    ],
)
def test_a_head_that_cannot_stand_for_the_teacher_is_refused(tmp_path, teacher, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, teacher, method="hidden")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["a bit", "cut", "missing", "another"])
@fault(120)
def test_a_damaged_head_is_named_and_written_again(tmp_path, damage):
    make(tmp_path, method="hidden")
    whole = content(tmp_path)
    (path,) = tmp_path.glob("teacher_head_*.pt")
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "another":
        torch.save({"weight": torch.ones(V, DIM)}, path)
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        path.write_bytes(flipped if damage == "a bit" else data[:middle])
    with pytest.raises(CorruptFileError, match=path.name):
        TeacherCache.open(tmp_path)
    make(tmp_path, method="hidden", rebuild=True)
    assert content(tmp_path) == whole


def test_a_replaced_cache_leaves_no_head_behind(tmp_path):
    make(tmp_path, method="hidden")
    make(tmp_path, Teacher(V + 1), method="hidden", force=True, weights="other")
    assert len(list(tmp_path.glob("teacher_head_*.pt"))) == 1
    make(tmp_path, force=True)
    assert not list(tmp_path.glob("teacher_head_*.pt"))


# What is reported


def test_top_k_statistics_equal_a_direct_computation(tmp_path):
    store, blocks = make(tmp_path, k=6), make_blocks()
    p = probabilities(blocks, 2.0)
    answer = store(batch := blocks.batch(range(N)), real(batch))
    assert isinstance(answer, TopKTeacher)
    tail = answer.log_tail.double().exp()
    restored = (tail / (V - 6)).unsqueeze(1).repeat(1, V)
    restored.scatter_(1, answer.indices, answer.log_probs.double().exp())
    torch.testing.assert_close(restored.sum(1), torch.ones(len(p)).double(), rtol=0, atol=1e-6)
    facts = store.facts()
    fidelity = (p * (p.log() - restored.log())).sum(1).mean().item()
    assert facts["fidelity_kl"] == pytest.approx(fidelity, rel=1e-3) and fidelity > 0.001
    assert facts["tail_mass"] == pytest.approx(1 - p.topk(6).values.sum(1).mean().item(), rel=1e-4)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.pt"))
    assert facts["bytes_per_token"] == size / len(p)
    assert store.manifest["statistics"]["tokens"] == len(p)
    assert (facts["method"], facts["k"]) == ("topk", 6)


# Of something else


@pytest.mark.parametrize(
    "field, other",
    [("teacher", "x"), ("weights", "x"), ("tokenizer", "x"), ("text", "x"), ("block_size", 8),
     ("packed", True), ("blocks", "x"), ("dtype", "bfloat16"), ("method", "sample"), ("k", 4),
     ("temperature", 1.0)],
)  # fmt: skip
def test_a_cache_of_something_else_is_refused_by_field(tmp_path, field, other):
    make(tmp_path)
    before = content(tmp_path)
    mine = getattr(FINGERPRINT, field)
    message = f"{field}: cache has {mine!r}, this run needs {other!r}"
    for attempt in (
        lambda: TeacherCache.open(tmp_path, {field: other}),
        lambda: make(tmp_path, **{field: other}),
    ):
        with pytest.raises(FingerprintMismatch) as caught:
            attempt()
        layout = ["layout: cache has None, this run needs packed"]  # a sample's, when written
        assert caught.value.differences in ([message], [message] + layout * (other == "sample"))
        assert "--force_recompute" in str(caught.value) and "--teacher_cache" in str(caught.value)
    assert content(tmp_path) == before
    TeacherCache.open(tmp_path, {field: mine})
    if field != "block_size":
        make(tmp_path, force=True, **{field: other})
        TeacherCache.open(tmp_path, {field: other})


def test_bad_arguments(tmp_path):
    for fields, message in [
        ({"method": "top"}, "method is 'top'; expected one of topk, sample, hidden"),
        ({"k": 0}, "k is 0; expected at least 1"),
        ({"temperature": 0.0}, "temperature"),
        ({"k": V + 1}, f"k in CACHE_METHOD is {V + 1}; expected at most {V}"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(tmp_path, **fields)
    with pytest.raises(ValueError, match="batch_size is 0"):
        make(tmp_path, batch_size=0)
    with pytest.raises(FileNotFoundError):
        TeacherCache.open(tmp_path)


@pytest.mark.parametrize("method", METHODS)
def test_a_teacher_that_gives_nan_is_named_with_the_place(tmp_path, method):
    class Sick(Teacher):
        def __call__(self, batch, rows):
            answer = self.answer(batch, rows) if method == "hidden" else None
            given = self.logits(batch, rows) if answer is None else answer.hidden
            if 7 in batch.rows:
                at = batch.rows.tolist().index(7) * batch.input_ids.shape[1] + 4
                given[rows == at, 2] = torch.nan
            return LogitsTeacher(given) if answer is None else answer

    with pytest.raises(
        ValueError, match="'tiny' is NaN at 1 of .* block 7, token 4: check the teacher's weights"
    ):
        make(tmp_path, Sick(), method=method)
    teacher = Teacher()
    make(tmp_path, teacher, method=method)
    assert teacher.asked < N  # the first shard is kept


# Interrupted, killed, damaged


@pytest.mark.parametrize("method", METHODS)
def test_a_damaged_shard_is_named_and_requested_again(tmp_path, method):
    make(tmp_path, method=method)
    whole = content(tmp_path)
    path = tmp_path / "teacher_00001.pt"
    data = path.read_bytes()
    path.write_bytes(data[:900] + bytes([data[900] ^ 1]) + data[901:])
    for attempt in (lambda: TeacherCache.open(tmp_path), lambda: make(tmp_path, method=method)):
        with pytest.raises(CorruptFileError, match="teacher_00001.pt.*--rebuild_damaged rebuilds"):
            attempt()
    teacher = Teacher()
    make(tmp_path, teacher, rebuild=True, method=method)
    assert teacher.asked == 1 + 6  # one row for the vocabulary, batches 3-5 and 6-8 for rows 4-7
    assert content(tmp_path) == whole


@pytest.mark.parametrize("method", METHODS)
@fault(119)
def test_a_file_that_does_not_fit_on_the_disk_is_named_and_the_rest_kept(tmp_path, method):
    make(tmp_path / "whole", method=method)
    teacher, room = Teacher(), [2]

    def until_full(path, tensors):
        if "_head_" not in str(path):
            room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        save_tensors(path, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssl_kd.core.shards.writer.save_tensors", until_full)
        with pytest.raises(OSError, match="No space left.*teacher_00002.pt"):
            make(tmp_path / "own", teacher, method=method)
    with pytest.raises(FileNotFoundError):
        TeacherCache.open(tmp_path / "own")
    assert not list((tmp_path / "own").rglob("*.tmp"))
    teacher.asked = 0
    make(tmp_path / "own", teacher, method=method)
    assert teacher.asked == 1 + 5  # one row for the vocabulary, batches 6-8 and 9-10 for rows 8-10
    assert content(tmp_path / "own") == content(tmp_path / "whole")


def change(folder, tamper, **stated):
    """Tamper with the second shard, and have the manifest state its new checksum."""
    path = folder / "teacher_00001.pt"
    shard = torch.load(path, weights_only=True)
    tamper(shard)
    torch.save(shard, path)
    manifest = read_manifest(folder / "teacher.json") | stated
    manifest["shards"][1] |= {"sha256": sha256_file(path), "bytes": path.stat().st_size}
    write_manifest(folder / "teacher.json", manifest)


@pytest.mark.parametrize(
    ("method", "column", "value", "message"),
    [
        ("topk", "tokens", V, "tokens from .* to 40, expected 0 to 39"),
        ("topk", "tokens", 255, "tokens from .* to 255, expected 0 to 39"),
        ("sample", "largest", V, "tokens from .* to 40, expected 0 to 39"),
        ("sample", "drawn", 255, "tokens from -1 to .*, expected 0 to 39"),  # too few ids
        ("topk", "log_probs", 0.5, "log_probs from .* to 0.5, expected -inf to 0.01"),
        ("topk", "log_tail", 1e-3, "log_tail from .* to 0.001, expected -inf to 0"),
        ("sample", "share", -0.5, "weights from -0.5 to .*, expected -1e-05 to 1.01"),
        ("sample", "share", 60_000.0, "weights from -[0-9.e+]* to 60000, expected"),
        ("sample", "share", -torch.inf, "weights from -inf to"),
        ("sample", "entropy", -1.0, "entropy from -1 to .*, expected -0.01 to 3.69"),
        ("sample", "entropy", 9.0, "entropy from .* to 9, expected"),
        ("topk", "log_probs", torch.nan, "log_probs is NaN"),
        ("sample", "share", torch.inf, "share is NaN"),
        ("hidden", "hidden", torch.nan, "hidden is NaN"),
        ("hidden", "hidden", -torch.inf, "hidden is NaN"),
    ],
)
@fault(148)
def test_invalid_content_is_named_despite_a_matching_checksum(
    tmp_path, method, column, value, message
):
    make(tmp_path, method=method)
    change(tmp_path, lambda shard: shard[column][2, 1].view(-1)[-1:].fill_(value))
    with pytest.raises(
        NonFiniteRow, match=f"teacher_00001.pt, row 2 .row 6 .*'block 6'.: {message}"
    ):
        TeacherCache.open(tmp_path)
    TeacherCache.open(tmp_path, verify=False)


@pytest.mark.parametrize("vocabulary", [40_000, 70_000])
@fault(148)
def test_tokens_of_any_width_are_compared_with_the_vocabulary(tmp_path, vocabulary):
    make(tmp_path, Teacher(vocabulary))
    TeacherCache.open(tmp_path)
    change(tmp_path, lambda shard: shard["tokens"][2, 1].fill_(-1))  # of int16: 65,535
    with pytest.raises(NonFiniteRow, match=f"tokens from .*, expected 0 to {vocabulary - 1:g}"):
        TeacherCache.open(tmp_path)


@pytest.mark.parametrize("indices", [[5, 4, 6, 7], [4, 4, 6, 7], [-4, 5, 6, 7], [2**62, 5, 6, 7]])
@fault(148)
def test_rows_that_are_of_another_block_are_named(tmp_path, indices):
    make(tmp_path)
    change(tmp_path, lambda shard: shard["indices"].copy_(torch.tensor(indices)))
    message = "teacher_00001.pt cannot be used: its indices are not the rows of this shard in order"
    with pytest.raises(CorruptFileError, match=message):
        TeacherCache.open(tmp_path)


@fault(148)
@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"statistics": {}}, "statistics: the names are those of another version"),
        ({"head": "../../elsewhere"}, "head is '../../elsewhere'"),
        ({"head": "\0"}, "head is "),
        ({"n": N + 1}, "teacher_00002.pt: the row counts do not add up"),
    ],
)
def test_a_manifest_that_names_something_else_is_one_line(tmp_path, stated, message):
    make(tmp_path, method="hidden")
    change(tmp_path, lambda shard: None, **stated)
    with pytest.raises(CorruptFileError, match=message) as caught:
        TeacherCache.open(tmp_path)
    assert "\n" not in str(caught.value) and "\0" not in str(caught.value)
