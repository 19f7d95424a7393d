"""Addresses at which WeightService listens and that engines get, by the learner's own."""

from dataclasses import replace
from pathlib import Path

import pytest

from flotilla_learner.weights.publication_child import server_config_of
from tests.support.learner import make_config, make_runtime
from tests.support.outsiders import run


@pytest.mark.parametrize(
    ("listen", "advertise", "weights", "expected"),
    [
        ("127.0.0.1:7001", None, {}, ("127.0.0.1:0", None)),
        ("10.0.0.4:0", None, {}, ("10.0.0.4:0", None)),
        ("0.0.0.0:50051", "203.0.113.7", {"port": 50052}, ("0.0.0.0:50052", "203.0.113.7")),
        ("0.0.0.0:50051", "203.0.113.7:10022", {"port": 50052}, ("0.0.0.0:50052", "203.0.113.7")),
        (
            "0.0.0.0:50051",
            "203.0.113.7:10022",
            {"port": 50052, "advertise": "203.0.113.7:10023"},
            ("0.0.0.0:50052", "203.0.113.7:10023"),
        ),
        ("[::]:50051", "[2001:db8::1]:9", {"port": 50052}, ("[::]:50052", "2001:db8::1")),
    ],
)
def test_weights_are_served_beside_the_learner(
    tmp_path: Path,
    listen: str,
    advertise: str | None,
    weights: dict[str, object],
    expected: tuple[str, str | None],
) -> None:
    runtime = make_runtime(tmp_path, make_config(tmp_path, weights=weights), listen=listen)
    runtime = replace(runtime, advertise=advertise, tls=run().tls_for("learner"))
    start = server_config_of(runtime)
    assert (start.listen, start.advertise) == expected
    assert start.delta
    assert start.tls == run().tls_for("learner").to_text()
    assert run().tls_for("learner").key.decode() not in repr(start)


def test_a_server_sends_no_differences_where_they_are_off(tmp_path: Path) -> None:
    config = make_config(tmp_path, weights={"delta": "off"})
    assert not server_config_of(make_runtime(tmp_path, config, listen="127.0.0.1:0")).delta
