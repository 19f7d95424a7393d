"""Log lines: JSON, with their context, without secrets, bounded."""

import asyncio
import base64
import json
import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flotilla_common.telemetry import log
from flotilla_common.text.redaction import add_secret
from tests.support.examples import examples


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging belongs to the whole process: restore it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    before = structlog.get_config()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**before)
    structlog.contextvars.clear_contextvars()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_names_who_where_and_what(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("learner", "run-1", replica=2, pretty=False)
    log.bind(step=7)
    log.get_logger("flotilla_learner.run.train_loop").info("a step is done", loss=0.5)
    logging.getLogger("grpc").warning("foreign %d", 3)
    ours, foreign = lines(capsys)
    expected = {"service": "learner", "replica": 2, "run_id": "run-1", "step": 7}
    assert expected.items() <= ours.items()
    assert {"event": "a step is done", "loss": 0.5, "level": "info"}.items() <= ours.items()
    assert ours["logger"] == "flotilla_learner.run.train_loop"
    assert {**expected, "event": "foreign 3", "logger": "grpc"}.items() <= foreign.items()


async def test_what_a_task_binds_stays_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("rollout", "run-1", pretty=False)

    async def work(group: str) -> None:
        log.bind(group_id=group)
        await asyncio.sleep(0)
        log.get_logger("x").info("working")

    await asyncio.gather(work("a"), work("b"))
    log.get_logger("x").info("outside")
    assert [line.get("group_id") for line in lines(capsys)] == ["a", "b", None]


def test_secrets_never_appear(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_API_KEY", 'sk-"quoted"-CANARY')
    log.setup("env_gateway", "run-1", pretty=False)
    add_secret("token-CANARY-0123456")
    logger = log.get_logger("x")
    logger.info(
        'with sk-"quoted"-CANARY', header="Authorization: Bearer abc.CANARY", token="CANARY"
    )
    logger.info("nested", value={"list": ["token-CANARY-0123456", 'sk-"quoted"-CANARY']})
    logger.info("cut", value="x" * 4090 + "token-CANARY-0123456")
    logging.getLogger("lib").warning("logged %s", {"key": "token-CANARY-0123456"})
    logger.error("failed", exc_info=ValueError("token-CANARY-0123456"))
    output = capsys.readouterr().err
    assert "CANARY" not in output
    assert len([json.loads(line) for line in output.splitlines()]) == 5


def test_a_line_in_which_a_number_was_a_secret_is_written_without_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.setup("env_gateway", "run-1", pretty=False)
    add_secret("2718281828459")
    log.get_logger("x").info("a pin", value={"pin": 2718281828459, "n": 1})
    [line] = lines(capsys)
    assert line["event"] == "a pin" and line["value"] == '{"pin": ***, "n": 1}'


def test_secrets_do_not_appear_in_another_writing_or_in_a_url(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_API_KEY", "sk/CANARY+0123456789")
    monkeypatch.setenv("DATABASE_URL", "postgres://app:CANARY-of-a-base@db/runs")
    log.setup("env_gateway", "run-1", pretty=False)
    logger = log.get_logger("x")
    for before in ("", "a", "ab"):
        encoded = base64.b64encode(f"{before}:sk/CANARY+0123456789".encode()).decode()
        logger.info("refused", header=f"Basic {encoded}")
        assert encoded[8:-8] not in capsys.readouterr().err
    logger.info("requested", url=f"https://h/?key={quote('sk/CANARY+0123456789', safe='')}")
    logger.info("cannot connect with CANARY-of-a-base")
    # The password of an unknown URL.
    logger.info("cannot reach postgres://other:CANARY@db/runs")
    output = capsys.readouterr().err
    assert "CANARY" not in output
    assert "postgres://***@db/runs" in output


def test_secrets_do_not_appear_on_a_terminal_either(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("env_gateway", "run-1", pretty=True)
    log.get_logger("x").info("hello", header="Bearer CANARY-12345", n=3)
    output = capsys.readouterr().err
    assert "CANARY" not in output
    assert "hello" in output
    assert "n=3" in output


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=examples(50),
    deadline=None,
)
@given(
    st.dictionaries(
        st.text(min_size=1).filter(lambda key: key not in ("event", "exc_info", "stack_info")),
        st.text(max_size=20) | st.integers() | st.binary() | st.lists(st.floats()),
        max_size=5,
    )
)
def test_any_values_make_one_bounded_json_line(
    capsys: pytest.CaptureFixture[str], values: dict[str, Any]
) -> None:
    log.setup("rollout", "run-1", pretty=False)
    capsys.readouterr()
    keywords = {f"k{key}": value for key, value in values.items()}
    log.get_logger("x").info("any", many={str(i): "é" * 5000 for i in range(9)}, **keywords)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert json.loads(err)["event"] == "any"
    assert len(err.encode(errors="surrogatepass")) <= log.MAX_LINE_BYTES + 1


def test_a_line_of_many_long_values_is_cut_but_still_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.setup("rollout", "run-1", pretty=False)
    values: dict[str, Any] = {f"v{index}": "é" * 4000 for index in range(20)}
    log.get_logger("x").info("long", small=1, **values)
    (line,) = lines(capsys)
    assert line["event"] == "long"
    assert line["small"] == 1
    assert line["cut_bytes"] > log.MAX_LINE_BYTES
