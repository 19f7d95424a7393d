"""Alarms of services other than the learner take the same way as the learner's."""

from pathlib import Path

from flotilla.launcher.v1 import alarm_pb2 as alarm_pb
from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.cli.run_view import RunBoard, alarm_name
from flotilla_launcher.run_progress import Alarm, RaisedAlarms
from tests.support.launcher import serving, spec

LATE = Alarm("late_heartbeats", "fleet", "error", 0, "3 of 9 were not heard of", "wait")
ENTROPY = Alarm("entropy_collapse", step=4)
ERROR = alarm_pb.ALARM_SEVERITY_ERROR
GATEWAY, OTHER, LEARNER = ("env_gateway", 0), ("env_gateway", 1), ("learner", 0)


def names(raised: RaisedAlarms) -> list[tuple[str, int]]:
    return [(alarm.rule, alarm.step) for alarm in raised.all_alarms]


def test_each_replica_raises_and_clears_its_own_at_the_step_of_the_run() -> None:
    raised = RaisedAlarms(())
    raised.replace_alarms(GATEWAY, [LATE], 7)
    raised.replace_alarms(LEARNER, [ENTROPY], 7)
    raised.replace_alarms(GATEWAY, [LATE], 9)
    assert names(raised) == [("entropy_collapse", 4), ("late_heartbeats", 7)]
    raised.replace_alarms(LEARNER, [], 9)
    assert names(raised) == [("late_heartbeats", 7)]
    raised.replace_alarms(GATEWAY, [], 9)
    assert names(raised) == []


def test_what_two_gateways_see_is_one_alarm_until_both_see_it_no_more() -> None:
    raised = RaisedAlarms(())
    raised.replace_alarms(GATEWAY, [LATE], 7)
    raised.replace_alarms(OTHER, [LATE], 7)
    assert names(raised) == [("late_heartbeats", 7)]
    raised.replace_alarms(GATEWAY, [], 8)
    assert names(raised) == [("late_heartbeats", 7)]
    raised.drop_alarms(OTHER)
    assert names(raised) == []


def test_the_next_launcher_knows_whose_alarms_were_reported() -> None:
    before = RaisedAlarms(())
    before.replace_alarms(GATEWAY, [LATE], 7)
    before.replace_alarms(LEARNER, [ENTROPY], 7)
    raised = RaisedAlarms(before.all_alarms)
    raised.replace_alarms(LEARNER, [ENTROPY], 8)
    assert raised.all_alarms == before.all_alarms, (
        "nothing is cleared because the gateway has not spoken yet"
    )
    raised.drop_alarms(LEARNER)
    assert names(raised)[0] == ("entropy_collapse", 4), "a learner's last words stay"


async def test_a_gateways_alarm_is_on_board_and_in_status_until_it_is_cleared(
    tmp_path: Path,
) -> None:
    late, board = tmp_path / "late", RunBoard()
    async with serving(tmp_path) as served:
        wish = spec(env_gateway={"alarmed_by": str(late)}, learner={"steps": 10**6})
        run_id = await served.start(wish)
        late.touch()
        run = await served.until(run_id, lambda run: bool(run.alarms))
        assert [alarm_name(alarm) for alarm in run.alarms] == ["late_heartbeats of fleet"]
        late.unlink()
        await served.until(run_id, lambda run: not run.alarms)
        lines: list[str] = []
        async for event in served.runs.WatchRun(pb.WatchRunRequest(run_id=run_id)):
            lines.append(board.take_event(event))
            if event.WhichOneof("what") == "raised":
                assert board.alarms["late_heartbeats of fleet"].severity == ERROR
            if event.WhichOneof("what") == "cleared":
                break
    assert any(line.startswith("alarm: late_heartbeats of fleet, since step") for line in lines)
    assert not board.alarms
