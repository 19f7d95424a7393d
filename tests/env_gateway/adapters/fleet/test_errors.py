"""Meanings of Fleet's error bodies."""

import json
import time
from typing import Any

import pytest

from flotilla_env_gateway.adapters.fleet.errors import classify_error
from flotilla_env_gateway.adapters.fleet.wire import find_duplicate_id
from flotilla_env_gateway.adapters.http_client import HttpError

BAD_GATEWAY = "<html><h1>502 Bad Gateway</h1></html>"
LIMIT = {
    "error_type": "instance_limit_exceeded",
    "message": "You have 5 running instances out of a maximum of 5.",
    "running_instances": 5,
    "instance_limit": 5,
}
PLACEMENT = {"error": "seed_placement_failed", "message": "no host for the seed"}


def error(status: int, detail: Any, retry_after_s: float | None = None) -> HttpError:
    body = detail if isinstance(detail, str) else json.dumps({"detail": detail})
    return HttpError(status, body, retry_after_s)


@pytest.mark.parametrize(
    ("status", "detail"),
    [
        (400, {"message": "Environment 'nope' not found"}),
        (400, json.dumps({"detail": "version v9 not found"})),
        (401, {"message": "Invalid or missing API key"}),
        (403, {"message": "you do not have permission to use this environment"}),
        (422, "env_key: field required"),
        (500, {"message": "the seed is corrupt", "retryable": False}),
    ],
)
def test_what_cannot_succeed_is_never_retried(status: int, detail: Any) -> None:
    assert classify_error(error(status, detail)).invalid


@pytest.mark.parametrize(
    ("status", "message", "is_bad"),
    [
        (400, "Environment 'nope' not found", True),
        (400, "Version 'v9' not found for 'shop': use one of v1", True),
        (400, "data id 'products' not found", True),
        (400, "Region nowhere not supported. Please use ['us-west-1']", False),
        (401, "Invalid or missing API key", False),
        (403, "team not found", False),
        (404, "Environment not found", False),
    ],
)
def test_a_refusal_is_the_tasks_only_if_it_is_of_what_the_task_names(
    status: int, message: str, *, is_bad: bool
) -> None:
    assert (classify_error(error(status, {"message": message})).kind == "bad_task") is is_bad


@pytest.mark.parametrize(
    ("status", "detail"),
    [
        (500, "oops"),
        (502, BAD_GATEWAY),
        (503, BAD_GATEWAY),
        (409, {"error": "conflict"}),
        (400, {**PLACEMENT, "retryable": True}),
        (400, PLACEMENT),
        (400, {"message": f"creation failed: {json.dumps({'e': {'retryable': True}})}"}),
        (422, json.dumps(json.dumps({"retryable": True}))),
        (400, '{"detail": "cut off \\"retryable\\": true, and then'),
    ],
)
def test_what_may_succeed_later_is_retried(status: int, detail: Any) -> None:
    judged = classify_error(error(status, detail))
    assert not judged.invalid and not judged.lost and judged.kind != "throttled"


@pytest.mark.parametrize(
    ("status", "detail"),
    [
        (429, "Rate limit exceeded"),
        (429, {"message": "Too many in-flight instance creations for this team"}),
        (403, LIMIT),
        (403, "the instance limit of your team is reached"),
        (500, "Too many in-flight instance creations"),
    ],
)
def test_a_full_account_is_waited_for(status: int, detail: Any) -> None:
    judged = classify_error(error(status, detail))
    assert (judged.kind, judged.invalid) == ("throttled", False)


def test_a_throttled_request_states_how_long_to_wait() -> None:
    assert classify_error(error(429, "slow down", 7.5)).retry_after_s == 7.5


def test_a_refused_key_names_the_setting_that_mends_it() -> None:
    judged = classify_error(error(401, {"message": "Invalid or missing API key"}))
    assert "Invalid or missing API key" in str(judged)
    assert "env_gateway.backends.fleet.api_key_env" in str(judged)


def test_an_error_is_reported_in_fleets_own_words() -> None:
    assert str(classify_error(error(403, LIMIT))) == f"throttled: HTTP 403: {LIMIT['message']}"
    assert "502 Bad Gateway" in str(classify_error(error(502, BAD_GATEWAY)))


def test_a_body_that_nests_without_end_is_judged_by_its_status() -> None:
    body = '{"detail": ' * 2000 + "1" + "}" * 2000
    assert classify_error(HttpError(502, body, None)).kind == "http"


def test_a_body_of_backslashes_is_searched_in_one_pass() -> None:
    began = time.process_time()
    classify_error(HttpError(500, "\\" * 4000, None))
    assert time.process_time() - began < 0.2


def test_a_body_nested_deeply_names_no_instance() -> None:
    assert find_duplicate_id("[" * 4000) is None
