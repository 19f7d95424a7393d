"""The webhook against real HTTP servers, good and bad ones."""

import json
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from structlog.testing import capture_logs

from services.common.rpc.errors import ConfigError
from services.common.spec.config import parse_config
from services.common.text.redaction import redact
from services.learner.alarms.adapters.webhook_sink import WebhookAlarmSink, webhook_url
from services.learner.alarms.types import Alarm, AlarmVerdict
from services.learner.config.alarms import AlarmsConfig
from tests.support.free_ports import free_port
from tests.support.waiting import wait_until

Answer = Callable[[int], int]


def alarm(number: int = 0) -> Alarm:
    verdict = AlarmVerdict("signal_ratio", "shop", True, f"cause {number}", "fix it", 0.1, 0.25)
    return Alarm(verdict, raised=True, step=24, since_step=24)


@contextmanager
def server(answer: Answer) -> Generator[tuple[str, list[str]]]:
    """Answers its n-th request with the status `answer(n)`; collects the texts it was sent."""
    texts: list[str] = []

    class WebhookHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            texts.append(json.loads(body)["text"])
            self.send_response(answer(len(texts)))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Tests are quiet."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), WebhookHandler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/services/T000", texts
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def test_an_alarm_is_one_text_with_the_run_the_cause_and_the_fix() -> None:
    with server(lambda number: 200) as (url, texts):
        hook = WebhookAlarmSink(url, "run-7")
        hook.send_alarm(alarm())
        hook.close()
    assert texts == ["[run-7] alarm in step 24: signal_ratio of shop: cause 0. fix it"]


def test_what_is_answered_with_500_is_sent_again() -> None:
    with server(lambda number: 500 if number < 3 else 200) as (url, texts):
        hook = WebhookAlarmSink(url, "run", first_pause_s=0.01)
        hook.send_alarm(alarm())
        wait_until(lambda: len(texts) == 3)
        hook.close()
    assert len(set(texts)) == 1
    assert hook.dropped == 0


def test_a_server_that_keeps_failing_costs_the_message_and_is_logged_once() -> None:
    with server(lambda number: 500) as (url, texts), capture_logs() as lines:
        hook = WebhookAlarmSink(url, "run", first_pause_s=0.01)
        for number in range(3):
            hook.send_alarm(alarm(number))
        wait_until(lambda: hook.dropped == 3)
        hook.close()
    assert len(texts) == 15
    reported = [line for line in lines if line["event"].startswith("the webhook accepts no")]
    assert [line["error"] for line in reported] == ["answered HTTP 500"]


def test_what_is_refused_is_not_sent_again() -> None:
    with server(lambda number: 404) as (url, texts):
        hook = WebhookAlarmSink(url, "run", first_pause_s=0.01)
        hook.send_alarm(alarm())
        wait_until(lambda: hook.dropped == 1)
        hook.close()
    assert len(texts) == 1


def test_a_server_that_hangs_holds_up_neither_the_run_nor_its_end() -> None:
    release = threading.Event()

    def hang(number: int) -> int:
        release.wait(10)
        return 200

    with server(hang) as (url, _):
        hook = WebhookAlarmSink(url, "run", capacity=4, timeout_s=5.0, close_s=0.2)
        started = time.monotonic()
        for number in range(100):
            hook.send_alarm(alarm(number))
        assert time.monotonic() - started < 4
        assert hook.dropped >= 95
        hook.close()
        assert time.monotonic() - started < 4
        release.set()


def test_a_server_that_is_away_is_tried_again() -> None:
    port = free_port()
    hook = WebhookAlarmSink(f"http://127.0.0.1:{port}/", "run", first_pause_s=0.01)
    hook.send_alarm(alarm())
    wait_until(lambda: hook.dropped == 1)
    hook.close()


def test_the_url_is_a_secret() -> None:
    url = webhook_url("https://hooks.example/services/T0/B0/abcdef")
    assert redact(f"POST {url} failed") == "POST *** failed"


def test_the_url_may_stand_in_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_HOOK", "https://hooks.example/x")
    assert webhook_url("$MY_HOOK") == "https://hooks.example/x"
    assert "MY_HOOK" not in os.environ, "what a tracker starts inherits the rest"
    with pytest.raises(ConfigError, match="MY_HOOK holds no"):
        webhook_url("$MY_HOOK")


def test_what_is_no_url_is_refused_without_being_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(AlarmsConfig, {"webhook": "htps://hooks.example/T0/secret"}, where="test")
    assert "webhook" in str(caught.value)
    assert "secret" not in str(caught.value)
