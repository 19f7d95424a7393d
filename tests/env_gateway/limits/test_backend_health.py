"""Evidence from requests that end, and from those whose callers end them."""

from flotilla_env_gateway.limits.backend_health import HealthEvidence, RequestObserver, UsualTime
from flotilla_env_gateway.ports import BackendError


def usual(at_least_s: float = 1.0, at_most_s: float = 45.0) -> UsualTime:
    return UsualTime(at_least_s=at_least_s, at_most_s=at_most_s)


def error(kind: str = "http", **more: bool) -> BackendError:
    return BackendError(kind, "on demand", delivered=None, **more)


def test_the_usual_time_is_a_multiple_of_the_slowest_answer_within_its_bounds() -> None:
    times = usual()
    assert times.usual_seconds("look") == 45.0
    times.record_answer("look", 0.01)
    assert times.usual_seconds("look") == 1.0
    times.record_answer("look", 2.0)
    assert times.usual_seconds("look") == 8.0
    times.record_answer("look", 30.0)
    assert times.usual_seconds("look") == 45.0
    assert times.usual_seconds("other") == 45.0


def test_an_answer_that_was_slow_once_is_forgotten() -> None:
    times = usual()
    times.record_answer("look", 10.0)
    for _ in range(32):
        times.record_answer("look", 0.5)
    assert times.usual_seconds("look") == 2.0


def test_kinds_of_requests_are_remembered_up_to_a_number() -> None:
    times = usual()
    for kind in range(5000):
        times.record_answer(f"tool-{kind}", 0.1)
    assert times.usual_seconds("tool-4999") == 1.0
    assert times.usual_seconds("tool-0") == 45.0


def test_silence_counts_from_the_usual_time_on_for_any_end() -> None:
    observer = RequestObserver(usual())
    observer.observe_answer("look", "i1", 1.0)
    timeout = error("timeout")
    assert observer.observe_failure(timeout, "look", "i1", 3.9) is HealthEvidence.NOTHING
    assert observer.observe_failure(timeout, "look", "i1", 4.0) is HealthEvidence.SILENT
    assert observer.observe_silence("look", "i1", 3.9) is HealthEvidence.NOTHING
    assert observer.observe_silence("look", "i1", 4.0) is HealthEvidence.SILENT


def test_a_backend_that_has_answered_nothing_is_waited_for_longest() -> None:
    observer = RequestObserver(usual(at_most_s=45.0))
    assert observer.observe_silence("look", "i1", 44.0) is HealthEvidence.NOTHING
    assert observer.observe_silence("look", "i1", 45.0) is HealthEvidence.SILENT


def test_what_a_backend_answers_is_distinguished() -> None:
    observer = RequestObserver(usual())
    assert (
        observer.observe_failure(error("throttled"), "look", "i1", 0.1) is HealthEvidence.THROTTLED
    )
    assert observer.observe_failure(error(), "look", "i1", 0.1) is HealthEvidence.FAILED
    for flag in ("lost", "invalid", "bad_arguments"):
        assert (
            observer.observe_failure(
                BackendError("http", "", delivered=None, **{flag: True}), "look", "i1", 0.1
            )
            is HealthEvidence.NOTHING
        )


def test_an_instance_of_its_own_fails_once_until_it_answers_again() -> None:
    observer = RequestObserver(usual(), apart=True)
    assert observer.observe_failure(error(), "look", "i1", 0.1) is HealthEvidence.FAILED
    assert observer.observe_silence("look", "i1", 99.0) is HealthEvidence.NOTHING
    assert observer.observe_silence("look", "i2", 99.0) is HealthEvidence.FAILED
    assert observer.observe_answer("look", "i1", 0.1) is HealthEvidence.SUCCESS
    assert observer.observe_failure(error(), "look", "i1", 0.1) is HealthEvidence.FAILED


def test_a_refusal_for_too_much_at_once_concerns_all_instances() -> None:
    observer = RequestObserver(usual(), apart=True)
    for _ in range(3):
        assert (
            observer.observe_failure(error("throttled"), "look", "i1", 0.1)
            is HealthEvidence.THROTTLED
        )
