"""Trains models step by step at callers' requests: with adapters on one base, or with all weights.

It serves `flotilla.learner.v1.TrainingService` and needs no other service; a spec with `name`,
`policy` and `learner.rank` is enough:

    FLOTILLA_TOKEN=... python -m flotilla_learner.training --config spec.toml
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flotilla_common.process.service_main import Runtime, run_service_process
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.weights.shared_memory import private_folder, shared_name
from flotilla_learner.config.training import TrainingServiceConfig

if TYPE_CHECKING:
    from flotilla_learner.training.serving_ranks import ServingRanks

_Runtime = Runtime[TrainingServiceConfig]


def _load_training() -> Callable[[_Runtime], Awaitable[None]]:
    from flotilla_learner.checkpoints.model_file_checks import check_model_files
    from flotilla_learner.ports import RankError
    from flotilla_learner.training.app import serve_training

    async def run(runtime: _Runtime) -> None:
        from flotilla_common.adapters.model_hub import stage_model

        policy, name = runtime.shared.policy, shared_name(runtime.run_id, runtime.run_dir)
        with private_folder(f"{name}-training") as memory:
            check_model_files(policy, runtime.run_dir)
            with runtime.loading():
                await asyncio.to_thread(stage_model, policy.model, policy.revision)

            def make_ranks(group: str, frozen: bool) -> "ServingRanks":
                return _make_ranks(runtime, memory, f"{name}-{group}", group, frozen=frozen)

            try:
                await serve_training(runtime, make_ranks, _make_exporter(policy))
            except RankError as error:
                raise ConfigError(str(error)) from error

    return run


def _make_ranks(
    runtime: _Runtime, memory: Path, name: str, group: str, *, frozen: bool
) -> "ServingRanks":
    from flotilla_learner.ranks.rank_group import RankGroup
    from flotilla_learner.training.serving_ranks import ServingRanks

    log = runtime.run_dir / "logs" / f"training-{group}.log"
    ranks = RankGroup(name, runtime.config.rank, log, memory)
    return ServingRanks(ranks, runtime.shared.policy, runtime.config, frozen=frozen)


def _make_exporter(policy: PolicyConfig) -> Callable[[Path, Path], None]:
    from flotilla_learner.checkpoints.adapters.model_assets import folder_under
    from flotilla_learner.checkpoints.export import export_adapters, export_model, has_adapters

    def write(state: Path, out: Path) -> None:
        if has_adapters(state):
            export_adapters(state, None, out)
        else:
            export_model(state, folder_under(state, policy), policy, out)

    return write


if __name__ == "__main__":
    run_service_process("learner", TrainingServiceConfig, _load_training, doc=__doc__ or "")
