"""An episode as messages and turns, from its tokens and what the rollout recorded."""

from dataclasses import replace

import numpy as np
import pytest

from flotilla_common.domain.messages import (
    ChatCall,
    ChatMessage,
    MessagesError,
    TokenText,
    encode_messages,
)
from flotilla_common.domain.token_authors import Author
from flotilla_common.domain.trajectory import (
    Media,
    Sequence,
    SequenceCause,
    SequenceOrigin,
    TurnTiming,
)
from flotilla_common.episodes.episode_text import EpisodeText, read_episode
from tests.common.episodes.texts import (
    decode,
    environment,
    policy,
    prompt,
    sequence_of,
    trajectory_of_texts,
)

HEAD = prompt("<s>Be brief.<u>Book a room.<a>")
REPLY = policy("(Look first.) I look. {find}<e>")
RESULT = environment("<t>[1, 2]<a>")
LAST = policy("Done.<e>")
PARTS = (HEAD, REPLY, RESULT, LAST)
CALL = ChatCall("call_2_0", "find", '{"city": "Rome"}')


def place(text: str, skip: int = 0) -> TokenText:
    """Return the tokens of a text in the episode, and `skip` before it that are left out."""
    start = "".join(part for _, part in PARTS).index(text)
    return TokenText(start - skip, start + len(text), skip)


def told(*, media: tuple[str, ...] = ()) -> list[ChatMessage]:
    head, turn = len(HEAD[1]), len(HEAD[1]) + len(REPLY[1])
    return [
        ChatMessage("system", place("Be brief.").end, place("Be brief."), by_template=True),
        ChatMessage("user", place("Book a room.").end, place("Book a room.")),
        ChatMessage("assistant", turn, place("I look."), place("Look first."), (CALL,)),
        ChatMessage(
            *("tool", place("[1, 2]").end, place("[1, 2]", skip=1), "", (), CALL.id, "find", "ok"),
            media=media,
        ),
        ChatMessage("assistant", head + sum(len(part) for _, part in PARTS[1:]), place("Done.")),
        ChatMessage("tool", head + sum(len(part) for _, part in PARTS[1:]), "unseen"),
    ]


def recorded(**changes: object) -> Sequence:
    return replace(sequence_of(*PARTS), messages=encode_messages(told()), **changes)


def read(*sequences: Sequence, turns: tuple[TurnTiming, ...] = ()) -> EpisodeText:
    return read_episode(trajectory_of_texts(*sequences, turns=turns), decode)


def test_messages_are_those_that_the_rollout_recorded() -> None:
    episode = read(recorded())
    assert [(m.role, m.content) for m in episode.messages] == [
        ("system", "Be brief."),
        ("user", "Book a room."),
        ("assistant", "I look."),
        ("tool", "[1, 2]"),
        ("assistant", "Done."),
        ("tool", "unseen"),
    ]
    reply, result = episode.messages[2:4]
    assert reply.thinking == "Look first."
    assert reply.to_json()["tool_calls"] == [
        {
            "id": CALL.id,
            "type": "function",
            "function": {"name": "find", "arguments": {"city": "Rome"}},
        }
    ]
    assert (result.name, result.call_id, result.outcome) == ("find", CALL.id, "ok")
    assert [turn.number for turn in episode.sequences[0].turns] == [1, 2]
    assert [turn.message for turn in episode.sequences[0].turns] == [2, 4]
    assert [m.to_json().get("by_template") for m in episode.messages[:2]] == [True, None]
    assert "outcome" not in result.to_json()
    assert replace(result, outcome="tool_error").to_json()["outcome"] == "tool_error"


def test_raw_texts_are_all_of_the_tokens() -> None:
    episode = read(recorded())
    [sequence] = episode.sequences
    assert [(run.author, run.text) for run in sequence.runs] == list(PARTS)
    assert episode.prompt == HEAD[1]
    assert episode.response == REPLY[1] + RESULT[1] + LAST[1]


def test_a_sequence_without_messages_is_shown_by_its_authors() -> None:
    episode = read(sequence_of(HEAD, REPLY, (Author.FORCED, "!"), RESULT, LAST))
    assert [(m.role, m.content) for m in episode.messages] == [
        ("user", HEAD[1]),
        ("assistant", f"{REPLY[1]}!"),
        ("tool", RESULT[1]),
        ("assistant", LAST[1]),
    ]
    assert [turn.message for turn in episode.sequences[0].turns] == [1, 3]


@pytest.mark.parametrize(
    "arguments",
    [
        *("[1, 2]", "{", '{"a": NaN}', '{"a": 1e999}', "[" * 100_000, '{"a": "\\ud800"}'),
        '{"a": ' * 200 + "1" + "}" * 200,
    ],
)
def test_arguments_that_are_no_object_are_kept_as_text(arguments: str) -> None:
    messages = told()
    messages[2] = ChatMessage("assistant", messages[2].end, calls=(ChatCall("c", "f", arguments),))
    shown = read(replace(sequence_of(*PARTS), messages=encode_messages(messages))).messages[2]
    assert [call.arguments for call in shown.calls] == [arguments]


def test_turns_have_their_times_over_all_sequences() -> None:
    times = tuple(TurnTiming(float(n), 0.0, 1, 1) for n in range(3))
    episode = read(recorded(), sequence_of(HEAD, LAST), turns=times)
    assert [t.timing for each in episode.sequences for t in each.turns] == list(times)
    assert [t.number for each in episode.sequences for t in each.turns] == [1, 2, 3]


def test_a_sequence_that_continues_another_begins_with_its_messages() -> None:
    """A branch shares the conversation up to the first tool call, and asks for something else."""
    shared = len(HEAD[1]) + len(REPLY[1])
    asked, answer = environment("<t>other<a>"), policy("No.")
    branch = sequence_of(prompt(HEAD[1] + REPLY[1]), asked, answer)
    messages = [
        ChatMessage("tool", shared + 8, TokenText(shared + 3, shared + 8)),
        ChatMessage("assistant", shared + 14, TokenText(shared + 11, shared + 14)),
    ]
    branch = replace(
        branch,
        messages=encode_messages(messages),
        origin=SequenceOrigin(SequenceCause.BRANCH, 0, shared),
    )
    episode = read(recorded(), branch)
    assert [m.content for m in episode.messages] == [
        *("Be brief.", "Book a room.", "I look.", "other", "No."),
    ]
    # The shared turn is the parent's.
    assert [(t.number, t.message) for t in episode.sequences[1].turns] == [(3, 4)]


def test_a_branch_without_messages_is_shown_by_its_authors_after_those_of_its_parent() -> None:
    shared = len(HEAD[1]) + 4
    branch = sequence_of(prompt((HEAD[1] + REPLY[1])[:shared]), policy("No."))
    branch = replace(branch, origin=SequenceOrigin(SequenceCause.BRANCH, 0, shared))
    told = read(recorded(), branch).messages
    # The parent's turn is shared in part.
    assert [(m.role, m.content) for m in told] == [
        *(("system", "Be brief."), ("user", "Book a room.")),
        *(("assistant", ""), ("assistant", "No.")),
    ]
    assert told[2].thinking == "Loo"


def test_an_image_belongs_to_the_message_that_shows_it() -> None:
    image = Media("0a", "image/png", token_offset=place("[1, 2]").start)
    sequence = replace(
        sequence_of(*PARTS, media=(image,)), messages=encode_messages(told(media=("0a",)))
    )
    assert [m.media for m in read(sequence).messages] == [(), (), (), (0,), (), ()]


def test_an_attempt_whose_tokens_are_pruned_has_no_messages() -> None:
    episode = read()
    assert (episode.messages, episode.prompt, episode.response) == ((), "", "")


def test_what_is_no_list_of_messages_is_refused() -> None:
    with pytest.raises(MessagesError, match="messages: "):
        read(replace(sequence_of(*PARTS), messages=np.arange(3).tobytes()))
