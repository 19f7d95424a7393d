"""The alarm about a service that answers nobody."""

from flotilla_rollout.api.service_alarm import list_alarms
from flotilla_rollout.work.service_use import ServiceUse


def test_a_wait_of_a_minute_is_an_alarm_until_the_service_answers() -> None:
    use = ServiceUse()
    use.note_state("no credit left\x1b[2J", 10.0)
    assert not list_alarms(use, 69.0)
    [alarm] = list_alarms(use, 70.0)
    assert (alarm.rule, alarm.scope, alarm.severity) == ("service_away", "all", "warning")
    assert "no credit left" in alarm.cause and "\x1b" not in alarm.cause
    assert "policy.tinker.patience_s" in alarm.fix
    # The same alarm, whatever is waited for later.
    use.note_state("Connection error.", 80.0)
    assert list_alarms(use, 700.0) == [alarm]
    use.note_state("", 701.0)
    assert not list_alarms(use, 702.0)


def test_the_next_wait_says_its_own_reason() -> None:
    use = ServiceUse()
    use.note_state("first", 0.0)
    use.note_state("", 1.0)
    use.note_state("second", 2.0)
    [alarm] = list_alarms(use, 100.0)
    assert "second" in alarm.cause


def test_an_engine_of_our_own_has_no_such_alarm() -> None:
    assert not list_alarms(None, 1000.0)
