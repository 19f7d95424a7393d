"""Fair queuing between runs, without a clock and without I/O."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flotilla_env_gateway.limits.fair_queue import FairQueue
from tests.support.examples import examples

RUNS = "abcd"
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 3.0, "d": 0.25}


def pop_next(queue: FairQueue[int]) -> tuple[str, int]:
    run_id = queue.shares.ordered_runs()[0]
    return run_id, queue.pop(run_id)


class QueueMachine(RuleBasedStateMachine):
    """Runs request, give up and end in any order; a free place never waits while a run does."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue(WEIGHTS.__getitem__)
        self.places = 3
        self.held: list[str] = []
        self.waiting: list[tuple[str, int]] = []
        self.requested = 0

    def let_in(self) -> None:
        while self.queue and len(self.held) < self.places:
            run_id, item = pop_next(self.queue)
            own = [entry for entry in self.waiting if entry[0] == run_id]
            assert (run_id, item) == own[0], "within a run it goes by order of arrival"
            least = min(self.held.count(run) / WEIGHTS[run] for run, _ in self.waiting)
            assert self.held.count(run_id) / WEIGHTS[run_id] == least
            self.waiting.remove((run_id, item))
            self.held.append(run_id)

    @rule(run=st.sampled_from(RUNS))
    def request(self, run: str) -> None:
        self.requested += 1
        self.waiting.append((run, self.requested))
        self.queue.push(run, self.requested)
        self.let_in()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(entry)
        self.queue.discard(*entry)
        self.queue.discard(*entry)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.held))
        self.held.remove(run)
        self.queue.give_back(run)
        self.let_in()

    @rule(places=st.integers(0, 6))
    def other_limit(self, places: int) -> None:
        self.places = places
        self.let_in()

    @invariant()
    def conserves_work(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert not self.waiting or len(self.held) >= self.places

    def teardown(self) -> None:
        self.places = 1
        self.let_in()
        while self.held:
            self.queue.give_back(self.held.pop())
            self.let_in()
        assert not self.waiting


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=2, max_size=5),
    places=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=examples(60), deadline=None)
def test_no_run_waits_for_more_than_its_weight_allows(
    weights: list[float], places: int, seed: int
) -> None:
    """All runs want more than they get, for as long as they please; one that holds nothing is
    passed over by another at most as often as that one's weight is greater, and once more."""
    rng = random.Random(seed)
    queue: FairQueue[int] = FairQueue(lambda run: weights[int(run)])
    held: list[str] = []
    passed: dict[str, Counter[str]] = {str(run): Counter() for run in range(len(weights))}
    for run in passed:
        for item in range(3):
            queue.push(run, item)
    for step in range(400):
        while len(held) < places:
            run, _ = pop_next(queue)
            queue.push(run, step + 3)
            held.append(run)
            passed[run].clear()
            for other in passed.keys() - set(held):
                passed[other][run] += 1
                allowed = weights[int(run)] / weights[int(other)] + 1
                assert passed[other][run] <= allowed
        ended = rng.choice(held)
        held.remove(ended)
        queue.give_back(ended)


@pytest.mark.parametrize("places", [1, 4, 8, 40])
def test_places_are_shared_by_weight_as_far_as_whole_places_can_be(places: int) -> None:
    rng = random.Random(places)
    weights = {"light": 1.0, "heavy": 3.0}
    queue: FairQueue[int] = FairQueue(weights.__getitem__)
    for run in weights:
        for item in range(50):
            queue.push(run, item)
    held: list[str] = []
    had: Counter[str] = Counter()
    for step in range(4000):
        while len(held) < places:
            run, _ = pop_next(queue)
            queue.push(run, step + 50)
            held.append(run)
        had.update(held)
        run = held.pop(rng.randrange(len(held)))
        queue.give_back(run)
    assert had["heavy"] == pytest.approx(3 * had["light"], rel=0.15)


def test_a_run_with_slow_work_does_not_gather_all_places() -> None:
    """Work of one run takes 50 times as long; each of the two has half of the places all the
    same."""
    queue: FairQueue[int] = FairQueue()
    held: list[tuple[int, str]] = []
    shares: Counter[str] = Counter()
    for item in range(1000):
        queue.push("slow", item)
        queue.push("fast", item)
    for now in range(1000):
        for entry in [entry for entry in held if entry[0] <= now]:
            held.remove(entry)
            queue.give_back(entry[1])
        while len(held) < 8:
            run, _ = pop_next(queue)
            queue.push(run, 1000 + now)
            held.append((now + (50 if run == "slow" else 1), run))
        if now > 100:
            shares.update(run for _, run in held)
    assert shares["slow"] == pytest.approx(shares["fast"], rel=0.1)


def test_a_run_that_was_alone_or_away_has_no_advantage_afterwards() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in range(100):
        queue.push("early", item)
        queue.give_back(pop_next(queue)[0])
    order: list[str] = []
    for item in range(4):
        queue.push("early", item)
        queue.push("late", item)
    for _ in range(8):
        run, _ = pop_next(queue)
        order.append(run)
        queue.give_back(run)
    assert Counter(order[:4]) == Counter(early=2, late=2)


def test_runs_that_have_gone_are_forgotten() -> None:
    queue: FairQueue[int] = FairQueue()
    for run in range(1000):
        queue.push("steady", run)
        queue.push(f"run-{run}", run)
        for _ in range(2):
            name, _ = pop_next(queue)
            queue.give_back(name)
    assert len(queue.shares) <= 4


def test_an_item_that_returns_is_the_first_of_its_run() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in range(3):
        queue.push("run", item)
    queue.push("run", 9, first=True)
    assert list(queue.waiting_of("run")) == [9, 0, 1, 2]
    assert queue.pop("run") == 9


def test_those_of_other_runs_that_come_first_are_counted_by_their_weight() -> None:
    queue: FairQueue[int] = FairQueue(WEIGHTS.__getitem__)
    for item in range(10):
        queue.push("c", item)
        queue.push("d", item)
    # The third of `a` comes after up to nine of `c`, and after none but perhaps one of `d`.
    assert queue.count_others("a", 2) == 9
    assert queue.count_others("c", 0) == 0
    assert queue.count_others("a", 100) == 20
