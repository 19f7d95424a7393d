"""Members of a run, and their replacements."""

import pytest

from flotilla_launcher.store.roster import Member, ReplacedError, Roster


def test_a_roster_takes_no_replaced_member_back() -> None:
    roster = Roster()
    roster.register_member(Member("rollout", 0, "a", "x:1"))
    assert roster.record_heartbeat(("rollout", 0), "a", serving=True, now=1.0)
    version = roster.version
    assert roster.record_heartbeat(("rollout", 0), "a", serving=True, now=2.0)
    assert roster.version == version, "a heartbeat is no news"
    assert roster.silent_members(40.0, 30.0) == roster.serving_members("rollout")
    roster.register_member(Member("rollout", 0, "b", "x:2"))
    with pytest.raises(ReplacedError):
        roster.record_heartbeat(("rollout", 0), "a", serving=True, now=3.0)
    roster.forget_member(("rollout", 0))
    with pytest.raises(ReplacedError):
        roster.register_member(Member("rollout", 0, "b", "x:2"))
