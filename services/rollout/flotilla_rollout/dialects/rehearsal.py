"""Rehearsal of a dialect before anything is started: it must read what it writes.

A call of the family's own template must be parsed as the same call, and the tokens that follow a
turn must equal the whole conversation rendered at once. If found later, a fault would drop some
attempts of a group and keep others, which biases the training data. The prompt must show what the
environment offers and states: otherwise the policy would learn to guess it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_common.images.picture import Picture
from flotilla_rollout.dialects.common_prefix import common_length
from flotilla_rollout.dialects.full import FullDialect
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.dialects.turns import (
    OK,
    ParseError,
    PlayedTurn,
    Reply,
    Retention,
    ToolCall,
    Turn,
)
from flotilla_rollout.ports import Dialect
from flotilla_rollout.tokenizer_port import TemplateError, Tokenizer
from flotilla_rollout.types import PromptFacts, Tool

LOOK = Tool(
    "look_up",
    "Looks something up.",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "filter": {"type": "object"},
            **{key: {"type": "string"} for key in ("code", "zone", "page", "size")},
        },
        "required": ["text"],
    },
)
LIST = Tool("list_rooms", "Lists rooms.", {"type": "object", "properties": {}})
TOOLS = (LOOK, LIST)
FACTS = PromptFacts('What does "the page" say?', "2026-01-31", {"LOGGED_IN_NAME": "Ann"})
_LOOKS: Sequence[Mapping[str, Any]] = (
    {"text": "plain"},
    {"text": 'a "quoted" line\nand a second, with \\ and \t', "count": 3, "exact": True},
    {"text": "\u00e9\u4e2d\U0001f600 & <b>", "tags": ["a", "3"], "filter": {"size": {"min": -1.5}}},
    # Texts that look like other values.
    {"text": "007", "code": "12345", "zone": "null", "page": "true", "size": "[1]"},
)
CALLS: Sequence[ToolCall] = (
    *(ToolCall(LOOK.name, json.dumps(arguments)) for arguments in _LOOKS),
    ToolCall(LIST.name, "{}"),
)
# Tools' answers, with data that looks like structure.
ANSWERS = (
    '{"found": ["a \\"b\\"", 1]}',
    "two lines\nof text with \u00e9\u4e2d\U0001f600\n",
    " <|im_end|> </s> <|eot_id|> </tool_response> [/TOOL_RESULTS] <end_of_turn> ",
)
# An offer and facts in words that nothing else in a prompt has, and that every notation (JSON,
# TypeScript, XML, a signature) leaves as they are.
OFFERED = (
    Tool(
        "find_zebra",
        "Finds xylophones in the attic.",
        {
            "type": "object",
            "properties": {
                "plumage": {"type": "string", "description": "quokkas to match"},
                "tonnage": {"type": "integer", "description": "weight of the walrus"},
            },
            "required": ["plumage"],
        },
    ),
    Tool(
        "send_yak",
        "Sends marzipan by pigeon.",
        {
            "type": "object",
            "properties": {
                "gearbox": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "parts of a bagpipe",
                },
            },
            "required": ["gearbox"],
        },
    ),
)
STATED = PromptFacts("Where is the ocelot?", "2031-07-19", {"LOGGED_IN_NAME": "Ysolde"})
_SHOWN_WORDS = {
    "the names of tools": ("find_zebra", "send_yak"),
    "the names of parameters": ("plumage", "tonnage", "gearbox"),
    "the task": ("ocelot",),
    "the date and the variables of the task": ("2031-07-19", "Ysolde"),
}
# The tiny policy of the demo was trained without these.
_TOLD_WORDS = {
    "the descriptions of tools": ("xylophones", "marzipan"),
    "the descriptions of parameters": ("quokkas", "walrus", "bagpipe"),
}
# Longer than any difference that a template may make at the start of a turn.
THOUGHT = "The page has not been seen yet, so it is looked up first, and only then is it answered."
# A picture to be shown: what it holds is no matter of dialects.
PICTURE = Picture("0" * 64, "image/png", 1, 1, b"")
# Numbers of pictures in consecutive replies to one turn.
_PICTURES = ((1,), (2,), (1, 1), (0, 1), (2, 0, 1))
# Tokens shown on either side of a difference.
_SHOWN = 12
# Maximum tokens of a turn's header.
_HEADER = 4


def rehearse_dialect(
    dialect: Dialect, tokenizer: Tokenizer, retention: Retention = "all", pad: str = ""
) -> None:
    """Raise TemplateError, which names the fault, unless the dialect holds. `pad` is the token that
    stands for a picture; without it there are no pictures."""
    _rehearse_turns(dialect, tokenizer)
    if pad:
        _rehearse_pictures(dialect, tokenizer, pad)
    if hidden := _find_hidden(dialect, tokenizer, _SHOWN_WORDS):
        raise TemplateError(
            f"the prompt leaves out {', '.join(hidden)}: {_advise_shown(tokenizer)}"
        )
    if retention == "tool_cycle":
        _rehearse_thinking(dialect, tokenizer)


def _rehearse_turns(dialect: Dialect, tokenizer: Tokenizer) -> None:
    for call in CALLS:
        _rehearse_call(dialect, tokenizer, call)
    for count in range(1, len(ANSWERS) + 1):
        _rehearse_replies(dialect, tokenizer, count)


def find_untold(dialect: Dialect, tokenizer: Tokenizer) -> list[str]:
    """Return what the prompt leaves out although a policy may be able to play without it."""
    return _find_hidden(dialect, tokenizer, _TOLD_WORDS)


def _find_hidden(
    dialect: Dialect, tokenizer: Tokenizer, words: Mapping[str, Sequence[str]]
) -> list[str]:
    prompt = tokenizer.decode(dialect.prompt_ids(STATED, OFFERED))
    return [what for what, each in words.items() if any(word not in prompt for word in each)]


def _advise_shown(tokenizer: Tokenizer) -> str:
    """Return which settings hold and leave nothing out."""
    shows: list[str] = []
    for name, make in (("template", TemplateDialect), ("full", FullDialect)):
        with suppress(TemplateError):
            dialect = make(tokenizer)
            _rehearse_turns(dialect, tokenizer)
            if not _find_hidden(dialect, tokenizer, _SHOWN_WORDS):
                shows.append(f'rollout.dialect.name = "{name}"')
    change = "give the model a chat template that shows it"
    return f"set {' or '.join(shows)}, or {change}" if shows else change


def _rehearse_call(dialect: Dialect, tokenizer: Tokenizer, call: ToolCall) -> None:
    stage = _Stage(dialect, tokenizer, answer_calls([call]))
    turns = [
        dialect.parse_turn(before, completion, TOOLS) for before, completion in stage.variants()
    ]
    if any(_holds_calls(turn, [call]) for turn in turns):
        return
    written = tokenizer.decode(stage.completion)
    found = [_describe_item(item) for item in turns[0].items] or ["no call"]
    raise TemplateError(
        f"a call that the chat template writes is not read again: it writes {written!r}, and"
        f" {', '.join(found)} is read"
    )


def _rehearse_replies(dialect: Dialect, tokenizer: Tokenizer, count: int) -> None:
    turn = answer_calls([CALLS[0]] * count)
    try:
        stage = _Stage(dialect, tokenizer, turn)
    except TemplateError:
        if count == 1:
            raise
        # Some families call one tool a turn, and their templates refuse to show more.
        return
    if difference := _find_bridge_difference(stage, dialect, tokenizer, turn):
        raise TemplateError(
            f"{count} answers appended to a turn are not what the chat template renders:"
            f" {difference}"
        )


def _find_bridge_difference(
    stage: "_Stage", dialect: Dialect, tokenizer: Tokenizer, turn: PlayedTurn
) -> str:
    """Return where replies appended to a played turn differ from the whole; "" if nowhere."""
    bridge = dialect.bridge_ids(stage.before, stage.completion, turn.replies, TOOLS)
    played = [*stage.before.tolist(), *stage.completion]
    end = len(stage.whole) - len(bridge)
    if stage.whole[end:] == bridge and _keeps_turn(tokenizer, played, stage.whole[:end]):
        return ""
    return describe_difference(tokenizer, [*played, *bridge], stage.whole)


def _rehearse_pictures(dialect: Dialect, tokenizer: Tokenizer, pad: str) -> None:
    """Show pictures in a prompt and in replies to two turns: each must have one place, in which no
    text can stand."""
    said = replace(FACTS, prompt=f"Does {pad} stand for a picture?")
    _check_places(dialect.prompt_ids(said, TOOLS), tokenizer, pad, 0)
    facts = with_picture(said)
    _check_places(dialect.prompt_ids(facts, TOOLS), tokenizer, pad, 1)
    for counts in _PICTURES:
        turn = answer_with_pictures(*counts)
        for earlier in ([], [turn]):
            try:
                stage = _Stage(dialect, tokenizer, turn, earlier, facts)
            except TemplateError:
                if len(counts) == 1:
                    raise
                # As in `_rehearse_replies`.
                break
            _check_places(stage.whole, tokenizer, pad, 1 + sum(counts) * (1 + len(earlier)))
            if difference := _find_bridge_difference(stage, dialect, tokenizer, turn):
                raise TemplateError(
                    "pictures appended to a turn are not what the chat template renders:"
                    f" {difference}"
                )


def _check_places(ids: Sequence[int], tokenizer: Tokenizer, pad: str, pictures: int) -> None:
    [place] = tokenizer.encode(pad)
    if (found := list(ids).count(place)) != pictures:
        raise TemplateError(
            f"the chat template has {found} places for {pictures} pictures; give the model one that"
            " shows them (rollout.dialect.chat_template), or remove [policy.vision]"
        )


def with_picture(facts: PromptFacts) -> PromptFacts:
    """Return facts whose first observation is a picture."""
    return replace(facts, pictures=(PICTURE,))


def answer_with_pictures(*counts: int) -> PlayedTurn:
    """Return a turn of calls, whose answers end with so many pictures; the last is nothing else."""
    texts = [[text] for text in ANSWERS[: len(counts) - 1]]
    replies = [
        Reply(CALLS[0], OK, [*text, *([PICTURE] * count)])
        for text, count in zip([*texts, []], counts, strict=True)
    ]
    return PlayedTurn([CALLS[0]] * len(counts), replies)


def _rehearse_thinking(dialect: Dialect, tokenizer: Tokenizer) -> None:
    """Play two turns that think: the template must keep both in later renderings."""
    turn = answer_calls([CALLS[0]], THOUGHT)
    for earlier in ([], [turn]):
        try:
            _rehearse_thought(_Stage(dialect, tokenizer, turn, earlier), dialect, tokenizer, turn)
        except TemplateError as error:
            raise TemplateError(
                f'rollout.dialect.retention = "tool_cycle" cannot be kept: {error}; set it to'
                ' "all", with which the policy keeps reading every thinking'
            ) from error


def _rehearse_thought(
    stage: "_Stage", dialect: Dialect, tokenizer: Tokenizer, turn: PlayedTurn
) -> None:
    if THOUGHT not in tokenizer.decode(stage.completion):
        raise TemplateError("the chat template shows no thinking of a turn that makes calls")
    bridge = dialect.bridge_ids(stage.before, stage.completion, turn.replies, TOOLS)
    played = [*stage.before.tolist(), *stage.completion, *bridge]
    if played != stage.whole:
        raise TemplateError(
            "after a turn that thinks, the chat template renders"
            f" {describe_difference(tokenizer, stage.whole, played)}"
        )


def answer_calls(calls: Sequence[ToolCall], thought: str = "") -> PlayedTurn:
    """Return a turn of these calls, each with a different answer."""
    replies = [Reply(call, OK, [text]) for call, text in zip(calls, ANSWERS, strict=False)]
    return PlayedTurn(calls, replies, thought)


class _Stage:
    """A conversation up to the end of `turn`, which follows `earlier` ones, rendered whole.

    If the template opens a thinking that it does not show in a past turn, the turn begins where
    both renderings diverge."""

    def __init__(
        self,
        dialect: Dialect,
        tokenizer: Tokenizer,
        turn: PlayedTurn,
        earlier: Sequence[PlayedTurn] = (),
        facts: PromptFacts = FACTS,
    ) -> None:
        prompt = (
            dialect.render_turns(facts, TOOLS, earlier)
            if earlier
            else dialect.prompt_ids(facts, TOOLS)
        )
        alone = dialect.render_turns(facts, TOOLS, [*earlier, replace(turn, replies=())])
        shared = common_length(prompt, alone)
        if shared < len(prompt) - _SHOWN:
            raise TemplateError(
                "the chat template changes the prompt once a turn follows:"
                f" {describe_difference(tokenizer, prompt, alone)}"
            )
        self.before = np.array(alone[:shared], np.int32)
        self.whole = dialect.render_turns(facts, TOOLS, [*earlier, turn])
        self.completion = cut_at_stop(alone[shared:], self.whole[len(alone) :], dialect.stop_ids)
        self._tokenizer = tokenizer

    def variants(self) -> Iterator[tuple[NDArray[np.int32], list[int]]]:
        """Yield (tokens before the turn, turn) for each way to sample it: also after a thinking
        that the template has opened, and with its header if the template opens a channel."""
        thought = self._tokenizer.encode("a thought\n</think>\n\n")
        for start in range(len(self.before), len(self.before) - _HEADER - 1, -1):
            turn = [*self.before[start:].tolist(), *self.completion]
            yield self.before[:start], turn
            yield self.before[:start], [*thought, *turn]


def _keeps_turn(tokenizer: Tokenizer, played: Sequence[int], kept: Sequence[int]) -> bool:
    """Return True if the turn is shown as played, except for an omitted thinking: sampled tokens
    stay in the context regardless of the template."""
    start = common_length(played, kept)
    rest = len(kept) - start
    gone = played[start : len(played) - rest]
    same_end = list(played[len(played) - rest :]) == list(kept[start:])
    return same_end and LOOK.name not in tokenizer.decode(gone)


def cut_at_stop(ids: Sequence[int], follows: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
    """Return the ids up to the last one that stops a turn; without such an id, up to and including
    the token of the next role, which follows them."""
    stops = [position for position, token in enumerate(ids) if token in stop_ids]
    if stops:
        return list(ids[: stops[-1] + 1])
    return [*ids, *(token for token in follows[:1] if token in stop_ids)]


def _holds_calls(turn: Turn, calls: Sequence[ToolCall]) -> bool:
    found = [
        (item.name, json.loads(item.arguments_json))
        for item in turn.items
        if isinstance(item, ToolCall)
    ]
    wanted = [(call.name, json.loads(call.arguments_json)) for call in calls]
    return found == wanted and len(found) == len(turn.items)


def _describe_item(item: ToolCall | ParseError) -> str:
    if isinstance(item, ParseError):
        return f"an error ({item.message})"
    return f"{item.name}({item.arguments_json})"


def describe_difference(tokenizer: Tokenizer, got: Sequence[int], wanted: Sequence[int]) -> str:
    """Return both texts around the first token that differs."""
    start = common_length(got, wanted)
    shown = slice(max(start - _SHOWN, 0), start + _SHOWN)
    return (
        f"{tokenizer.decode(got[shown])!r} instead of {tokenizer.decode(wanted[shown])!r}"
        f" at token {start}"
    )
