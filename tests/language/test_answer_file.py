"""Log-probabilities that vLLM made elsewhere, as a cache to learn from; and every fault named."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from ssl_kd import cli  # noqa: E402
from ssl_kd.doctor.verify_served import compare_served  # noqa: E402
from ssl_kd.errors import InputError  # noqa: E402
from ssl_kd.language.caching import cache_teacher  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.settings import SettingsError  # noqa: E402
from ssl_kd.teachers import answer_file  # noqa: E402
from ssl_kd.teachers.answer_file import AnswerFile  # noqa: E402
from tests.faults.matrix import row as fault  # noqa: E402
from tests.language.test_run import log_lines, table, weights  # noqa: E402
from tests.served import Server  # noqa: E402

K = 8


@pytest.fixture
def server(tiny, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(tiny.model(spread=0.3), tokenizer=tiny.tokenizer) as running:
        yield running


@pytest.fixture
def made(settings, tmp_path):
    """Settings of a cache of answers.jsonl; with changes."""

    def change(**changes):
        own = {"teacher_url": str(tmp_path / "answers.jsonl"), "teacher_top_k": K}
        own |= {"teacher_cache": str(tmp_path / "cache"), "temperature": 1.0}
        return settings(**{**own, "student_model": "llama:1x32", **changes})

    return change


def prompts_of(settings):
    """What has to be answered, as it is written down."""
    file = Path(settings.teacher_url)
    with pytest.raises(InputError, match="were written to .*answers.prompts.jsonl"):
        cache_teacher(settings)
    lines = file.with_name("answers.prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt_token_ids"] for line in lines]


def answer(server, prompts, k=K):
    return [{"prompt_token_ids": ids, "prompt_logprobs": server.entries(ids, k)} for ids in prompts]


def write(settings, records):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    Path(settings.teacher_url).write_text("".join(f"{line}\n" for line in lines))


def files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.pt")}


@pytest.mark.parametrize("packing", [True, False])
def test_its_cache_is_that_of_the_server_to_the_bit(made, server, tmp_path, packing):
    given = made(packing=packing)
    write(given, answer(server, prompts_of(given)))
    cache_teacher(given)
    url = {"teacher_url": server.url, "teacher_served_as": "teacher"}
    asked = made(packing=packing, **url, teacher_cache=str(tmp_path / "asked"))
    cache_teacher(asked)
    assert files(tmp_path / "cache") == files(tmp_path / "asked") and files(tmp_path / "asked")
    path = run(given)
    assert weights(path) == weights(run(asked.replace(run_name="b")))
    assert all(line["kd"] > 0 for line in log_lines(path) if "eval" not in line)
    assert table(path)["student"]["perplexity"] < table(path)["student before"]["perplexity"]


def test_by_the_command_line_and_from_python(made, server, capsys):
    given = made()
    names = ("data_path", "teacher_model", "teacher_url", "teacher_cache", "block_size")
    flags = [word for n in names for word in (f"--{n}", str(getattr(given, n)))]
    flags += ["--teacher_top_k", str(K), "--student_model", "llama:1x32"]
    assert cli.cache_teacher(flags) == 2 and "answers.prompts.jsonl" in capsys.readouterr().err
    write(given, answer(server, prompts_of(given)))
    assert cli.cache_teacher(flags) == 0 and "topk" in capsys.readouterr().out


def test_the_forms_in_which_vllm_gives_them(made, server, tiny):
    """Its own objects, its server's answers, and texts that its tokenizer splits."""
    given = made()
    prompts = prompts_of(given)
    records = answer(server, prompts, k=K + 5)  # more than are wanted
    whole = {"request_id": "1", "prompt": None, "outputs": [], "finished": True}
    records[1] = whole | records[1]
    asked = {"prompt": prompts[2], "prompt_logprobs": K + 5, "return_token_ids": True}
    records[2] = server.completion(asked)
    write(given, records)
    assert cache_teacher(given)[0].fingerprint.k == K

    text = tiny.tokenizer.decode(prompts[0])
    ids = tiny.tokenizer(text)["input_ids"]
    write(given, [{"text": text, "prompt_logprobs": server.entries(ids, K)}])
    file = AnswerFile(given.teacher_url, tiny.tokenizer)
    found, same = file.top_k(ids, K, 320), server.entries(ids, K)[1]
    assert {str(token) for token in found.tokens[0].tolist()} <= same.keys()


def test_what_is_missing_is_written_down_and_added(made, server):
    given = made()
    prompts = prompts_of(given)
    records = answer(server, prompts)
    write(given, records[:-3])
    with pytest.raises(InputError, match=f"answers {len(prompts) - 3} of {len(prompts)} prompts"):
        cache_teacher(given)
    assert prompts_of(given) == prompts[-3:]
    write(given, [*answer(server, prompts, k=2), *records])  # the last answer to a prompt counts
    assert cache_teacher(given)[0].n > 0


def test_a_prompt_without_the_end_of_its_text_is_told_so(made, server):
    given = made()
    prompts = prompts_of(given)
    write(given, answer(server, [ids[:-1] for ids in prompts]))
    said = r"answers 0 of .*line 1 has one of .* without its last token, 1, which ends the text"
    with pytest.raises(InputError, match=said):
        cache_teacher(given)


def at(place, change):
    """A change of the answer after some token."""

    def spoil(record):
        record["prompt_logprobs"][place] = change(record["prompt_logprobs"][place])
        return record

    return spoil


def shifted(record):
    entries = record["prompt_logprobs"]
    return record | {"prompt_logprobs": [None, *entries[2:], entries[-1]]}


def without(name):
    return lambda record: {key: value for key, value in record.items() if key != name}


def renamed(entry):
    likeliest = max(entry, key=lambda token: entry[token]["logprob"])
    return {{likeliest: "9999"}.get(token, token): said for token, said in entry.items()} | {
        likeliest: {"logprob": -30.0, "rank": 300}
    }


FAULTS = [
    (lambda r: json.dumps(r)[:40], r":3 is not JSON: \{\"prompt_token_ids"),
    (
        without("prompt_token_ids"),
        r":3 has no prompt_token_ids, and no text or prompt: \['prompt_l",
    ),
    (without("prompt_logprobs"), r":3 has no list of prompt_logprobs: \{'prompt_token_ids'"),
    (lambda r: [r], r":3 has no list of prompt_logprobs: \[\{"),
    (lambda r: r | {"choices": [3]}, r":3 has no list of prompt_logprobs: None"),
    (lambda r: r | {"prompt_token_ids": [2**70]}, r":3 has no prompt_token_ids"),
    (lambda r: r | {"prompt_logprobs": r["prompt_logprobs"][1:]}, r":3 has prompt_logprobs of \d+"),
    (lambda r: without("prompt_token_ids")(r) | {"text": "a b"}, r":3 has .* is another one, or"),
    (shifted, r":3 does not give .* misaligned by one position \(row \d+ of the text, token 1\)"),
    (at(2, renamed), r":3 gives the token 9999 among .*another tokenizer"),
    (
        at(2, lambda e: dict([*e.items()][:3])),
        r":3 gives the \d likeliest tokens, expected 8 or mo",
    ),
    (at(2, lambda e: "-1.5"), r":3 gives no log-probabilities: -1.5 .*token 2"),
    (at(2, lambda e: {t: -1.5 for t in e}), r":3 gives .*expected \{id: \{'logprob'.*token 2"),
    *(
        (
            at(2, lambda e, n=name: e | {n: {"logprob": -9.0, "rank": 300}}),
            r":3 gives the id .*token 2",
        )
        for name in ("010", " 10", "\u0661", "1_0", "+10", "-0", str(2**70))
    ),
    (lambda r: "[" * 10**6, r":3 is not JSON that can be read \(its brackets are too deep"),
    (lambda r: '{"prompt_logprobs": ' + "9" * 5000 + "}", r":3 is not JSON: \{\"prompt_logp"),
    (lambda r: '{"prompt": "a", "prompt": "b"}', r":3 is not JSON with one .*'prompt' twice"),
    (lambda r: '{"prompt_logprobs": [], "text": "\\ud800"}', r":3 has a text that is no Unicode"),
    (lambda r: r | {"prompt_token_ids": [True] * 9}, r":3 has no prompt_token_ids"),
    (lambda r: r | {"prompt_token_ids": [1.0] * 9}, r":3 has no prompt_token_ids"),
    (at(2, lambda e: {t: s | {"rank": True} for t, s in e.items()}), r":3 gives .*expected \{id"),
    (at(2, lambda e: {t: s | {"logprob": 1.5} for t, s in e.items()}), r":3 .*log-probability 1.5"),
]


@pytest.mark.parametrize(("spoil", "said"), FAULTS, ids=range(len(FAULTS)))
@fault(114)
def test_a_line_that_cannot_be_is_named(made, server, spoil, said):
    given = made()
    records = answer(server, prompts_of(given))
    write(given, [*records[:2], spoil(records[2]), *records[3:]])
    with pytest.raises(InputError, match=f"answers.jsonl{said}") as caught:
        cache_teacher(given)
    assert "\n" not in str(caught.value)


@fault(114)
def test_a_line_without_end_is_named(made, monkeypatch):
    given = made()
    monkeypatch.setattr(answer_file, "LARGEST", 50)
    Path(given.teacher_url).write_bytes(b"\n" + b" " * 51)
    with pytest.raises(InputError, match="answers.jsonl:2 is longer than 50 bytes"):
        cache_teacher(given)


def test_too_few_tokens_are_found_although_the_prompts_own_comes_in_addition(made, server):
    given = made()
    records = answer(server, prompts_of(given), k=K - 1)
    outside = [r for r in records if len(r["prompt_logprobs"][1]) == K]
    assert outside  # as many as are wanted, and one of them is not among the likeliest
    write(given, records)
    with pytest.raises(InputError, match="gives the 7 likeliest tokens, expected 8 or more: lower"):
        cache_teacher(given)
    assert cache_teacher(given.replace(teacher_top_k=K - 1))[0].fingerprint.k == K - 1


def test_it_is_compared_with_the_teacher_that_is_here(made, server):
    given = made(block_size=32)
    write(given, answer(server, prompts_of(given)))
    (finding,) = compare_served(given)
    assert not finding.change and "off by" in finding.seen
    server.change = lambda logits: logits / 2
    prompts = [json.loads(line) for line in Path(given.teacher_url).read_text().splitlines()]
    write(given, answer(server, [one["prompt_token_ids"] for one in prompts]))
    (finding,) = compare_served(given)
    assert finding.change and "off by" in finding.seen


def test_a_run_learns_from_its_cache_alone(made):
    with pytest.raises(SettingsError, match="a file of answers .* keep them by cache_teacher.py"):
        run(made(teacher_cache=None))
