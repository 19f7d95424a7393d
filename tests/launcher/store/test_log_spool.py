"""Lines that watchers push are in the launcher's log once, despite repeats, cuts and restarts."""

import random
from pathlib import Path

import pytest

from flotilla_launcher.store.log_spool import LogGapError, LogSpool


@pytest.mark.parametrize("seed", range(200))
def test_a_log_has_every_byte_once_whatever_is_repeated_or_dies(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    log = tmp_path / "logs" / "learner-0.log"
    texts = {name: _text(rng, name) for name in ("first", "second", "third")}
    spool = LogSpool(log)
    for name, text in texts.items():
        position = 0
        while position < len(text):
            end = min(len(text), position + rng.randrange(1, 400))
            position = _push(spool, name, position, text[position:end], rng)
            if rng.random() < 0.3:
                # A launcher that was killed, perhaps while it wrote.
                spool = LogSpool(log)
                position = _cut(log, name, min(rng.randrange(0, 5), position), spool)
    wanted = [line for text in texts.values() for line in text.splitlines()]
    assert log.read_bytes().splitlines() == wanted


def _text(rng: random.Random, name: str) -> bytes:
    """Lines, the last one perhaps unfinished."""
    lines = [f"{name} {number} {'x' * rng.randrange(60)}\n" for number in range(40)]
    text = "".join(lines).encode()
    return text if rng.random() < 0.5 else text[:-1]


def _push(spool: LogSpool, name: str, position: int, chunk: bytes, rng: random.Random) -> int:
    """Push from an earlier offset, as after lost answers; too far ahead now and
    then."""
    if rng.random() < 0.1:
        with pytest.raises(LogGapError) as caught:
            spool.append_chunk(name, position + 7, chunk)
        assert caught.value.position == position
    reached = spool.append_chunk(name, position, chunk)
    if rng.random() < 0.4:
        assert spool.append_chunk(name, position, chunk) == reached
    return reached


def _cut(log: Path, name: str, lost: int, spool: LogSpool) -> int:
    """Cut the last append short by so many bytes, as if its answer were lost."""
    content = log.read_bytes()
    log.write_bytes(content[: len(content) - lost])
    return spool.append_chunk(name, 0, b"")


def test_an_unknown_incarnation_begins_at_its_beginning(tmp_path: Path) -> None:
    spool = LogSpool(tmp_path / "rollout-1.log")
    with pytest.raises(LogGapError) as caught:
        spool.append_chunk("new", 100, b"later\n")
    assert caught.value.position == 0


def test_incarnations_that_take_turns_keep_their_positions(tmp_path: Path) -> None:
    log = tmp_path / "rollout-1.log"
    for number in range(20):
        for name in ("old", "new"):
            line = f"{name} {number:03}\n".encode()
            assert LogSpool(log).append_chunk(name, number * len(line), line) == (number + 1) * len(
                line
            )
    lines = log.read_text().splitlines()
    for name in ("old", "new"):
        assert [line for line in lines if line.startswith(name)] == [
            f"{name} {number:03}" for number in range(20)
        ]


def test_a_log_that_was_taken_away_is_written_again(tmp_path: Path) -> None:
    log = tmp_path / "rollout-1.log"
    LogSpool(log).append_chunk("old", 0, b"before\n")
    LogSpool(log).append_chunk("new", 0, b"one\n")
    log.unlink()
    with pytest.raises(LogGapError) as caught:
        LogSpool(log).append_chunk("new", 4, b"two\n")
    assert LogSpool(log).append_chunk("new", 0, b"one\n") == 4
    assert (caught.value.position, log.read_text()) == (0, "one\n")
