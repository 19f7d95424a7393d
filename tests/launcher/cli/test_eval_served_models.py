"""`flotilla eval --model` with models that vLLM serves here: those of runs and folders."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from flotilla_launcher.cli.eval_sources import find_model, identify_model
from flotilla_launcher.cli.terminal import CommandError
from tests.support.repository import ROOT

OPTIONS = (
    "--enforce-eager --max-model-len 1024 --kv-cache-memory-bytes 268435456 --block-size 32"
    " --dtype float32"
)


def test_a_model_is_a_run_a_folder_or_a_name_of_the_hub(tmp_path: Path) -> None:
    runs, folder = tmp_path / "runs", tmp_path / "runs/made"
    (folder / "model").mkdir(parents=True)
    (folder / "journal.sqlite").touch()
    with find_model("made", runs) as served:
        assert served == str(folder / "model")
    with find_model(str(folder / "model"), runs) as served:
        assert served == str(folder / "model")
    for name in ("Qwen/Qwen3-4B", "Qwen3-4B"):
        with find_model(name, runs) as served:
            assert served == identify_model(served) == name


@pytest.mark.parametrize("text", ["", "made@7", "localhost:8000/v1", "runs/made/model", "./model"])
def test_what_can_be_no_model_is_refused_before_a_server_starts(tmp_path: Path, text: str) -> None:
    with pytest.raises(CommandError, match="is no URL"), find_model(text, tmp_path):
        pass


def test_a_model_in_a_folder_is_known_by_all_of_its_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    one, two = (identify_model(str(tmp_path / name)) for name in ("one", "two"))
    assert one == two != identify_model(str(tmp_path))
    (tmp_path / "two/model.safetensors").write_bytes(b"Weights")
    assert identify_model(str(tmp_path / "two")) != one


def test_a_checkpoint_that_cannot_be_exported_is_named(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made/journal.sqlite").touch()
    with (
        pytest.raises(CommandError, match="the model of made@7 cannot be exported"),
        find_model("made@7", tmp_path),
    ):
        pass


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_two_policies_that_vllm_serves_are_compared(engine_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs/trained"
    run.mkdir(parents=True)
    (run / "journal.sqlite").touch()
    shutil.copytree(engine_folder, run / "model")
    weights = run / "model/model.safetensors"
    save_file({name: -value for name, value in load_file(weights).items()}, weights)

    def evaluate(model: str, *more: str) -> str:
        words = ["docs/examples/notes.toml", "--tasks", "docs/examples/notes_tasks.json"]
        words += ["--attempts", "2", "--model", model, "--vllm-args", OPTIONS, *more]
        done = subprocess.run(
            [sys.executable, "-m", "flotilla_launcher.cli.app", "eval", *words],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    before, after = str(tmp_path / "before"), str(tmp_path / "after")
    evaluate(str(engine_folder), "--out", before)
    runs = ("--runs", str(tmp_path / "runs"))
    told = json.loads(evaluate("trained", *runs, "--out", after, "--against", before, "--json"))
    # The weights of both are random: they write noise, which is graded.
    assert told["evaluations"][0]["scores"][-1]["pass_at_1"]["mean"] == 0
    result = told["comparison"]["result"]
    assert (result["difference"], result["won"], result["lost"], result["p"]) == (0, 0, 0, 1)
    models = [
        json.loads((Path(out) / "evaluation.json").read_text())["model"] for out in (before, after)
    ]
    assert models[0] != models[1]
