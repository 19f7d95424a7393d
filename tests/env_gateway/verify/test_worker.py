"""Output of a verifier's process: kept at both ends."""

from flotilla_common.domain.attempts import NoGradeReason
from flotilla_env_gateway.grading.verdict import judge_execution
from flotilla_env_gateway.ports import Execution
from flotilla_env_gateway.verify.worker import Bounded


def test_the_end_of_what_a_verifier_prints_is_kept() -> None:
    """The checks, and the failure of a judge, are printed last."""
    printed = Bounded()
    for line in range(100_000):
        printed.write(f"line {line}\n")
    printed.write("JUDGE ERROR: no answer\n")
    kept = printed.getvalue()
    assert len(kept) < 2**18 + 100
    assert kept.startswith("line 0\n") and kept.endswith("line 99999\nJUDGE ERROR: no answer\n")
    grade = judge_execution(Execution(result=0, stdout=kept), attempts=1)
    assert grade.reason is NoGradeReason.JUDGE_ERROR


def test_one_long_text_is_kept_at_both_ends() -> None:
    printed = Bounded()
    assert printed.write("a" * 2**20 + "b" * 2**20) == 2**21
    kept = printed.getvalue()
    assert kept.startswith("aaa") and kept.endswith("bbb") and len(kept) < 2**18 + 100


def test_output_within_the_bound_is_kept_whole() -> None:
    printed = Bounded()
    printed.write("x" * 2**18)
    assert len(printed.getvalue()) == 2**18
