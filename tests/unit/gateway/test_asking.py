from __future__ import annotations

from typing import Any

import pytest

from services.contracts.limits import MAX_SEED
from services.gateway import asking
from services.gateway.fan_out import child_seed
from services.gateway.refusals import Refusal

USER = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> asking.Ask:
    return asking.completion({"model": "m", "prompt": "hi", **fields})


def chat(**fields: Any) -> asking.Ask:
    return asking.chat({"model": "m", "messages": USER, **fields})


def refused(parse: Any, **fields: Any) -> str:
    with pytest.raises(Refusal) as caught:
        parse(**fields)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
    return caught.value.message


def test_a_plain_completion() -> None:
    ask = completion(temperature=0, stop=["a"], top_k=5, seed=None, logprobs=2)
    assert ask.children == [
        {
            "prompt": "hi",
            "max_tokens": 16,
            "temperature": 0,
            "stop": ["a"],
            "top_k": 5,
            "logprobs": 2,
        }
    ]
    assert (ask.stream, ask.include_usage, ask.num_choices) == (False, False, 1)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [{"prompt": "a"}]),
        (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]),
        ([1, 2], [{"prompt_token_ids": [1, 2]}]),
        ([[1], [2, 3]], [{"prompt_token_ids": [1]}, {"prompt_token_ids": [2, 3]}]),
    ],
)
def test_prompts_of_every_form(prompt: Any, expected: list[Any]) -> None:
    ask = completion(prompt=prompt, max_tokens=1)
    assert ask.children == [{**fields, "max_tokens": 1} for fields in expected]


@pytest.mark.parametrize("prompt", [[], [[]], ["ok", ""], [1, "a"], [[1], 2], 5, None, [1.5]])
def test_case_29_prompts_of_no_form(prompt: Any) -> None:
    assert "`prompt" in refused(completion, prompt=prompt)


def test_case_56_counts_are_bounded_before_anything_is_multiplied() -> None:
    assert refused(completion, n=1_000_000) == "`n` must be at most 16"
    assert refused(completion, n=0) == "`n` must be at least 1"
    assert len(completion(n=16, prompt=["a"] * 4).children) == 64
    assert "more than 64" in refused(completion, n=16, prompt=["a"] * 5)
    assert "more than 64" in refused(completion, prompt=["a"] * 100_000)
    assert "best_of" in refused(completion, best_of=1_000_000)
    assert "logprobs" in refused(completion, logprobs=1_000_000)
    assert "top_logprobs" in refused(chat, logprobs=True, top_logprobs=1_000_000)


def test_choices_of_a_prompt_follow_each_other() -> None:
    ask = completion(prompt=["a", "b"], n=2)
    assert [child["prompt"] for child in ask.children] == ["a", "a", "b", "b"]


@pytest.mark.parametrize("seed", [0, 42, -1, MAX_SEED, -MAX_SEED - 1])
def test_case_23_every_choice_has_a_seed_of_its_own(seed: int) -> None:
    seeds = [child["seed"] for child in completion(n=16, seed=seed).children]
    assert seeds[0] == seed
    assert len(set(seeds)) == 16
    assert all(-MAX_SEED - 1 <= value <= MAX_SEED for value in seeds)
    assert seeds == [child["seed"] for child in completion(n=16, seed=seed).children]
    assert child_seed(seed, 1) != child_seed(seed + 1 if seed < MAX_SEED else 0, 1)


def test_fields_that_change_nothing_are_accepted() -> None:
    fields = {
        "best_of": 1,
        "echo": False,
        "logit_bias": {},
        "suffix": None,
        "user": "u",
    }
    assert completion(**fields).children == completion().children
    fields = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "store": True,
    }
    assert chat(**fields, metadata={"a": "b"}, service_tier="auto").children == chat().children


@pytest.mark.parametrize(
    ("parse", "fields"),
    [
        (completion, {"echo": True}),
        (completion, {"suffix": "x"}),
        (completion, {"logit_bias": {"5": 1}}),
        (chat, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (chat, {"response_format": {"type": "json_object"}}),
        (chat, {"tool_choice": "required"}),
        (chat, {"reasoning_effort": "high"}),
    ],
)
def test_fields_that_cannot_be_honoured_are_refused(parse: Any, fields: dict[str, Any]) -> None:
    (name,) = fields
    assert refused(parse, **fields) == f"`{name}` is not supported; leave it out"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^fine\\!$"},
        {"type": "object", "properties": {}},
        {"$ref": "#"},
    ],
    ids=["case_39", "case_38", "case_40"],
)
def test_case_39_a_schema_is_refused_and_never_ignored(schema: dict[str, Any]) -> None:
    """Until answers can be held to one: no 200 with text that breaks it."""
    asked = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    for parse in (completion, chat):
        assert "`response_format` is not supported" in refused(parse, response_format=asked)


def test_unknown_and_mistyped_fields() -> None:
    assert refused(completion, tempurature=1).endswith("did you mean `temperature`?")
    assert "chat_template_kwargs" in refused(chat, chat_template_kwargs={"tokenize": True})
    assert refused(completion, temperature=-1) == "`temperature` must be at least 0"
    assert refused(chat, presence_penalty=3) == "`presence_penalty` must be at most 2"
    assert refused(completion, top_p=0) == "`top_p` must be greater than 0"
    assert (
        refused(completion, max_tokens="9") == "`max_tokens` must be an integer or null, not text"
    )
    assert "may not be empty" in refused(completion, stop="")
    assert "may not be empty" in refused(completion, stop=["ok", ""])
    assert refused(completion, model=None) == "`model` must be text, not null"
    assert "stream_options" in refused(completion, stream_options={"include_usage": True})
    assert "prompt_logprobs" in refused(completion, prompt_logprobs=1, stream=True)
    with pytest.raises(Refusal, match="`model`"):
        asking.completion({"prompt": "a"})


def test_chat_fields() -> None:
    ask = chat(max_completion_tokens=5, logprobs=True, top_logprobs=3, n=2, cache_salt="s")
    assert ask.num_logprobs == 3
    assert (
        ask.children == [{"messages": USER, "max_tokens": 5, "logprobs": 3, "cache_salt": "s"}] * 2
    )
    assert "max_tokens" not in chat().children[0]
    assert chat(logprobs=True).num_logprobs == 0
    assert "top_logprobs" in refused(chat, top_logprobs=3)
    assert refused(chat, messages=[]) == "`messages` may not be empty"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert "image_url" in refused(chat, messages=image)


def test_an_answer_of_ours_may_come_back_as_a_message() -> None:
    theirs = {
        "role": "assistant",
        "content": "ok",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    (child,) = chat(messages=[*USER, theirs]).children
    assert child["messages"][1] == {"role": "assistant", "content": "ok", "tool_calls": None}


def test_generations_are_named_after_the_request() -> None:
    ask = asking.with_request_ids(completion(n=2), "abc")
    assert [child["request_id"] for child in ask.children] == ["abc-0", "abc-1"]
