import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_launcher.cli.command_runner import BAD_SPEC, FAILED, OK
from flotilla_launcher.cli.kept_services import KeptService
from flotilla_launcher.cli.tinker_serve import (
    TinkerServing,
    make_services,
    make_spec,
    read_or_make_key,
    serve_tinker,
    split_gpus,
)
from tests.support.health_children import health_children, make_health_child
from tests.support.waiting import wait_until

KEY = "tml-0123456789abcdef"


def _make_wish(folder: Path, **fields: Any) -> TinkerServing:
    given: dict[str, Any] = {
        "model": "tiny",
        "listen": "127.0.0.1:8700",
        "config": None,
        "folder": folder / "tinker",
        "settings": (),
        **fields,
    }
    return TinkerServing(**given)


def test_a_spec_is_made_for_this_machine(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 512}')

    spec = make_spec(_make_wish(tmp_path, model=str(model)))

    assert spec["policy"]["model"] == str(model)
    assert spec["policy"]["max_model_len"] == 512
    assert spec["rollout"]["engine"]["device"] == spec["learner"]["rank"]["device"]
    assert spec["tinker"] == {
        "listen": "127.0.0.1:8700",
        "keys": {"local": "$FLOTILLA_TINKER_KEY"},
    }


def test_settings_change_the_given_spec(tmp_path: Path) -> None:
    config = tmp_path / "given.json"
    given = {"name": "given", "policy": {"model": "x", "max_model_len": 64}}
    config.write_text(json.dumps({**given, "tinker": {"keys": {"a": "$A_KEY"}}}))
    settings = ("policy.max_model_len=128", "tinker.limits.samples=5")

    spec = make_spec(_make_wish(tmp_path, config=config, settings=settings))

    assert spec["policy"] == {"model": "tiny", "max_model_len": 128}
    assert spec["tinker"]["keys"] == {"a": "$A_KEY"}
    assert spec["tinker"]["limits"] == {"samples": 5}
    with pytest.raises(ConfigError, match=r"write --section\.key=value"):
        make_spec(_make_wish(tmp_path, settings=("nothing",)))


def test_a_folder_keeps_its_key_from_others(tmp_path: Path) -> None:
    key = read_or_make_key(tmp_path)

    assert key.startswith("tml-")
    assert read_or_make_key(tmp_path) == key
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_the_three_services_know_each_other_and_only_the_front_the_keys(tmp_path: Path) -> None:
    spec = make_spec(_make_wish(tmp_path))
    spec["tinker"]["keys"]["alice"] = "$ALICE_KEY"

    training, sampling, front = make_services(tmp_path, spec, KEY)

    assert json.loads((tmp_path / "spec.json").read_text()) == spec
    modules = [each.command[each.command.index("-m") + 1] for each in (training, sampling, front)]
    assert modules == ["flotilla_learner.training", "flotilla_rollout.sampling", "flotilla_tinker"]
    assert len({training.address, sampling.address, front.address}) == 3
    assert f"learner={training.address}" in front.command
    assert f"rollout={sampling.address}" in front.command
    assert {*front.variables} == {"FLOTILLA_TOKEN", "FLOTILLA_TINKER_KEY"}
    assert front.inherits == ("ALICE_KEY",)
    assert {*training.variables} == {*sampling.variables} == {"FLOTILLA_TOKEN"}
    assert KEY not in (tmp_path / "spec.json").read_text()


@pytest.mark.parametrize(
    ("gpus", "engine", "split"),
    [
        ((), {}, [{}, {}]),
        (("0",), {}, [{}, {}]),
        (("0", "1"), {}, [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]),
        (
            ("2", "3", "5"),
            {"tensor_parallel": 2},
            [{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "3,5"}],
        ),
        (("0",), {"device": "cpu"}, [{"CUDA_VISIBLE_DEVICES": "0"}, {}]),
    ],
)
def test_trainer_and_sampler_get_gpus_of_their_own_if_there_are_enough(
    gpus: tuple[str, ...], engine: dict[str, Any], split: list[dict[str, str]]
) -> None:
    spec = {"learner": {"rank": {"device": "cuda"}}, "rollout": {"engine": engine}}

    assert split_gpus(spec, gpus) == split


def test_a_folder_is_used_by_one_command_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = _make_wish(tmp_path)
    codes: list[int] = []

    def serve_twice(work: Any) -> int:
        work.close()
        codes.append(serve_tinker(wish))
        return 0

    monkeypatch.setattr("flotilla_launcher.cli.tinker_serve.run_until_interrupted", serve_twice)
    assert serve_tinker(wish) == 0

    assert codes == [FAILED]
    assert "another flotilla tinker-serve uses" in capsys.readouterr().out


def test_a_wrong_setting_is_a_bad_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_tinker(_make_wish(tmp_path, settings=("policy",))) == BAD_SPEC
    assert "override '--policy'" in capsys.readouterr().out


def test_a_client_is_told_what_it_needs_once_all_serve_and_ctrl_c_ends_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_stand_ins(folder: Path, spec: Any, key: str) -> list[KeptService]:
        return [make_health_child(folder) for _ in range(3)]

    monkeypatch.setattr("flotilla_launcher.cli.tinker_serve.make_services", make_stand_ins)
    printed: list[str] = []

    def interrupt_once_ready() -> None:
        wait_until(lambda: printed.append(capsys.readouterr().out) or "API_KEY" in "".join(printed))
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt_once_ready)
    interrupter.start()
    code = serve_tinker(_make_wish(tmp_path))
    interrupter.join()

    key = (tmp_path / "tinker" / "key").read_text().strip()
    assert code == OK
    assert "export TINKER_BASE_URL=http://127.0.0.1:8700\n" in "".join(printed)
    assert f"export TINKER_API_KEY={key}\n" in "".join(printed)
    assert health_children() == []


def test_the_kernel_gives_the_port_of_a_killed_service_to_no_connection(tmp_path: Path) -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(20):
        services = make_services(tmp_path, make_spec(_make_wish(tmp_path)), KEY)
        ports = {int(each.address.rpartition(":")[2]) for each in services}
        assert not ports & set(range(first, last + 1))
