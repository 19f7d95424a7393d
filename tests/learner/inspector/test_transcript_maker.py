"""The maker of transcripts, with its real child processes."""

from contextlib import closing
from pathlib import Path
from time import monotonic, sleep

from services.learner.inspector.queries.transcript_attempts import TranscriptSubject
from services.learner.inspector.transcript_maker import TranscriptMaker


def test_a_transcript_that_fails_shows_why_and_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "run-1").mkdir()
    subject = TranscriptSubject(1)
    with closing(TranscriptMaker()) as maker:
        first = maker.want(tmp_path / "run-1", subject, "a")
        assert maker.want(tmp_path / "run-1", subject, "a") is first
        end = monotonic() + 120
        while first.is_waiting and monotonic() < end:
            sleep(0.05)
        assert "journal" in first.problem
        assert maker.made(tmp_path / "run-1") == {}
        assert maker.want(tmp_path / "run-1", subject, "a") is first
        assert maker.want(tmp_path / "run-1", subject, "a") is not first


def test_an_inspector_that_ends_leaves_no_transcript_and_waits_for_none(tmp_path: Path) -> None:
    maker = TranscriptMaker()
    wanted = [maker.want(tmp_path, TranscriptSubject(step), "a") for step in range(3)]
    assert wanted[0].path.parent.is_dir()
    maker.close()
    assert not wanted[0].path.parent.exists()
    assert all(each.listed is None for each in wanted)
