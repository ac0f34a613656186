"""What a record means: each form that people write, and why one cannot be learned from."""

import json
import re

import pytest

from ssl_kd.datasets.records import Example, as_example

USER, BOT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def chat(*turns, **more):
    return Example("w", messages=turns, **more)


@pytest.mark.parametrize(
    ("record", "example"),
    [
        # Alpaca: its own prompt, with and without an input; before the text that some add to it.
        (
            {"instruction": "Add.", "input": "2 2", "output": "4", "text": "all of it"},
            Example(
                "w",
                prompt="Below is an instruction that describes a task, paired with an input that "
                "provides further context. Write a response that appropriately completes the "
                "request.\n\n### Instruction:\nAdd.\n\n### Input:\n2 2\n\n### Response:\n",
                completion="4",
            ),
        ),
        (
            {"instruction": "Sing.", "input": "", "output": "La."},
            Example(
                "w",
                prompt="Below is an instruction that describes a task. Write a response that "
                "appropriately completes the request.\n\n### Instruction:\nSing.\n\n"
                "### Response:\n",
                completion="La.",
            ),
        ),
        # ShareGPT, with its system prompt beside the turns or among them.
        (
            {
                "conversations": [
                    {"from": "human", "value": "2+2?"},
                    {"from": "gpt", "value": "4"},
                ],
                "system": "Be brief.",
            },
            chat(SYSTEM, USER, BOT),
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "2+2?"},
                    {"from": "function_call", "value": json.dumps(CALL)},
                    {"from": "observation", "value": "4"},
                    {"from": "gpt", "value": "4"},
                ],
                "tools": json.dumps(TOOLS),
            },
            chat(
                USER,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": CALL}],
                },
                {"role": "tool", "content": "4"},
                BOT,
                tools=tuple(TOOLS),
            ),
        ),
        ({"conversations": [USER, BOT]}, chat(USER, BOT)),
        # TRL's conversational prompt and completion: what the assistant said before is given.
        (
            {"prompt": [USER, BOT, USER], "completion": [BOT]},
            chat(USER, BOT, USER, BOT, given=3),
        ),
        # A chat in a table's cell.
        ({"messages": json.dumps([USER, BOT])}, chat(USER, BOT)),
        # Content in parts, tool calls as OpenAI's API gives them.
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "2+"}, "2?"]},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {
                                "id": "c1",
                                "type": "function",
                                "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'},
                            }
                        ],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "4"},
                ]
            },
            chat(
                USER,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "c1", "type": "function", "function": CALL}],
                },
                {"role": "tool", "content": "4", "tool_call_id": "c1"},
            ),
        ),
    ],
)
def test_forms(record, example):
    assert as_example(record, "w") == example


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (
            {"chosen": "a", "rejected": "b"},
            r"w: holds \['chosen', 'rejected'\]; expected strings in messages or conversations .*"
            "instruction and output, or text; --text_field selects",
        ),
        ({"instruction": "a", "input": "", "output": " "}, "output is empty"),
        ({"instruction": "a", "input": 5, "output": "b"}, "input is not a string but int"),
        ({"messages": "[{'role': 'user'}]"}, "messages: not JSON"),
        ({"messages": '{"role": 1}'}, "messages is not a list but dict"),
        ({"conversations": [{"from": "ghost", "value": "boo"}]}, "from 'ghost'; expected one of h"),
        ({"prompt": [USER, BOT], "completion": [USER]}, "no message of the assistant"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}, BOT]},
            "the image x.png cannot be read: No such",
        ),
        ({"messages": [{**BOT, "tool_calls": [5]}]}, "a tool call must hold function"),
        (
            {"messages": [{**BOT, "tool_calls": [{"name": "add", "arguments": "a=2"}]}]},
            "arguments of add: not JSON",
        ),
        ({"messages": [USER, BOT], "tools": "add"}, "tools: not JSON"),
    ],
)
def test_what_cannot_be_learned_from_says_why(record, complaint):
    found = as_example(record, "w")
    assert isinstance(found, str) and re.search(complaint, found), found


def test_a_named_field_is_the_only_one_that_is_looked_at():
    record = {"messages": [USER, BOT], "body": "once", "text": "not this"}
    assert as_example(record, "w", "body") == Example("w", text="once")
    said = as_example(record, "w", "boddy")
    assert isinstance(said, str) and said.startswith(
        "w: holds ['body', 'messages', 'text']; expected a string in boddy"
    )
    assert as_example({"body": " "}, "w", "body") == "w: body is empty"
