"""Transcripts within any limit, and as they are where they fit."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla_common.domain.transcripts import encode_transcript

ROLES = st.sampled_from(["user", "assistant", "tool"])
MESSAGES = st.lists(
    st.builds(
        lambda role, content, times: {"role": role, "content": content * times},
        *(ROLES, st.text(max_size=20), st.integers(1, 200)),
    ),
    max_size=30,
)


def decoded(transcript: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in transcript.decode().splitlines()]


def talk(turns: int, size: int) -> list[dict[str, str]]:
    """A question, and turns of a call and a result of this size."""
    messages = [{"role": "user", "content": "Find it."}]
    for turn in range(turns):
        messages.append({"role": "assistant", "content": f"call {turn}"})
        messages.append({"role": "tool", "content": f"{turn} ".ljust(size, "x")})
    return messages


@given(MESSAGES)
def test_what_fits_is_encoded_as_it_is(messages: list[dict[str, str]]) -> None:
    whole = encode_transcript(messages, 2**30)
    assert decoded(whole) == messages
    assert encode_transcript(messages, len(whole)) == whole


@given(MESSAGES, st.integers(0, 20_000))
def test_any_transcript_stays_within_any_limit(messages: list[dict[str, str]], most: int) -> None:
    transcript = encode_transcript(messages, most)
    assert len(transcript) <= most
    kept = decoded(transcript)
    assert all(line in messages or line["omitted_bytes"] > 0 for line in kept)


def test_results_in_the_middle_are_left_out_first_and_their_sizes_are_told() -> None:
    messages = talk(turns=60, size=228_000)
    kept = decoded(encode_transcript(messages, 2**22))
    assert [line["role"] for line in kept] == [message["role"] for message in messages]
    left_out = [index for index, line in enumerate(kept) if "omitted_bytes" in line]
    assert left_out == list(range(left_out[0], left_out[-1] + 1, 2)), "the middle, and only results"
    assert all(kept[index] == message for index, message in enumerate(messages[:5]))
    assert kept[-1] == messages[-1]
    size = len(json.dumps(messages[left_out[0]])) + 1
    mark = f"[left out of the transcript: {size} bytes]"
    assert kept[left_out[0]] == {"role": "tool", "content": mark, "omitted_bytes": size}


def test_other_messages_are_left_out_only_after_all_results() -> None:
    messages = talk(turns=3, size=1000)
    messages[3]["content"] = "thought " * 1000
    kept = decoded(encode_transcript(messages, 2000))
    assert [index for index, line in enumerate(kept) if "omitted_bytes" in line] == [2, 3, 4, 6]


@pytest.mark.parametrize("most", [0, 50, 1000])
def test_where_even_marks_are_too_long_messages_are_dropped(most: int) -> None:
    assert len(encode_transcript(talk(turns=1000, size=500), most)) <= most
