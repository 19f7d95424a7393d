"""Alarms of environments whose tools or version changed."""

from flotilla_env_gateway.api.alarms import GatewayAlarms

KEY = ("tools_changed", "shop")


def test_a_change_is_an_alarm_for_ten_minutes_from_the_newest_one() -> None:
    alarms = GatewayAlarms()
    assert alarms.update_alarms({}, {KEY: ("added sell", 5.0)}, 5.0)
    assert not alarms.update_alarms({}, {KEY: ("added sell", 5.0)}, 604.9), "the same alarm"
    assert alarms.update_alarms({}, {KEY: ("removed buy", 604.0)}, 605.1)
    assert [(a.rule, a.scope, a.cause) for a in alarms.raised] == [(*KEY, "removed buy")]
    assert alarms.update_alarms({}, {KEY: ("removed buy", 604.0)}, 1204.0)
    assert alarms.raised == []


def test_what_changed_is_one_short_line() -> None:
    alarms = GatewayAlarms()
    alarms.update_alarms(
        {}, {("version_changed", "shop"): ("added a\nb\ud800" + "c" * 999, 0.0)}, 0.0
    )
    (alarm,) = alarms.raised
    assert alarm.cause.startswith("added a b c") and len(alarm.cause.encode()) <= 300
