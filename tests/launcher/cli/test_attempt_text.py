"""An attempt that saw pictures, as text."""

from typing import Any

from flotilla_launcher.cli.attempt_text import draw_attempt

WORDS = ("open", "<start>", "<pad>", "<end>", "click")
SHA = "ab" * 32


def attempt(**media: Any) -> dict[str, Any]:
    """An attempt whose prompt shows a picture of 300 tokens."""
    shown = {"bytes": 61234, "sha256": SHA, "picture": "image/png", "token_offset": 2, **media}
    prompt = {"author": "prompt", "token_ids": [0, 1, *[2] * 300, 3], "media": [shown]}
    turn = {"policy": "1:4", "temperature": 1.0, "mean_logprob": -0.5}
    return {
        **{"reward": 1.0, "step": 1, "eval_id": "", "group_id": "g", "attempt_index": 0, "try": 0},
        **{"task_key": "t", "task_prompt": "Open it.", "partial_reward": None, "failure": None},
        "judged": False,
        "named_rewards": {},
        **{"stop_reason": "done", "no_grade": "", "detail": "", "dropped": "", "worker_id": "w"},
        **{"tokens_kept": True, "turns": [], "checks_passed": [], "checks_failed": []},
        "suspicion": "",
        "counts": {
            **{"turns": 1, "tool_calls": 0, "tool_errors": {}, "parse_errors": 0, "repeats": 0},
            **{"open_s": 0.1, "grade_s": 0.1},
        },
        "sequences": [[prompt, {"author": "policy", "token_ids": [4], **turn}]],
        "messages": [
            [
                {"role": "user", "end": 303, "content": [0, 303], "media": [SHA]},
                {"role": "assistant", "end": 304, "content": [303, 304]},
            ]
        ],
    }


def test_a_picture_is_a_line_and_its_token_is_written_once() -> None:
    text = draw_attempt(attempt(), lambda ids: " ".join(WORDS[each] for each in ids)).plain
    assert "  user         open <start> <pad> <end>\n" in text
    assert "  picture      image/png, 61,234 bytes, SHA-256 abababababab\n" in text
    assert text.count("<pad>") == 1


def test_a_judged_attempt_neither_passes_nor_fails() -> None:
    judged = attempt() | {"judged": True, "reward": 0.7}
    text = draw_attempt(judged, str).plain
    assert text.startswith("JUDGED")
    assert "reward 0.7, judged" in text
    assert draw_attempt(judged | {"reward": None}, str).plain.startswith("TO BE JUDGED")
    failed = judged | {"reward": None, "failure": "no_grade", "no_grade": "judge_failed"}
    assert draw_attempt(failed, str).plain.startswith("NO REWARD")
