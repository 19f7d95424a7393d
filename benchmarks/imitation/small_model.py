"""Valid calls of a real model before and after a few steps of imitation:
`python -m benchmarks.imitation.small_model`, after `make zoo`.

SmolLM2-135M-Instruct is offered one tool and writes a turn, at T = 1, for each of some held-out
tasks. A turn is valid if it calls that tool once with exactly its parameters, as texts; it is right
if they are also the task's. In between, the model imitates a few calls that the environment's
reference policy made at training tasks. One process, one thread; 11 CPU minutes. The last line is
a JSON object.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from flotilla_common.spec.spec import PolicyConfig
from flotilla_environments.api import Instance, open_instance
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.task_generator import Split, make_data_id
from flotilla_environments.tiny_policy.evaluate import Score
from flotilla_environments.tiny_policy.sampler import choose_tokens, left_padded
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.types import TrainBatch, TrainSequence
from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.adapters.tokenizer import load_tokenizer
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.dialects.full import write_call
from flotilla_rollout.dialects.turns import ToolCall
from flotilla_rollout.types import PromptFacts, Tool

MODEL = Path("build/zoo/models/smollm2-135m")
ENV_KEY, TOOL, PARAMETERS = "tracker", "find_issues", {"repo", "label"}
STEPS, SEQUENCES_PER_STEP, LEARNING_RATE = 6, 4, 5e-5
HELDOUT_TASKS, MOST_TOKENS = 64, 56


class Pupil:
    """The model's prompts, and its readings of turns."""

    def __init__(self) -> None:
        self._tokenizer = load_tokenizer(MODEL)
        self._dialect = choose_dialect(MODEL.name, self._tokenizer, DialectConfig(name="full"))

    @property
    def stop_id(self) -> int:
        return self._dialect.stop_ids[0]

    def prompt_ids(self, instance: Instance) -> list[int]:
        """Return the prompt of the instance's task, which offers `TOOL` alone."""
        scenario = instance.scenario
        facts = PromptFacts(scenario.prompt, scenario.variables["CURRENT_DATE"], {})
        return self._dialect.prompt_ids(facts, _offered(instance))

    def show_call(self, instance: Instance) -> TrainSequence:
        """Return the first call of the reference policy, as the learner would record it."""
        prompt, (name, arguments) = self.prompt_ids(instance), plan_calls(instance.scenario)[0]
        text = write_call(ToolCall(name, json.dumps(dict(arguments))))
        written = [*self._tokenizer.encode(text), self.stop_id]
        return TrainSequence(
            group_id=instance.data_id,
            attempt_index=0,
            reward=1.0,
            token_ids=np.array(prompt + written, np.int32),
            policy_mask=np.array([False] * len(prompt) + [True] * len(written)),
            behaviour_logprobs=np.zeros(len(prompt) + len(written), np.float32),
            temperature=1.0,
            staleness=0,
        )

    def judge(self, instance: Instance, ids: Sequence[int]) -> tuple[bool, bool]:
        """Return whether a turn is valid, and whether it is right."""
        prompt = np.array(self.prompt_ids(instance), np.int32)
        items = self._dialect.parse_turn(prompt, list(ids), _offered(instance)).items
        if len(items) != 1 or not isinstance(items[0], ToolCall) or items[0].name != TOOL:
            return False, False
        given = json.loads(items[0].arguments_json)
        if set(given) != PARAMETERS or not all(isinstance(value, str) for value in given.values()):
            return False, False
        return True, given == dict(plan_calls(instance.scenario)[0][1])


def main() -> None:
    torch.set_num_threads(1)
    pupil, started = Pupil(), time.process_time()
    config = PolicyConfig(model=str(MODEL), dtype="float32", max_model_len=768)
    # Nothing is measured after an update, which would take as long as half of it.
    rank = RankConfig(post_update_tokens=0)
    policy = load_policy(config, rank)
    optimizer_config = OptimizerConfig(lr=LEARNING_RATE, warmup_steps=2)
    optimizer = Optimizer(policy.named_parameters(), optimizer_config)
    trainer = Trainer(policy, optimizer, AlgorithmConfig(), rank)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    results = {"before": _examine(model, pupil)}
    for step in range(1, STEPS + 1):
        first = (step - 1) * SEQUENCES_PER_STEP
        shown = map(pupil.show_call, _open_tasks("train", first, SEQUENCES_PER_STEP))
        result = trainer.train_step(TrainBatch(step, tuple(shown), imitated=True), LEARNING_RATE)
        print(f"step {step}: loss {result.metrics['policy/loss']:.3f}", file=sys.stderr)
    trained = policy.named_parameters()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(trained[name])
    results["after"] = _examine(model, pupil)
    _report(results, time.process_time() - started)


def _examine(model: Any, pupil: Pupil) -> dict[str, Score]:
    tasks = _open_tasks("heldout", 0, HELDOUT_TASKS)
    turns = sample_after_prefix(model, [pupil.prompt_ids(task) for task in tasks], pupil.stop_id)
    judged = [pupil.judge(task, turn) for task, turn in zip(tasks, turns, strict=True)]
    return {
        "valid": Score(sum(valid for valid, _ in judged), len(judged)),
        "right": Score(sum(right for _, right in judged), len(judged)),
    }


@torch.inference_mode()
def sample_after_prefix(
    model: Any, prompts: Sequence[list[int]], stop_id: int, most_tokens: int = MOST_TOKENS
) -> list[list[int]]:
    """Continue every prompt by one turn at T = 1; what all begin with is computed once."""
    shared = next(
        place for place, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1
    )
    cache = DynamicCache()
    model(input_ids=torch.tensor([prompts[0][:shared]]), past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(prompts))
    ids, own = left_padded([prompt[shared:] for prompt in prompts])
    mask = torch.cat([own.new_ones(len(prompts), shared), own], dim=1)
    positions = (mask.cumsum(-1) - 1)[:, shared:].clamp(min=0)
    generator = torch.Generator().manual_seed(0)
    turns: list[list[int]] = [[] for _ in prompts]
    for _ in range(most_tokens):
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        ids, _ = choose_tokens(logits.float(), 1.0, generator)
        for turn, token in zip(turns, ids[:, 0].tolist(), strict=True):
            if not turn or turn[-1] != stop_id:
                turn.append(token)
        if all(turn[-1] == stop_id for turn in turns):
            break
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        positions = positions[:, -1:] + 1
    return turns


def _open_tasks(split: Split, first: int, count: int) -> list[Instance]:
    return [
        open_instance(ENV_KEY, make_data_id(split, index)) for index in range(first, first + count)
    ]


def _offered(instance: Instance) -> list[Tool]:
    return [
        Tool(tool.name, tool.description, tool.parameters, tool.read_only)
        for tool in instance.tools()
        if tool.name == TOOL
    ]


def _report(results: dict[str, dict[str, Score]], seconds: float) -> None:
    print(f"| {HELDOUT_TASKS} held-out tasks | valid calls | right calls |\n|---|---|---|")
    figures: dict[str, Any] = {}
    for name, scores in results.items():
        cells = [
            f"{score.pass_at_1:.1%} [{', '.join(f'{100 * end:.1f}' for end in score.interval)}]"
            for score in scores.values()
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
        figures[name] = {key: score.solved for key, score in scores.items()}
    print(json.dumps({"tasks": HELDOUT_TASKS, "cpu_seconds": round(seconds), **figures}))


if __name__ == "__main__":
    main()
