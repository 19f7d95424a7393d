"""The policy folder: its content, when it is built again, and the command line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from flotilla_environments.tiny_policy import __main__ as cli
from flotilla_environments.tiny_policy.build import MANIFEST, BuildError, build, recipe_digest
from flotilla_environments.tiny_policy.evaluate import evaluate, load_player
from flotilla_rollout.adapters.tokenizer import load_tokenizer
from tests.environments.tiny_policy.conftest import MINI, MINI_OTHER_SEED

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    MANIFEST,
}


def test_the_folder_holds_what_transformers_and_engines_load(policy_folder: Path) -> None:
    assert {path.name for path in policy_folder.iterdir()} == FILES
    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    assert isinstance(model, Qwen3ForCausalLM)
    tokenizer = load_tokenizer(policy_folder)
    [end] = tokenizer.encode("<|im_end|>")
    config = json.loads((policy_folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["eos_token_id"] == end
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "chat_template" in json.loads((policy_folder / "tokenizer_config.json").read_text())


def test_the_same_seed_gives_the_same_bytes(policy_folder: Path, tmp_path: Path) -> None:
    assert build(tmp_path / "again", MINI)
    for name in FILES - {MANIFEST}:
        assert (tmp_path / "again" / name).read_bytes() == (policy_folder / name).read_bytes(), name


def test_an_up_to_date_folder_is_left_alone(policy_folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in policy_folder.iterdir()}
    assert not build(policy_folder, MINI)
    assert before == {path.name: path.stat().st_mtime_ns for path in policy_folder.iterdir()}


def test_another_seed_replaces_the_folder_whole_and_keeps_the_tokenizer(
    policy_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "policy"
    shutil.copytree(policy_folder, out)
    (out / "left-over.txt").write_text("old")
    assert build(out, MINI_OTHER_SEED)
    assert {path.name for path in out.iterdir()} == FILES
    assert {path.name for path in tmp_path.iterdir()} == {"policy", ".policy.lock"}
    assert json.loads((out / MANIFEST).read_text())["digest"] == recipe_digest(MINI_OTHER_SEED)
    weights, tokenizer = "model.safetensors", "tokenizer.json"
    assert (out / weights).read_bytes() != (policy_folder / weights).read_bytes()
    assert (out / tokenizer).read_bytes() == (policy_folder / tokenizer).read_bytes()


def test_a_folder_of_another_owner_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BuildError, match="choose another --out"):
        build(tmp_path, MINI)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_interrupted_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "policy", MINI, interrupt)
    assert {path.name for path in tmp_path.iterdir()} == {".policy.lock"}


def test_the_digest_depends_on_the_recipe() -> None:
    assert recipe_digest(MINI) == recipe_digest(MINI)
    assert recipe_digest(MINI) != recipe_digest(MINI_OTHER_SEED)


def test_evaluation_plays_each_environment_equally_and_repeats_itself(policy_folder: Path) -> None:
    player = load_player(policy_folder)
    first, second = (evaluate(player, "heldout", 4, temperature=1.0, seed=5) for _ in range(2))
    assert first == second
    assert {name: score.attempts for name, score in first.items()} == {
        "all": 12,
        "booking": 4,
        "tracker": 4,
        "shop": 4,
    }


def test_the_command_line_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "flotilla tiny build --seed 0 --out build/tiny-0" in capsys.readouterr().out


def test_evaluating_what_is_no_policy_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", "--model", str(tmp_path)]) == 2
    assert "build one first" in capsys.readouterr().err


def test_building_over_a_foreign_folder_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["build", "--out", str(tmp_path)]) == 2
    assert "choose another --out" in capsys.readouterr().err
