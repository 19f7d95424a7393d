"""The answer to a scrape."""

import urllib.request

from flotilla_common.telemetry import metrics


def _scrape(address: str) -> list[str]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        return answer.read().decode().splitlines()


def test_a_scrape_gets_what_each_part_has_shown_last() -> None:
    address = metrics.start_http("127.0.0.1:0")
    for open_episodes in (1.0, 2.0):
        values = {("shop", "ready"): open_episodes}
        metrics.show("here", [metrics.gauge("t_open", "Open", ("env", "state"), values)])
    metrics.show("there", [metrics.counter("t_done", "Done", (), {(): 7.0})])
    metrics.seconds_histogram("t_seconds", "Seconds", "outcome")("ok")(0.2)
    lines = _scrape(address)
    assert 't_open{env="shop",state="ready"} 2.0' in lines
    assert "t_done_total 7.0" in lines
    assert 't_seconds_bucket{le="0.5",outcome="ok"} 1.0' in lines
    metrics.show("here", [])
    assert not any(line.startswith("t_open{") for line in _scrape(address))
