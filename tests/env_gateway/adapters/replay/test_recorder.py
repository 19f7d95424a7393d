"""Recordings: what they may hold, and what is left of one that could not be finished."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from flotilla_common.domain.attempts import Grade, NoGradeReason
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.text import redaction
from flotilla_env_gateway.adapters.replay.recorder import Recording
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import CallResult, Media, Text
from tests.env_gateway.adapters.replay.record_bench import call, recording, replaying
from tests.support.fake_environments import ScriptedBackend
from tests.support.fake_gateway import open_spec, opened
from tests.support.waiting import until

SECRET = "hunter2-hunter2"


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(redaction, "_secrets", set())
    monkeypatch.setattr(redaction, "_hidden", [])
    redaction.add_secret(SECRET)
    redaction.add_secret("1234567890")
    yield SECRET


async def play(gateway: Gateway, attempt: int, calls: int, **arguments: Any) -> Grade:
    session = await opened(gateway, open_spec(attempt))
    for _ in range(calls):
        await call(gateway, session, "look", **arguments)
    grade = await gateway.grade_episode(session, arguments.get("at", ""), None, 10.0)
    gateway.close(session.episode.episode_id)
    return grade


def content(run: Path) -> bytes:
    return b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())


def lines(run: Path) -> list[list[dict[str, Any]]]:
    files = sorted((run / "recording" / "episodes").iterdir())
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


async def test_a_secret_is_in_no_part_of_a_recording_and_the_rest_is(
    secret: str, tmp_path: Path
) -> None:
    picture = Media(b"PNG" + secret.encode() + b"rest", "image/png", b"", 22)
    long = Text(f"{secret} " * 1000)

    async def hook(name: str, arguments: Mapping[str, Any]) -> CallResult:
        return CallResult((Text(f'{{"key": "{secret}", "pin": 1234567890}}'), picture, long))

    backend = ScriptedBackend()
    backend.hook = hook
    async with recording(tmp_path, backend) as gateway:
        assert (await play(gateway, 0, 1, at=secret, pin=1234567890)).reward == 1.0
    kept = content(tmp_path)
    assert secret.encode() not in kept and b"1234567890" not in kept
    async with replaying(tmp_path) as gateway:
        session = await opened(gateway)
        parts = (await call(gateway, session, "look", at=secret, pin=1234567890)).parts
        grade = await gateway.grade_episode(session, secret, None, 5.0)
    text, media, _ = parts
    assert text == Text('{"key": "***", "pin": ***}')
    assert isinstance(media, Media) and media.data == b"PNG" + b"*" * len(secret) + b"rest"
    assert grade.reward == 1.0, "what is asked with the secret is what was asked with it"


async def test_a_large_part_is_kept_once(tmp_path: Path) -> None:
    async def hook(name: str, arguments: Mapping[str, Any]) -> CallResult:
        return CallResult((Text("x" * 50_000),))

    backend = ScriptedBackend()
    backend.hook = hook
    async with recording(tmp_path, backend) as gateway:
        for attempt in range(4):
            await play(gateway, attempt, 5)
    assert 50_000 < len(content(tmp_path)) < 75_000


async def test_at_its_bound_a_recording_ends_and_the_run_goes_on(tmp_path: Path) -> None:
    with capture_logs() as events:
        async with recording(tmp_path, ScriptedBackend(), most=2**16) as gateway:
            # A call takes some 150 bytes.
            assert (await play(gateway, 0, 3)).reward == 1.0
            assert (await play(gateway, 1, 600)).reward == 1.0
            assert (await play(gateway, 2, 3)).reward == 1.0
    first, second = lines(tmp_path)
    assert first[-1]["op"] == "end"
    assert second[-1]["op"] == "cut" and "record_bytes" in second[-1]["why"]
    assert len(content(tmp_path)) < 2**16 + 300
    cut = [event["why"] for event in events if event["event"] == "recording_cut"]
    assert cut == [second[-1]["why"]]
    async with replaying(tmp_path) as gateway:
        assert (await play(gateway, 0, 3)).reward == 1.0
        grade = await play(gateway, 1, 600)
    assert (grade.reward, grade.reason) == (None, NoGradeReason.REPLAY_MISS)
    assert "cut here: the recording holds env_gateway.limits.record_bytes" in grade.detail


async def test_what_is_there_counts_to_the_bound_when_a_gateway_starts_again(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        async with recording(tmp_path, ScriptedBackend(), most=2**16) as gateway:
            await play(gateway, 0, 300)
    assert len(content(tmp_path)) < 2**16 + 600


async def test_a_disk_that_fails_costs_no_grade(tmp_path: Path) -> None:
    with capture_logs() as events:
        async with recording(tmp_path, ScriptedBackend()) as gateway:
            session = await opened(gateway)
            await call(gateway, session, "look")
            # A thread writes: a folder that is being removed must not get its next file.
            await until(lambda: b'"seq"' in content(tmp_path))
            shutil.rmtree(tmp_path / "recording")
            await call(gateway, session, "look")
            assert (await gateway.grade_episode(session, "", None, 5.0)).reward == 1.0
    cut = [event for event in events if event["event"] == "recording_cut"]
    assert len(cut) == 1 and "No such file" in cut[0]["why"]


@pytest.mark.parametrize(("bytes_lost", "reward"), [(3, 1.0), (60, None)])
async def test_a_file_that_was_cut_is_played_as_far_as_it_is_whole(
    bytes_lost: int, reward: float | None, tmp_path: Path
) -> None:
    async with recording(tmp_path, ScriptedBackend()) as gateway:
        await play(gateway, 0, 2)
    (file,) = (tmp_path / "recording" / "episodes").iterdir()
    file.write_bytes(file.read_bytes()[:-bytes_lost])
    async with replaying(tmp_path) as gateway:
        grade = await play(gateway, 0, 2)
    assert grade.reward == reward
    if reward is None:
        assert grade.reason is NoGradeReason.REPLAY_MISS
        assert "cut here: the gateway that recorded it ended before the episode" in grade.detail


async def test_a_part_that_was_damaged_is_a_miss(tmp_path: Path) -> None:
    async def hook(name: str, arguments: Mapping[str, Any]) -> CallResult:
        return CallResult((Text("x" * 50_000),))

    backend = ScriptedBackend()
    backend.hook = hook
    async with recording(tmp_path, backend) as gateway:
        await play(gateway, 0, 1)
    (part,) = (tmp_path / "recording" / "parts").iterdir()
    part.write_bytes(b"y" * 50_000)
    async with replaying(tmp_path) as gateway:
        session = await opened(gateway)
        (text,) = (await call(gateway, session, "look")).parts
        grade = await gateway.grade_episode(session, "", None, 5.0)
    assert isinstance(text, Text) and "is damaged" in text.text
    assert grade.reason is NoGradeReason.REPLAY_MISS


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "recording").write_text("a file")
    with pytest.raises(ConfigError, match=r"env_gateway\.record: "):
        Recording(tmp_path, max_bytes=2**20)
