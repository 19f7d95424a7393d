"""An attempt's conversation and facts, as pages and transcripts show them."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flotilla_common.episodes.episode_text import EpisodeMessage
from flotilla_common.images.picture_files import PictureRefused, read_size
from flotilla_reading.inspector.pages.clicks import Mark, mark_call
from flotilla_reading.inspector.pages.links import Links
from flotilla_reading.inspector.pages.visible_text import cut
from flotilla_reading.inspector.queries.episodes import Episode
from flotilla_reading.inspector.queries.run_folders import NotFoundError
from flotilla_reading.inspector.queries.token_tracks import TokenTrack

_IMAGES = {
    "image/png": b"\x89PNG\r\n",
    "image/jpeg": b"\xff\xd8\xff",
    "image/gif": b"GIF8",
    "image/webp": b"RIFF",
}


@dataclass(frozen=True, slots=True)
class ShownImage:
    """A picture of a message: its address, its width and height in pixels (0 if unknown), and what
    the turns that saw it last did on it."""

    href: str
    size: tuple[int, int]
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message of the conversation; `content` is cut by `left_out` characters."""

    message: EpisodeMessage
    content: str
    left_out: int
    raw: str
    # Facts about the policy's turn, as (label, value).
    facts: tuple[tuple[str, str], ...]
    turn: int | None
    images: tuple[ShownImage, ...]
    # Answers that were cut for the policy: (bytes, address; "" if not kept).
    answers: tuple[tuple[int, str], ...]


def shown_messages(links: Links, run_id: str, episode: Episode) -> list[ShownMessage]:
    """List the messages of the last sequence, which is the whole conversation."""
    number = len(episode.sequences) - 1
    if number < 0:
        return []
    text, track = episode.sequences[number], episode.tracks[number]
    turns = {turn.message: turn for turn in text.turns}
    sequence = episode.trajectory.sequences[number]
    marks = _mark_images(episode, number)
    shown: list[ShownMessage] = []
    for index, message in enumerate(text.messages):
        content, left_out = cut(message.content)
        turn, run = turns.get(index), text.runs[message.run]
        media = [(n, sequence.media[n]) for n in message.media]
        images = [n for n, item in media if image_type(item.content)]
        others = [(n, item) for n, item in media if n not in images]
        raw = links.raw(run_id, episode.row, number, f"message-{index}")
        shown.append(
            ShownMessage(
                message=message,
                content=content,
                left_out=left_out,
                raw=raw if left_out else "",
                facts=turn_facts(track, run.start, run.end, turn.timing) if turn else (),
                turn=turn.number if turn else None,
                images=tuple(
                    ShownImage(
                        links.media(run_id, episode.row, number, n),
                        _size_of(sequence.media[n].content),
                        tuple(marks.get((index, n), ())),
                    )
                    for n in images
                ),
                answers=tuple(
                    (
                        item.size_bytes,
                        links.raw(run_id, episode.row, number, f"answer-{n}")
                        if item.content
                        else "",
                    )
                    for n, item in others
                ),
            )
        )
    return shown


def _mark_images(episode: Episode, number: int) -> dict[tuple[int, int], list[Mark]]:
    """Return what turns did on the picture that they saw last, by the message that shows it and its
    place among the media."""
    text, media = episode.sequences[number], episode.trajectory.sequences[number].media
    turns = {turn.message: turn.number for turn in text.turns}
    found: dict[tuple[int, int], list[Mark]] = {}
    seen: tuple[int, int] | None = None
    size = (0, 0)
    for index, message in enumerate(text.messages):
        for call in message.calls if seen and index in turns else ():
            mark = mark_call(call, episode.tools.get(call.name, ""), turns[index], size)
            if seen and mark:
                found.setdefault(seen, []).append(mark)
        for place in message.media:
            if any(own := _size_of(media[place].content)):
                seen, size = (index, place), own
    return found


def _size_of(content: bytes) -> tuple[int, int]:
    """Return width and height of a picture; zeros for what is none."""
    try:
        return read_size(content)
    except PictureRefused:
        return 0, 0


def raw_text(episode: Episode, sequence: int, part: str) -> str:
    """Return the whole of a text cut in a page: `message-N` or `answer-N`. Raises NotFoundError."""
    kind, _, digits = part.partition("-")
    number = int(digits) if digits.isascii() and digits.isdigit() else -1
    if kind == "answer" and number >= 0:
        return episode.media_of(sequence, number).content.decode(errors="replace")
    known = 0 <= sequence < len(episode.sequences)
    if kind == "message" and known and 0 <= number < len(episode.sequences[sequence].messages):
        return episode.sequences[sequence].messages[number].content
    raise NotFoundError(f"The attempt has no text {part!r} in sequence {sequence}.")


def image_type(content: bytes) -> str:
    """Return the type of an image by its first bytes; "" for anything else."""
    return next((mime for mime, magic in _IMAGES.items() if content.startswith(magic)), "")


def attempt_facts(episode: Episode) -> list[tuple[str, str]]:
    """Return labels and values of an attempt."""
    trajectory, row = episode.trajectory, episode.row
    counts, facts = trajectory.counts, trajectory.facts
    policies = dict.fromkeys(f"{p.run_epoch}:{p.version}" for p in trajectory.policies)
    errors = ", ".join(f"{n} {name}" for name, n in counts.tool_errors.items())
    listed = [
        ("stopped by", row.ended),
        ("partial reward", _number(trajectory.partial_reward)),
        ("named rewards", ", ".join(f"{n} {v:g}" for n, v in trajectory.named_rewards.items())),
        ("turns", f"{counts.turns}"),
        ("tool calls", f"{counts.tool_calls}" + (f" ({errors})" if errors else "")),
        ("parse errors", f"{counts.parse_errors}" if counts.parse_errors else ""),
        ("repeats", f"{counts.repeats}" if counts.repeats else ""),
        ("tokens", f"{row.tokens:,}, {row.policy_tokens:,} by the policy"),
        ("policy", ", ".join(policies)),
        ("time", f"{row.seconds:.1f} s; open {counts.open_s:.1f} s, grade {counts.grade_s:.1f} s"),
        ("worker", facts.worker_id),
        ("instance", facts.instance_id),
        ("environment", " ".join(filter(None, (facts.env_key, facts.env_version)))),
    ]
    return [(label, value) for label, value in listed if value]


def turn_facts(track: TokenTrack, start: int, end: int, timing: Any) -> tuple[Any, ...]:
    """Return labels and values of a turn's tokens."""
    logprobs = track.logprobs[start:end]
    sampled = logprobs[~np.isnan(logprobs)]
    pairs = np.stack([track.epochs[start:end], track.versions[start:end]], axis=1)
    policies = np.unique(pairs[pairs[:, 1] >= 0], axis=0).tolist()
    listed = [("tokens", f"{end - start:,}")]
    if len(sampled):
        listed.append(("mean logprob", f"{sampled.mean():.3f}"))
    listed.append(("policy", ", ".join(f"{epoch}:{version}" for epoch, version in policies)))
    if timing is not None:
        listed.append(("generate", f"{timing.generate_s:.2f} s"))
        listed.append(("tools", f"{timing.tools_s:.2f} s"))
        if timing.thinking_tokens:
            listed.append(("thinking", f"{timing.thinking_tokens:,} tokens"))
        if timing.reward is not None:
            listed.append(("reward", f"{timing.reward:g}"))
    return tuple((label, value) for label, value in listed if value)


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:g}"
