"""Whatever comes in, the answer is a precise refusal and the bookkeeping stays whole."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.config import parse_config
from services.common.domain.attempts import NoGradeReason
from services.common.errors import ConfigError
from services.env_gateway.config.gateway import EnvGatewayConfig
from services.env_gateway.grading.verdict import compute_partial_reward, judge_execution
from services.env_gateway.limits.backoff import Backoff
from services.env_gateway.ports import Execution
from services.env_gateway.tasks.task_format import TaskError, parse_task
from services.env_gateway.tools.call_retries import RetryBudget
from services.env_gateway.verify.verifier_source import VerifierError, find_verifier
from tests.support.fake_gateway import printed_checks, task_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
FIELDS = st.sampled_from(
    ["key", "task_key", "prompt", "env_id", "env_key", "version", "data_id", "env_variables"]
)


@given(st.text() | st.dictionaries(FIELDS, JSON).map(json.dumps))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_task_or_a_precise_error(text: str) -> None:
    try:
        task = parse_task(text)
    except TaskError as error:
        assert str(error)
    else:
        assert task.key and task.prompt and task.env_key


def test_both_vocabularies_mean_the_same_task() -> None:
    sdk = parse_task(
        task_json(version="v1", data_id="d", verifier_func="def v(env): ...", env_variables={})
    )
    other = parse_task(
        json.dumps(
            {
                "task_key": "task-1",
                "prompt": "Count to one.",
                "env_key": "fake",
                "env_version": "v1",
                "data_key": "d",
                "verifier_code": "def v(env): ...",
                "env_variables": "{}",
            }
        )
    )
    assert sdk == other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env_id": None}, r"env_id \(or env_key\) is missing"),
        ({"env_key": "other"}, "same field with two values"),
        ({"prompt": 5.5}, "prompt must be a string, not float"),
        ({"env_id": "../../etc"}, "must be letters"),
        ({"env_variables": [1]}, "env_variables must be an object"),
        ({"env_variables": "{"}, "env_variables is not JSON"),
        ({"prompt": "\ud800"}, "prompt holds a lone surrogate"),
    ],
)
def test_a_task_error_names_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        parse_task(task_json(**changes))


def test_variables_are_text_and_the_date_is_apart() -> None:
    task = parse_task(
        task_json(env_variables='{"CURRENT_DATE": "2026-02-14T10:00:00", "N": 3, "L": ["a"]}')
    )
    assert task.current_date == "2026-02-14"
    assert task.variables == {"N": "3", "L": '["a"]'}


@given(st.text())
@settings(deadline=None)
def test_any_source_is_a_verifier_or_an_error(source: str) -> None:
    try:
        assert find_verifier(source).name
    except VerifierError as error:
        assert str(error)


def test_the_verifier_is_found_by_its_shape() -> None:
    helper = "def helper(x):\n    return x\n"
    assert find_verifier(f"{helper}def check(env): ...").name == "check"
    decorated = f"{helper}@verifier(key='k')\ndef a(b, final_answer=None): ..."
    assert find_verifier(decorated).name == "a"
    assert find_verifier(decorated).takes_final_answer
    assert find_verifier(helper).name == "helper"
    with pytest.raises(VerifierError, match="async"):
        find_verifier("async def verify(env): ...")


@given(st.text())
def test_any_output_is_parsed(stdout: str) -> None:
    wrapped = f">>> ERROR_ACCUMULATOR >>>\n{stdout}\n<<< ERROR_ACCUMULATOR <<<"
    for text in (stdout, wrapped):
        passed, failed = printed_checks(text)
        partial = compute_partial_reward(passed, failed)
        assert partial is None or 0.0 <= partial <= 1.0


@given(JSON)
def test_a_reward_is_known_exactly_when_the_result_is_a_number_within_bounds(result: Any) -> None:
    grade = judge_execution(Execution(result=result), attempts=1)
    assert (grade.reward is None) == (grade.reason is not None)
    assert grade.reward is None or abs(grade.reward) <= 1e6
    if isinstance(result, str | list | dict) or result is None:
        assert grade.reward is None


@pytest.mark.parametrize(
    "result", [1e308, -1e308, 1.0000001e6, 10**400, -(2**63), float("nan"), float("-inf")]
)
def test_a_reward_that_would_overflow_a_mean_is_no_grade_and_says_so(result: float) -> None:
    grade = judge_execution(Execution(result=result), attempts=1)
    assert (grade.reward, grade.reason) == (None, NoGradeReason.EXECUTION_FAILED)
    assert "a reward is a number from -1e+06 to 1e+06, and 1 is a pass" in grade.detail
    for within in (1e6, -1e6, 0, True, 0.5):
        assert judge_execution(Execution(result=within), attempts=1).reward == within


@given(st.floats(0.01, 1.0), st.integers(0, 2**32), st.none() | st.floats(0, 100))
def test_waits_stay_within_their_bounds(base: float, seed: int, after: float | None) -> None:
    import random

    backoff = Backoff(base_s=base, cap_s=5.0, rng=random.Random(seed))
    for _ in range(20):
        wait = backoff.next_wait_s(after)
        assert wait >= base and wait >= (after or 0)
        assert wait <= max(5.0, after or 0)


def test_retries_are_a_share_of_first_attempts() -> None:
    budget = RetryBudget(ratio=0.1, cap=2.0)
    spent = 0
    for _ in range(100):
        budget.deposit()
        spent += budget.try_spend()
    assert spent <= 12


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"backend": "mcp"}, "backends.mcp is not set"),
        ({"lease_ttl": 3}, "lease_ttl"),
        ({"backends": {"mcp": {"url": "ftp://x"}}}, "http"),
        ({"backends": {"mcp": {}}}, "url and command"),
        ({"limits": {"max_calls": 0}}, "max_calls"),
    ],
)
def test_a_wrong_section_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(EnvGatewayConfig, section, where="spec [env_gateway]")
