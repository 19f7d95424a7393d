"""Tokens of an episode read back as messages and turns."""

import pytest

from services.common.domain.trajectory import Author, Media, TurnTiming
from services.common.episodes.episode_text import EpisodeText, read_episode
from tests.common.episodes.texts import (
    Part,
    decode,
    environment,
    policy,
    prompt,
    sequence_of,
    trajectory_of_texts,
)

CALL = '<tool_call>\n{"name": "find", "arguments": {"city": "Rome"}}\n</tool_call>'
# What a tool answered, in the markup of each family, up to the policy's next turn.
FAMILIES: dict[str, tuple[Part, Part, Part]] = {
    "chatml": (
        prompt(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nBook a room.<|im_end|>\n"
            "<|im_start|>assistant\n"
        ),
        policy(f"<think>Look first.</think>\n\nI look.\n{CALL}<|im_end|>"),
        environment(
            "\n<|im_start|>user\n<tool_response>\n[1, 2]\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        ),
    ),
    "llama": (
        prompt(
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nBook a room.<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
        policy('{"name": "find", "parameters": {"city": "Rome"}}<|eot_id|>'),
        environment(
            "<|start_header_id|>ipython<|end_header_id|>\n\n[1, 2]<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
    ),
    "glm": (
        prompt(
            "[gMASK]<sop><|system|>\nBe brief.<|user|>\nBook a room.<|assistant|>\n"
            "<think></think>\n"
        ),
        policy(
            "<tool_call>find\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
            "<|observation|>"
        ),
        environment("\n<tool_response>\n[1, 2]\n</tool_response><|assistant|>\n"),
    ),
    "mistral": (
        prompt("<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Book a room.[/INST]"),
        policy('[TOOL_CALLS]find[ARGS]{"city": "Rome"}</s>'),
        environment("[TOOL_RESULTS][1, 2][/TOOL_RESULTS]"),
    ),
    "coder": (
        prompt(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nBook a room.<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n"
        ),
        policy(
            "Look.\n</think>\n<tool_call>\n<function=find>\n<parameter=city>\nRome\n</parameter>\n"
            "</function>\n</tool_call><|im_end|>"
        ),
        environment("\n<|im_start|>tool\n[1, 2]<|im_end|>\n<|im_start|>assistant\n<think>\n"),
    ),
    "deepseek": (
        prompt(
            "<\uff5cbegin\u2581of\u2581sentence\uff5c>Be brief.<\uff5cUser\uff5c>Book a room."
            "<\uff5cAssistant\uff5c></think>"
        ),
        policy(
            "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>find"
            '<\uff5ctool\u2581sep\uff5c>{"city": "Rome"}<\uff5ctool\u2581call\u2581end\uff5c>'
            "<\uff5ctool\u2581calls\u2581end\uff5c><\uff5cend\u2581of\u2581sentence\uff5c>"
        ),
        environment(
            "<\uff5ctool\u2581output\u2581begin\uff5c>[1, 2]<\uff5ctool\u2581output\u2581end\uff5c>"
        ),
    ),
    "harmony": (
        prompt(
            "<|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>Book a room.<|end|>"
            "<|start|>assistant"
        ),
        policy(
            "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant to=functions.find"
            '<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
        ),
        environment(
            "<|start|>functions.find to=assistant<|channel|>commentary<|message|>[1, 2]<|end|>"
            "<|start|>assistant"
        ),
    ),
    "full": (
        prompt(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nBook a room.<|im_end|>\n"
            "<|im_start|>assistant\n"
        ),
        policy(f"{CALL}<|im_end|>"),
        environment("\n<|im_start|>user\nTool result:\n[1, 2]<|im_end|>\n<|im_start|>assistant\n"),
    ),
}


def read(*parts: Part) -> EpisodeText:
    return read_episode(trajectory_of_texts(sequence_of(*parts)), decode)


@pytest.mark.parametrize("family", FAMILIES)
def test_messages_and_calls_of_a_family_are_read(family: str) -> None:
    thought = "Yes.</think>" if family == "coder" else ""
    episode = read(*FAMILIES[family], policy(f"{thought}Done. <done>"))
    roles = [message.role for message in episode.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    system, user, reply, result, last = episode.messages
    assert system.content.endswith("Be brief.")
    assert user.content == "Book a room."
    [call] = reply.calls
    assert (call.name, call.arguments) == ("find", {"city": "Rome"})
    assert "tool_call" not in reply.content and "find" not in reply.content
    assert result.content.removeprefix("Tool result:\n") == "[1, 2]"
    assert (result.name, result.call_id) == ("find", call.call_id)
    assert last.content == "Done. <done>"
    assert [turn.number for turn in episode.sequences[0].turns] == [1, 2]


def test_raw_texts_are_all_of_the_tokens() -> None:
    parts = FAMILIES["chatml"]
    episode = read(*parts)
    [sequence] = episode.sequences
    assert [run.text for run in sequence.runs] == [text for _, text in parts]
    assert [(run.author, run.end - run.start) for run in sequence.runs] == [
        (author, len(text)) for author, text in parts
    ]
    assert episode.prompt == parts[0][1]
    assert episode.response == parts[1][1] + parts[2][1]


def test_thinking_is_apart_from_the_content() -> None:
    reply = read(*FAMILIES["chatml"]).messages[2]
    assert (reply.thinking, reply.content) == ("Look first.", "I look.")
    assert read(*FAMILIES["coder"]).messages[2].thinking == "Look."


def test_what_was_forced_into_a_turn_belongs_to_it() -> None:
    head, *_ = FAMILIES["coder"]
    forced = (Author.FORCED, "\nTime is up.</think>\n")
    episode = read(head, policy("I wonder"), forced, policy("Yes.<|im_end|>"))
    [turn] = episode.sequences[0].turns
    message = episode.messages[turn.message]
    assert (message.thinking, message.content) == ("I wonder\nTime is up.", "Yes.")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>not a call</tool_call>",
        '<tool_call>{"name": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments":',
        "[TOOL_CALLS]",
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_a_malformed_call_stays_in_the_content(text: str) -> None:
    message = read(FAMILIES["chatml"][0], policy(f"Look: {text}")).messages[-1]
    assert message.calls == ()
    assert message.content == f"Look: {text}"


def test_arguments_that_are_no_object_are_kept_as_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": [1, 2]}</tool_call>'
    [call] = read(FAMILIES["chatml"][0], policy(text)).messages[-1].calls
    assert (call.arguments, call.arguments_text) == (None, "[1, 2]")
    half = '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'
    [call] = read(FAMILIES["chatml"][0], policy(half)).messages[-1].calls
    assert call.arguments is None and call.arguments_text.encode()


def test_an_end_tag_in_an_argument_ends_nothing() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call> after'
    message = read(FAMILIES["chatml"][0], policy(text)).messages[-1]
    assert message.calls[0].arguments == {"a": "</tool_call>"}
    assert message.content == "after"


def test_several_answers_belong_to_their_calls_in_order() -> None:
    calls = "".join(f'<tool_call>{{"name": "f{n}", "arguments": {{}}}}</tool_call>' for n in (1, 2))
    answers = "".join(f"\n<tool_response>\n{n}\n</tool_response>" for n in (1, 2))
    episode = read(
        FAMILIES["chatml"][0],
        policy(f"{calls}<|im_end|>"),
        environment(f"\n<|im_start|>user{answers}<|im_end|>\n<|im_start|>assistant\n"),
    )
    assert [(m.name, m.content) for m in episode.messages[-2:]] == [("f1", "1"), ("f2", "2")]


def test_turns_have_their_times_over_all_sequences() -> None:
    times = tuple(TurnTiming(float(n), 0.0, 1, 1) for n in range(3))
    head, reply, result = FAMILIES["chatml"]
    sequences = [sequence_of(head, reply, result, reply), sequence_of(head, policy("Done."))]
    episode = read_episode(trajectory_of_texts(*sequences, turns=times), decode)
    assert [t.timing for each in episode.sequences for t in each.turns] == list(times)
    assert episode.messages[-1].content == "Done."


def test_an_image_belongs_to_the_message_that_shows_it() -> None:
    head, reply, result = FAMILIES["chatml"]
    image = Media("00", "image/png", token_offset=len(head[1]) + len(reply[1]) + 5)
    sequence = sequence_of(head, reply, result, policy("Done."), media=(image,))
    episode = read_episode(trajectory_of_texts(sequence), decode)
    assert [message.media for message in episode.messages] == [(), (), (), (0,), ()]


def test_an_attempt_whose_tokens_are_pruned_has_no_messages() -> None:
    episode = read_episode(trajectory_of_texts(), decode)
    assert (episode.messages, episode.prompt, episode.response) == ((), "", "")
