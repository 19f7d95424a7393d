"""The events of a run that become messages, and their recipients."""

import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.config.notify import NotifyConfig, SlackConfig
from flotilla_launcher.control import ledger_writer
from flotilla_launcher.notify.adapters.slack import SlackSink, slack_text
from flotilla_launcher.notify.adapters.webhook import WebhookSink
from flotilla_launcher.notify.delivery import DeliveryWorker
from flotilla_launcher.notify.message_selection import state_messages
from flotilla_launcher.notify.messages import (
    Message,
    MessageKind,
    RunFacts,
    spending_messages,
)
from flotilla_launcher.notify.notifier import Notifier, targets_of
from flotilla_launcher.notify.outbox import DeliveryTarget, Letter, Outbox
from flotilla_launcher.notify.run_facts import describe_model, describe_steps, selected_tasks
from flotilla_launcher.notify.sinks import Sink
from flotilla_launcher.run_progress import Alarm, Progress
from flotilla_launcher.state import Cleanup, Cost, Outcome, Run, RunState, TokenCount
from flotilla_launcher.store.ledger import Ledger
from tests.launcher.notify.slack_double import CHANNEL_ID, TOKEN, SlackDouble, slack
from tests.support.repository import ROOT

RUN = "demo-20261121-120000"
FACTS = RunFacts(
    Run(RUN, "demo", wanted={"learner": 1, "rollout": 2}, backend="sky"),
    estimate=12.5,
    max_cost=100.0,
    max_hours=24.0,
)


def facts(**changes: Any) -> RunFacts:
    """The facts with changes of their own or of their run."""
    of_run = {name: changes.pop(name) for name in [*changes] if hasattr(FACTS.run, name)}
    return replace(FACTS, run=replace(FACTS.run, **of_run), **changes)


def test_the_start_shows_what_runs_where_and_its_maximum_cost() -> None:
    (message,) = state_messages(
        RunState.PREFLIGHT, facts(tracker_project="https://wandb.ai/team/project")
    )
    text = slack_text(message)
    assert message.kind is MessageKind.STARTED
    for part in (RUN, "1 learner, 2 rollout", "sky", "https://wandb.ai/team/project"):
        assert part in text
    assert "$12.50 an hour, $300.00 in 24 h; stops at $100.00" in text


def test_the_start_lists_the_selected_tasks() -> None:
    select = {"modality": "tool_use", "env_keys": ["shop", "bank"], "max_tasks": 100}
    learner = {"tasks": "data/all.json", "select": select}
    (message,) = state_messages(
        RunState.PREFLIGHT, facts(tasks=selected_tasks({"learner": learner}))
    )
    assert (
        "*Tasks:* data/all.json; modality tool_use; env_keys shop, bank; max_tasks 100"
        in slack_text(message)
    )
    (without,) = state_messages(RunState.PREFLIGHT, facts(tasks=selected_tasks({})))
    assert "Tasks" not in slack_text(without)


def test_the_start_of_a_run_at_a_tinker_service_shows_model_steps_and_tasks() -> None:
    overrides = ("--data.env=shop,bank", "--data.max_tasks=9", "--learner.steps=50")
    spec = load_spec(ROOT / "deploy/runs/fleet-tinker.toml", overrides)
    (message,) = state_messages(
        RunState.PREFLIGHT,
        facts(
            model=describe_model(spec),
            steps=describe_steps(spec["learner"]),
            tasks=selected_tasks(spec),
        ),
    )
    text = slack_text(message)
    assert "*Model:* Qwen/Qwen3-8B at a Tinker service" in text
    assert "*Steps:* 50 of 8 tasks, 4 attempts at each" in text
    assert "*Tasks:* fleet:; modality tool_use; env shop,bank; max-tasks 9; eval-ratio 0.2" in text


def test_the_steps_of_a_warm_start_are_named_before_the_others() -> None:
    learner = {"steps": 50, "groups_per_step": 8, "group_size": 4, "warm_start": {"steps": 9}}
    assert describe_steps(learner) == "9 of imitation, 50 of 8 tasks, 4 attempts at each"


def test_what_a_spec_leaves_out_is_not_in_the_message() -> None:
    assert describe_model({"policy": {"model": "none"}}) == "none"
    assert describe_model({}) == describe_steps({"steps": 50}) == ""


def test_a_resumed_run_is_not_a_new_one() -> None:
    (message,) = state_messages(RunState.PREFLIGHT, FACTS, resumed=True)
    assert message.kind is MessageKind.RESUMED


def test_the_end_shows_results_and_the_state_of_the_machines() -> None:
    done = facts(
        outcome=Outcome.COMPLETED, cleanup=Cleanup.VERIFIED, before=0.12, after=0.55, cost=Cost(7.0)
    )
    (message,) = state_messages(RunState.COMPLETED, done)
    text = slack_text(message)
    assert "12.0% → 55.0%" in text
    assert "*Machines:* verified" in text
    assert "$7.00" in text


def test_a_failure_carries_the_end_of_the_log_in_bounds() -> None:
    failed = facts(error="learner-0 exited with code 1", log="line <&>\n" * 5_000)
    (message,) = state_messages(RunState.FAILED, failed)
    text = slack_text(message)
    assert "learner-0 exited with code 1" in text
    assert text.endswith("line &lt;&amp;&gt;\n```")
    assert len(text) < 10_000


def test_a_failure_shows_the_end_of_the_log_once() -> None:
    error = (
        "learner-0 exited with code 1; gave up after 1 failure. Its last lines:\nTraceback\nboom"
    )
    (message,) = state_messages(
        RunState.FAILED, facts(error=error, log="before\nTraceback\nboom\n")
    )
    text = slack_text(message)
    assert text.count("boom") == text.count("Traceback") == 1
    assert "gave up after 1 failure. Its last lines:\n```before\n" in text
    # Without that log, the error has the lines.
    (bare,) = state_messages(RunState.FAILED, facts(error=error))
    assert slack_text(bare).endswith("Traceback\nboom")


@pytest.mark.parametrize("state", [RunState.COMPLETED, RunState.FAILED, RunState.STOPPED])
def test_an_end_links_to_the_job_the_logs_and_the_runs_own_page(state: RunState) -> None:
    ended = facts(
        link="https://git.example/runs/7",
        logs="host:/runs/demo/logs",
        tracker="https://wandb.ai/team/project/runs/1",
        tracker_project="https://wandb.ai/team/project",
    )
    (message,) = state_messages(state, ended)
    shown = dict(message.facts)
    assert shown["Submitted by"] == "https://git.example/runs/7"
    assert shown["Logs"] == "host:/runs/demo/logs"
    assert shown["Tracker"] == "https://wandb.ai/team/project/runs/1"
    (never,) = state_messages(state, facts(tracker_project="https://wandb.ai/team/project"))
    assert "Tracker" not in dict(never.facts), "that run is not there"


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Outcome.STOPPED, "Run cancelled"),
        (Outcome.BUDGET, "budget is spent"),
        (Outcome.DEADLINE, "time is up"),
    ],
)
def test_a_stop_gives_its_reason(outcome: Outcome, words: str) -> None:
    (message,) = state_messages(RunState.STOPPED, facts(outcome=outcome, cleanup=Cleanup.VERIFIED))
    assert words in message.title
    assert "*Machines:* verified" in slack_text(message)


def test_a_suspected_leak_is_a_message_of_its_own() -> None:
    leak = facts(cleanup=Cleanup.LEAK_SUSPECTED, cleanup_detail="flo-demo-learner-0 is up")
    for state in (RunState.COMPLETED, RunState.FAILED, RunState.STOPPED):
        kinds = [message.kind for message in state_messages(state, leak)]
        assert kinds[1:] == [MessageKind.LEAK_SUSPECTED]


def test_states_on_the_way_send_nothing() -> None:
    for state in RunState:
        if not state.has_ended and state is not RunState.PREFLIGHT:
            assert state_messages(state, FACTS) == []


def test_limits_are_sent_at_four_fifths_and_when_they_are_reached() -> None:
    assert spending_messages(facts(cost=Cost(79.9))) == {}
    (near,) = spending_messages(facts(cost=Cost(80.0))).values()
    assert near.title == "80% of the cost are used"
    (over,) = spending_messages(facts(cost=Cost(100.0))).values()
    assert "reached" in over.title
    assert set(spending_messages(facts(hours=24.0))) == {"hours-reached-24"}
    used = Cost(1.5, tokens=TokenCount(100, 20, 10))
    (tokens,) = spending_messages(facts(cost=used, max_tokens=150)).values()
    assert tokens.title == "87% of the tokens are used"
    assert ("Used", "130 of 150 (launcher.max_tokens)") in tokens.facts
    assert tokens.facts[-2:] == (("Spent", "$1.50"), ("Tokens", "130"))


def test_nothing_is_sent_without_a_channel_and_slack_is_optional() -> None:
    assert targets_of(NotifyConfig()) == []
    slack_only = NotifyConfig(slack=SlackConfig(channel="C1"))
    assert [target.kind for target in targets_of(slack_only)] == ["slack"]
    silent = NotifyConfig(slack=SlackConfig(channel="C1"), disable_slack=True, webhook_env="HOOK")
    assert [target.kind for target in targets_of(silent)] == ["webhook"]


def spec_of(double: SlackDouble, **launcher: Any) -> str:
    notify = {"slack": {"channel": CHANNEL_ID, "api_url": double.url}}
    return json.dumps({"name": "demo", "launcher": {"notify": notify, **launcher}})


class Reported:
    """A ledger with one run, and a notifier that gets its events."""

    def __init__(self, folder: Path, spec_json: str) -> None:
        self.store = Ledger(folder / "launcher.sqlite")
        self.outbox = Outbox(folder / "launcher.sqlite")
        self.post = DeliveryWorker(self.outbox, lambda target: SlackSink(target, TOKEN))
        self.notifier = Notifier(folder, self.store, self.outbox, self.post)
        self.run = Run(RUN, "demo", {"learner": 1})
        with self.store.transaction():
            self.store.begin_run(self.run, spec_json, 1_700_000_000.0, {"learner": 2.0})

    async def state(self, state: RunState, **changes: Any) -> None:
        self.run = replace(self.run, state=state, **changes)
        with self.store.transaction():
            self.store.save_run(self.run, [], None)
            self.store.add_event(RUN, 0.0, "state", {"state": state})
        await self.notify()

    async def notify(self) -> None:
        """Notify of all events from the beginning, as a successor may."""
        stored = self.store.get_run(RUN)
        assert stored is not None
        for event in self.store.list_events(RUN, 0):
            await self.notifier(stored, event)
        await self.post.deliver_due()

    async def close(self) -> None:
        await self.post.close()
        self.outbox.close()
        self.store.close()


@asynccontextmanager
async def reports(folder: Path, double: SlackDouble, **launcher: Any) -> AsyncGenerator[Reported]:
    one = Reported(folder, spec_of(double, **launcher))
    yield one
    await one.close()


async def test_a_run_has_one_thread_and_each_event_one_message(tmp_path: Path) -> None:
    logs = tmp_path / RUN / "logs"
    logs.mkdir(parents=True)
    (logs / "rollout-1.log").write_text("of the rollout\n")
    page = tmp_path / RUN / "analysis" / "newest.html"
    page.parent.mkdir()
    page.touch()
    async with slack() as double, reports(tmp_path, double) as one:
        for state in (RunState.PREFLIGHT, RunState.PROVISIONING, RunState.RUNNING):
            await one.state(state)
        error = "rollout-1 exited with code 1; gave up"
        await one.state(RunState.FAILED, outcome=Outcome.FAILED, error=error)
        await one.notify()
        start, end = double.messages
        assert "Run started" in start["text"] and "$2.00 an hour" in start["text"]
        assert end["thread_ts"] == start["ts"]
        assert "Run failed" in end["text"] and "of the rollout" in end["text"]
        assert f"*Logs:* {socket.gethostname()}:{logs}" in end["text"]
        assert f"*Analysis:* {socket.gethostname()}:{page}" in end["text"]


async def test_a_second_start_of_a_run_is_a_reply(tmp_path: Path) -> None:
    async with slack() as double, reports(tmp_path, double) as one:
        for state in (RunState.PREFLIGHT, RunState.STOPPED, RunState.PREFLIGHT):
            await one.state(state)
        heads = [text.splitlines()[0] for text in double.texts]
        assert [head.partition(" ")[2] for head in heads] == [
            "*Run started*",
            "*Run cancelled*",
            "*Run resumed*",
        ]
        assert all("thread_ts" in message for message in double.messages[1:])


async def test_messages_name_the_page_of_the_run_once_its_learner_has_reported_it(
    tmp_path: Path,
) -> None:
    notify = {"link": "https://git.example/runs/7"}
    async with slack() as double:
        text = json.loads(spec_of(double))
        text["launcher"]["notify"] |= notify
        one = Reported(tmp_path, json.dumps(text))
        await one.state(RunState.PREFLIGHT)
        url = "https://wandb.ai/team/project/runs/1"
        await one.state(RunState.COMPLETED, outcome=Outcome.COMPLETED, tracker_url=url)
        await one.close()
        assert [f"*Tracker:* {url}" in text for text in double.texts] == [False, True]
        assert all("*Submitted by:* https://git.example/runs/7" in text for text in double.texts)


async def test_an_alarm_of_the_learner_is_sent_each_time_that_it_is_raised(tmp_path: Path) -> None:
    alarm = Alarm("no_grade_rate", "shop", "warning", 7, "why", "how")
    solved = Alarm("solved", "desk", "notice", 7, "all pass", "give harder ones")
    failed = Alarm("run_failed", "all", "error", 7, "the launcher reports it too")
    raised = Progress(alarms=(alarm, failed, solved))
    async with slack() as double, reports(tmp_path, double) as one:
        await one.state(RunState.PREFLIGHT)
        known = Progress()
        for progress in (raised, raised, Progress(), raised):
            ledger_writer.write_progress(one.store, RUN, known, progress, 0.0)
            known = progress
            await one.notify()
        heads = [text.splitlines()[0] for text in double.texts[1:]]
        assert heads == ["⚠️ *Alarm: no grade rate of shop*", "💡 *Notice: solved of desk*"] * 2
        assert "why. how" in double.texts[1]
        assert all("thread_ts" in message for message in double.messages[1:])


async def test_a_budget_is_reported_once_a_limit(tmp_path: Path) -> None:
    async with slack() as double, reports(tmp_path, double, max_cost=10.0) as one:
        await one.state(RunState.PREFLIGHT)
        for accrued in (1.0, 8.5, 9.0, 10.2, 10.3):
            one.run = replace(one.run, cost=Cost(accrued, 2.0))
            with one.store.transaction():
                one.store.save_run(one.run, [], None)
                one.store.add_event(RUN, 0.0, "cost", {"accrued": accrued})
            await one.notify()
        titles = [text.splitlines()[0] for text in double.texts[1:]]
        assert len(titles) == 2
        assert "85% of the cost are used" in titles[0]
        assert "Limit of cost reached" in titles[1]


async def test_before_and_after_come_from_the_first_and_the_newest_evaluation(
    tmp_path: Path,
) -> None:
    async with slack() as double, reports(tmp_path, double) as one:
        await one.state(RunState.PREFLIGHT)
        for share in (0.1, 0.3, 0.7):
            one.store.save_progress(RUN, Progress(metrics={"eval/all/pass_at_1": share}))
            one.notifier.note_first_evaluations()
        await one.state(RunState.COMPLETED, outcome=Outcome.COMPLETED)
        assert "10.0% → 70.0%" in double.texts[-1]


async def test_a_webhook_gets_json_with_a_key_and_its_url_is_in_no_error(tmp_path: Path) -> None:
    got: list[tuple[str, dict[str, Any]]] = []
    answers = [503, 200]

    async def take(request: web.Request) -> web.Response:
        got.append((request.headers["Idempotency-Key"], await request.json()))
        return web.Response(status=answers.pop(0))

    app = web.Application()
    app.router.add_post("/secret-path", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/secret-path"
    now = 1_700_000_000.0
    outbox = Outbox(tmp_path / "launcher.sqlite")

    def make(target: DeliveryTarget) -> Sink:
        return WebhookSink(target, url)

    post = DeliveryWorker(outbox, make, clock=lambda: now)
    outbox.put_message(
        RUN, "1", Message(MessageKind.STARTED, "hello"), [DeliveryTarget("webhook", "HOOK")], now
    )
    await post.deliver_due()
    (waiting,) = outbox.list_heads()
    assert waiting.attempts == 1
    now += 60.0
    await post.deliver_due()
    assert [key for key, _ in got] == [f"{RUN}/1", f"{RUN}/1"]
    assert got[1][1]["title"] == "hello"
    assert outbox.list_heads() == []
    await post.close()
    outbox.close()
    await runner.cleanup()


def test_a_letter_is_named_by_its_run_and_event(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "launcher.sqlite")
    target = DeliveryTarget("webhook", "HOOK")
    for _ in range(2):
        outbox.put_message(RUN, "state/4/0", Message(MessageKind.STARTED, "hello"), [target], 0.0)
    (letter,) = outbox.list_heads()
    assert isinstance(letter, Letter) and letter.key == f"{RUN}/state/4/0"
    outbox.close()
