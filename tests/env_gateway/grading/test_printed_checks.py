"""Checks read from output of any length and kind, for display only."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla_env_gateway.grading.printed_checks import prints_checks, read_printed_checks
from flotilla_env_gateway.grading.verdict import judge_execution
from flotilla_env_gateway.ports import CheckReport, Execution

OPENED = ">>> ERROR_ACCUMULATOR >>>\n"


@pytest.mark.parametrize(
    ("stdout", "passed", "failed"),
    [
        ("", (), ()),
        ("App mail: 1\nApp mail: 0\n", (), ("App mail",)),
        ("App google drive: 1 \r\nApp x: 2\n App y: 1\n", ("App google drive",), ()),
        (">>> SUCCESS_ACCUMULATOR >>>\n['a', 'b']\n<<< SUCCESS_ACCUMULATOR <<<", ("a", "b"), ()),
        (">>> ERROR_ACCUMULATOR >>>\nnot a list\n<<< ERROR_ACCUMULATOR <<<", (), ("not a list",)),
        (">>> ERROR_ACCUMULATOR >>>\n['a']\n<<< SUCCESS_ACCUMULATOR <<<", (), ()),
        (">>> SUCCESS_ACCUMULATOR >>>\n[]\n<<< SUCCESS_ACCUMULATOR <<<", (), ()),
        (
            "noise\n>>> SUCCESS_ACCUMULATOR >>>\n['a']\n<<< SUCCESS_ACCUMULATOR <<<\n"
            ">>> SUCCESS_ACCUMULATOR >>>\n['a', 'b']\n<<< SUCCESS_ACCUMULATOR <<<\n"
            f"{OPENED}>>> SUCCESS_ACCUMULATOR >>>\nc\n<<< ERROR_ACCUMULATOR <<<\n"
            f"{OPENED}never closed",
            ("a", "b"),
            (">>> SUCCESS_ACCUMULATOR >>>", "c"),
        ),
    ],
)
def test_the_last_print_of_each_check_is_shown(
    stdout: str, passed: tuple[str, ...], failed: tuple[str, ...]
) -> None:
    assert read_printed_checks(stdout) == CheckReport(passed, failed)


@given(st.text(), st.text())
def test_nothing_that_is_printed_breaks_the_reading_of_checks(body: str, rest: str) -> None:
    read_printed_checks(f"{OPENED}{body}\n<<< ERROR_ACCUMULATOR <<<{rest}")


@pytest.mark.parametrize(
    "printed",
    ["0x" + "f" * 20_000, "[" * 100, "{[]: 1}", "-" * 9000 + "1", "[" + "1," * 9000 + "]", r"'\d'"],
    ids=lambda text: text[:6],
)
def test_any_list_of_checks_is_read(printed: str) -> None:
    report = read_printed_checks(f"{OPENED}{printed}\n<<< ERROR_ACCUMULATOR <<<")
    assert not report.passed and report.failed
    assert all(len(check) <= 500 for check in report.failed)


@pytest.mark.parametrize(
    "stdout",
    [
        "\n" * 2**18,
        "\r\n \t" * 2**16,
        OPENED * 10_000,
        (OPENED + "x\n<<< SUCCESS_ACCUMULATOR <<<\n") * 5_000,
        "App x" + ": 0 " * 2**16,
        "\n" * 10_000_000,
    ],
    ids=["lines", "blanks", "openers", "crossed", "apps", "megabytes"],
)
def test_no_output_holds_the_gateway_up(stdout: str) -> None:
    started = time.thread_time()
    assert judge_execution(Execution(result=0, stdout=stdout), attempts=1).reward == 0.0
    assert time.thread_time() - started < 2.0


def test_of_a_longer_output_only_the_end_is_read() -> None:
    checks = f"{OPENED}['a']\n<<< ERROR_ACCUMULATOR <<<\n"
    assert read_printed_checks(checks).failed == ("a",)
    assert read_printed_checks(checks + "x" * 2**19).failed == ()
    assert read_printed_checks("x" * 2**19 + "\n" + checks).failed == ("a",)


@pytest.mark.parametrize("items", [["x"] * 4097, ["x" * 2**15]])
def test_a_list_that_takes_long_to_parse_is_read_by_its_lines(items: list[str]) -> None:
    report = read_printed_checks(f"{OPENED}{items}\n<<< ERROR_ACCUMULATOR <<<\n")
    assert report.failed == (str(items)[:500],)


@pytest.mark.parametrize(
    "stdout",
    [
        "App mail: 1\nApp drive: 0\n",
        ">>> SUCCESS_ACCUMULATOR >>>\n['a']\n<<< SUCCESS_ACCUMULATOR <<<\n"
        f"{OPENED}['b']\n<<< ERROR_ACCUMULATOR <<<",
    ],
)
@pytest.mark.parametrize("result", [0, 0.2, 1])
def test_printed_checks_are_shown_and_change_no_reward(stdout: str, result: float) -> None:
    grade = judge_execution(Execution(result=result, stdout=stdout), attempts=1)
    assert (grade.reward, grade.partial_reward) == (result, None)
    assert len(grade.checks_passed) == len(grade.checks_failed) == 1


@pytest.mark.parametrize(
    ("source", "prints"),
    [
        ('print(f"App {app}: {1 if ok else 0}")', True),
        ("print('App %s: %d' % (app, ok))", True),
        ('print("App " + app)', True),
        ('print(f">>> ERROR_ACCUMULATOR >>>\\n{errors}")', True),
        ('print("Apply", app)', False),
        ("return len(error_accumulator)", False),
    ],
)
def test_a_verifier_that_prints_checks_is_known_by_its_source(source: str, prints: bool) -> None:
    assert prints_checks(source) is prints
