import unicodedata
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402

from ssl_kd.language.losses.cross_tokenizer import chunk_log_likelihood  # noqa: E402
from ssl_kd.language.text.aligned import aligned_blocks  # noqa: E402
from ssl_kd.language.text.blocks import make_blocks  # noqa: E402
from ssl_kd.language.text.dataset import TextDataset  # noqa: E402
from ssl_kd.language.text.new_tokenizer import train_tokenizer  # noqa: E402
from ssl_kd.language.text.records import Example  # noqa: E402
from ssl_kd.language.text.rows import first_rows  # noqa: E402
from ssl_kd.language.text.segmentation import TextReader, align, partition  # noqa: E402
from ssl_kd.language.text.vocabulary import shared_vocabulary, token_texts  # noqa: E402
from tests.language.text.test_blocks import dataset  # noqa: E402

STORY = (
    "Once upon a time, a little girl named Lily went to the park. She saw a big dog. The dog was"
    " happy to see her!\n\nThe end. Lily and the dog went home, and they played all day long."
)
SHARED = (
    "lm/stories3M", "lm/stories260K", "lm/tinystories-656K", "tokenizers/gpt2", "tokenizers/olmo",
)  # fmt: skip


def wrap(tokenizer, normalizer, pre_tokenizer, trainer, decoder, **special):
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoder
    tokenizer.train_from_iterator([STORY], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def train_word_piece():
    """Lower-cases, strips accents, drops control characters, and has no spaces."""
    return wrap(
        tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]")),
        tokenizers.normalizers.BertNormalizer(),
        tokenizers.pre_tokenizers.BertPreTokenizer(),
        tokenizers.trainers.WordPieceTrainer(
            vocab_size=150, special_tokens=["[UNK]", "[SEP]"], show_progress=False
        ),
        tokenizers.decoders.WordPiece(),
        unk_token="[UNK]",
        eos_token="[SEP]",
    )


def train_dropping():
    """SentencePiece-like, spaces inside tokens, and silent about characters it does not know."""
    tokenizer = wrap(
        tokenizers.Tokenizer(tokenizers.models.BPE()),
        tokenizers.normalizers.NFKC(),
        tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        tokenizers.trainers.BpeTrainer(
            vocab_size=120, special_tokens=["<s>", "</s>"], max_token_length=8, show_progress=False
        ),
        tokenizers.decoders.Metaspace(),
        bos_token="<s>",
        eos_token="</s>",
    )
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def trained():
    return {
        "bytes": train_tokenizer(dataset(STORY), 300),
        "bytes, more of them": train_tokenizer(dataset(STORY), 400),
        "word piece": train_word_piece(),
        "dropping": train_dropping(),
    }


@pytest.fixture(scope="module")
def shared(shared_data):
    loaded = {name: AutoTokenizer.from_pretrained(shared_data / name) for name in SHARED}
    return {name: (TextReader(tok), token_texts(tok)) for name, tok in loaded.items()}


AWKWARD = [
    # A family and a flag joined by ZWJ, a skin tone.
    "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f3f3\ufe0f\u200d\U0001f308",
    "\U0001f44d\U0001f3fd",
    # Marks composed, decomposed and stacked; what normalisation makes several characters of.
    "\u00e9", "e\u0301", "q\u0323\u0307", "\uac01", "\u1112\u1161\u11ab", "\u0130", "\ufb01",
    # CJK, right-to-left, control characters, spaces.
    "\u5bb6", "\u65e5\u672c\u8a9e", "\u05e9\u05dc\u05d5\u05dd", "\u0645\u0631\u062d\u0628",
    "\u202eabc\u202c", "\u200d", "\x00", "\x07", "\x1b[0m", "\u2028", "\ufeff", "\U0010ffff",
    " ", "   ", "\u00a0", "\t", "\n\n", "\r\n", "#", "%", "<s>",
    # Words, some very long.
    "Once upon a time", " Lily", "dog.", "a" * 60, "Donaudampfschifffahrtsgesellschaft" * 3,
]  # fmt: skip
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(AWKWARD),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
        st.text("abo ", max_size=8),
    ),
    max_size=12,
).map("".join)


def check_side(text, reader):
    """What must hold of one tokenizer: a partition, whole characters, and the text itself."""
    tokenizer = reader.tokenizer
    ids, ends = reader.read(text)
    if not len(ids):
        return ids, ends
    assert (np.diff(ends) >= 0).all() and ends[0] > 0 and ends[-1] == len(text)
    if not reader._drops(text):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        assert encoded["input_ids"] == ids.tolist()
        holds = [set() for _ in text]
        for end, (a, b) in zip(ends.tolist(), encoded["offset_mapping"], strict=True):
            for character in range(a, b):
                holds[character].add(end)
        assert all(len(stretches) <= 1 for stretches in holds), "a character is split"
    return ids, ends


def check_texts(text, reader, says):
    """Stretch by stretch, the tokens say what stands there."""
    ids, ends = reader.read(text)
    start = 0
    for stop in np.unique(ends):
        decoded = b"".join(says[i] or b"" for i in ids[ends == stop]).decode()
        written = "".join(c for c in text[start:stop] if c not in reader._drops(text))
        assert decoded in (written, f" {written}" if not start else written)
        start = stop


def check_pair(text, student, teacher):
    aligned = align(student, teacher)
    if not (len(student) and len(teacher)):
        assert not len(aligned.ends)
        return
    assert (np.diff(aligned.ends, prepend=0) > 0).all() and aligned.ends[-1] == len(text)
    assert set(aligned.ends) == set(student) & set(teacher)  # the finest
    for ends, groups in ((student, aligned.student), (teacher, aligned.teacher)):
        assert set(groups) == set(range(len(aligned.ends)))
        begins = np.append(0, aligned.ends)[groups]
        assert ((begins < ends) & (ends <= aligned.ends[groups])).all()
    with_special = np.concatenate([[0], student, [0]])
    one_sided = align(with_special, teacher)
    assert np.array_equal(one_sided.ends, aligned.ends)
    assert np.array_equal(one_sided.teacher, aligned.teacher)
    assert np.array_equal(one_sided.student[with_special > 0], aligned.student)
    assert (one_sided.student[with_special == 0] == -1).all()


def check(text, readers):
    sides = [check_side(text, reader)[1] for reader in readers]
    for s, t in product(range(len(readers)), repeat=2):
        check_pair(text, sides[s], sides[t])


relaxed = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@relaxed
@given(text=TEXTS)
def test_alignment_of_tokenizers_trained_here(trained, text):
    check(text, [TextReader(tokenizer) for tokenizer in trained.values()])
    for name in () if "<" in text else ("bytes", "bytes, more of them"):  # <s> is no text
        check_texts(text, TextReader(trained[name]), token_texts(trained[name]))


@relaxed
@given(text=TEXTS)
def test_alignment_of_real_tokenizers(shared, trained, text):
    check(text, [*(reader for reader, _ in shared.values()), TextReader(trained["word piece"])])
    if "▁" in text or "<" in text:  # a space to SentencePiece; the name of a special token
        return
    for name, (reader, says) in shared.items():
        if name != "tokenizers/olmo" or unicodedata.is_normalized("NFC", text):
            check_texts(text, reader, says)


def test_offsets_become_a_partition():
    def cut(text, *offsets):
        return partition(text, np.array(offsets)).tolist()

    assert cut("abc", (0, 1), (0, 2), (2, 3)) == [2, 2, 3]  # overlapping
    assert cut("a b", (0, 1), (2, 3)) == [1, 3]  # a space left out goes to the word after it
    assert cut("e\u0301 b", (0, 1), (3, 4)) == [2, 4]  # a mark composed away, to what it marks
    assert cut("ab##", (0, 1), (1, 2)) == [1, 4]  # the end, to the last
    assert cut("##ab", (2, 3), (3, 4)) == [3, 4]  # the beginning, to the first
    assert cut("a  b", (0, 1), (3, 3), (3, 4)) == [1, 3, 4]  # a space without a width
    assert cut("ab", (0, 0), (0, 1), (1, 2)) == [1, 1, 2]  # a prefix without a width
    assert cut("ab", (0, 1), (1, 2), (2, 2)) == [1, 2, 2]
    assert partition("", np.zeros((0, 2), dtype=int)).tolist() == []


def test_silently_dropped_characters_do_not_shift_later_text(trained):
    tokenizer = trained["dropping"]
    reader = TextReader(tokenizer)
    text = "a dog 家家家 and 👩 the girl"
    assert len(tokenizer("家")["input_ids"]) <= 3  # nothing but the frame and a space
    ids, ends = reader.read(text)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids.tolist()
    says = token_texts(tokenizer)
    start, pieces = 0, []
    for stop in np.unique(ends):
        pieces.append((text[start:stop], b"".join(says[i] for i in ids[ends == stop]).decode()))
        start = stop
    for i, (written, decoded) in enumerate(pieces):
        kept = written.translate({ord("家"): None, ord("👩"): None})
        assert decoded == (f" {kept}" if i == 0 else kept)


def test_one_tokenizer_on_both_sides_is_one_to_one(trained):
    tokenizer = trained["bytes"]
    blocks = aligned_blocks(dataset(STORY, "The dog. 👩‍👧"), tokenizer, tokenizer, 256)
    assert torch.equal(blocks.student.ids, blocks.teacher.ids)
    batch = blocks.batch([0])
    groups = batch.groups()
    assert groups.one_to_one.all() and groups.matched.all()
    n = len(groups)
    assert n == int(batch.student.counts.sum()) - 1  # all that cross-entropy counts, but the end
    for side in (groups.student, groups.teacher):
        assert torch.equal(side.groups, torch.arange(n)) and torch.equal(side.first, side.groups)
    logits = torch.randn(batch.student.input_ids.numel(), len(tokenizer))
    likely = chunk_log_likelihood(
        logits[groups.student.rows], groups.student.targets, groups.student.groups, n
    )
    plain = torch.nn.functional.cross_entropy(
        logits[groups.student.rows], batch.student.input_ids.flatten()[1 : n + 1], reduction="none"
    )
    torch.testing.assert_close(-likely, plain)
    every = blocks.statistics()
    assert every["coverage"] == 1 and 0.9 < every["one_to_one"] == every["matched"] < 1  # the emoji


def test_the_first_rows_hold_the_same_text_for_both(trained):
    texts = [STORY[start:] for start in range(0, 40, 10)]
    blocks = aligned_blocks(dataset(*texts), trained["bytes"], trained["word piece"], 256)
    few = first_rows(blocks, 2)
    assert len(few) == len(few.teacher) == 2 < len(blocks)
    assert few.digest != blocks.digest
    groups, expected = few.batch([0, 1]).groups(), blocks.batch([0, 1]).groups()
    assert torch.equal(groups.student.targets, expected.student.targets)
    assert torch.equal(groups.teacher.targets, expected.teacher.targets)
    assert torch.equal(groups.n_bytes, expected.n_bytes)


@pytest.mark.parametrize("student", ["bytes", "word piece", "dropping"])
def test_rows_are_those_of_make_blocks(trained, student):
    # The third one drops characters that it does not know.
    completion = "a dog" if student == "dropping" else "a 👩‍👧 déjà vu"
    data = dataset(STORY, ("She saw the dog. ", completion), ("", "a dog"))
    teacher = trained["bytes, more of them"]
    blocks = aligned_blocks(data, trained[student], teacher, 256)
    for ours, tokenizer in ((blocks.student, trained[student]), (blocks.teacher, teacher)):
        plain = make_blocks(data, tokenizer, 256, packing=False)
        assert torch.equal(ours.ids, plain.ids) and torch.equal(ours.counts, plain.counts)
        assert torch.equal(ours.documents, plain.documents)
        assert torch.equal(ours.row_bytes, plain.row_bytes)
    assert not blocks.student.left_out


def test_a_long_document_is_cut_where_both_sides_cut_it(trained):
    student, teacher = trained["bytes"], trained["dropping"]
    whole = aligned_blocks(dataset(STORY * 3), student, teacher, 600)
    cut = aligned_blocks(dataset(STORY * 3), student, teacher, 20)
    assert len(whole) == 1 and len(cut) > 10 and "in" in cut.student.left_out[0]
    assert cut.student.ids.shape[1] == cut.teacher.ids.shape[1] == 20
    assert cut.student.target_bytes == whole.student.target_bytes == len(STORY * 3)
    one, many = whole.batch([0]).groups(), cut.batch(range(len(cut))).groups()
    assert torch.equal(one.n_bytes, many.n_bytes)
    assert torch.equal(one.matched, many.matched)
    for a, b in ((one.student, many.student), (one.teacher, many.teacher)):
        assert torch.equal(a.targets, b.targets) and torch.equal(a.groups, b.groups)
    assert cut.statistics()["coverage"] == 1


def test_every_row_of_logits_stands_before_its_token(trained):
    data = dataset(STORY, "a dog", STORY[40:])
    blocks = aligned_blocks(data, trained["bytes"], trained["dropping"], 64)
    batch = blocks.batch([3, 0, 1])
    groups = batch.groups()
    for side, model in ((groups.student, batch.student), (groups.teacher, batch.teacher)):
        ids = model.input_ids
        assert torch.equal(ids.flatten()[side.rows + 1], side.targets)
        width = ids.shape[1]
        assert torch.equal(side.rows // width, (side.rows + 1) // width)
        assert model.documents.flatten()[side.rows + 1].all()
        assert torch.equal(side.groups[side.first], torch.arange(len(groups)))
        assert (side.groups.diff() >= 0).all()
    assert groups.student.rows.max() < batch.student.input_ids.numel()
    one_by_one = [blocks.batch([row]).groups() for row in (3, 0, 1)]
    assert torch.equal(groups.n_bytes, torch.cat([g.n_bytes for g in one_by_one]))
    assert torch.equal(groups.teacher.targets, torch.cat([g.teacher.targets for g in one_by_one]))


def test_only_tokens_that_both_models_predict_count(trained):
    prompt, completion = "What did Lily see? ", "a dog"
    data = dataset((prompt, completion))
    blocks = aligned_blocks(data, trained["bytes"], trained["word piece"], 64)
    assert blocks.batch([0]).groups().n_bytes.tolist() == [2, 4]  # " a" begins in the prompt
    assert blocks.student.target_bytes == len(completion) and blocks.statistics()["coverage"] == 1
    # A teacher without BOS before a prompt: the first token has no predictor on one side.
    text = aligned_blocks(dataset("a dog"), trained["bytes"], trained["word piece"], 64)
    before = text.batch([0]).groups()
    assert before.n_bytes.sum() == 5
    no_start = text.teacher.ids.clone().roll(-1, 1)
    shifted = type(text)(
        text.student,
        type(text.teacher)(no_start, text.teacher.counts.roll(-1, 1), text.teacher.documents,
                           text.teacher.row_bytes, (), ""),
        (text.ends[0], text.ends[1].roll(-1, 1)),
        text.vocabulary,
        text.n_bytes,
    )  # fmt: skip
    after = shifted.batch([0]).groups()
    assert len(after) == len(before) - 1
    assert torch.equal(after.student.targets, before.student.targets[before.student.groups > 0])


def test_texts_longer_than_a_block_are_omitted_and_counted(trained):
    text = "The dog " + "家" * 40 + " went home"
    blocks = aligned_blocks(dataset(text), trained["bytes"], trained["dropping"], 32)
    stats = blocks.statistics()
    lost = blocks.n_bytes - blocks.student.target_bytes
    assert 3 * 40 <= lost < 130 and blocks.n_bytes == len(text.encode())
    assert stats["coverage"] == pytest.approx(1 - lost / len(text.encode()))
    assert "bytes that fit in no row" in blocks.student.left_out[0]


def test_the_prompt_is_shortened_before_the_completion(trained):
    data = dataset((STORY, "a dog"))
    blocks = aligned_blocks(data, trained["bytes"], trained["dropping"], 40)
    assert len(blocks) == 1 and blocks.student.target_bytes == 5
    assert (blocks.ends[0] > 0).sum() > 10  # as much of the prompt as fits


def test_tokens_of_one_side_count_by_their_first_bytes(trained):
    student, teacher = trained["bytes"], trained["bytes, more of them"]
    vocabulary = shared_vocabulary(student, teacher)
    says = [token_texts(student), token_texts(teacher)]
    common = sorted(set(says[0]) & set(says[1]) - {None})
    for texts, (classes, size), exact in zip(
        says, vocabulary[:2], (vocabulary.student_exact, vocabulary.teacher_exact), strict=True
    ):
        assert size == len(common)
        for text, k, is_exact in zip(texts, classes.tolist(), exact.tolist(), strict=True):
            begins = [c for c in common if text and text.startswith(c)]
            assert k == (common.index(max(begins, key=len)) if begins else size)
            assert is_exact == (text in common)
    assert not vocabulary.teacher_exact.all()


def test_token_texts_of_three_kinds(trained):
    def text(name, token):
        tokenizer = trained[name]
        return token_texts(tokenizer)[tokenizer.convert_tokens_to_ids(token)]

    assert text("bytes", "Ġthe") == b" the" and text("bytes", "Ċ") == b"\n"
    assert text("word piece", "dog") == b" dog" and text("word piece", "##g") == b"g"
    assert text("dropping", "▁") == b" "
    assert text("bytes", "<s>") is None and text("word piece", "[SEP]") is None


def test_bad_arguments_are_named(trained):
    byte, other = trained["bytes"], trained["dropping"]
    chat = TextDataset("chat", "all", (Example("c:1", messages=({"role": "user"},)),), "", ())
    with pytest.raises(ValueError, match="c:1: chat messages"):
        aligned_blocks(chat, byte, other, 32)
    with pytest.raises(ValueError, match="returns no tokens"):
        aligned_blocks(dataset("家"), byte, other, 32)
    endless = PreTrainedTokenizerFast(tokenizer_object=byte.backend_tokenizer)
    with pytest.raises(ValueError, match="eos_token"):
        aligned_blocks(dataset(STORY), endless, other, 32)

    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="Slow returns no token offsets"):
        TextReader(Slow())
