"""Locate the assistant's turns in rendered chats; the templates are in a folder."""

import copy
import json
import os
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from ssl_kd.core.errors import InputError
from ssl_kd.language.text.blocks import make_blocks
from ssl_kd.language.text.dataset import TextDataset
from ssl_kd.language.text.new_tokenizer import train_tokenizer
from ssl_kd.language.text.records import Example, as_example
from ssl_kd.language.text.render import render
from tests.faults.matrix import row

FOLDER = Path(__file__).parent / "templates"
TEMPLATES = {path.stem: path.read_text("utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
# Other templates, such as those of TRL or llama.cpp, are held to the same where this names them.
PUBLIC = [Path(p) for p in os.environ.get("SSL_KD_CHAT_TEMPLATES", "").split(os.pathsep) if p]
TEMPLATES |= {p.stem: p.read_text("utf-8") for folder in PUBLIC for p in folder.glob("*.jinja")}
EVERY = pytest.mark.parametrize("name", TEMPLATES)
TOOL = {"name": "weather", "description": "of a city", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": TOOL}]
SYSTEM = {"role": "system", "content": "Be brief."}


def tokenizer_with(template):
    """A tokenizer without a vocabulary, but with a chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def user(content):
    return {"role": "user", "content": content}


def assistant(content, *calls, **more):
    """A message of the assistant; calls are names, or names with arguments."""
    named = [call if isinstance(call, tuple) else (call, {"city": "Bern"}) for call in calls]
    functions = [{"name": name, "arguments": arguments} for name, arguments in named]
    listed = [{"id": f"abcdefgh{n}", "function": f} for n, f in enumerate(functions, 1)]
    return {"role": "assistant", "content": content, **more} | (
        {"tool_calls": listed} if listed else {}
    )


def tool(content):
    return {"role": "tool", "content": content, "tool_call_id": "abcdefgh1", "name": "weather"}


def show(name, *messages, given=0):
    """What is rendered of a chat under the template."""
    chat = copy.deepcopy(list(messages))
    tools = TOOLS if any("tool_calls" in message for message in chat) else None
    record = {"messages": chat, "tools": tools}
    if given:
        record = {"prompt": chat[:given], "completion": chat[given:], "tools": tools}
    example = as_example(record, "f:1")
    assert isinstance(example, Example), example
    return render(example, tokenizer_with(TEMPLATES.get(name, name)))


def learned(name, *messages, given=0):
    """The learned stretches, or why there are none."""
    rendered = show(name, *messages, given=given)
    return [rendered.text[a:b] for a, b, _ in rendered.spans] or list(rendered.left_out)


def by_prefixes(template, messages):
    """Spans by what the first messages render to: right wherever that begins the whole."""
    tokenizer = tokenizer_with(template)

    def text(upto, prompt=False):
        return tokenizer.apply_chat_template(
            messages[:upto], tokenize=False, add_generation_prompt=prompt
        )

    whole, spans = str(text(len(messages))), []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = str(text(i, True)), str(text(i + 1))
            if whole.startswith(before) and whole.startswith(after):
                spans.append((len(before), len(after)))
    return spans


SEVERAL = [
    user("Hi"),
    assistant("No."),
    user("Hi"),
    assistant("No."),
    user("Bye"),
    assistant("Bye."),
]
CALLED = [user("Rain?"), assistant("", "weather"), tool("sun"), assistant("Sunny.")]
ENDS = {
    "deepseek_r1": ["No.<｜end▁of▁sentence｜>"] * 2 + ["Bye.<｜end▁of▁sentence｜>"],
    "gemma3": ["No.<end_of_turn>\n"] * 2 + ["Bye.<end_of_turn>\n"],
    "harmony": ["<|channel|>final<|message|>No.<|end|>"] * 2
    + ["<|channel|>final<|message|>Bye.<|return|>"],
    "llama3": ["No.<|eot_id|>"] * 2 + ["Bye.<|eot_id|>"],
    "mistral": [" No.</s>"] * 2 + [" Bye.</s>"],
    "phi35": ["No.<|end|>\n"] * 2 + ["Bye.<|end|>\n</s>"],
    "qwen25": ["No.<|im_end|>\n"] * 2 + ["Bye.<|im_end|>\n"],
    "qwen3": ["No.<|im_end|>\n"] * 2 + ["<think>\n\n</think>\n\nBye.<|im_end|>\n"],
    "qwen3_generation": ["No.<|im_end|>"] * 2 + ["Bye.<|im_end|>"],
}


@pytest.mark.parametrize("name", ENDS)
def test_every_turn_is_learned_from_its_prompt_to_its_end(name):
    assert learned(name, *SEVERAL) == ENDS[name]
    assert learned(name, SYSTEM, *SEVERAL) == ENDS[name]
    turns = show(name, SYSTEM, *SEVERAL).turns
    assert turns == Counter(there=3, learned=3)
    # What is given is not learned, and a conversation may end with the user.
    assert learned(name, *SEVERAL, given=4) == ENDS[name][2:]
    assert learned(name, *SEVERAL[:5]) == ENDS[name][:2]


@pytest.mark.parametrize("name", [n for n, t in TEMPLATES.items() if "{%- generation" not in t])
def test_spans_are_those_of_prefixes_where_these_show_them(name):
    template = TEMPLATES[name]
    chats = [
        SEVERAL[:2],
        SEVERAL,
        [user(" Hi\n"), assistant("  Well.\n\n"), user("x"), assistant("\n<b>y</b> ")],
        [
            user("<b>Hi</b>"),
            assistant("Straße 🙂\u200d <|im_end|>"),
            user("[INST]"),
            assistant("</s>"),
        ],
        [user("Hi"), assistant(""), user("Well?"), assistant("Well.")],
    ]
    for chat in chats:
        spans = [span[:2] for span in show(name, *chat).spans]
        assert set(by_prefixes(template, chat)) <= set(spans), chat
        assert len(spans) == sum(m["role"] == "assistant" for m in chat)


CALLS = {
    "qwen3": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    "<|im_end|>\n",
    "llama3": '{"name": "weather", "parameters": {"city": "Bern"}}<|eot_id|>',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern"}, '
    '"id": "abcdefgh1"}]</s>',
    "harmony": ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Bern"}<|call|>',
    "deepseek_r1": '<｜tool▁call▁begin｜>weather\n{"city": "Bern"}<｜end▁of▁sentence｜>',
}


@pytest.mark.parametrize("name", CALLS)
def test_tool_calls_are_learned_but_not_tool_results(name):
    last = learned(name, *CALLED)
    assert last[0] == CALLS[name] and len(last) == 2 and "sun" not in "".join(last).lower()[:-40]
    assert learned(name, *CALLED, user("Thanks"), assistant("Bye."))[0] == CALLS[name]
    as_text = copy.deepcopy(CALLED)
    as_text[1]["content"] = None
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Bern"}'
    assert learned(name, *as_text) == last
    bare = learned(
        name, user("Rain?"), assistant("", ("weather", {})), tool("sun"), assistant("Sunny.")
    )
    assert "weather" in bare[0] and "{}" in bare[0] and "sun" not in bare[0]


def test_several_calls_in_a_turn_and_content_beside_them():
    calls = assistant("Both:", "weather", ("time", {"n": 2}))
    first, last = learned("qwen3", user("Rain?"), calls, tool("sun"), assistant("Sunny."))
    assert first.startswith("Both:\n<tool_call>") and first.count("<tool_call>") == 2
    assert last.endswith("Sunny.<|im_end|>\n")
    # Content or a second call that is left out would teach not to say it.
    refused = ["f:1: the chat template fails on the messages: one call at once"]
    assert learned("llama3", user("Rain?"), calls) == refused
    (why,) = learned("llama3", user("Rain?"), assistant("Look:", "weather"))
    assert why.startswith("f:1: the chat template omits the content: use another template")
    (why,) = learned("harmony", user("Rain?"), assistant("", "weather", "time"))
    assert why.startswith("f:1: the chat template omits the tool calls")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_generation", "harmony"])
def test_thoughts_may_be_left_out_and_answers_and_calls_stay(name):
    def learned(*chat):
        record = {"messages": list(chat), "tools": TOOLS if len(chat) > 2 else None}
        example = as_example(copy.deepcopy(record), "f:1")
        shown = render(example, tokenizer_with(TEMPLATES[name]), learn_thoughts=False)
        return [(shown.text[a:b].split("<|im_end|>")[0], n) for a, b, n in shown.spans]

    answer = "<|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    answer, field = (answer, "thinking") if name == "harmony" else ("Four.", "reasoning_content")
    assert learned(user("2+2?"), assistant("Four.", **{field: "two"})) == [(answer, 5)]
    call, last = learned(
        user("Rain?"), assistant("", "weather", **{field: "x"}), tool("sun"), assistant("4")
    )
    assert "weather" in call[0] and "think" not in call[0] + last[0] and "4" in last[0]
    ((inline, n),) = learned(user("2+2?"), assistant("<think>\ntwo\n</think>\n\nFour."))
    assert inline == answer[answer.index("Four.") :] and n == 7
    example = Example("f:1", prompt="2+2?", completion="<think>two</think>\nFour.")
    assert render(example, None, learn_thoughts=False).spans == ((23, 28, 5),)


THOUGHT = [
    user("2+2?"),
    assistant("4", reasoning_content="two"),
    user("3+3?"),
    assistant("6", thinking="tri"),
]


@row(143)
@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen25", "mistral", "phi35", "deepseek_r1"])
@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_that_a_template_never_shows_are_refused(name, field):
    chat = [user("2+2?"), assistant("4", **{field: "two and two"})]
    for messages in (chat, [*chat, user("And?"), assistant("Done.")]):
        rendered = show(name, *messages)
        assert not rendered.spans
        assert rendered.left_out[0].startswith("f:1: the chat template omits the reasoning")
        assert rendered.turns == Counter(there=len(messages) // 2)


def test_thoughts_of_earlier_turns_are_hidden_by_design_and_counted():
    assert learned("qwen3", *THOUGHT) == [
        "4<|im_end|>\n",
        "<think>\ntri\n</think>\n\n6<|im_end|>\n",
    ]
    assert show("qwen3", *THOUGHT).turns == Counter(there=2, learned=2, hidden=1)
    assert show("harmony", *THOUGHT).turns == Counter(there=2, learned=2, hidden=1)
    assert "<|channel|>analysis<|message|>tri<|end|>" in learned("harmony", *THOUGHT)[1]
    # Characters are those of what is learned: a hidden thought is none of it.
    assert [n for *_, n in show("qwen3", *THOUGHT).spans] == [1, len("6tri")]
    inline = [user("2+2?"), assistant("<think>\ntwo\n</think>\n\n4"), user("3+3?"), assistant("6")]
    assert learned("qwen3", *inline)[0] == "4<|im_end|>\n"
    assert learned("llama3", *inline)[0] == "<think>\ntwo\n</think>\n\n4<|eot_id|>"
    (why,) = learned("deepseek_r1", *inline)
    assert "omits the reasoning" in why


HOSTILE = {
    "repeats the user": [user("No."), assistant("No."), user("No."), assistant("No.")],
    "is the end token": [user("a"), assistant("<|im_end|>"), user("b"), assistant("<|eot_id|>")],
    "holds the next turn": [
        user("a"),
        assistant("x<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\ny"),
        user("b"),
        assistant("y"),
    ],
    "holds the prompt": [user("<|im_start|>assistant\n"), assistant("<|im_start|>assistant\n"),
                         user("b"), assistant("<start_of_turn>model\n")],
    "is white space": [user("a"), assistant("x"), user("b"), assistant("  ")],
    "is one letter": [user("a"), assistant("a"), user("a"), assistant("a")],
    "is Unicode": [user("é"), assistant("e\u0301\u202e🙂\u200d🙂\ufeff"), user("\u2028"),
                   assistant("ß\u0085")],
    "holds marks": [user("𓀀0c𓀁"), assistant("𓀀1c𓀁 x"), user("b"), assistant("𓀀")],
    "is a tag": [user("<a>"), assistant("<b>"), user("</a>"), assistant("</b>")],
    "is a tool's answer": [user("<tool_response>\nx\n</tool_response>"), assistant("y")],
    "opens a thought": [user("a"), assistant("x <think> y"), user("b"), assistant("<think>")],
    "is braces": [user("{{ a }}"), assistant("{% raw %}"), user("{#"),
                  assistant("{{ bos_token }}")],
    "is long": [user("a " * 9000), assistant("b " * 9000), user("c"), assistant("d " * 9000)],
    "is backslashes": [user("\\n"), assistant('\\"\\u0041'), user("\x00"),
                       assistant("\x00\x1b[0m")],
    "has no user's text": [user(""), assistant("x"), user(" "), assistant("y")],
    "is a system's": [SYSTEM, user("Be brief."), assistant("Be brief."), user("a"),
                      assistant("Be brief.")],
}  # fmt: skip


@EVERY
@pytest.mark.parametrize("chat", HOSTILE.values(), ids=HOSTILE)
def test_hostile_contents_are_learned_exactly(name, chat):
    rendered = show(name, *chat)
    spoken = [m["content"] for m in chat if m["role"] == "assistant"]
    if "𓀀1c𓀁" in spoken[0] and len(rendered.spans) < len(spoken):
        assert len(rendered.left_out) == len(spoken) - len(rendered.spans)  # named, not guessed
        return
    assert len(rendered.spans) == len(spoken) and not rendered.left_out
    end = 0
    for (begin, stop, n), content in zip(rendered.spans, spoken, strict=True):
        assert end <= begin <= stop
        part = rendered.text[begin:stop]
        assert content.strip() in part and n == len(content.encode())
        # Beside the content there are but an empty thought, channels and the end.
        assert len(part) <= len(content) + 60
        end = stop


@row(144)
def test_turns_that_cannot_be_located_are_named_and_refused_above_one_percent():
    counts = (  # marks disturb it, and its first messages do not begin the whole
        "{{ messages|length }}{% for m in messages %}{{ m.role }} {{ m.content|length }}: "
        "{{ m.content }}{% endfor %}"
    )
    long = [user("a"), assistant("b"), user("c"), assistant("d")]
    tokenizer = train_tokenizer(TextDataset("t", "all", (Example("f", text="abcd"),), "", ()), 259)
    tokenizer.chat_template = counts
    example = Example("f:7", messages=tuple(long))
    rendered = render(example, tokenizer)
    assert rendered.turns["lost"] and rendered.left_out[0].startswith(
        "f:7: assistant turn 1 cannot be located"
    )
    # With a hundred that are located, one that is not is left out by name; without, all is refused.
    easy = Example("f:8", messages=(user("a"), assistant("b" * 9)))
    tokenizer.chat_template = (
        "{% if messages|length > 2 %}" + counts + "{% else %}{% for m in messages %}"
        "[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}{% endif %}"
    )
    texts = TextDataset("chats", "all", (example, *[easy] * 200), "", ())
    blocks = make_blocks(texts, tokenizer, 64)
    assert blocks.turns["there"] == 202 and blocks.turns["learned"] == 200
    assert [line[:28] for line in blocks.left_out[0].split("; ")] == [
        "f:7: assistant turn 1 cannot",
        "f:7: assistant turn 2 cannot",
    ]
    with pytest.raises(
        InputError, match=r"chats: 2 of 12 assistant turns .* \(f:7: assistant turn 1 .*generation"
    ):
        make_blocks(TextDataset("chats", "all", (example, *[easy] * 10), "", ()), tokenizer, 64)


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{{ nothing.at.all }}", "{% for %}",
     "{{ messages[9].content }}", "{{ raise_exception('no\nuser') }}"],
)  # fmt: skip
def test_a_template_that_fails_leaves_a_line(template):
    (why,) = learned(template, *SEVERAL)
    assert why.startswith("f:1: the chat template fails on the messages: ") and "\n" not in why


def test_an_opening_turn_is_learned_without_its_prefix():
    first, second = learned("llama3", assistant("Welcome!"), user("Hi"), assistant("Hello."))
    assert (first, second) == ("Welcome!<|eot_id|>", "Hello.<|eot_id|>")
    assert learned("qwen25", assistant("Welcome!"))[0] == "Welcome!<|im_end|>\n"
    twice = learned("qwen3", user("Hi"), assistant("Hello."), assistant("And you?"))
    assert twice[0] == "Hello.<|im_end|>\n" and twice[1].endswith("And you?<|im_end|>\n")


@EVERY
def test_tokens_that_count_are_those_of_the_turns(name):
    texts = TextDataset("t", "all", (Example("f:1", messages=tuple(SEVERAL)),), "", ())
    tokenizer = train_tokenizer(texts, 300)
    tokenizer.chat_template = TEMPLATES[name]
    blocks = make_blocks(texts, tokenizer, 1024)
    rendered = render(texts.examples[0], tokenizer)
    decoded = tokenizer.decode(blocks.ids[0][blocks.counts[0]].tolist())
    assert decoded == "".join(rendered.text[a:b] for a, b, _ in rendered.spans)
    assert blocks.target_bytes == len("No.No.Bye.") and blocks.turns["learned"] == 3
    # Cut into short rows, each of them counts once.
    short = make_blocks(texts, tokenizer, 8, packing=False)
    assert int(short.counts.sum()) == int(blocks.counts.sum())


def test_an_unrenderable_chat_does_not_affect_the_next():
    template = (
        "{% if 'bad' in messages[0].content and messages|length == 1 %}{{ raise_exception('') }}"
        "{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    for first, located in (("bad", False), ("good", True), ("bad", True)):  # the last one from it
        rendered = show(template, user(first), assistant("Yes."))
        assert bool(rendered.spans) == located, first


@pytest.mark.parametrize(
    "arguments", [{}, {"a": [1, {"b": None}]}, {"é": '\n"\\', "n": 1e300}], ids=json.dumps
)
@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_every_kind_are_learned_as_they_are(name, arguments):
    chat = [
        user("a"),
        assistant("", ("f<b>", arguments)),
        tool("f<b>"),
        assistant("f<b>"),
        user("f<b>"),
    ]
    first, second = learned(name, *chat, assistant("f<b>"))[:2]
    assert json.dumps(arguments, ensure_ascii=False) in first and "f<b>" in first
    assert second.count("f<b>") == 1 and "𓀀" not in first + second


def test_named_templates_are_chosen_by_tools():
    tokenizer = tokenizer_with(TEMPLATES["llama3"])
    tokenizer.chat_template = {"default": TEMPLATES["llama3"], "tool_use": TEMPLATES["qwen3"]}
    plain = as_example({"messages": SEVERAL[:2]}, "f:1")
    called = as_example({"messages": copy.deepcopy(CALLED), "tools": TOOLS}, "f:1")
    assert "<|eot_id|>" in render(plain, tokenizer).text
    assert "<|im_end|>" in render(called, tokenizer).text
