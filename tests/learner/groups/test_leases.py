"""The lease book: slots, shares, tries, deadlines, and thousands of random events."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import count

import pytest

from flotilla_common.domain.attempts import AttemptKey, Purpose
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.trajectory import Trajectory
from flotilla_learner.group_types import EndedGroup, GroupSpec, Lease, SubmittedTry
from flotilla_learner.groups.batcher import Batcher, WithoutSignal
from flotilla_learner.groups.graded_attempts import AttemptRecord, ReadyGroup
from flotilla_learner.groups.leases import LeaseBook
from flotilla_learner.groups.open_groups import LeaseLostError, LeaseRules
from flotilla_learner.sampling.tasks import Task

RULES = LeaseRules(
    train_slots=4, eval_slots=2, ttl_s=10.0, group_deadline_s=60.0, max_tries=2, min_group=2
)
TASK = Task("task", "env", "{}")


def make_book(rules: LeaseRules = RULES, *, size: int = 3) -> LeaseBook:
    numbers = count()

    def fresh() -> GroupSpec:
        number = next(numbers)
        return GroupSpec(f"g{number}", number, TASK, Purpose.TRAIN, size, 1.0)

    book = LeaseBook(rules, fresh)
    book.policy = PolicyId(1, 0)
    return book


def join(book: LeaseBook, worker_id: str = "a", *, version: int = 0, devices: int = 1) -> None:
    book.greet_worker(worker_id, "first", 0.0)
    book.workers.attach_worker(worker_id, devices)
    book.workers.mark_serving(worker_id, PolicyId(1, version))


def lease_one(book: LeaseBook, lease_id: str, worker_id: str = "a", *, now: float = 0.0) -> Lease:
    lease = book.lease_next(worker_id, 64, lease_id, now)
    assert lease is not None
    return lease


def grade(book: LeaseBook, lease: Lease, index: int, *, attempt_try: int = 0) -> EndedGroup | None:
    key = AttemptKey(lease.group.group_id, index, attempt_try)
    return book.record_attempt(key, graded=True, oldest_version=0)


def test_no_more_groups_are_leased_than_there_are_slots() -> None:
    book = make_book()
    join(book)
    for number in range(4):
        lease_one(book, str(number))
    assert book.lease_next("a", 64, "more", 0.0) is None
    assert book.free_slots == 0


def test_a_complete_group_holds_its_slot_until_it_is_freed() -> None:
    book = make_book()
    join(book)
    leases = [lease_one(book, str(number)) for number in range(4)]
    ended = [grade(book, leases[0], index) for index in range(3)]
    assert ended[-1] is not None
    assert ended[-1].reason == ""
    assert book.lease_next("a", 64, "more", 0.0) is None
    book.free_groups([leases[0].group.group_id])
    assert lease_one(book, "more").group.group_id == "g4"


def test_a_worker_below_the_newest_policy_gets_nothing() -> None:
    book = make_book()
    join(book)
    book.policy = PolicyId(1, 1)
    assert book.lease_next("a", 64, "x", 0.0) is None
    book.workers.mark_serving("a", PolicyId(1, 1))
    assert lease_one(book, "x").min_policy == PolicyId(1, 1)


def test_shares_follow_device_counts_and_are_at_least_one() -> None:
    book = make_book()
    join(book, "big", devices=6)
    join(book, "small", devices=1)
    taken = [book.lease_next("big", 64, f"b{n}", 0.0) for n in range(5)]
    assert sum(1 for lease in taken if lease) == 4
    book.end_leases_of("big")
    lease_one(book, "s0", "small")
    assert book.lease_next("small", 64, "s1", 0.0) is None


def test_evaluation_goes_first_and_only_to_the_exact_policy() -> None:
    book = make_book()
    join(book, "old", version=0)
    join(book, "new", version=1)
    book.policy = PolicyId(1, 0)
    exact = PolicyId(1, 0)
    book.add_groups([GroupSpec("e0", -1, TASK, Purpose.EVAL, 1, 0.0, 0, "eval", exact)])
    assert lease_one(book, "n", "new").group.purpose is Purpose.TRAIN
    assert lease_one(book, "o", "old").group.purpose is Purpose.EVAL


def test_a_lost_lease_is_leased_again_for_the_missing_attempts_alone() -> None:
    book = make_book()
    join(book)
    first = lease_one(book, "first")
    grade(book, first, 1)
    assert book.expire_leases(9.0) == []
    book.expire_leases(10.0)
    assert book.renew_leases("a", ["first"], 10.0) == ["first"]
    again = lease_one(book, "again", now=11.0)
    assert again.group.group_id == first.group.group_id
    assert again.attempts == ((0, 0), (2, 0))
    assert book.held_slots() == 1


def test_renewing_keeps_a_lease_but_not_past_the_groups_deadline() -> None:
    book = make_book()
    join(book)
    lease = lease_one(book, "x")
    for now in range(0, 60, 5):
        assert book.renew_leases("a", ["x"], float(now)) == []
    ended = book.expire_leases(60.0)
    assert [e.reason for e in ended] == ["too_few_graded"]
    with pytest.raises(LeaseLostError):
        book.check_attempt(SubmittedTry("x", "a", AttemptKey(lease.group.group_id, 0, 0)), 60.0)
    assert book.held_slots() == 0


def test_a_group_past_its_deadline_is_used_when_enough_of_it_is_graded() -> None:
    book = make_book()
    join(book)
    lease = lease_one(book, "x")
    grade(book, lease, 0)
    grade(book, lease, 2)
    (ended,) = book.expire_leases(60.0)
    assert ended.reason == ""
    assert [key.attempt_index for key in ended.graded] == [0, 2]


def test_an_attempt_that_failed_every_try_ends_without_counting() -> None:
    book = make_book(size=2)
    join(book)
    lease = lease_one(book, "x")
    grade(book, lease, 0)
    ended = None
    for number in range(2):
        key = AttemptKey(lease.group.group_id, 1, number)
        ended = book.record_attempt(key, graded=False, oldest_version=None)
    assert ended is not None
    assert ended.reason == "too_few_graded"


def test_a_new_incarnation_ends_its_predecessors_leases() -> None:
    book = make_book()
    join(book)
    lease_one(book, "x")
    book.greet_worker("a", "second", 1.0)
    assert book.find_lease("x") is None
    assert book.workers["a"].leases == set()


def test_a_worker_smaller_than_a_group_takes_one_when_it_has_nothing_else() -> None:
    book = make_book()
    join(book)
    assert book.lease_next("a", 1, "x", 0.0) is not None
    assert book.lease_next("a", 1, "y", 0.0) is None
    assert book.lease_next("a", 0, "z", 0.0) is None


def test_an_attempt_that_has_ended_takes_no_other_try() -> None:
    book = make_book()
    join(book)
    lease = lease_one(book, "x")
    grade(book, lease, 0)
    with pytest.raises(ValueError, match="has ended"):
        book.check_attempt(SubmittedTry("x", "a", AttemptKey(lease.group.group_id, 0, 1)), 0.0)


class _Run:
    """Random workers, clocks and outcomes around a book and a batcher."""

    def __init__(self, seed: int, *, max_staleness: int, without_signal: WithoutSignal) -> None:
        self.chooser = random.Random(seed)
        self.groups_per_step = 2
        slots = (max_staleness + 1) * self.groups_per_step
        self.rules = LeaseRules(slots, 2, 10.0, 60.0, 2, 2)
        self.book = make_book(self.rules, size=3)
        self.batcher = Batcher(
            groups_per_step=2,
            max_staleness=max_staleness,
            without_signal=without_signal,
            max_refill=2,
        )
        self.max_staleness = max_staleness
        self.version, self.now, self.ids = 0, 0.0, count()
        self.leases: list[Lease] = []
        self.trained: Counter[str] = Counter()
        self.oldest: dict[str, int] = {}
        self.replaced = 0

    def event(self) -> None:
        self.now += self.chooser.random()
        events = [self.join, self.lease, self.lease, self.submit, self.submit, self.submit]
        events += [self.renew, self.release, self.expire, self.train]
        self.chooser.choice(events)()

    def join(self) -> None:
        worker = self.chooser.choice("abc")
        self.book.greet_worker(worker, self.chooser.choice("1111111112"), self.now)
        self.book.workers.attach_worker(worker, self.chooser.randint(1, 4))
        self.book.workers.mark_serving(worker, PolicyId(1, self.version))

    def lease(self) -> None:
        worker = self.chooser.choice("abc")
        if self.book.workers.find_worker(worker):
            free = self.chooser.choice([1, 3, 64])
            if lease := self.book.lease_next(worker, free, str(next(self.ids)), self.now):
                self.leases.append(lease)

    def submit(self) -> None:
        if not self.leases:
            return
        lease = self.chooser.choice(self.leases[-8:])
        index, number = self.chooser.choice(lease.attempts)
        key = AttemptKey(lease.group.group_id, index, number + (self.chooser.random() < 0.2))
        try:
            self.book.check_attempt(SubmittedTry(lease.lease_id, lease.worker_id, key), self.now)
        except (LeaseLostError, ValueError):
            return
        graded = self.chooser.random() < 0.8
        version = max(0, lease.min_policy.version - (self.chooser.random() < 0.2))
        ended = self.book.record_attempt(
            key, graded=graded, oldest_version=version if graded else None
        )
        self.settle([ended] if ended else [])

    def settle(self, ended: list[EndedGroup]) -> None:
        for group in ended:
            if not group.reason:
                self.oldest[group.group.group_id] = group.oldest_version
                rewards = [self.chooser.random() < 0.5 for _ in group.graded]
                if self.batcher.add_group(ready(group, rewards)):
                    self.book.free_groups([group.group.group_id])

    def renew(self) -> None:
        for lease in self.leases[-3:]:
            self.book.renew_leases(lease.worker_id, [lease.lease_id], self.now)

    def release(self) -> None:
        if self.leases:
            lease = self.chooser.choice(self.leases)
            self.book.release_leases(lease.worker_id, [lease.lease_id])

    def expire(self) -> None:
        self.settle(self.book.expire_leases(self.now))

    def train(self) -> None:
        self.drop_stale()
        batch = self.batcher.take_batch(self.version)
        if batch is None:
            return
        self.replaced += batch.replaced
        assert batch.replaced <= 2 * self.groups_per_step
        for group in batch.groups:
            group_id = group.spec.group_id
            self.trained[group_id] += 1
            assert self.version - self.oldest[group_id] <= self.max_staleness
        self.version += 1
        self.book.policy = PolicyId(1, self.version)
        self.book.free_groups(group.spec.group_id for group in batch.all_groups)
        self.drop_stale()

    def drop_stale(self) -> None:
        bound = self.batcher.oldest_allowed(self.version)
        self.settle(self.book.drop_stale(bound))
        self.book.free_groups(
            group.spec.group_id for group in self.batcher.drop_stale(self.version)
        )


def ready(ended: EndedGroup, rewards: Sequence[float]) -> ReadyGroup:
    records = tuple(
        AttemptRecord(Trajectory(key, "", (), b"", reward=reward), 1, 1, ended.oldest_version, 0)
        for key, reward in zip(ended.graded, rewards, strict=True)
    )
    return ReadyGroup(ended.group, records, ())


@pytest.mark.parametrize("without_signal", ["mask", "drop", "replace"])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_slots_never_leak_and_nothing_stale_is_trained(
    seed: int, max_staleness: int, without_signal: WithoutSignal
) -> None:
    run = _Run(seed, max_staleness=max_staleness, without_signal=without_signal)
    for _ in range(3000):
        run.event()
        assert run.book.held_slots() <= run.rules.train_slots
        assert run.book.leased_groups <= run.book.held_slots()
    assert run.version > 3
    assert max(run.trained.values()) == 1
    assert (run.replaced > 2) == (without_signal == "replace")
    # Everybody leaves: the deadline gives every slot back that is not waiting for a step.
    run.now += 1000.0
    run.expire()
    assert run.book.leased_groups == 0
    assert run.book.held_slots() == len(run.batcher)


SCREEN = Task("screen", "env", '{"task_modality": "computer_use"}')


def test_tasks_that_need_images_wait_for_a_worker_that_can_and_do_not_hold_up_others() -> None:
    numbers = count()

    def fresh() -> GroupSpec:
        number = next(numbers)
        task = TASK if number % 2 else SCREEN
        return GroupSpec(f"g{number}", number, task, Purpose.TRAIN, 3, 1.0)

    book = LeaseBook(RULES, fresh)
    book.policy = PolicyId(1, 0)
    join(book, "text")
    assert lease_one(book, "1", "text").group.group_id == "g1"
    assert book.missing_capabilities(0.0) == {"images"}
    join(book, "eyes")
    book.workers["eyes"].capabilities = frozenset({"images"})
    assert book.missing_capabilities(0.0) == frozenset()
    assert lease_one(book, "2", "eyes").group.group_id == "g0"


def test_no_more_tasks_wait_for_a_capability_than_there_are_slots() -> None:
    made = count()
    book = LeaseBook(RULES, lambda: GroupSpec(f"g{next(made)}", 0, SCREEN, Purpose.TRAIN, 3, 1.0))
    book.policy = PolicyId(1, 0)
    join(book)
    for number in range(50):
        assert book.lease_next("a", 64, str(number), 0.0) is None
    assert next(made) == RULES.train_slots


def test_lost_groups_that_need_images_are_not_leased_to_the_blind() -> None:
    book = LeaseBook(RULES, lambda: GroupSpec("g0", 0, SCREEN, Purpose.TRAIN, 3, 1.0))
    book.policy = PolicyId(1, 0)
    join(book, "eyes")
    book.workers["eyes"].capabilities = frozenset({"images"})
    lease_one(book, "1", "eyes")
    book.end_leases_of("eyes")
    join(book, "text")
    assert book.lease_next("text", 64, "2", 0.0) is None
    assert lease_one(book, "3", "eyes").group.group_id == "g0"


def test_without_slots_not_even_lost_groups_are_leased() -> None:
    book = make_book()
    join(book)
    lease_one(book, "x")
    book.end_leases_of("a")
    book.train_slots = 0
    assert book.lease_next("a", 64, "y", 0.0) is None
