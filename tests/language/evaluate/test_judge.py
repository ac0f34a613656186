"""Judging language models: tiny real ones against direct computations."""

import json
import math

import pytest
import torch

transformers = pytest.importorskip("transformers")

from ssl_kd.language.evaluate import generation  # noqa: E402
from ssl_kd.language.evaluate import judge as judge  # noqa: E402
from ssl_kd.language.evaluate.generation import prompt_ids, repetition  # noqa: E402
from ssl_kd.language.evaluate.judge import (  # noqa: E402
    LanguageJudge,
    Reading,
    judge_answers,
    judge_tokens,
)
from ssl_kd.language.models.frozen import FrozenTeacher, linear_head  # noqa: E402
from ssl_kd.language.text.blocks import make_blocks  # noqa: E402
from ssl_kd.language.text.dataset import TextDataset  # noqa: E402
from ssl_kd.language.text.new_tokenizer import train_tokenizer  # noqa: E402
from ssl_kd.language.text.records import Example  # noqa: E402

TEXTS = (
    "A cat sat on the mat, and a dog sat on the cat.",
    "The sun was up. Tom ran to the park.",
    "Lily had a red ball, and she let Tom play with it until the evening came.",
    "Zoë: 没有 🙂",
    "2 + 2 = 4; 3 + 3 = 6; 4 + 4 = 8.",
)
DATASET = TextDataset(
    "texts", "test", tuple(Example(f"t:{i}", text=t) for i, t in enumerate(TEXTS)), "", ()
)
TOKENIZER = train_tokenizer(DATASET, 300)


def llama(seed=0, kind="Llama", **changes):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=changes.pop("vocab_size", len(TOKENIZER)),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=TOKENIZER.bos_token_id,
        eos_token_id=TOKENIZER.eos_token_id,
        **changes,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def blocks(packing=True):
    return make_blocks(DATASET, TOKENIZER, 32, packing=packing)


def direct(model, text_blocks, teacher=None):
    """Each document alone, whole logits, float64: nll and KL per target."""
    nll, kl = [], []
    for ids, counts, documents in zip(
        text_blocks.ids, text_blocks.counts, text_blocks.documents, strict=True
    ):
        for document in range(1, int(documents.max()) + 1):
            mine = documents == document
            x, real = ids[mine][None], counts[mine]
            log_q = model(x).logits[0].double().log_softmax(-1)
            for t in range(1, len(real)):
                if real[t]:
                    nll.append(-log_q[t - 1, x[0, t]].item())
                    if teacher is not None:
                        log_p = teacher(x).logits[0, t - 1].double().log_softmax(-1)
                        kl.append((log_p.exp() * (log_p - log_q[t - 1])).sum().item())
    return torch.tensor(nll), torch.tensor(kl)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("linear", [True, False])
def test_tokens_are_judged_by_the_logits_of_the_model(packing, linear, monkeypatch):
    # Granite scales its logits: they are not hidden @ weight.T, and the judge must ask for them.
    own = {} if linear else {"kind": "Granite", "logits_scaling": 3.0}
    model, teacher = llama(seed=1, **own).eval(), llama(seed=2, **own).eval()
    assert (linear_head(model) is not None) is linear
    text = blocks(packing)
    with torch.no_grad():
        nll, kl = direct(model, text, teacher)
    monkeypatch.setattr(judge, "CHUNK_BYTES", 4 * 5 * len(TOKENIZER))  # five tokens a chunk
    scores = judge_tokens(model, text, teachers=[FrozenTeacher(teacher)], batch_size=2)
    assert scores.tokens == len(nll) == int(text.counts.sum()) and scores.left_out == []
    assert scores.nll == pytest.approx(nll.mean().item(), rel=1e-5)
    assert scores.kl == pytest.approx(kl.mean().item(), rel=1e-4)
    n_bytes = sum(len(text.encode()) for text in TEXTS)
    bits = nll.sum().item() / math.log(2) / n_bytes
    assert scores.bits_per_byte == pytest.approx(bits, rel=1e-5)
    assert scores.kl and scores.agreement and scores.agreement < 1
    both = [FrozenTeacher(teacher), FrozenTeacher(model)]  # the second has a KL of 0
    mean = judge_tokens(model, text, teachers=both, weights=(3.0, 1.0), batch_size=2)
    assert mean.kl == pytest.approx(0.75 * scores.kl, rel=1e-4) and mean.nll == scores.nll
    assert mean.agreement == pytest.approx(0.75 * scores.agreement + 0.25)


def test_a_teacher_can_be_judged_against_itself():
    model, text = llama(), blocks()
    teacher = FrozenTeacher(llama())
    scores = judge_tokens(model, text, teachers=[teacher])
    assert scores.agreement == 1 and scores.kl == pytest.approx(0, abs=1e-6)
    row, own = judge_tokens(teacher, text).table_row("t"), judge_tokens(model, text).table_row("t")
    assert row == own and row["kl"] is None and row["agreement"] is None
    assert generate(teacher, TOKENIZER, ["A cat"], 5) == generate(model, TOKENIZER, ["A cat"], 5)


def test_the_model_is_unchanged():
    model = llama(attention_dropout=0.5).train()
    model.lm_head.eval()  # a user's own choice
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    first, second = judge_tokens(model, blocks()), judge_tokens(model, blocks())
    generate(model, TOKENIZER, ["Tom"], 3)
    assert first.nll == second.nll  # no dropout
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    with torch.no_grad():
        assert first.nll == pytest.approx(direct(model.eval(), blocks())[0].mean().item(), rel=1e-5)


# --- generating -----------------------------------------------------------------------------------


def generate(model, tokenizer, prompts, n, **options):
    ids = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    return [text for text, _ in generation.generate(model, tokenizer, ids, n, **options)]


def greedy(model, prompt, n):
    """The largest logit, again and again, without a cache."""
    ids = TOKENIZER(prompt).input_ids
    start = len(ids)
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == TOKENIZER.eos_token_id:
            ids.pop()
            break
    return TOKENIZER.decode(ids[start:])


@torch.no_grad()
def test_generating_is_greedy_whatever_stands_beside_it():
    model = llama(seed=3).eval()
    model.generation_config.update(do_sample=True, temperature=0.3, repetition_penalty=5.0)
    prompts = ["A", "Tom ran to the park", "", "2 + 2 =", "The sun was up, and"]
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    side = TOKENIZER.padding_side
    assert generate(model, TOKENIZER, prompts, 12, batch_size=3) == expected
    assert generate(model, TOKENIZER, prompts, 12, batch_size=1) == expected
    assert len(set(expected)) > 1 and TOKENIZER.padding_side == side
    assert generate(model, TOKENIZER, [], 1) == []


QUESTIONS = tuple(
    Example(f"q.jsonl:{i + 1}", prompt=prompt, completion=completion)
    for i, (prompt, completion) in enumerate(
        [
            ("2 + 2 =", " <answer>4</answer>"),
            ("the cat sat on", " a <answer>mat</answer>"),
            ("3 + 3 =", " <answer>6</answer>"),
            ("who ran?", " Tom\n#### Tom"),
            ("nothing to be found in", " this"),
        ]
    )
)


@pytest.fixture(scope="module")
def trained():
    """A model that has learned the questions by heart."""
    model = llama().train()
    text = make_blocks(TextDataset("q", "train", QUESTIONS, "", ()), TOKENIZER, 64, packing=False)
    batch = text.batch(range(len(text)))
    labels = torch.where(batch.counts, batch.input_ids, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(80):
        loss = model(**batch.model_inputs(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    return model


def test_answers_are_counted(trained):
    scores, generations = judge_answers(trained, TOKENIZER, QUESTIONS, batch_size=3)
    # The last example states no answer, so it is not a question.
    assert (scores.n, scores.answered, scores.right, scores.faults) == (4, 4, 4, ())
    assert [g.where for g in generations] == [f"q.jsonl:{i}" for i in (1, 2, 3, 4)]
    assert [g.reference for g in generations] == ["4", "mat", "6", "Tom"]
    assert generations[1].prompt == "the cat sat on"
    assert generations[1].text == " a <answer>mat</answer>"

    changed = [
        Example("w:1", prompt="2 + 2 =", completion="<answer>5</answer>"),
        Example("w:2", prompt="nothing to be found in", completion="<answer>this</answer>"),
        *QUESTIONS[1:],
    ]
    scores, _ = judge_answers(trained, TOKENIZER, changed, limit=4)
    assert (scores.n, scores.answered, scores.right) == (4, 3, 2)
    scores, _ = judge_answers(trained, TOKENIZER, changed[:1], tolerance=0.25)
    assert scores.accuracy == 1
    nothing, generations = judge_answers(trained, TOKENIZER, QUESTIONS[-1:])
    assert nothing.accuracy is None and generations == []


def tokenizer_of_chats():
    tokenizer = train_tokenizer(DATASET, 300)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'odd' %}{{ raise_exception('no such role') }}{% endif %}"
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    return tokenizer


def test_chats_are_rendered_by_the_tokenizer_template(trained):
    def chat(where, role, question, answer):
        turns = ({"role": role, "content": question}, {"role": "assistant", "content": answer})
        return Example(where, messages=(*turns, {"role": "user", "content": "thanks"}))

    examples = [
        chat("c:1", "user", "3 + 3 =", "<answer>6</answer>"),
        chat("c:2", "odd", "3 + 3 =", "<answer>6</answer>"),
        chat("c:3", "user", "3 + 3 =", "six"),
    ]
    scores, generations = judge_answers(trained, tokenizer_of_chats(), examples)
    assert (scores.n, scores.right) == (1, 1)
    assert generations[0].prompt == "<s>3 + 3 ="
    assert generations[0].text == " <answer>6</answer>"


def test_generations_that_fail_are_named_and_counted(trained, caplog):
    model = llama(vocab_size=len(TOKENIZER) - 1)  # knows one token less than the tokenizer
    model.load_state_dict(
        {
            name: value[:-1] if value.shape[:1] == (len(TOKENIZER),) else value
            for name, value in trained.state_dict().items()
        }
    )
    nan, unknown = TOKENIZER("@", add_special_tokens=False).input_ids[0], len(TOKENIZER) - 1
    with torch.no_grad():
        model.model.embed_tokens.weight[nan] = math.nan
    questions = [
        QUESTIONS[0],
        Example("bad:nan", prompt="@", completion="#### 1"),
        Example("bad:crash", prompt=TOKENIZER.decode([unknown]), completion="#### 1"),
        Example("bad:long", prompt="z" * 130, completion="#### 1"),
        QUESTIONS[2],
    ]
    scores, generations = judge_answers(model, TOKENIZER, questions, max_new_tokens=20)
    assert (scores.n, scores.answered, scores.right) == (5, 2, 2)
    nan_fault, crash, long = scores.faults
    assert nan_fault == "bad:nan: logits not finite at new token 1"
    assert crash.startswith("bad:crash: IndexError: ")
    assert long.startswith(
        "bad:long: the prompt has 131 tokens; expected less than the model's 128"
    )
    assert "failed for 3 of 5 questions, first for bad:nan: logits not finite" in caplog.text
    assert [g.text == "" for g in generations] == [False, True, True, True, False]
    assert generate(model, TOKENIZER, ["@", "2 + 2 ="], 20) == ["", " <answer>4</answer>"]


def test_the_last_position_of_a_model_ends_a_text_and_no_other():
    model = llama(seed=3).eval()
    long = "z" * 120  # 121 tokens and BOS leave room for seven
    with torch.no_grad():
        expected = [greedy(model, "Tom", 12), greedy(model, long, 7)]
    assert generate(model, TOKENIZER, ["Tom", long], 12) == expected


def test_real_stories(shared_data):
    folder = shared_data / "lm"
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder / "stories260K", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "stories260K")
    lines = (shared_data / "text" / "tinystories_valid.jsonl").read_text().splitlines()[:4]
    stories = tuple(Example(f"s:{i}", text=json.loads(s)["text"]) for i, s in enumerate(lines))
    text = make_blocks(TextDataset("s", "test", stories, "", ()), tokenizer, 256)
    scores = judge_tokens(model, text)
    assert scores.perplexity == pytest.approx(4.4, abs=1)
    assert scores.bits_per_byte == pytest.approx(1.1, abs=0.2)
    assert scores.ece == pytest.approx(0, abs=0.1)
    [story] = generate(model, tokenizer, ["Once upon a time, there was a"], 20)
    assert story.startswith(" little girl named Lily")


def test_rows_report_repetition_and_chats_use_their_template(trained):
    tokenizer = tokenizer_of_chats()
    turns = ({"role": "user", "content": "who ran?"}, {"role": "assistant", "content": " Tom"})
    refused = ({"role": "odd", "content": "who ran?"}, turns[1])
    examples = [Example("c:1", messages=refused), Example("c:2", messages=turns), *QUESTIONS[:1]]
    looks = LanguageJudge(
        examples, Reading(tokenizer, blocks()), generations=2, max_new_tokens=24, answer_prompts=0
    )
    row, texts = looks.row("student", trained)
    assert texts == [" Tom\n#### Tom", " <answer>4</answer>"]
    tokens = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    assert row["repetition"] == repetition(tokens) and row["n"] == 0
    shown = looks.side_by_side({"after": texts})
    assert shown[0] == {"prompt": "<s>who ran?", "reference": " Tom", "after": texts[0]}
    none = LanguageJudge(examples, Reading(tokenizer, blocks()), generations=0, answer_prompts=0)
    assert none.row("student", trained)[0]["repetition"] is None


def test_repetition_counts_within_a_text():
    loop, free = list("abcdabcdabcd"), list("abcdefgh")
    assert repetition([loop]) == 1 - 4 / 9
    assert repetition([loop, free, ["a"]]) == pytest.approx((1 - 4 / 9) / 2)  # one token: none
    assert repetition([free, free]) == 0  # two texts may be the same
    assert repetition([]) is None
