import random
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from ssl_kd.language.losses.token_distillation import next_token_targets
from ssl_kd.language.text.blocks import best_fit, isolates_documents, make_blocks
from ssl_kd.language.text.dataset import TextDataset
from ssl_kd.language.text.new_tokenizer import train_tokenizer
from ssl_kd.language.text.records import Example
from ssl_kd.language.text.rows import first_rows  # noqa: E402

STORIES = (
    "Once upon a time, there was a little dog named Spot. Spot liked to play in the park.",
    "One day, Lily went to the park. She saw a big red ball, and she was very happy.",
    "The end.",
    "Tom and Mia like to draw. They draw a sun, a tree, and a cat with a very long tail. "
    "The cat looks at them and says: meow! Tom and Mia laugh, and draw some more.",
)
REAL = ("stories3M", "stories260K", "tinystories-656K", "gpt2", "olmo")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def dataset(*examples):
    """Texts, (prompt, completion) pairs and lists of messages."""
    forms = {str: lambda e: {"text": e}, tuple: lambda e: {"prompt": e[0], "completion": e[1]}}
    return TextDataset(
        "test",
        "all",
        tuple(
            Example(f"f:{i}", **forms.get(type(e), lambda e: {"messages": tuple(e)})(e))
            for i, e in enumerate(examples, 1)
        ),
        "",
        (),
    )


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(dataset(*STORIES), 320)


@pytest.fixture(scope="module", params=["trained", *REAL])
def any_tokenizer(request):
    if request.param == "trained":
        return request.getfixturevalue("tokenizer")
    shared = request.getfixturevalue("shared_data")
    (folder,) = shared.glob(f"*/{request.param}/tokenizer.json")
    return AutoTokenizer.from_pretrained(folder.parent)


def expected(tokenizer, text):
    """The targets of a document that is a text."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def pieces(blocks):
    """The documents, or parts of one, that the rows hold: ids and counts."""
    found = []
    for ids, counts, documents in zip(blocks.ids, blocks.counts, blocks.documents, strict=True):
        for number in range(1, int(documents.max()) + 1):
            here = documents == number
            found.append((tuple(ids[here].tolist()), tuple(counts[here].tolist())))
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_every_target_once_whatever_the_tokenizer(any_tokenizer, packing):
    size = len(any_tokenizer)
    blocks = make_blocks(dataset(*STORIES), any_tokenizer, 128, packing=packing)
    targets = [[i for i, c in zip(*piece, strict=True) if c] for piece in pieces(blocks)]
    assert sorted(targets) == sorted(expected(any_tokenizer, t) for t in STORIES)
    start = any_tokenizer.bos_token_id
    start = any_tokenizer.eos_token_id if start is None else start
    for ids, counts in pieces(blocks):
        assert ids[0] == start
        assert counts == (False, *[True] * (len(ids) - 1))
    assert len(blocks) == len(STORIES) if not packing else len(blocks) < len(STORIES)
    assert not (blocks.counts & (blocks.documents == 0)).any()
    assert blocks.ids.max() < size == len(any_tokenizer)  # GPT-2 has no padding, and gets none
    assert blocks.left_out == ()


@pytest.mark.parametrize(("packing", "block_size"), [(True, 7), (False, 64), (True, 512)])
def test_bytes_are_those_of_the_text(any_tokenizer, packing, block_size):
    texts = (*STORIES, "  two  spaces, é, 家, 👩‍👧 and \n\nlines ", "a", "now 5 %")
    blocks = make_blocks(dataset(*texts), any_tokenizer, block_size, packing=packing)
    assert blocks.target_bytes == sum(len(text.encode()) for text in texts)
    halves = [blocks.batch(range(0, len(blocks), 2)), blocks.batch(range(1, len(blocks), 2))]
    assert sum(b.target_bytes for b in halves if len(b.rows)) == blocks.target_bytes
    assert (blocks.row_bytes >= 0).all()


def test_a_part_of_the_rows(tokenizer):
    blocks = make_blocks(dataset(*STORIES), tokenizer, 16)
    assert len(blocks) > 4
    few, some = blocks.part(slice(1, 4)), blocks.batch(range(1, 4))
    assert torch.equal(few.batch(range(3)).input_ids, some.input_ids)
    assert (len(few), few.target_bytes, few.digest) == (3, some.target_bytes, blocks.digest)
    assert len(blocks.part(slice(10**6))) == len(blocks)


def test_the_first_rows_have_a_digest_of_their_own(tokenizer):
    blocks = make_blocks(dataset(*STORIES), tokenizer, 16)
    few = first_rows(blocks, 3)
    assert torch.equal(few.ids, blocks.ids[:3])
    assert len({blocks.digest, few.digest, first_rows(blocks, 2).digest}) == 3
    for limit in (None, len(blocks), len(blocks) + 1):
        assert first_rows(blocks, limit) is blocks


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    texts=st.lists(st.text(min_size=1), min_size=1, max_size=6),
    block_size=st.integers(2, 40),
    data=st.data(),
)
def test_no_token_is_lost_or_doubled(tokenizer, texts, block_size, data):
    padded = make_blocks(dataset(*texts), tokenizer, block_size, packing=False)
    wanted = [i for text in texts for i in expected(tokenizer, text)]
    assert padded.ids[padded.counts].tolist() == wanted
    packed = make_blocks(dataset(*texts), tokenizer, block_size)
    assert Counter(pieces(packed)) == Counter(pieces(padded))
    assert packed.target_bytes == padded.target_bytes == sum(len(text.encode()) for text in texts)
    assert len(packed) <= len(padded)
    # Each further part begins with the last token of the part before.
    for text in texts:
        one = pieces(make_blocks(dataset(text), tokenizer, block_size, packing=False))
        for (before, _), (after, counts) in zip(one, one[1:], strict=False):
            assert after[0] == before[-1] and len(before) == block_size and not counts[0]
    # The one place where labels are shifted gives each of them to the token before it.
    rows = data.draw(st.permutations(range(len(padded))))
    batch = padded.batch(rows)
    places, targets = next_token_targets(batch.input_ids, batch.counts)
    assert len(targets) == len(wanted)
    assert (batch.documents.flatten()[places] == 1).all()


def test_only_the_completion_counts(any_tokenizer):
    pairs = [("Tom has 2 cats. How many?\n", "2 cats"), ("Lily saw a", " big red ball.")]
    blocks = make_blocks(dataset(*pairs), any_tokenizer, 64)
    assert blocks.target_bytes == sum(len(completion) for _, completion in pairs)
    # Packed rows hold the longest first; the pairs are in that order.
    for (ids, counts), (prompt, completion) in zip(pieces(blocks), pairs, strict=True):
        first = counts.index(True)
        assert counts == (False,) * first + (True,) * (len(ids) - first)
        assert ids[-1] == any_tokenizer.eos_token_id
        # What stands before is what the model is given when it is asked.
        given_ids = any_tokenizer(prompt)["input_ids"]
        assert list(ids[:first]) == given_ids[:first]
        # A token may reach into the completion; in one of the tokenizers, over several words.
        assert len(given_ids) - first <= 2
        decoded = any_tokenizer.decode(ids[first:-1])
        assert decoded.strip().endswith(completion.strip())


def test_a_completion_without_a_prompt_has_a_start(shared_data, tokenizer):
    olmo = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "olmo")
    for tok in (olmo, tokenizer):
        blocks = make_blocks(dataset(("", "a cat")), tok, 16)
        ((ids, counts),) = pieces(blocks)
        assert counts == (False, *[True] * (len(ids) - 1))
        assert ids[1:] == tuple(expected(tok, "a cat"))
        assert blocks.target_bytes == 5


def test_long_prompts_are_cut_at_the_start(tokenizer):
    prompt, completion = STORIES[3], " The end."
    tail = expected(tokenizer, completion)
    whole = [tokenizer.bos_token_id, *expected(tokenizer, prompt + completion)]
    blocks = make_blocks(dataset((prompt, completion)), tokenizer, 24)
    assert blocks.ids.tolist() == [whole[-24:]]
    assert blocks.ids[blocks.counts].tolist() == tail
    assert blocks.target_bytes == len(completion)
    lost = len(whole) - 24
    assert blocks.left_out == (
        f"f:1: the document has {len(whole)} tokens (block_size 24); prompt tokens cut off: "
        f"{lost}; parts: 1",
    )
    (share,) = blocks.shares
    prompt_tokens = len(whole) - len(tail)
    what = f"1 of 1 prompts (100.0%) shortened, {lost / prompt_tokens:.0%} of their tokens lost, "
    assert (
        str(share) == f"{what}for example {blocks.left_out[0]}; raise BLOCK_SIZE to keep them whole"
    )
    # A completion that is itself too long keeps one token of the prompt, and is split.
    short = make_blocks(dataset((prompt, completion)), tokenizer, 4, packing=False)
    assert short.ids[short.counts].tolist() == tail
    assert short.ids[0, 0] == whole[-len(tail) - 1]
    assert f"; parts: {len(short)}" in short.left_out[0]
    most = f"{(prompt_tokens - 1) / prompt_tokens:.0%}"
    assert [str(share).partition(", for")[0] for share in short.shares] == [
        f"1 of 1 prompts (100.0%) shortened, {most} of their tokens lost",
        "1 of 1 documents (100.0%) split over rows",
    ]


def test_only_assistant_tokens_count(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    chat = [
        {"role": "user", "content": "a cat?"},
        {"role": "assistant", "content": "a dog!"},
        {"role": "user", "content": "a sun?"},
        {"role": "assistant", "content": "a café."},
        {"role": "user", "content": "good"},
    ]
    blocks = make_blocks(dataset(chat), tokenizer, 128)
    ((ids, counts),) = pieces(blocks)
    whole = (
        "<s>[user]a cat?</s>[assistant]a dog!</s>[user]a sun?</s>[assistant]a café.</s>"
        "[user]good</s>"
    )
    assert tokenizer.decode(ids) == whole  # nothing is added to what the template writes
    counted = tokenizer.decode([i for i, c in zip(ids, counts, strict=True) if c])
    assert counted == "a dog!</s>a café.</s>"
    assert blocks.target_bytes == len("a dog!a café.".encode()) == 14
    # A part with user messages only is dropped.
    split = make_blocks(dataset(chat), tokenizer, 4, packing=False)
    assert split.target_bytes == blocks.target_bytes and split.row_bytes.min() >= 0
    parts = pieces(split)
    assert all(any(counts) for _, counts in parts)
    counted = [i for ids, counts in parts for i, c in zip(ids, counts, strict=True) if c]
    assert tokenizer.decode(counted) == "a dog!</s>a café.</s>"


def test_chat_prompts_carry_no_loss_and_show_their_tools(tokenizer, monkeypatch):
    shown = ("{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}" + TEMPLATE).replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}({{ c.function.arguments.a }}){% endfor %}",
    )
    call = {"type": "function", "function": {"name": "sun", "arguments": {"a": "é"}}}
    turns = (
        {"role": "user", "content": "a cat?"},
        {"role": "assistant", "content": "a dog!"},
        {"role": "user", "content": "a sun?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )
    chat = Example("f:1", messages=turns, given=3, tools=(call,))
    texts = TextDataset("test", "all", (chat,), "digest", ())
    monkeypatch.setattr(tokenizer, "chat_template", shown)
    blocks = make_blocks(texts, tokenizer, 128)
    ((ids, counts),) = pieces(blocks)
    assert tokenizer.decode(ids).startswith("<sun><s>[user]a cat?")
    decoded = tokenizer.decode([i for i, c in zip(ids, counts, strict=True) if c])
    assert decoded == "sun(é)</s>"
    assert blocks.target_bytes == len('{"name": "sun", "arguments": {"a": "é"}}'.encode())
    # A template that knows of no tools would have it learn to say nothing.
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    with pytest.raises(ValueError, match="f:1: the chat template omits the tool calls"):
        make_blocks(texts, tokenizer, 128)


def test_the_first_token_never_counts(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content }} and so on")
    chat = [{"role": "assistant", "content": " a cat "}]
    for block_size in (4, 64):
        blocks = make_blocks(dataset(chat), tokenizer, block_size, packing=False)
        assert not blocks.counts[:, 0].any()
        ids = tokenizer(" a cat  and so on", add_special_tokens=False)["input_ids"]
        assert blocks.ids[blocks.counts].tolist() == ids[1:]
        assert blocks.row_bytes.min() >= 0
        assert blocks.target_bytes <= len(" a cat ")


def test_messages_that_a_template_cannot_show(tokenizer, monkeypatch):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match="f:2: messages need a chat template, but the tokenizer"):
        make_blocks(dataset("text", chat), tokenizer, 16)
    refusing = "{% if messages|length == 1 %}" + TEMPLATE + "{% endif %}"
    monkeypatch.setattr(
        tokenizer,
        "chat_template",
        TEMPLATE + "{% if messages[0].role != 'user' %}{{ raise_exception('no user') }}{% endif %}",
    )
    blocks = make_blocks(dataset(chat[::-1], chat), tokenizer, 64)
    assert len(pieces(blocks)) == 1
    assert blocks.left_out == ("f:1: the chat template fails on the messages: no user",)
    monkeypatch.setattr(tokenizer, "chat_template", refusing)
    with pytest.raises(ValueError, match="test: 1 of 1 assistant turns .* .f:1: assistant turn 1"):
        make_blocks(dataset(chat, "text"), tokenizer, 64)


def test_a_document_that_becomes_empty():
    tok = train_tokenizer(dataset("a"), 259)
    tok.backend_tokenizer.normalizer = normalizers.Replace("%", "")
    blocks = make_blocks(dataset("%%", "a"), tok, 16)
    assert len(pieces(blocks)) == 1
    assert blocks.left_out == ("f:1: the tokenizer returns no tokens",)
    with pytest.raises(
        ValueError, match="test contains no token to train on: f:1: the tokenizer ret"
    ):
        make_blocks(dataset("%%"), tok, 16)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_no_two_rows_would_fit_into_one(lengths):
    assert best_fit([3, 9, 5, 1, 2], 10) == [[0, 2, 4], [1, 3]]  # in the order of the documents
    rows = best_fit(lengths, 30)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    used = sorted(sum(lengths[i] for i in row) for row in rows)
    assert used[-1] <= 30
    assert len(used) == 1 or used[0] + used[1] > 30
    assert rows == sorted(rows)


def test_the_digest_is_that_of_the_blocks(tokenizer):
    blocks = make_blocks(dataset(*STORIES), tokenizer, 128)
    assert make_blocks(dataset(*STORIES), tokenizer, 128).digest == blocks.digest
    prompted = make_blocks(dataset(*STORIES[:3], (STORIES[3][:9], STORIES[3][9:])), tokenizer, 128)
    assert torch.equal(prompted.ids, blocks.ids)  # only what counts differs
    others = [
        prompted,
        make_blocks(dataset(*STORIES), tokenizer, 129),
        make_blocks(dataset(*STORIES), tokenizer, 128, packing=False),
        make_blocks(dataset(*STORIES, "a"), tokenizer, 128),
    ]
    assert len({b.digest for b in (blocks, *others)}) == 5


def test_a_batch_is_cut_to_its_longest_row(tokenizer):
    blocks = make_blocks(dataset(*STORIES), tokenizer, 100, packing=False)
    lengths = (blocks.documents > 0).sum(1)
    batch = blocks.batch([2, 0])
    assert batch.input_ids.shape == (2, max(lengths[2], lengths[0]))
    assert batch.rows.tolist() == [2, 0]
    assert batch.input_ids.dtype == batch.position_ids.dtype == torch.int64
    assert torch.equal(batch.input_ids[0, : lengths[2]], blocks.ids[2, : lengths[2]])
    assert batch.counts.sum() == blocks.counts[[2, 0]].sum()
    assert not batch.packed and list(batch.model_inputs()) == ["input_ids"]


def test_positions_restart_in_each_document(tokenizer):
    blocks = make_blocks(dataset("The end.", "One day", "a"), tokenizer, 40)
    batch = blocks.batch(range(len(blocks)))
    assert batch.packed and list(batch.model_inputs()) == ["input_ids", "position_ids"]
    for documents, positions in zip(batch.documents, batch.position_ids, strict=True):
        for number in range(1, int(documents.max()) + 1):
            here = positions[documents == number]
            assert here.tolist() == list(range(len(here)))


def test_a_tokenizer_without_eos_is_refused(tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="has no EOS token to end documents: set tokenizer.eos"):
        make_blocks(dataset("a"), bare, 16)


def test_a_tokenizer_is_trained_the_same_twice_and_loads_again(tokenizer, tmp_path):
    again = train_tokenizer(dataset(*STORIES), 320)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert len(again) == 320
    assert [again.bos_token_id, again.eos_token_id, again.pad_token_id] == [0, 1, 2]
    again.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(loaded, name) == getattr(tokenizer, name) is not None
    blocks = [make_blocks(dataset(*STORIES), t, 64) for t in (tokenizer, loaded)]
    assert blocks[0].digest == blocks[1].digest
    chat = [{"role": "user", "content": "xyxyxyxy"}, {"role": "assistant", "content": "zw" * 9}]
    learned = train_tokenizer(dataset(("abababab", "cdcdcdcd"), chat), 300)
    assert {"ab", "cd", "xy", "zw"} <= set(learned.get_vocab())


SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
OLD_SIZES = {k: SIZES[k] for k in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id")}
ISOLATING = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=8),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "gpt2": GPT2Config(
        vocab_size=320,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=1,
    ),
}
LEAKING = {
    "bloom": BloomConfig(**OLD_SIZES, n_layer=2, n_head=4),
    "opt": OPTConfig(
        **OLD_SIZES,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=128,
    ),
}


def build(config, attention="eager"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def losses(model, blocks, size):
    """Every target's cross-entropy, by its token and the tokens before it in its document."""
    found = []
    for start in range(0, len(blocks), size):
        batch = blocks.batch(range(start, min(start + size, len(blocks))))
        rows, targets = next_token_targets(batch.input_ids, batch.counts)
        with torch.no_grad():
            logits = model(**batch.model_inputs(), use_cache=False).logits.flatten(0, 1)[rows]
        found.append(cross_entropy(logits, targets, reduction="none"))
    return torch.cat(found).sort().values


@pytest.mark.parametrize(
    ("name", "attention"), [*((n, "sdpa") for n in ISOLATING), ("llama", "eager")]
)
def test_packed_documents_do_not_see_each_other(name, attention, tokenizer):
    model = build(ISOLATING[name], attention)
    assert isolates_documents(model)
    model.eval()
    packed = make_blocks(dataset(*STORIES), tokenizer, 100)
    assert packed.batch(range(len(packed))).packed
    first = packed.batch([int((packed.documents > 1).any(1).nonzero()[0])])
    other = first.input_ids.clone()
    other[first.documents == 1] = 7
    inputs = first.model_inputs()
    with torch.no_grad():
        before = model(**inputs, use_cache=False).logits
        after = model(**{**inputs, "input_ids": other}, use_cache=False).logits
    torch.testing.assert_close(
        before[first.documents > 1], after[first.documents > 1], rtol=0, atol=1e-6
    )
    assert not torch.allclose(before[first.documents == 1], after[first.documents == 1])
    # Nor do they see the padding: every loss is what it is in a row of its own.
    alone = make_blocks(dataset(*STORIES), tokenizer, 100, packing=False)
    torch.testing.assert_close(losses(model, packed, 2), losses(model, alone, 1))
    torch.testing.assert_close(losses(model, alone, 4), losses(model, alone, 1))


@pytest.mark.parametrize("name", LEAKING)
def test_models_that_do_not_look_at_positions_are_found_out(name):
    assert not isolates_documents(build(LEAKING[name]))


class Bare(torch.nn.Module):
    """Takes no positions."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids):
        return self.embedding(input_ids)


def test_a_model_without_positions_leaks():
    assert not isolates_documents(Bare())


@pytest.mark.parametrize("output", ["the same for any input", "not finite"])
def test_an_uninformative_output_is_not_a_leak(output, caplog):
    model = build(ISOLATING["llama"])
    if output == "not finite":
        model.model.norm.weight.data[0] = float("nan")
    else:
        torch.nn.init.zeros_(model.lm_head.weight)
    assert not isolates_documents(model)
    assert f"the output of LlamaForCausalLM is {output}" in caplog.text
    assert "attend to each other" not in caplog.text


def test_the_probe_leaves_everything_as_it_was():
    model = build(ISOLATING["gpt2"]).train()
    model.transformer.h[0].eval()  # as frozen parts are
    modes = [m.training for m in model.modules()]
    random_states = torch.get_rng_state(), random.getstate()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    isolates_documents(model)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert random.getstate() == random_states[1]
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
