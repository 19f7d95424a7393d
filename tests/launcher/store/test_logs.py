"""Lines of a replica's log, and where its tail begins."""

from pathlib import Path

from flotilla_launcher.store import logs


def test_the_tail_of_a_log_is_found_across_blocks_and_without_a_last_newline(
    tmp_path: Path,
) -> None:
    log = tmp_path / "rollout-0.log"
    for ending in ("", "\n"):
        log.write_text("\n".join(f"{i} {'x' * 300}" for i in range(1000)) + ending)
        position = logs.find_tail_position(log, 400)
        lines = logs.read_lines(log, position, limit=10**6)
        assert [line.text.split()[0] for line in lines] == [str(i) for i in range(600, 1000)]
    assert logs.find_tail_position(log, 5000) == 0
    assert logs.find_tail_position(log, 0) == log.stat().st_size


def test_an_endless_line_comes_in_pieces(tmp_path: Path) -> None:
    log = tmp_path / "rollout-0.log"
    log.write_text("x" * (2 * logs.LINE_BYTES + 10))
    assert [len(line.text) for line in logs.read_lines(log, 0, final=False)] == [
        logs.LINE_BYTES
    ] * 2
    assert len(logs.read_lines(log, 0, final=True)) == 3
