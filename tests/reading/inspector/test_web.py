"""Access to the inspector's pages, and the start and end of its process."""

import base64
import hashlib
import json
import signal
import socket
import subprocess
import zipfile
from collections.abc import Generator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from flotilla_common.process.python_command import python_command
from flotilla_reading.analysis.documents import STYLE
from flotilla_reading.inspector.__main__ import main
from tests.reading.inspector.made_runs import RUN, MadeRun
from tests.reading.inspector.served_pages import ServedPages, serving
from tests.support.process_forge import fork_of
from tests.support.repository import ROOT


@pytest.fixture
def connection(served: ServedPages) -> Generator[HTTPConnection]:
    found = HTTPConnection(urlsplit(served.url).netloc, timeout=30)
    yield found
    found.close()


def send(
    connection: HTTPConnection, path: str, *, method: str = "GET", **headers: str
) -> HTTPResponse:
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    answer.read()
    return answer


def cookie_of(served: ServedPages, connection: HTTPConnection) -> str:
    token = parse_qs(urlsplit(served.url).query)["token"][0]
    answer = send(connection, f"/curves?metric=x&token={token}")
    assert answer.status == 303
    assert answer.headers["location"] == "/curves?metric=x"
    given = answer.headers["set-cookie"]
    assert "HttpOnly" in given and "SameSite=strict" in given
    return given.split(";")[0]


def test_a_page_needs_the_token_and_then_the_cookie(
    served: ServedPages, connection: HTTPConnection
) -> None:
    assert send(connection, "/").status == 401
    assert send(connection, "/?token=wrong").status == 401
    assert send(connection, "/", Cookie="flotilla_inspector=wrong").status == 401
    cookie = cookie_of(served, connection)
    answer = send(connection, "/", Cookie=cookie)
    assert answer.status == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert send(connection, f"/runs/{RUN}/live.html", Cookie=cookie).status == 200


def test_an_analysis_is_linked_and_served_with_its_own_style(
    served: ServedPages, connection: HTTPConnection
) -> None:
    cookie, path = cookie_of(served, connection), f"/runs/{RUN}/analysis"
    connection.request("GET", f"/runs/{RUN}", headers={"Cookie": cookie})
    assert f'href="{path}"' in connection.getresponse().read().decode()
    answer = send(connection, path, Cookie=cookie)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    # No other style in a page is let through.
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    assert f"style-src 'self' 'sha256-{digest}';" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1:1", "127.0.0.1"])
def test_a_name_that_leads_here_from_elsewhere_gets_nothing(
    served: ServedPages, connection: HTTPConnection, host: str
) -> None:
    assert send(connection, "/", Host=host, Cookie=cookie_of(served, connection)).status == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_get_is_served(
    served: ServedPages, connection: HTTPConnection, method: str
) -> None:
    assert send(connection, "/", method=method, Cookie=cookie_of(served, connection)).status == 405


@pytest.mark.parametrize(
    "path",
    [
        *("/runs/..", "/runs/%2e%2e%2fx", "/runs/nothing", "/runs/%00", "/nothing"),
        *("/runs/nothing/analysis", "/runs/%2e%2e%2fx/analysis"),
        *(f"/runs/{RUN}/steps/99", f"/runs/{RUN}/steps/x", f"/runs/{RUN}/evals/none"),
        *(f"/runs/{RUN}/steps/99999999999999999999", f"/runs/{RUN}/steps/3?page=x"),
        *(f"/runs/{RUN}/attempts/none/0/0", f"/runs/{RUN}/attempts/g000001r0/77/0"),
        f"/runs/{RUN}/attempts/g000001r0/0/0/tokens.bin?sequence=3",
        f"/runs/{RUN}/attempts/g000001r0/0/0/raw/0/message-99",
        f"/runs/{RUN}/attempts/g000001r0/0/0/raw/0/..%2f..%2fspec.json",
        f"/runs/{RUN}/attempts/g000001r0/0/0/media/0/0",
        *("/compare", "/compare?run=..&task=x", f"/runs/{RUN}/attempts?min=x"),
        *(f"/runs/{RUN}/attempts?max=nan", f"/runs/{RUN}/attempts?outcome=x"),
        *(f"/runs/{RUN}/attempts?before=x", "/runs/none/attempts", "/runs/none/task?key=x"),
        "/static/../templates/base.html",
        "/static/%2e%2e/templates/base.html",
    ],
)
def test_what_is_not_there_is_not_found(
    served: ServedPages, connection: HTTPConnection, path: str
) -> None:
    assert send(connection, path, Cookie=cookie_of(served, connection)).status == 404


def test_an_interrupt_ends_it_cleanly(runs: Path) -> None:
    with serving(runs, "--run", RUN) as served:
        assert urlsplit(served.url).path == f"/runs/{RUN}"
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(20) == 0


def test_a_token_file_and_a_socket_file_let_another_process_serve_it_until_it_terminates_it(
    made_run: MadeRun, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("from-a-file\n")
    path = tmp_path / "socket"
    arguments = ("--token-file", str(tmp_path / "token"), "--unix", str(path))
    with serving(made_run.folder.parent, *arguments) as served:
        assert served.url.endswith("?token=from-a-file")
        assert path.stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            head = f"GET /runs/{RUN} HTTP/1.0\r\nAuthorization: Bearer from-a-file\r\n\r\n"
            client.sendall(head.encode())
            assert client.recv(12) == b"HTTP/1.1 200"
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0


def test_an_open_page_holds_its_group_and_the_end_of_standard_input_releases_it(
    made_run: MadeRun,
) -> None:
    with serving(made_run.folder.parent) as served:
        connection = HTTPConnection(urlsplit(served.url).netloc, timeout=30)
        cookie = cookie_of(served, connection)
        path = f"/runs/{RUN}/attempts/g000001r0/0/0/hold"
        assert send(connection, path, Cookie=cookie).status == 204
        connection.close()
        (hold,) = (made_run.folder / "holds").glob(f"inspector-{fork_of(served.process.pid)}.json")
        assert json.loads(hold.read_text())["groups"] == ["g000001r0"]
        assert served.process.poll() is None
    assert served.process.returncode == 0
    assert not hold.exists()


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = python_command("-m", "flotilla_reading.inspector", *arguments)
    environ = {"PYTHONPATH": f"{ROOT}:{ROOT / 'gen'}", "PATH": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)


def test_a_run_that_is_not_there_is_named(runs: Path) -> None:
    answer = run_program("--runs", str(runs), "--run", "none")
    assert answer.returncode == 1
    assert "There is no run 'none'" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--listen", "0.0.0.0:80"), "'0.0.0.0:80' is not a loopback address"),
        (("--bundle", "x.zip"), "--bundle needs --run"),
        (("--step", "1"), "--step requires --bundle"),
    ],
)
def test_wrong_arguments_are_named(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], hint: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err


def test_a_token_file_that_is_not_there_is_an_error(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--runs", str(runs), "--token-file", "nowhere"]) == 1
    assert "No such file" in capsys.readouterr().err


def test_a_bundle_holds_the_steps_that_were_chosen(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.zip"
    answer = run_program(
        *("--runs", str(runs), "--run", RUN, "--bundle", str(path), "--step", "1", "--step", "3")
    )
    summary = json.loads(answer.stdout)
    assert summary == {"bundle": str(path), "steps": [1, 3], "attempts": 18}
    with zipfile.ZipFile(path) as file:
        names = set(file.namelist())
    assert {"index.html", "curves.html", f"{RUN}/step-1.html", f"{RUN}/step-3.html"} <= names
    assert f"{RUN}/step-2.html" not in names
    assert sum(name.endswith(".tokens.html") for name in names) == 18
