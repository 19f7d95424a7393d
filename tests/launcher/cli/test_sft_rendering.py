"""`flotilla sft` from conversations: rendered in a process of the rollout's, and equal to what the
rollout itself records."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from flotilla_common.domain.attempts import AttemptKey, ToolOutcome
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.episodes.demonstrations import DemonstrationFile, read_demonstrations
from flotilla_common.run_folder.journal_file import BEGAN_WITH
from flotilla_common.weights.fingerprint import tokenizer_digest
from flotilla_environments.tiny_policy.tokenizer import save_tokenizer, train_tokenizer
from flotilla_launcher.cli import sft
from flotilla_launcher.cli.app import app
from flotilla_launcher.cli.conversation_rendering import render_conversations
from flotilla_launcher.cli.train import TrainOptions
from flotilla_reading.demonstrations.acceptance import AcceptanceRules
from flotilla_reading.demonstrations.run_conversations import RunConversations
from flotilla_reading.demonstrations.run_episodes import make_demonstrations
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer, load_tokenizer
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.types import ToolResult
from tests.reading.demonstrations.test_conversation_files import row, write_lines
from tests.reading.inspector.made_runs import open_run
from tests.rollout.episodes.test_conversation import play_turns
from tests.support.rollout import FakeEnvironment
from tests.support.tiny_model import load_model, reference_logprobs

# Each starts processes that load tokenizers and models.
pytestmark = pytest.mark.timeout(400)
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "Rome"}}\n</tool_call>'
SAID = "The hotel is found."


def spec_of(model: Path) -> dict[str, Any]:
    return {
        "name": "imitation",
        "policy": {"model": str(model), "max_model_len": 512},
        "learner": {"sft": {"sequences_per_step": 2}, "steps": 2},
    }


def play(tokenizer: TransformersTokenizer, *turns: Sequence[int]) -> Trajectory:
    """Have the rollout play an attempt whose policy samples these tokens."""
    environment = FakeEnvironment(lambda *_: ToolResult(ToolOutcome.OK, ('{"found": 1}',)))
    end = tokenizer.encode("<|im_end|>")
    ids = [[*turn, *end] for turn in turns]
    return play_turns(tokenizer, TemplateDialect(tokenizer), ids, environment)


def record(runs: Path, model: Path, trajectories: Sequence[Trajectory]) -> Path:
    """Journal a run of a model with these attempts, each of which passed; return its folder."""

    async def write() -> Path:
        run = open_run(runs)
        run.write("spec.json", spec_of(model))
        await run.journal.begin_epoch(1)
        digest = tokenizer_digest(model)
        await run.journal.set_meta({BEGAN_WITH: {"tokenizer": digest.hex()}})
        for number, each in enumerate(trajectories):
            group = await run.add_group([], size=1)
            key, lease = AttemptKey(group, 0, 0), f"lease-{number}"
            await run.journal.add_trajectory(replace(each, key=key, lease_id=lease, reward=1.0))
        await run.journal.close()
        return run.folder

    return asyncio.run(write())


def loss_of(file: DemonstrationFile, model: Path) -> float:
    """Mean negative log-likelihood of the trained tokens, as `sft/loss` is."""
    loaded, losses = load_model(model), list[np.ndarray[Any, Any]]()
    for each in file.sequences:
        losses.append(-reference_logprobs(loaded, each.token_ids)[each.trained[1:]])
    return float(np.concatenate(losses).mean())


def rendered(run: Path, model: Path, out: Path) -> DemonstrationFile:
    found = RunConversations(run, AcceptanceRules())
    render_conversations(spec_of(model), found, out, lambda done, total: None)
    return read_demonstrations(out)


def recorded(run: Path, out: Path) -> DemonstrationFile:
    make_demonstrations(run, out, AcceptanceRules())
    return read_demonstrations(out)


def test_episodes_rendered_from_their_messages_are_those_of_the_journal_where_that_is_exact(
    tmp_path: Path, engine_folder: Path
) -> None:
    tokenizer = load_tokenizer(engine_folder)
    encode = tokenizer.encode
    attempts = [
        play(tokenizer, encode(CALL), encode(SAID)),
        play(tokenizer, encode(f"I look.\n{CALL}"), encode(CALL), encode(SAID)),
        play(tokenizer, encode(SAID)),
    ]
    run = record(tmp_path / "runs", engine_folder, attempts)
    journal = recorded(run, tmp_path / "journal.npz")
    said = rendered(run, engine_folder, tmp_path / "said.npz")
    assert len(journal.sequences) == len(said.sequences) == 3
    for one, other in zip(journal.sequences, said.sequences, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.trained, other.trained)
        assert (one.key, one.task_key, one.reward) == (other.key, other.task_key, other.reward)
    exact, again = (loss_of(each, engine_folder) for each in (journal, said))
    assert abs(exact - again) < 1e-6
    assert said.head.tokenizer == journal.head.tokenizer
    assert said.head.counts["accepted"] == 3 and not said.head.left_out


def test_tokens_that_rendering_would_change_are_trained_as_they_were_sampled(
    tmp_path: Path, engine_folder: Path
) -> None:
    tokenizer = load_tokenizer(engine_folder)
    call = tokenizer.encode(CALL)
    # "hotel" is one token, and a policy may write it letter by letter.
    letters = [token for letter in SAID for token in tokenizer.encode(letter)]
    assert len(letters) > len(tokenizer.encode(SAID))
    assert tokenizer.decode(letters) == SAID
    attempt = play(tokenizer, call, letters)
    run = record(tmp_path / "runs", engine_folder, [attempt])
    journal = recorded(run, tmp_path / "journal.npz")
    said = rendered(run, engine_folder, tmp_path / "said.npz")
    [one], [other] = journal.sequences, said.sequences
    np.testing.assert_array_equal(one.token_ids, attempt.sequences[0].token_ids)
    assert len(one.token_ids) > len(other.token_ids)
    decode = tokenizer.decode
    assert decode(one.token_ids.tolist()) == decode(other.token_ids.tolist())
    wanted = -reference_logprobs(load_model(engine_folder), attempt.sequences[0].token_ids)
    exact = loss_of(journal, engine_folder)
    assert exact == pytest.approx(float(wanted[one.trained[1:]].mean()), abs=1e-6)
    assert abs(exact - loss_of(said, engine_folder)) > 1e-3


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files of demonstrations for which `flotilla sft` would have started a run."""
    found: list[Path] = []

    def train(path: Path, runs: Path, overrides: Sequence[str], options: TrainOptions) -> int:
        [data] = [each for each in overrides if each.startswith("--learner.sft.data=")]
        found.append(Path(data.partition("=")[2]))
        return 0

    monkeypatch.setattr(sft, "train_policy", train)
    return found


def call(tmp_path: Path, model: Path, *words: str, **changes: Any) -> tuple[int, str]:
    (tmp_path / "spec.json").write_text(json.dumps(spec_of(model) | changes))
    given = ("sft", str(tmp_path / "spec.json"), "--runs", str(tmp_path / "runs"), *words)
    result = CliRunner().invoke(app, given)
    return result.exit_code, " ".join(result.output.split())


def test_a_run_of_another_tokenizer_is_imitated_by_what_it_says(
    tmp_path: Path, engine_folder: Path, files: list[Path]
) -> None:
    tokenizer = load_tokenizer(engine_folder)
    attempt = play(tokenizer, tokenizer.encode(CALL), tokenizer.encode(SAID))
    run = record(tmp_path / "runs", engine_folder, [attempt])
    student = tmp_path / "student"
    shutil.copytree(engine_folder, student)
    save_tokenizer(train_tokenizer(["The hotel is found in Rome. look at"] * 3, 300), student)
    code, said = call(tmp_path, student, "--from", run.name)
    assert code == 0, said
    assert "another tokenizer or chat template than" in said and "are rendered" in said
    found = read_demonstrations(files[0])
    own = load_tokenizer(student)
    [one] = found.sequences
    text = tokenizer.decode(attempt.sequences[0].token_ids.tolist())
    assert own.decode(one.token_ids.tolist()) == text
    assert one.token_ids.tolist() != attempt.sequences[0].token_ids.tolist()
    assert own.decode(one.token_ids[one.trained].tolist()) == f"{CALL}<|im_end|>{SAID}<|im_end|>"
    assert found.head.tokenizer == tokenizer_digest(student).hex()
    assert files[0].name.startswith(f"{run.name}-")


def test_a_file_becomes_demonstrations_and_what_is_left_out_is_named(
    tmp_path: Path, engine_folder: Path, files: list[Path]
) -> None:
    strange = row(3)
    strange["messages"][1]["tool_calls"][0] = {"function": {"name": "fly", "arguments": "{}"}}
    source = write_lines(
        *(tmp_path / "talks.jsonl", row(0), row(1, reward=0.2), row(2, id=4), strange)
    )
    code, said = call(tmp_path, engine_folder, "--from", str(source), "--ignore", "id")
    assert code == 0, said
    assert "2 sequences with" in said and "of 3 accepted conversations" in said
    assert "1 below reward 1.0" in said and "1 with calls of tools that they do not offer" in said
    assert "line 4: turn 1 calls 'fly', which its tools do not have" in said
    found = read_demonstrations(files[0])
    assert [each.key.group_id for each in found.sequences] == ["line 1", "line 3"]
    tokenizer = load_tokenizer(engine_folder)
    for number, each in zip((0, 2), found.sequences, strict=True):
        text = tokenizer.decode(each.token_ids.tolist())
        assert f"Find {number}." in text and "find(" in text
        assert tokenizer.decode(each.token_ids[each.trained].tolist()).endswith(
            "It is 7.<|im_end|>"
        )


def test_what_cannot_be_used_ends_the_command_with_the_reason(
    tmp_path: Path, engine_folder: Path, files: list[Path]
) -> None:
    broken = write_lines(tmp_path / "broken.jsonl", row(0), row(1, source="web"))
    code, said = call(tmp_path, engine_folder, "--from", str(broken))
    assert code == 1 and "line 2: unknown keys 'source': remove them, or name each" in said
    code, said = call(tmp_path, engine_folder, "--from", str(tmp_path / "none.jsonl"))
    assert code == 1 and "none.jsonl does not exist, and no run has such an id" in said
    good = write_lines(tmp_path / "good.jsonl", row(0))
    code, said = call(tmp_path, engine_folder, "--from", str(good), "--best-of", "2")
    assert code == 1 and "--best-of: " in said and "is no run" in said
    wrong = {"rollout": {"dialect": {"name": "mystral"}}}
    code, said = call(tmp_path, engine_folder, "--from", str(good), **wrong)
    assert code == 1 and "rollout.dialect.name: there is no 'mystral'" in said
    silent = write_lines(tmp_path / "silent.jsonl", row(0, reward=0))
    code, said = call(tmp_path, engine_folder, "--from", str(silent))
    assert code == 1 and "silent has nothing to imitate" in said
    assert not files and not any((tmp_path / "runs").glob("demonstrations/*"))
