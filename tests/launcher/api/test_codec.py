"""Conversion of messages to the domain, with hostile texts."""

from flotilla.launcher.v1 import alarm_pb2 as alarm_pb
from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from flotilla_launcher.api import codec


def test_a_learners_text_of_an_alarm_cannot_steer_a_terminal() -> None:
    words = "\x1b]0;t\x07why" + "x" * 9_999
    alarm = alarm_pb.Alarm(rule="r\x1b[2J", scope="a\nb", cause=words, fix="\x9b")
    request = registry_pb.HeartbeatRequest(alarms=[alarm])
    (reported,) = codec.progress_from_pb(request).alarms
    assert (reported.rule, reported.scope, reported.severity, reported.fix) == (
        "r",
        "a b",
        "warning",
        "",
    )
    assert reported.cause.startswith("whyxxx") and len(reported.cause) == 1_000
