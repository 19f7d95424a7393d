"""Messages reach Slack once, in the run's thread, whatever happens on the way."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from flotilla_common.rpc.free_ports import free_port
from flotilla_launcher.notify.adapters.slack import SlackSink
from flotilla_launcher.notify.delivery import DeliveryWorker
from flotilla_launcher.notify.messages import Message, MessageKind
from flotilla_launcher.notify.outbox import DeliveryTarget, Outbox
from tests.launcher.notify.slack_double import CHANNEL_ID, CHANNEL_NAME, TOKEN, Fault, slack
from tests.support.repository import ROOT

RUN = "demo-1"
# Before and after each: two letters are put, marked, sent, and marked as sent.
STEPS = 16


class Clock:
    """Time as the test sets it."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def post_office(
    folder: Path, clock: Callable[[], float], token: str = TOKEN
) -> AsyncGenerator[tuple[Outbox, DeliveryWorker]]:
    outbox = Outbox(folder / "launcher.sqlite")
    post = DeliveryWorker(outbox, lambda target: SlackSink(target, token), clock=clock)
    yield outbox, post
    await post.close()
    outbox.close()


def put(outbox: Outbox, target: DeliveryTarget, event: str, title: str, now: float) -> None:
    kind = MessageKind.STARTED if title == "start" else MessageKind.COMPLETED
    outbox.put_message(RUN, event, Message(kind, title), [target], now)


async def test_replies_are_in_the_thread_of_the_start(tmp_path: Path) -> None:
    clock = Clock()
    async with slack() as double, post_office(tmp_path, clock) as (outbox, post):
        target = DeliveryTarget("slack", "SLACK_BOT_TOKEN", double.url, CHANNEL_NAME)
        put(outbox, target, "1", "start", clock())
        put(outbox, target, "1", "start", clock())
        put(outbox, target, "2", "end", clock())
        await post.deliver_due()
        first, second = double.messages
        assert "thread_ts" not in first
        assert second["thread_ts"] == first["ts"]
        assert second["channel"] == CHANNEL_ID
        await post.deliver_due()
        assert len(double.messages) == 2


async def test_slack_names_the_next_time_and_is_not_called_before(tmp_path: Path) -> None:
    clock = Clock()
    async with slack() as double, post_office(tmp_path, clock) as (outbox, post):
        double.faults = [Fault(status=429, error="ratelimited", retry_after="30")]
        target = DeliveryTarget("slack", "SLACK_BOT_TOKEN", double.url, CHANNEL_ID)
        put(outbox, target, "1", "start", clock())
        await post.deliver_due()
        clock.now += 29.0
        await post.deliver_due()
        assert double.requests == 1
        clock.now += 1.5
        await post.deliver_due()
        assert double.keys == [f"{RUN}/1"]


async def test_an_hour_without_slack_delays_messages_and_loses_none(tmp_path: Path) -> None:
    clock, port = Clock(), free_port()
    target = DeliveryTarget("slack", "SLACK_BOT_TOKEN", f"http://127.0.0.1:{port}/api", CHANNEL_ID)
    with capture_logs() as lines:
        async with post_office(tmp_path, clock) as (outbox, post):
            for event, title in (("1", "start"), ("2", "end")):
                put(outbox, target, event, title, clock())
            for _ in range(3600 // 5):
                await post.deliver_due()
                clock.now += 5.0
            (head,) = outbox.list_heads()
            assert head.attempts < 25
            async with slack(port) as double:
                clock.now += 300.0
                await post.deliver_due()
                assert double.keys == [f"{RUN}/1", f"{RUN}/2"]
    assert len([line for line in lines if line["event"] == "messages wait"]) == 1


@pytest.mark.parametrize(
    "fault",
    [
        Fault(cut=True, taken=True),
        Fault(status=500, taken=True),
        Fault(error="internal_error", taken=True),
    ],
    ids=["cut", "500", "internal_error"],
)
@pytest.mark.parametrize("number", [0, 1])
async def test_what_arrived_without_an_answer_is_not_sent_again(
    tmp_path: Path, fault: Fault, number: int
) -> None:
    clock = Clock()
    async with slack() as double, post_office(tmp_path, clock) as (outbox, post):
        target = DeliveryTarget("slack", "SLACK_BOT_TOKEN", double.url, CHANNEL_ID)
        for event, title in (("1", "start"), ("2", "end")):
            double.faults = [fault] if int(event) == number + 1 else []
            put(outbox, target, event, title, clock())
            for _ in range(3):
                await post.deliver_due()
                clock.now += 60.0
        assert double.keys == [f"{RUN}/1", f"{RUN}/2"]
        assert double.messages[1]["thread_ts"] == double.messages[0]["ts"]


async def test_a_bot_that_may_not_read_sends_again_what_may_have_been_lost(tmp_path: Path) -> None:
    clock = Clock()
    async with slack() as double, post_office(tmp_path, clock) as (outbox, post):
        double.faults, double.readable = [Fault(cut=True)], False
        target = DeliveryTarget("slack", "SLACK_BOT_TOKEN", double.url, CHANNEL_ID)
        put(outbox, target, "1", "start", clock())
        await post.deliver_due()
        clock.now += 60.0
        await post.deliver_due()
        assert double.keys == [f"{RUN}/1"]


@pytest.mark.parametrize(
    ("token", "channel", "fix"),
    [
        ("xoxb-wrong-and-secret", CHANNEL_ID, "set it to the token of a bot"),
        ("", CHANNEL_ID, "SLACK_BOT_TOKEN is empty"),
        (TOKEN, "#elsewhere", "invite the bot there"),
    ],
    ids=["wrong token", "no token", "wrong channel"],
)
async def test_what_people_must_mend_is_logged_once_with_the_fix(
    tmp_path: Path, token: str, channel: str, fix: str
) -> None:
    clock = Clock()
    async with slack() as double:
        with capture_logs() as lines:
            async with post_office(tmp_path, clock, token) as (outbox, post):
                target = DeliveryTarget("slack", "SLACK_BOT_TOKEN", double.url, channel)
                put(outbox, target, "1", "start", clock())
                for _ in range(20):
                    await post.deliver_due()
                    clock.now += 100.0
        assert double.messages == []
        reported = [line["error"] for line in lines if line["event"] == "messages wait"]
        assert len(reported) == 1 and fix in reported[0]
        assert double.requests <= 5
        # The start of the next launcher repairs it.
        async with post_office(tmp_path, clock) as (outbox, post):
            clock.now += 700.0
            await post.deliver_due()
        assert len(double.messages) == (0 if channel.startswith("#") else 1)


async def test_a_target_that_is_away_does_not_hold_up_another(tmp_path: Path) -> None:
    clock = Clock()
    async with slack() as double, post_office(tmp_path, clock) as (outbox, post):
        away = DeliveryTarget(
            "slack", "SLACK_BOT_TOKEN", f"http://127.0.0.1:{free_port()}/api", CHANNEL_ID
        )
        put(outbox, away, "1", "start", clock())
        well = DeliveryTarget("slack", "SLACK_BOT_TOKEN", double.url, CHANNEL_ID)
        outbox.put_message("demo-2", "1", Message(MessageKind.STARTED, "start"), [well], clock())
        await post.deliver_due()
        assert double.keys == ["demo-2/1"]


@pytest.mark.slow
async def test_a_launcher_killed_at_any_step_leaves_one_message_of_each(tmp_path: Path) -> None:
    async with slack() as double:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.launcher.notify.killed_sender"),
            *(str(tmp_path), double.url, str(STEPS)),
            cwd=ROOT,
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'gen'}"},
        )
        assert await process.wait() == 0
        for number in range(STEPS + 1):
            run_id = f"run-{number}"
            start, end = (
                m
                for m, key in zip(double.messages, double.keys, strict=True)
                if key.startswith(f"{run_id}/")
            )
            assert start["text"].endswith("*started*")
            assert end["thread_ts"] == start["ts"]


def test_no_byte_of_the_ledger_is_a_secret(tmp_path: Path) -> None:
    asyncio.run(report_a_secret(tmp_path))
    assert not [path for path in tmp_path.iterdir() if TOKEN.encode() in path.read_bytes()]


async def report_a_secret(tmp_path: Path) -> None:
    clock = Clock()
    async with slack() as double, post_office(tmp_path, clock) as (outbox, post):
        target = DeliveryTarget("slack", "SLACK_BOT_TOKEN", double.url, CHANNEL_ID)
        message = Message(
            MessageKind.FAILED, "Run failed", (), "", f"Authorization: Bearer {TOKEN}"
        )
        SlackSink(target, TOKEN)
        outbox.put_message(RUN, "1", message, [target], clock())
        await post.deliver_due()
        assert "***" in double.texts[0]
        assert TOKEN not in double.texts[0]
