"""Records in all their forms become examples, or messages with the reason."""

import json
import re

import pytest

from ssl_kd.language.text.records import Example, as_example, as_examples

USER, BOT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
HUMAN, GPT = {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}
CALLED = {"type": "function", "function": CALL}
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
                "conversations": [HUMAN, GPT],
                "system": "Be brief.",
            },
            chat(SYSTEM, USER, BOT),
        ),
        (
            {
                "conversations": [
                    HUMAN,
                    {"from": "function_call", "value": json.dumps(CALL)},
                    {"from": "observation", "value": "4"},
                    GPT,
                ],
                "tools": json.dumps(TOOLS),
            },
            chat(
                USER,
                {"role": "assistant", "content": "", "tool_calls": [CALLED]},
                {"role": "tool", "content": "4"},
                BOT,
                tools=tuple(TOOLS),
            ),
        ),
        ({"conversations": [USER, BOT]}, chat(USER, BOT)),
        # TRL's conversational prompt and completion: earlier answers belong to the prompt.
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
                                **{"id": "c1", "type": "function"},
                                "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'},
                            }
                        ],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "4"},
                ]
            },
            chat(
                USER,
                {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **CALLED}]},
                {"role": "tool", "content": "4", "tool_call_id": "c1"},
            ),
        ),
    ],
)
def test_forms(record, example):
    assert as_example(record, "w") == example


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"chosen": "a", "rejected": "b"},
            r"w: the fields are \['chosen', 'rejected'\]; expected one of the fields messages, .*"
            "instruction and output, or text; choose another text field with --text_field",
        ),
        ({"instruction": "a", "input": "", "output": " "}, "output is empty"),
        ({"instruction": "a", "input": 5, "output": "b"}, "input is int; expected a string"),
        ({"messages": "[{'role': 'user'}]"}, "messages is not valid JSON"),
        ({"messages": '{"role": 1}'}, "messages is dict; expected a list"),
        (
            {"conversations": [{"from": "ghost", "value": "boo"}]},
            "from is 'ghost'; expected one of h",
        ),
        ({"prompt": [USER, BOT], "completion": [USER]}, "no assistant message to train on"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}, BOT]},
            "the image x.png cannot be read: No such",
        ),
        ({"messages": [{**BOT, "tool_calls": [5]}]}, "a tool call lacks function"),
        (
            {"messages": [{**BOT, "tool_calls": [{"name": "add", "arguments": "a=2"}]}]},
            "arguments of add is not valid JSON",
        ),
        ({"messages": [USER, BOT], "tools": "add"}, "tools is not valid JSON"),
    ],
)
def test_an_unusable_record_is_explained(record, message):
    result = as_example(record, "w")
    assert isinstance(result, str) and re.search(message, result), result


def test_a_prompt_alone_is_an_example_where_a_model_continues_it():
    for record, example in (
        ({"prompt": "2+2?", "chosen": "4"}, Example("w", prompt="2+2?")),
        ({"prompt": [SYSTEM, USER]}, chat(SYSTEM, USER, given=2)),
    ):
        assert as_example(record, "w", prompts=True) == example and example.is_prompt
        assert "--on_policy 1 or --teacher_text 1 lets a" in str(as_example(record, "w"))
    record = {"messages": [USER, BOT, USER]}
    assert as_example(record, "w", prompts=True) == chat(USER, BOT, USER, given=3)


def test_each_of_several_answers_is_an_example():
    first, empty = as_examples({"prompt": "2+2?", "responses": ["4", " "]}, "w")
    assert isinstance(first, Example) and empty == "w answer 2: completion is empty"
    assert first == Example("w answer 1", prompt="2+2?", completion="4", group=first.group)
    for none in ("", None, 5):
        _, last = as_examples({"prompt": "2+2?", "completions": ["4", none]}, "w", prompts=True)
        assert isinstance(last, str) and last.startswith("w answer 2: ")
    chats = as_examples({"messages": [SYSTEM, USER], "completions": ["4", [BOT]]}, "w")
    assert [getattr(each, "messages", each) for each in chats] == [(SYSTEM, USER, BOT)] * 2
    assert [*as_examples({"messages": [USER, BOT], "generations": ["5"]}, "w")] == [chat(USER, BOT)]


def test_a_named_field_is_the_only_one_read():
    record = {"messages": [USER, BOT], "body": "once", "text": "not this"}
    assert as_example(record, "w", "body") == Example("w", text="once")
    message = as_example(record, "w", "boddy")
    assert isinstance(message, str) and message.startswith(
        "w: the fields are ['body', 'messages', 'text']; expected a string in the field boddy"
    )
    assert as_example({"body": " "}, "w", "body") == "w: body is empty"
