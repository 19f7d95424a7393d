"""TLS of a run: files that are read, and files that are refused before anything starts."""

import os
from pathlib import Path

import pytest

from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.network_addresses import advertised_address, check_dial, check_listen
from flotilla_common.rpc.tls import TLS_VARIABLE, Tls, from_text, read_tls
from tests.support import echo_service
from tests.support.outsiders import beyond_loopback, of_one_authority, other_run, run


def write(folder: Path, tls: Tls, **changes: bytes) -> Path:
    parts = {"ca.pem": tls.ca, "cert.pem": tls.certificate, "key.pem": tls.key}
    names = {"ca": "ca.pem", "certificate": "cert.pem", "key": "key.pem"}
    for name, content in changes.items():
        parts[names[name]] = content
    folder.mkdir(exist_ok=True)
    for name, content in parts.items():
        (folder / name).write_bytes(content)
    return folder


def test_the_variable_is_read_once_and_taken_out_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TLS_VARIABLE, run().tls_for("learner").to_text())
    assert read_tls(None) == run().tls_for("learner")
    assert TLS_VARIABLE not in os.environ
    assert read_tls(None) is None


def test_a_folder_counts_before_the_variable_which_goes_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(TLS_VARIABLE, run().tls_for("learner").to_text())
    assert read_tls(write(tmp_path, run().tls_for("rollout"))) == run().tls_for("rollout")
    assert TLS_VARIABLE not in os.environ


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path, run().tls_for("learner"))
    (tmp_path / "key.pem").unlink()
    with pytest.raises(ConfigError, match=r"cannot read key\.pem \(No such file"):
        read_tls(tmp_path)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"key": run().tls_for("rollout").key}, "the key does not match the certificate"),
        ({"ca": other_run().tls_for("learner").ca}, "the certificate is not of this CA"),
        ({"certificate": b"none"}, "not usable PEM"),
        ({"ca": b"\xff"}, "not usable PEM"),
    ],
)
def test_files_that_do_not_belong_together_are_refused_by_cause(
    tmp_path: Path, changes: dict[str, bytes], error: str
) -> None:
    with pytest.raises(ConfigError, match=error) as caught:
        read_tls(write(tmp_path, run().tls_for("learner"), **changes))
    assert str(tmp_path) in str(caught.value)
    assert "BEGIN" not in str(caught.value)


def test_certificates_out_of_their_time_are_refused_with_the_fix() -> None:
    _, expired, too_early = of_one_authority()
    with pytest.raises(ConfigError, match="expired: start a new run"):
        from_text(expired.to_text(), where="it")
    with pytest.raises(ConfigError, match="clock is behind"):
        from_text(too_early.to_text(), where="it")


@pytest.mark.parametrize("text", ["-", "e30=", "bnVsbA==", "eyJjYSI6MX0="])
def test_a_variable_that_holds_something_else_is_refused_without_repeating_it(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(TLS_VARIABLE, text)
    with pytest.raises(ConfigError, match="FLOTILLA_TLS is not what") as caught:
        read_tls(None)
    assert text not in str(caught.value).replace("FLOTILLA_TLS", "")


def test_any_address_will_do_with_tls_and_none_but_loopback_without() -> None:
    assert check_listen("0.0.0.0:7", encrypted=True) == ("0.0.0.0", 7)
    check_dial("learner.example.com:7", encrypted=True)
    check_dial("[::1]:7", encrypted=False)
    for address in ("192.0.2.9:7", "learner.example.com:7", "[2001:db8::1]:7"):
        with pytest.raises(ConfigError, match="--tls-dir"):
            check_dial(address, encrypted=False)


@pytest.mark.parametrize(
    ("host", "advertise", "address"),
    [
        ("127.0.0.1", None, "127.0.0.1:7"),
        ("::1", None, "[::1]:7"),
        ("0.0.0.0", "203.0.113.7", "203.0.113.7:7"),
        ("0.0.0.0", "host.example.com:10022", "host.example.com:10022"),
        ("::", "2001:db8::1", "[2001:db8::1]:7"),
        ("::", "[2001:db8::1]:9", "[2001:db8::1]:9"),
    ],
)
def test_others_receive_its_address(host: str, advertise: str | None, address: str) -> None:
    assert advertised_address(host, 7, advertise) == address


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_everywhere_is_no_address_to_advertise(host: str) -> None:
    with pytest.raises(ConfigError, match="--advertise HOST"):
        advertised_address(host, 7, None)


async def test_a_channel_beyond_loopback_is_refused_without_tls() -> None:
    with pytest.raises(ConfigError, match="refusing to call"):
        rpc.channel(f"{beyond_loopback()}:7", token=echo_service.TOKEN)
