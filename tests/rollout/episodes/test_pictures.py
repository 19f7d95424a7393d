"""Attempts at tasks on screens: what the engine is shown is recorded, picture by picture."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flotilla_common.domain.attempts import Grade, NoGradeReason, StopReason, ToolOutcome
from flotilla_common.domain.messages import TokenText, check_messages, decode_messages
from flotilla_common.domain.token_authors import Author
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.images.made_pictures import plain_picture
from flotilla_common.images.picture import Picture, PlacedPicture, ShownPicture
from flotilla_common.images.placeholders import check_places
from flotilla_common.images.vision_family import VisionFamily
from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.adapters.fake import FakeEngine
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.api.codec import lease_from_pb
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.dialects.full import FullDialect
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.episodes.attempt_record import make_submission
from flotilla_rollout.episodes.episode import AttemptRunner
from flotilla_rollout.episodes.transcript import Transcript
from flotilla_rollout.ports import Dialect
from flotilla_rollout.types import Completion, Sampling, ToolResult
from tests.rollout.dialects.templates import PAD, seeing, tokenizer_that_sees, vision_ids
from tests.support.fake_peers import lease
from tests.support.model_zoo import make_tokenizer, read_template
from tests.support.rollout import (
    FACTS,
    PASSED,
    POLICY,
    FakeEnvironment,
    FakeEpisode,
    attempt,
    limits,
    turns,
)
from tests.support.vision_family import make_family

TOKENIZER = tokenizer_that_sees(seeing())
FAMILY = make_family(vision_ids(TOKENIZER))
DIALECTS = {
    "template": TemplateDialect(TOKENIZER, pad=PAD),
    "full": FullDialect(TOKENIZER, pad=PAD),
}
APART = TemplateDialect(tokenizer_that_sees(seeing("tool")), pad=PAD)
# Of 2, 6 and 12 tokens.
SMALL, MIDDLE, LARGE = (plain_picture(*size) for size in ((64, 32), (96, 64), (128, 96)))
LOOK = '<tool_call>{"name": "look", "arguments": {"at": "door"}}</tool_call>'
DONE = "found <done>"


class ShownEngine(FakeEngine):
    """Remembers what it is given."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.requests: list[tuple[NDArray[np.int32], Sequence[ShownPicture]]] = []

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        self.requests.append((token_ids.copy(), tuple(pictures)))
        return await super().generate(token_ids, sampling, max_tokens, timeout_s, pictures)


class Screens(FakeEnvironment):
    """Shows `first` in the task, and `answers` one call after the other, the last again."""

    def __init__(
        self, first: Sequence[Picture], *answers: Sequence[str | Picture], grade: Grade = PASSED
    ) -> None:
        left = list(answers)

        def answer(name: str, arguments: str) -> ToolResult:
            parts = left.pop(0) if len(left) > 1 else left[0]
            return ToolResult(ToolOutcome.OK, tuple(parts))

        class ShownAttempt(FakeEpisode):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                facts = replace(FACTS, shown=("A screen.",), pictures=tuple(first))
                self.info = replace(self.info, facts=facts)

        super().__init__(answer, grade, episode=ShownAttempt)


async def play(
    screens: Screens,
    *texts: str,
    dialect: Dialect = DIALECTS["template"],
    tokenizer: TransformersTokenizer = TOKENIZER,
    family: VisionFamily = FAMILY,
    **changes: Any,
) -> tuple[Trajectory, ShownEngine]:
    engine = ShownEngine(tokenizer, dialect.stop_ids[0], turns(*texts), policy=POLICY)
    bounds = limits(**{"max_images": 8, **changes})
    runner = AttemptRunner(engine, screens, tokenizer, dialect, bounds, family=family)
    trajectory = await runner.run_attempt(attempt())
    assert not trajectory.detail, trajectory.detail
    return trajectory, engine


def places_of(trajectory: Trajectory, family: VisionFamily = FAMILY) -> list[PlacedPicture]:
    """Return the places of a trajectory's pictures, after a check that it is whole."""
    [sequence] = trajectory.sequences
    places = [
        PlacedPicture(item.sha256, (item.grid[0], item.grid[1], item.grid[2]), item.token_offset)
        for item in sequence.pictures
    ]
    check_places(sequence.token_ids, places, family)
    assert sum(span.length for span in sequence.spans) == len(sequence.token_ids)
    hashes = {item.sha256 for item in sequence.media}
    check_messages(sequence.messages, 0, len(sequence.token_ids), hashes)
    assert {place.sha256 for place in places} == trajectory.pictures.keys()
    return places


def text_of(trajectory: Trajectory, part: Any) -> str:
    ids = trajectory.sequences[0].token_ids.tolist()
    return part if isinstance(part, str) else part.read(ids, TOKENIZER.decode)


@pytest.mark.parametrize("name", DIALECTS)
async def test_the_engine_is_shown_all_pictures_so_far_and_the_record_names_them(name: str) -> None:
    screens = Screens([SMALL], ["a door", LARGE], [MIDDLE, SMALL])
    dialect = DIALECTS[name]
    trajectory, engine = await play(screens, LOOK, LOOK, DONE, dialect=dialect)
    given = [[each.picture for each in pictures] for _, pictures in engine.requests]
    assert given == [[SMALL], [SMALL, LARGE], [SMALL, LARGE, MIDDLE, SMALL]]
    for ids, pictures in engine.requests:
        check_places(ids, [each.place for each in pictures], FAMILY)
    places = places_of(trajectory)
    assert places == [each.place for each in engine.requests[-1][1]]
    [sequence] = trajectory.sequences
    assert [FAMILY.count(place.grid) for place in places] == [2, 12, 6, 2]
    for item, picture in zip(sequence.pictures, given[-1], strict=True):
        assert (item.mime, item.size_bytes) == ("image/png", len(picture.data))
        assert (item.processor_digest, item.content) == (FAMILY.processor_digest, b"")
    assert trajectory.pictures == {each.sha256: each.data for each in (SMALL, MIDDLE, LARGE)}
    # The prompt's picture is the prompt's, and those of answers are the environment's.
    ends = np.cumsum([span.length for span in sequence.spans])
    authors = [
        sequence.spans[int(np.searchsorted(ends, place.offset, "right"))].author for place in places
    ]
    assert authors == [Author.PROMPT, *[Author.ENVIRONMENT] * 3]
    assert len(sequence.logprobs) == sum(
        span.length for span in sequence.spans if span.author is Author.POLICY
    )


async def test_messages_name_the_pictures_that_they_show_and_have_their_texts() -> None:
    trajectory, _ = await play(Screens([SMALL], ["a door", LARGE], [MIDDLE]), LOOK, LOOK, DONE)
    told = [
        (message.role, text_of(trajectory, message.content), message.media)
        for message in decode_messages(trajectory.sequences[0].messages)
        if message.role != "system"
    ]
    task = replace(FACTS, shown=("A screen.",)).task
    assert told == [
        ("user", task, (SMALL.sha256,)),
        ("assistant", "", ()),
        ("tool", "a door", (LARGE.sha256,)),
        ("assistant", "", ()),
        ("tool", "", (MIDDLE.sha256,)),
        ("assistant", DONE, ()),
    ]


async def test_pictures_apart_from_their_tools_are_recorded_alike() -> None:
    trajectory, engine = await play(Screens([SMALL], ["a door", LARGE]), LOOK, DONE, dialect=APART)
    assert len(places_of(trajectory)) == 2
    text = TOKENIZER.decode(engine.requests[-1][0].tolist())
    assert f"<|im_start|>user\n<|vision_start|>{PAD * 12}<|vision_end|><|im_end|>" in text


@pytest.mark.parametrize("name", ["qwen3-vl", "template", "full"])
async def test_a_published_familys_pictures_are_recorded_alike(name: str) -> None:
    template = read_template("trl/qwen3_vl.jinja")
    words = TransformersTokenizer(make_tokenizer("qwen3", (), template))
    family = make_family(vision_ids(words))
    dialect = choose_dialect("", words, DialectConfig(name=name), (), PAD)
    screens = Screens([SMALL], ["a door", LARGE], [MIDDLE])
    trajectory, engine = await play(
        screens, LOOK, LOOK, DONE, dialect=dialect, tokenizer=words, family=family
    )
    places = places_of(trajectory, family)
    assert [each.sha256 for each in places] == [SMALL.sha256, LARGE.sha256, MIDDLE.sha256]
    assert places == [each.place for each in engine.requests[-1][1]]
    ids = trajectory.sequences[0].token_ids.tolist()
    told = decode_messages(trajectory.sequences[0].messages)
    [tool, *_] = [each for each in told if LARGE.sha256 in each.media]
    assert isinstance(tool.content, TokenText)
    assert tool.content.read(ids, words.decode).endswith("a door")


async def test_a_cut_never_falls_inside_a_picture() -> None:
    screens = Screens([SMALL], ["a door", LARGE, MIDDLE])
    whole, _ = await play(screens, LOOK, DONE)
    [place, large, middle] = places_of(whole)
    # Up to the last turn, which needs a window that holds all pictures.
    length = sum(span.length for span in whole.spans[:-1])
    shown = set[int]()
    for window in range(1, length + 1):
        lengths: dict[str, Any] = {"max_model_len": window, "max_input_length": window - 1}
        trajectory, engine = await play(screens, LOOK, DONE, **lengths)
        places = places_of(trajectory)
        shown.add(len(places))
        ids = trajectory.sequences[0].token_ids
        assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW
        assert len(ids) <= window
        assert np.array_equal(ids, whole.sequences[0].token_ids[: len(ids)])
        # At most a picture, its mark and what is after it in the observation are left out.
        cut_before = [each.offset - 1 for each in (place, large, middle)]
        assert len(ids) == window or len(ids) in cut_before
        for given, pictures in engine.requests:
            check_places(given, [each.place for each in pictures], FAMILY)
    assert shown == {0, 1, 2, 3}


@pytest.mark.parametrize(("most", "turns_played", "recorded"), [(0, 0, 0), (1, 1, 1), (2, 2, 2)])
async def test_a_picture_too_many_ends_the_attempt_and_is_not_recorded(
    most: int, turns_played: int, recorded: int
) -> None:
    trajectory, engine = await play(
        Screens([SMALL], ["a door", LARGE]), LOOK, max_images=most, max_turns=9
    )
    assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert (trajectory.counts.turns, len(places_of(trajectory))) == (turns_played, recorded)
    assert all(len(pictures) <= most for _, pictures in engine.requests)


async def test_a_long_answer_loses_text_and_keeps_its_picture() -> None:
    said = " ".join(["a door"] * 200)
    trajectory, engine = await play(Screens([], [said, LARGE]), LOOK, DONE, observation_tokens=20)
    [place] = places_of(trajectory)
    assert place.sha256 == LARGE.sha256
    assert "tokens left out" in TOKENIZER.decode(engine.requests[-1][0].tolist())
    media = trajectory.sequences[0].media
    assert {item.mime for item in media} == {"image/png", "text/plain;charset=utf-8"}
    [message] = [
        each for each in decode_messages(trajectory.sequences[0].messages) if each.role == "tool"
    ]
    assert {*message.media} == {item.sha256 for item in media}


async def test_a_watched_prompt_has_a_picture_as_one_token() -> None:
    engine = ShownEngine(TOKENIZER, DIALECTS["full"].stop_ids[0], turns(DONE), policy=POLICY)
    watched = AttemptRunner(
        engine,
        Screens([LARGE], [""]),
        TOKENIZER,
        DIALECTS["full"],
        limits(max_images=1),
        family=FAMILY,
    )
    seen = list[tuple[str, str]]()
    await watched.run_attempt(attempt(), lambda kind, text: seen.append((kind, text)))
    assert [(kind, text.count(PAD)) for kind, text in seen] == [("prompt", 1), ("completion", 0)]


async def test_attempts_share_a_prompt_only_if_they_see_the_same() -> None:
    digests = {
        (await play(Screens(pictures, [""]), DONE))[0].facts.prompt_digest
        for pictures in ([], [SMALL], [plain_picture(64, 33)], [SMALL, SMALL], [SMALL])
    }
    assert len(digests) == 4


async def test_text_prompts_have_the_digest_that_they_had() -> None:
    trajectory, engine = await play(Screens([], [""]), DONE)
    data = engine.requests[0][0].astype("<i4").tobytes()
    assert trajectory.facts.prompt_digest == hashlib.sha256(data).hexdigest()


async def test_an_attempt_without_a_grade_sends_no_pictures() -> None:
    ungraded = Grade(reason=NoGradeReason.EXECUTION_FAILED)
    trajectory, _ = await play(Screens([SMALL], [LARGE], grade=ungraded), LOOK, DONE)
    made = make_submission(trajectory, lease_from_pb(lease()), "w")
    assert (made.sequences, made.pictures) == ((), {})


def test_a_picture_that_ends_at_the_window_is_kept() -> None:
    places = [ShownPicture(SMALL, PlacedPicture(SMALL.sha256, FAMILY.grid(64, 32), 2))]
    start, end, pad, _ = vision_ids(TOKENIZER)
    ids = [9, start, pad, pad, end, 9]
    for window, kept in [(6, 6), (5, 5), (4, 4), (3, 1), (2, 1), (1, 1)]:
        transcript = Transcript(ids, window, places, family=FAMILY, most_pictures=1)
        assert (len(transcript), transcript.is_cut) == (kept, window < 6)
        assert len(transcript.pictures) == (kept >= 4)
