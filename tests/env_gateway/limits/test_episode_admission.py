"""Admission of episodes in batches: limits, fairness, and no caller that waits for ever."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flotilla_env_gateway.limits.episode_admission import (
    Admission,
    OverLimitError,
    QueueFullError,
    Ticket,
)
from tests.support.examples import examples

WAIT_S = 5.0


def admission(places: int, *, waiting: int = 10_000, **by_env: int) -> Admission:
    return Admission(
        max_episodes=places, max_by_env=by_env, max_waiting=waiting, batch_wait_s=WAIT_S
    )


def request_batch(at: Admission, run: str, batch: str, size: int, env: str = "e") -> list[Ticket]:
    """Request places for all members of a batch."""
    return [at.request_place(run, batch, env, size, 0.0)[0] for _ in range(size)]


def is_admitted_together(at: Admission, env: str, opening: int) -> bool:
    """A batch of more than half of the limit is admitted member by member."""
    return 2 * opening <= at.limit_of(env)


def are_in(tickets: Sequence[Ticket]) -> bool:
    states = {ticket.admitted for ticket in tickets}
    assert len(states) == 1, "a batch is admitted together"
    return states.pop()


class AdmissionMachine(RuleBasedStateMachine):
    """Opens, gives up and releases in any order; the limits hold, and no ticket is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.admission = admission(6, waiting=10, a=4)
        # By ticket: its batch, once that is complete.
        self.tickets: dict[Ticket, str] = {}
        self.filling: dict[tuple[str, str, str, int], tuple[float, list[Ticket]]] = {}
        self.complete: dict[str, list[Ticket]] = {}

    @rule(
        run=st.sampled_from("rs"),
        batch=st.sampled_from("xyz"),
        env=st.sampled_from("ab"),
        opening=st.integers(1, 7),
    )
    def request(self, run: str, batch: str, env: str, opening: int) -> None:
        try:
            ticket, admitted = self.admission.request_place(run, batch, env, opening, self.now)
        except OverLimitError:
            assert opening > self.admission.limit_of(env)
        except QueueFullError:
            assert self.admission.waiting >= 10
        else:
            self.tickets[ticket] = env
            if not is_admitted_together(self.admission, env, opening):
                opening = 1
            key = (run, batch, env, opening)
            _, members = self.filling.setdefault(key, (self.now, []))
            members.append(ticket)
            if len(members) == opening:
                self.finish(key)
            self.check_admitted(admitted)

    def finish(self, key: tuple[str, str, str, int]) -> None:
        _, members = self.filling.pop(key)
        self.complete[f"{key}{len(self.complete)}"] = members

    def check_admitted(self, admitted: list[Ticket]) -> None:
        assert all(ticket.admitted for ticket in admitted)
        for members in self.complete.values():
            left = [ticket for ticket in members if ticket in self.tickets]
            assert len({ticket.admitted for ticket in left}) <= 1, "a batch is admitted together"

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(list(self.tickets)))
        del self.tickets[ticket]
        for key, (_, members) in list(self.filling.items()):
            if ticket in members:
                members.remove(ticket)
                if not members:
                    del self.filling[key]
        self.check_admitted(self.admission.release_place(ticket))
        self.check_admitted(self.admission.release_place(ticket))

    @rule(passed=st.floats(0, 6))
    def time(self, passed: float) -> None:
        self.now += passed
        for key, (since, _) in list(self.filling.items()):
            if self.now >= since + WAIT_S:
                self.finish(key)
        self.check_admitted(self.admission.expire_batches(self.now))

    @invariant()
    def limits_hold(self) -> None:
        admitted = [ticket for ticket in self.tickets if ticket.admitted]
        assert len(admitted) <= self.admission.held_places <= 6
        assert sum(self.tickets[ticket] == "a" for ticket in admitted) <= 4
        assert self.admission.usage_of("a")[0] <= 4
        assert self.admission.waiting == len(self.tickets) - len(admitted)

    @invariant()
    def absent_members_hold_nothing(self) -> None:
        waiting = [ticket for ticket in self.tickets if not ticket.admitted]
        members = {ticket for _, members in self.filling.values() for ticket in members}
        if all(ticket in members for ticket in waiting):
            admitted = sum(ticket.admitted for ticket in self.tickets)
            assert self.admission.held_places == admitted

    @invariant()
    def work_is_conserved(self) -> None:
        """Places are idle only while some batch reserves them, and never for its last one."""
        waiting = [ticket for ticket in self.tickets if not ticket.admitted]
        idle = self.admission.held_places - (len(self.tickets) - len(waiting))
        assert idle == 0 or idle < len(waiting)
        first: dict[tuple[str, str], Ticket] = {}
        for members in self.complete.values():
            for ticket in (one for one in members if one in waiting):
                first.setdefault((ticket.batch.run_id, ticket.batch.env_key), ticket)
        free = 6 - self.admission.held_places
        free_a = 4 - self.admission.usage_of("a")[0]
        for (_, env_key), ticket in first.items():
            room = min(free, free_a) if env_key == "a" else free
            assert room < ticket.batch.missing

    def teardown(self) -> None:
        self.admission.expire_batches(self.now + 100.0)
        while self.tickets:
            admitted = [ticket for ticket in self.tickets if ticket.admitted]
            assert admitted, "a ticket waits while everything is free"
            for ticket in admitted:
                del self.tickets[ticket]
                self.admission.release_place(ticket)
            self.admission.expire_batches(self.now + 100.0)
        assert (self.admission.held_places, self.admission.waiting) == (0, 0)


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_a_batch_is_admitted_when_it_is_complete_and_its_places_are_free() -> None:
    at = admission(4)
    first, *_ = request_batch(at, "run", "one", 2) + request_batch(at, "run", "other", 1)
    batch = request_batch(at, "run", "two", 2)
    assert not are_in(batch)
    assert at.release_place(first) == batch
    assert (are_in(batch), at.held_places) == (True, 4)


def test_a_batch_that_needs_the_whole_limit_leaves_no_place_idle() -> None:
    """Episodes of 40 s end one after the other: a place that is free is in use, by a member of the
    batch or by another run's, and those of the other run go in in turn with it."""
    at = admission(8)
    running = request_batch(at, "busy", "first", 4) + request_batch(at, "busy", "second", 4)
    large = request_batch(at, "large", "batch", 8)
    small = [request_batch(at, "small", f"s{i}", 1)[0] for i in range(8)]
    for released, ticket in enumerate(running, start=1):
        at.release_place(ticket)
        assert sum(one.admitted for one in [*large, *small]) == released
    assert sum(one.admitted for one in large) == sum(one.admitted for one in small) == 4


def test_absent_members_hold_no_places() -> None:
    """One member of a batch used to hold places for all for as long as the batch might come."""
    at = admission(512)
    alone, _ = at.request_place("run", "batch", "e", 256, 0.0)
    assert at.held_places == 0
    assert are_in(request_batch(at, "other", "x", 512))
    for ticket in request_batch(at, "third", "y", 1):
        assert not ticket.admitted
    assert at.expire_batches(WAIT_S - 0.1) == [] and not alone.admitted


def test_a_batch_continues_without_absent_members() -> None:
    at = admission(16)
    requests = [at.request_place("run", "batch", "e", 8, 0.0)[0] for _ in range(3)]
    assert at.expire_batches(WAIT_S) == requests
    assert (are_in(requests), at.held_places) == (True, 3)


def test_a_batch_that_waits_for_places_does_not_keep_others_waiting() -> None:
    at = admission(8)
    busy = request_batch(at, "busy", "first", 8)
    large = request_batch(at, "busy", "large", 4)
    small = [request_batch(at, "other", f"s{i}", 1)[0] for i in range(3)]
    # `other` has every place until it has its share, or every second one.
    for released, ticket in enumerate(busy[:4], start=1):
        at.release_place(ticket)
        assert sum(ticket.admitted for ticket in small) >= released // 2
    assert not are_in(large)


def test_a_batch_that_waits_for_its_environment_leaves_the_others_to_all() -> None:
    at = admission(16, full=4)
    request_batch(at, "run", "a", 4, env="full")
    waiting = request_batch(at, "run", "b", 2, env="full")
    assert are_in(request_batch(at, "run", "c", 4, env="other"))
    assert not are_in(waiting)


@pytest.mark.parametrize("size", [2, 8, 16])
@pytest.mark.parametrize("of_run", ["small", "large"])
def test_small_batches_do_not_starve_a_large_one(size: int, of_run: str) -> None:
    """A batch of another run gets in before twice its size has come free; one of the same run, not
    before those that came first."""
    rng = random.Random(size)
    at = admission(32)
    running = [request_batch(at, "small", f"s{i}", 1)[0] for i in range(32)]
    queued = [request_batch(at, "small", f"q{i}", 1)[0] for i in range(40)]
    large = request_batch(at, of_run, "large", size)
    released = 0
    while not are_in(large):
        ticket = running.pop(rng.randrange(len(running)))
        running += [one for one in at.release_place(ticket) if one not in large]
        queued.append(request_batch(at, "small", f"more{released}", 1)[0])
        released += 1
        assert at.held_places <= 32 and released < 200
    allowed = 2 * size if of_run == "large" else 40 + 2 * size
    assert released <= allowed + 1


@given(
    sizes=st.lists(st.integers(1, 8), min_size=4, max_size=30),
    envs=st.lists(st.sampled_from("ab"), min_size=30, max_size=30),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=examples(25), deadline=None)
def test_every_waiting_batch_gets_in_however_others_come_and_go(
    sizes: list[int], envs: list[str], seed: int
) -> None:
    """Three runs replace every batch that ends; each gets in before the others have been in so
    often that it must have been passed over for ever."""
    rng = random.Random(seed)
    at = admission(20, a=16)
    waiting: dict[int, list[Ticket]] = {}
    since: dict[int, int] = {}
    running: list[Ticket] = []
    requests = 0

    def request_next() -> None:
        nonlocal requests
        index = requests % len(sizes)
        tickets = request_batch(at, f"run{index % 3}", f"b{requests}", sizes[index], envs[index])
        waiting[requests], since[requests] = tickets, releases
        requests += 1

    releases = 0
    for _ in range(len(sizes)):
        request_next()
    while releases < 300:
        for number in [number for number, tickets in waiting.items() if are_in(tickets)]:
            running += waiting.pop(number)
            request_next()
        assert running, "everybody waits for each other"
        assert at.held_places <= 20 and at.usage_of("a")[0] <= 16
        releases += 1
        at.release_place(running.pop(rng.randrange(len(running))))
        oldest = min(since[number] for number in waiting)
        assert releases - oldest <= 3 * sum(sizes) + 100


def test_runs_get_equal_shares_of_places_whatever_the_size_of_their_batches() -> None:
    rng = random.Random(0)
    at = admission(60)
    sizes = {"one": 1, "four": 4, "eight": 8}
    waiting: dict[str, list[list[Ticket]]] = {run: [] for run in sizes}
    running: list[tuple[str, Ticket]] = []
    had: Counter[str] = Counter()
    number = 0
    for step in range(4000):
        for run, size in sizes.items():
            while len(waiting[run]) < 20:
                number += 1
                waiting[run].append(request_batch(at, run, f"b{number}", size))
            for batch in [batch for batch in waiting[run] if are_in(batch)]:
                waiting[run].remove(batch)
                running += [(run, ticket) for ticket in batch]
        if step > 1000:
            had.update(run for run, _ in running)
        _, ticket = running.pop(rng.randrange(len(running)))
        at.release_place(ticket)
    shares = [had[run] / had.total() for run in sizes]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.06)
