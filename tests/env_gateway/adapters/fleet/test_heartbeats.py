"""Heartbeats of many instances to a control plane that is slow, fails or throttles."""

import asyncio
import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flotilla_env_gateway.adapters.fleet.heartbeat_schedule import HeartbeatSchedule
from flotilla_env_gateway.adapters.fleet.heartbeats import Heartbeats
from flotilla_env_gateway.api.alarms import GatewayAlarms
from flotilla_env_gateway.api.status import update_alarms_forever
from flotilla_env_gateway.ports import BackendError, HeartbeatLateness
from tests.env_gateway.adapters.fleet.virtual_time import in_virtual_time
from tests.support.examples import examples
from tests.support.fake_environments import ScriptedBackend
from tests.support.fake_gateway import running
from tests.support.waiting import until

TTL_S = 60.0
THROTTLED = BackendError("throttled", "HTTP 429", delivered=False, retry_after_s=1.0)
FAILED = BackendError("http", "HTTP 502", delivered=None)


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Plane:
    """A control plane that takes `latency_s` to answer, refuses `refused` of all beats with
    `error`, and ends instances of which it has not heard for `TTL_S`."""

    latency_s: float
    refused: float = 0.0
    error: BackendError = FAILED
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    heard_at: dict[str, float] = field(default_factory=dict[str, float])
    ended: set[str] = field(default_factory=set[str])
    unheard: dict[str, float] = field(default_factory=dict[str, float])

    def start(self, instance_id: str) -> "Kept":
        self.heard_at[instance_id] = now()
        return Kept(self, instance_id)

    def hear(self, instance_id: str) -> None:
        if now() - self.heard_at[instance_id] > TTL_S:
            self.ended.add(instance_id)
        self.heard_at[instance_id] = now()

    def all_ended(self) -> set[str]:
        late = {name for name, at in self.heard_at.items() if now() - at > TTL_S}
        return self.ended | late


@dataclass
class Kept:
    """One instance, as the heartbeats see it."""

    plane: Plane
    name: str

    async def send_heartbeat(self, timeout_s: float) -> None:
        plane = self.plane
        try:
            async with asyncio.timeout(timeout_s):
                half_s = plane.latency_s / 2 * plane.rng.uniform(0.8, 1.2)
                await asyncio.sleep(half_s)
                refused = plane.rng.random() < plane.refused
                if not refused:
                    plane.hear(self.name)
                await asyncio.sleep(half_s)
        except TimeoutError:
            raise BackendError("timeout", "no answer", delivered=None) from None
        if refused:
            raise plane.error

    def mark_ended(self, why: str) -> None:
        self.plane.unheard[self.name] = now()


async def keep(plane: Plane, instances: int, seconds: float) -> None:
    """All are created within ten seconds."""
    heartbeats = Heartbeats(ttl_s=TTL_S)
    for number in range(instances):
        heartbeats.watch_instance(f"i{number}", plane.start(f"i{number}"))
        await asyncio.sleep(10.0 / instances)
    await asyncio.sleep(seconds)
    await heartbeats.close()


@dataclass
class Simulation:
    """A schedule and a control plane in a queue of events; `run` returns which instances the plane
    has ended and which the schedule gave up."""

    instances: int
    latency_s: float
    refused: float
    retry_after_s: float | None = None
    most: int = 0

    def run(self, seconds: float) -> tuple[set[str], set[str]]:
        rng = random.Random(0)
        schedule = HeartbeatSchedule(ttl_s=TTL_S, rng=rng)
        heard = {f"i{number}": 10.0 * number / self.instances for number in range(self.instances)}
        ended, lost = set[str](), set[str]()
        events = [(at, "create", name) for name, at in heard.items()]
        while (at := min(events[0][0] if events else seconds, _or(schedule, seconds))) < seconds:
            while events and events[0][0] <= at:
                _, what, name = heapq.heappop(events)
                if what == "create":
                    schedule.watch_instance(name, at)
                elif what == "hear":
                    ended |= {name} if at - heard[name] > TTL_S else set()
                    heard[name] = at
                elif what == "answer":
                    schedule.confirm_beat(name, at)
                else:
                    schedule.record_failure(name, at, self.retry_after_s)
            lost.update(schedule.pop_lost(at))
            for name in schedule.begin_due_beats(at):
                took_s = self.latency_s * rng.uniform(0.8, 1.2)
                refused = rng.random() < self.refused
                answered_at = at + min(took_s, schedule.timeout_s)
                if not refused:
                    heapq.heappush(events, (at + took_s / 2, "hear", name))
                in_time = not refused and took_s <= schedule.timeout_s
                heapq.heappush(events, (answered_at, "answer" if in_time else "fail", name))
            self.most = max(self.most, schedule.in_flight)
        return ended | {name for name, at in heard.items() if seconds - at > TTL_S}, lost


def _or(schedule: HeartbeatSchedule, otherwise: float) -> float:
    at = schedule.next_event_at()
    return otherwise if at is None else at


@pytest.mark.parametrize(("instances", "latency_s"), [(500, 6.0), (1000, 3.0), (2000, 3.0)])
def test_no_instance_ends_at_a_slow_control_plane(instances: int, latency_s: float) -> None:
    simulation = Simulation(instances, latency_s, refused=0.01)
    assert simulation.run(120.0) == (set(), set())
    assert simulation.most <= 4 * instances * latency_s / (TTL_S / 3)


def test_a_control_plane_that_throttles_most_beats_ends_no_instance() -> None:
    simulation = Simulation(500, 0.2, refused=0.6, retry_after_s=1.0)
    assert simulation.run(300.0) == (set(), set())


def test_few_beats_are_under_way_at_a_control_plane_that_is_fast() -> None:
    simulation = Simulation(2000, 0.05, refused=0.0)
    assert simulation.run(60.0) == (set(), set())
    assert simulation.most <= 16


@pytest.mark.slow
def test_two_thousand_instances_live_for_ten_minutes_at_a_slow_control_plane() -> None:
    plane = Plane(3.0, refused=0.01)

    async def ten_minutes() -> None:
        await keep(plane, 2000, 600.0)
        assert (plane.all_ended(), plane.unheard) == (set(), {})

    in_virtual_time(ten_minutes())


def test_no_beat_waits_for_a_round_of_others() -> None:
    plane = Plane(6.0, refused=0.01)

    async def two_minutes() -> None:
        await keep(plane, 150, 120.0)
        assert (plane.all_ended(), plane.unheard) == (set(), {})

    in_virtual_time(two_minutes())


def test_an_instance_of_which_nothing_is_confirmed_in_its_time_is_reported() -> None:
    plane = Plane(0.1, refused=1.0)

    async def until_lost() -> None:
        heartbeats = Heartbeats(ttl_s=TTL_S)
        started = now()
        for name in ("one", "two"):
            heartbeats.watch_instance(name, plane.start(name))
        await asyncio.sleep(TTL_S * 0.7)
        assert (heartbeats.late_count, plane.unheard) == (2, {})
        plane.refused = 0.0
        await asyncio.sleep(TTL_S / 3)
        assert (heartbeats.late_count, plane.unheard) == (0, {})
        plane.refused, heard_at = 1.0, dict(plane.heard_at)
        await asyncio.sleep(TTL_S * 2)
        for name, at in plane.unheard.items():
            assert heard_at[name] + TTL_S <= at <= heard_at[name] + TTL_S + 0.2
        assert plane.unheard.keys() == plane.all_ended() == {"one", "two"}
        assert heartbeats.late_count == 0
        assert now() > started
        await heartbeats.close()

    in_virtual_time(until_lost())


def test_beats_that_hang_do_not_hold_up_those_of_others() -> None:
    plane, silent = Plane(0.5), Plane(10_000.0)

    async def five_minutes() -> None:
        heartbeats = Heartbeats(ttl_s=TTL_S)
        for number in range(20):
            heartbeats.watch_instance(f"silent{number}", silent.start(f"silent{number}"))
            heartbeats.watch_instance(f"well{number}", plane.start(f"well{number}"))
        await asyncio.sleep(300.0)
        assert plane.all_ended() == set()
        assert len(silent.unheard) == 20
        await heartbeats.close()

    in_virtual_time(five_minutes())


async def test_heartbeats_continue_after_a_fault_of_ours() -> None:
    class Broken:
        beats = 0

        async def send_heartbeat(self, timeout_s: float) -> None:
            self.beats += 1
            raise RuntimeError("a fault")

        def mark_ended(self, why: str) -> None: ...

    broken = Broken()
    heartbeats = Heartbeats(ttl_s=6.0)
    heartbeats.watch_instance("broken", broken)
    await until(lambda: broken.beats >= 3, 10.0)
    await heartbeats.close()
    beats = broken.beats
    await asyncio.sleep(0.2)
    assert broken.beats == beats


class ScheduleMachine(RuleBasedStateMachine):
    """Instances come, go, are heard of and are not, in any order and at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.schedule = HeartbeatSchedule(ttl_s=TTL_S, rng=random.Random(0))
        # By instance: when the last confirmed beat was sent, and when its answer came.
        self.heard: dict[str, tuple[float, float]] = {}
        self.due_at: dict[str, float] = {}
        self.in_flight: dict[str, float] = {}
        self.count = 0

    def act(self) -> None:
        for name in self.schedule.pop_lost(self.now):
            assert self.now >= self.heard[name][1] + TTL_S
            self.drop(name)
        begun = self.schedule.begin_due_beats(self.now)
        order = [self.heard[name][0] for name in begun]
        assert order == sorted(order), "earliest deadline first"
        for name in begun:
            assert name not in self.in_flight and self.due_at[name] <= self.now
            self.in_flight[name] = self.now

    def drop(self, name: str) -> None:
        del self.heard[name], self.due_at[name]
        self.in_flight.pop(name, None)

    @rule(count=st.integers(1, 40))
    def create(self, count: int) -> None:
        for _ in range(count):
            self.count += 1
            name = f"i{self.count}"
            self.heard[name] = (self.now, self.now)
            self.due_at[name] = self.now + TTL_S / 3
            self.schedule.watch_instance(name, self.now)
        self.act()

    @precondition(lambda self: self.heard)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.heard)))
        self.schedule.forget_instance(name)
        self.drop(name)
        self.act()

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), well=st.booleans(), after=st.none() | st.floats(0, 100))
    def answer(self, data: st.DataObject, well: bool, after: float | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.in_flight)))
        sent_at = self.in_flight.pop(name)
        if well:
            self.schedule.confirm_beat(name, self.now)
            self.heard[name] = (sent_at, self.now)
            self.due_at[name] = sent_at + TTL_S / 3
        else:
            self.schedule.record_failure(name, self.now, after)
            self.due_at[name] = self.now
        self.act()

    @rule(seconds=st.floats(0, 25))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.act()

    @invariant()
    def bounds_hold(self) -> None:
        assert len(self.schedule) == len(self.heard)
        assert self.schedule.in_flight == len(self.in_flight) <= 1024
        # No instance is forgotten: a next check is scheduled, or a request is in flight.
        assert not self.heard or self.schedule.next_event_at() is not None

    @invariant()
    def work_is_conserved(self) -> None:
        ready = [n for n, at in self.due_at.items() if at + 8.0 <= self.now]
        idle = [n for n in ready if n not in self.in_flight]
        full = self.schedule.in_flight >= 16
        paused = all(self.now < self.heard[n][0] + TTL_S for n in idle)
        assert not idle or full or paused


TestSchedule = ScheduleMachine.TestCase
TestSchedule.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)


class Beating(ScriptedBackend):
    """A backend with late heartbeats."""

    late = 0
    why = "throttled: 429"

    @property
    def lateness(self) -> HeartbeatLateness:
        return HeartbeatLateness(self.late, 9, self.why)


def looked(alarms: GatewayAlarms, late: int, now: float) -> list[str]:
    """Return the causes of the raised alarms."""
    backend = Beating()
    backend.late, backend.why = late, "timeout: no answer\nin 20 s"
    alarms.update_alarms({"fleet": backend}, {}, now)
    return [alarm.cause for alarm in alarms.raised]


def test_late_beats_raise_one_alarm_which_ends_once_none_was_late_for_a_while() -> None:
    alarms = GatewayAlarms()
    assert looked(alarms, 0, 0.0) == []
    (cause,) = looked(alarms, 3, 1.0)
    assert cause.startswith("3 of 9 instances") and cause.endswith(": timeout: no answer in 20 s")
    assert looked(alarms, 5, 2.0) == [cause], "its words do not change, or it were another"
    assert looked(alarms, 0, 31.9) == [cause]
    assert looked(alarms, 1, 32.0) == [cause]
    assert looked(alarms, 0, 61.0) == [cause]
    assert looked(alarms, 0, 62.0) == []


async def test_a_gateway_reports_late_beats_at_once() -> None:
    backend, alarms, changed = Beating(), GatewayAlarms(), asyncio.Event()
    async with running(backend) as gateway:
        keeping = asyncio.create_task(update_alarms_forever(gateway, alarms, changed.set))
        await asyncio.sleep(0.05)
        assert not changed.is_set()
        backend.late = 2
        async with asyncio.timeout(5):
            await changed.wait()
        keeping.cancel()
    (alarm,) = alarms.raised
    assert (alarm.rule, alarm.scope, alarm.severity) == ("late_heartbeats", "embedded", "error")
    assert "2 of 9 instances" in alarm.cause and "429" in alarm.cause
