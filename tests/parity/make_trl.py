"""Writes fixtures/trl.json, in an environment that has TRL: see README.md."""

import importlib
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.parity import inputs, tiny
from tests.parity.fixtures import Recorder
from tests.parity.recording import tensors, with_gradient

trl: Any = importlib.import_module("trl")
datasets: Any = importlib.import_module("datasets")
tokenizers: Any = importlib.import_module("tokenizers")
transformers: Any = importlib.import_module("transformers")

_LOSS = "trl.GRPOTrainer._compute_loss"
_LENGTH = 16


def tokenizer() -> Any:
    words = {f"<{number}>": number for number in range(tiny.VOCABULARY)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<0>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<0>", eos_token="<1>", unk_token="<0>"
    )


@contextmanager
def trainer(kind: str = "GRPO", reward: Any = None, **settings: Any) -> Generator[Any]:
    """A trainer of TRL as its users make one, on the tiny policy, with these settings."""
    defaults = {
        "per_device_train_batch_size": 8,
        "num_generations": 2,
        "max_completion_length": _LENGTH,
        "beta": 0.0,
        "temperature": 1.0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.policy(transformers)
        # Where a trainer with a KL term loads its reference from.
        tiny.policy(transformers, tiny.REFERENCE).save_pretrained(folder)
        model.config._name_or_path = folder
        yield getattr(trl, f"{kind}Trainer")(
            model=model,
            reward_funcs=reward or (lambda completions, **_: [0.0] * len(completions)),
            args=getattr(trl, f"{kind}Config")(output_dir=folder, **(defaults | settings)),
            train_dataset=datasets.Dataset.from_list([{"prompt": "<2>"}] * 8),
            processing_class=tokenizer(),
        )


def loss_of_logprobs(given: dict[str, Tensor], **settings: Any) -> dict[str, Any]:
    """The loss and its gradient by the logprobs, which stand in for the model's."""
    with trainer(**settings) as made:
        made.current_gradient_accumulation_steps = 1
        return part_of_loss(made, given, given["mask"].sum())


def loss_of_parts(given: dict[str, Tensor], **settings: Any) -> dict[str, Any]:
    """The same accumulated over micro-batches of 3 and 5 sequences."""
    with trainer(gradient_accumulation_steps=2, steps_per_generation=2, **settings) as made:
        made.current_gradient_accumulation_steps = 2
        total = given["mask"].sum()
        parts = [
            part_of_loss(made, {name: value[rows] for name, value in given.items()}, total)
            for rows in (slice(0, 3), slice(3, 8))
        ]
    return {
        "value": sum(part["value"] for part in parts),
        "gradient": [row for part in parts for row in part["gradient"]],
    }


def part_of_loss(made: Any, given: dict[str, Tensor], total: Tensor) -> dict[str, Any]:
    mask = given["mask"]
    batch = {
        "prompt_ids": torch.ones(len(mask), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.int64),
        "completion_ids": torch.ones(mask.shape, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": given["advantages"],
        "old_per_token_logps": given["old"],
        "num_items_in_batch": total,
    }
    if "reference" in given:
        batch["ref_per_token_logps"] = given["reference"]

    def loss(logprobs: Tensor) -> Tensor:
        scored = (logprobs, torch.zeros_like(logprobs), None)
        made._get_per_token_logps_and_entropies = lambda *_, **__: scored
        return made._compute_loss(made.model, batch)

    return with_gradient(loss, given["logprobs"])


def add_losses(record: Recorder) -> None:
    record.inputs["tokens"] = inputs.tokens()
    record.inputs["sequences"] = inputs.sequences()
    record.inputs["sequences_by_token"] = inputs.sequences_by_token()
    record.inputs["extremes"] = inputs.extremes()
    higher = {"epsilon": 0.2, "epsilon_high": 0.28}
    tight = {"epsilon": 0.03, "epsilon_high": 0.07, "importance_sampling_level": "sequence"}
    for name, given, settings in (
        ("ppo_clip", "tokens", {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.2}),
        ("ppo_clip_higher", "tokens", {"loss_type": "dapo", **higher}),
        ("ppo_clip_sequence_mean", "tokens", {"loss_type": "grpo", **higher}),
        ("ppo_clip_sum_norm", "tokens", {"loss_type": "dr_grpo", **higher}),
        ("dual_clip", "tokens", {"loss_type": "dapo", "delta": 3.0, **higher}),
        ("gspo", "sequences", {"loss_type": "grpo", **tight}),
        ("gspo_by_token", "sequences_by_token", {"loss_type": "grpo", **tight}),
        ("gspo_token_mean", "sequences", {"loss_type": "dapo", **tight}),
        ("luspo", "sequences", {"loss_type": "luspo", **tight}),
        ("ppo_clip_extremes", "extremes", {"loss_type": "dapo", **higher}),
        # A bound on the ratio itself, and none below.
        ("cispo_no_low", "tokens", {"loss_type": "cispo", "epsilon_high": 1.28}),
        (
            "sapo",
            "tokens",
            {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
        ),
    ):
        outputs = loss_of_logprobs(tensors(record.inputs[given]), **settings)
        record.add("loss", name, _LOSS, given, outputs, **settings)
    for name, settings in (
        ("ppo_clip_parts", {"loss_type": "dapo", **higher}),
        ("ppo_clip_parts_local_mean", {"loss_type": "bnpo", **higher}),
    ):
        outputs = loss_of_parts(tensors(record.inputs["tokens"]), **settings)
        record.add("loss", name, _LOSS, "tokens", outputs, **settings)


def add_kl(record: Recorder) -> None:
    """Record the KL term: the loss with advantages of 0."""
    # TRL multiplies the estimate by the policy's ratio by default.
    plain = {"use_bias_correction_kl": False}
    for name, given, settings in (
        ("k3", "tokens", {"loss_type": "dapo", "beta": 1.0, **plain}),
        ("k3_sequence_mean", "tokens", {"loss_type": "grpo", "beta": 0.04, **plain}),
        ("k3_extremes", "extremes", {"loss_type": "dapo", "beta": 1.0, **plain}),
        ("k3_bias_corrected", "tokens", {"loss_type": "dapo", "beta": 1.0}),
    ):
        values = tensors(record.inputs[given])
        values["advantages"] = torch.zeros_like(values["advantages"])
        record.add("kl", name, _LOSS, given, loss_of_logprobs(values, **settings), **settings)
    settings = {"loss_type": "dapo", "beta": 0.04, "epsilon": 0.2, "epsilon_high": 0.28, **plain}
    outputs = loss_of_logprobs(tensors(record.inputs["tokens"]), **settings)
    record.add("loss", "ppo_clip_with_k3", _LOSS, "tokens", outputs, **settings)


def add_advantages(record: Recorder) -> None:
    """Record the advantages of groups of 4, on completions that are put in place of samples."""
    rewards = [0.0, 0.25, 1.0, 0.75, 0.5, 0.5, 0.5, 0.5]
    record.inputs["fours"] = {"group": [str(place // 4) for place in range(8)], "reward": rewards}
    tokens, texts = ([[2]] * 8, [[3, 1]] * 8), ["<3>"] * 8
    # In this order: tokens, (GRPO alone) masks of tools, texts, (GRPO alone) what stays empty.
    sampled = {"GRPO": (*tokens, None, texts, None, {}, None, None), "RLOO": (*tokens, texts)}
    choices: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("grpo", "GRPO", {"scale_rewards": "group"}),
        ("dr_grpo", "GRPO", {"scale_rewards": "none"}),
        ("rloo", "RLOO", {"normalize_advantages": False}),
    )
    for name, kind, settings in choices:
        with trainer(kind, lambda **_: list(rewards), num_generations=4, **settings) as made:
            made._generate = lambda _, kind=kind: sampled[kind]
            outputs = made._generate_and_score_completions([{"prompt": "<2>"} for _ in rewards])
        advantages = {"advantages": outputs["advantages"].tolist()}
        function = f"trl.{kind}Trainer._generate_and_score_completions"
        record.add("advantage", name, function, "fours", advantages, **settings)


def add_step(record: Recorder) -> None:
    """A loss on the tiny policy itself: its gradient by every parameter."""
    record.inputs["step"] = tiny.batch()
    higher = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}
    tight = {"loss_type": "grpo", "epsilon": 0.03, "epsilon_high": 0.07}
    choices: dict[str, dict[str, Any]] = {
        "ppo_clip": higher,
        "ppo_clip_entropy": {"entropy_coef": 0.01, **higher},
        "ppo_clip_kl": {"beta": 0.1, "use_bias_correction_kl": False, **higher},
        "gspo": {"importance_sampling_level": "sequence", **tight},
    }
    for name, settings in choices.items():
        with trainer(temperature=tiny.TEMPERATURE, **settings) as made:
            made.current_gradient_accumulation_steps = 1
            batch = step_batch(made)
            loss = made._compute_loss(made.model, batch)
            loss.backward()
            gradients = {
                name: [round(value, 10) for value in parameter.grad.flatten().tolist()]
                for name, parameter in made.model.named_parameters()
            }
        outputs = {"value": loss.item(), "gradients": gradients}
        record.add("step", name, _LOSS, "step", outputs, **settings)


def step_batch(made: Any) -> dict[str, Tensor]:
    """The tiny batch as TRL takes it, with logprobs of the trainer's reference if it has one."""
    batch = tiny.batch()
    prompts, completions = torch.tensor(batch["prompts"]), torch.tensor(batch["completions"])
    present, mask = torch.tensor(batch["present"]), torch.tensor(batch["mask"])
    found = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": present,
        "tool_mask": mask,
        "advantages": torch.tensor(batch["advantages"], dtype=torch.float64),
        "old_per_token_logps": torch.tensor(batch["behaviour"], dtype=torch.float64),
        "num_items_in_batch": mask.sum().double(),
    }
    if made.ref_model is not None:
        whole = torch.cat([prompts, completions], 1)
        attended = torch.cat([torch.ones_like(prompts), present], 1)
        with torch.no_grad():
            found["ref_per_token_logps"], _, _ = made._get_per_token_logps_and_entropies(
                made.ref_model, whole, attended, completions.size(1)
            )
    return found


def main() -> None:
    torch.manual_seed(0)
    record = Recorder("trl", trl.__version__)
    add_losses(record)
    add_kl(record)
    add_advantages(record)
    add_step(record)
    print(record.write())


if __name__ == "__main__":
    main()
