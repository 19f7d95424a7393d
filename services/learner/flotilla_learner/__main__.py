"""The learner: gives out groups to sample, takes trajectories back, trains and publishes."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from flotilla_common.process.service_main import Runtime, run_service_process
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.network_addresses import split_host_port
from flotilla_common.run_folder.metric_lines import ALARMS_FILE
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.weights.shared_memory import private_folder, shared_name
from flotilla_common.wire.registry import load_registry
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.ports import RemoteStore

if TYPE_CHECKING:
    from flotilla_learner.dependencies import LearnerDependencies
    from flotilla_learner.dumps.run_dumps import RunDumps
    from flotilla_learner.hosted.hosted_ranks import HostedRanks
    from flotilla_learner.judge.group_judge import GroupJudge
    from flotilla_learner.ranks.cluster import RayCluster
    from flotilla_learner.ranks.local_ranks import LocalRanks
    from flotilla_learner.teacher.adapters.hint_renderer import TemplateRenderer
    from flotilla_learner.teacher.adapters.vllm_teacher import VllmTeacher
    from flotilla_learner.weights.live_sender import LiveSender
    from flotilla_learner.weights.publication_child import PublicationChild

_WEIGHT_SERVER = "flotilla_learner.weights.weight_server"
# Of the run, in which a service may be waited for.
_STAGES = ("start ranks", "train", "publish", "checkpoint")


def _load_learner() -> Callable[[Runtime[LearnerConfig]], Awaitable[None]]:
    from flotilla_learner.app import run_learner
    from flotilla_learner.checkpoints.model_file_checks import check_model_files

    async def run_learner_service(runtime: Runtime[LearnerConfig]) -> None:
        with private_folder(f"{_memory_name(runtime)}-learner") as memory:
            if runtime.config.engine == "ranks":
                check_model_files(runtime.shared.policy, runtime.run_dir)
                await _stage_model(runtime)
            async with _opened_dependencies(runtime, memory) as vendors:
                await run_learner(runtime, vendors)

    return run_learner_service


@asynccontextmanager
async def _opened_dependencies(
    runtime: Runtime[LearnerConfig], memory: Path
) -> "AsyncGenerator[LearnerDependencies]":
    """Yield the learner's dependencies. On exit the ranks close first, then what they rely on."""
    from flotilla_learner.alarms.adapters.jsonl_sink import JsonlAlarmSink
    from flotilla_learner.checkpoints.adapters.model_assets import (
        tokenizer_digests_of,
        vision_family_of,
    )
    from flotilla_learner.dependencies import LearnerDependencies
    from flotilla_learner.dumps.run_dumps import Dumps
    from flotilla_learner.tracking.adapters.build_trackers import build_trackers
    from flotilla_learner.weights.publication_child import server_config_of

    config, policy = runtime.config, runtime.shared.policy
    tokenizer, vision = tokenizer_digests_of(policy), vision_family_of(policy)
    hosted = config.engine == "tinker"
    cluster = None if hosted else _build_cluster(runtime)
    ranks = (_build_hosted if hosted else _build_ranks)(runtime, memory, cluster)
    weights, sender = _build_publication_servers(runtime)
    tracker = build_trackers(config.tracking, runtime.run_id, runtime.run_dir, runtime.spec)
    sinks = [JsonlAlarmSink(runtime.run_dir / ALARMS_FILE, runtime.run_id)]
    dumps, teacher = _build_dumps(runtime), _build_teacher(runtime, tokenizer.tokenizer_json)
    hints, judge = _build_hints(runtime), _build_judge(runtime)
    async with AsyncExitStack() as ending:
        # Callbacks run last in, first out.
        ending.push_async_callback(asyncio.to_thread, tracker.close)
        for part in (sender, weights, cluster, ranks, dumps, teacher, judge):
            if part is not None:
                ending.push_async_callback(part.close)
        address = await weights.start_process(server_config_of(runtime))
        # A service's checkpoints hold no weights.
        store, export = _open_remote_store(runtime), None if hosted else _make_exporter(policy)
        yield LearnerDependencies(
            *(ranks, tracker, tokenizer, weights, address, store, sinks, export, cluster),
            *(sender, dumps or Dumps(), vision, teacher, hints, judge),
        )


def _build_publication_servers(
    runtime: Runtime[LearnerConfig],
) -> "tuple[PublicationChild, LiveSender | None]":
    """Return WeightService, not yet started, and the sender of weights into live engines, if the
    run has one."""
    from flotilla_learner.weights.live_sender import LiveSender
    from flotilla_learner.weights.publication_child import PublicationChild, sender_config_of

    logs = runtime.run_dir / "logs"
    config = sender_config_of(runtime) if runtime.config.engine == "ranks" else None
    sender = LiveSender(config, logs / "learner-sender.log") if config else None
    return PublicationChild(_WEIGHT_SERVER, logs / "learner-weights.log"), sender


async def _stage_model(runtime: Runtime[LearnerConfig]) -> None:
    """Download the whole model before the ranks load it; a run with a checkpoint needs no weights.

    Raises ConfigError."""
    from flotilla_common.adapters.model_hub import stage_model

    policy = runtime.shared.policy
    if any(runtime.run_dir.glob("checkpoints/step-*")):
        return
    with runtime.loading():
        await asyncio.to_thread(stage_model, policy.model, policy.revision)


def _memory_name(runtime: Runtime[LearnerConfig]) -> str:
    return shared_name(runtime.run_id, runtime.run_dir)


def _build_ranks(
    runtime: Runtime[LearnerConfig], memory: Path, cluster: "RayCluster | None"
) -> "LocalRanks":
    from flotilla_learner.ranks.local_ranks import LocalRanks

    log = runtime.run_dir / "logs" / "learner-rank-0.log"
    policy = runtime.shared.policy
    return LocalRanks(_memory_name(runtime), policy, runtime.config, log, memory, cluster)


def _build_hosted(
    runtime: Runtime[LearnerConfig], memory: Path, _: "RayCluster | None"
) -> "HostedRanks":
    """Return what stands in for ranks when a Tinker service trains. Raises ConfigError."""
    from flotilla_learner.checkpoints.adapters.model_assets import vocabulary_of
    from flotilla_learner.hosted.adapters.tinker_trainer import TinkerTrainer
    from flotilla_learner.hosted.hosted_ranks import HostedRanks, HostedSite
    from flotilla_learner.hosted.step_book import StepBook

    config, policy = runtime.config, runtime.shared.policy
    site = HostedSite(_memory_name(runtime), memory, policy, vocabulary_of(policy))
    service = TinkerTrainer(
        *(policy.tinker, site.base_model, config.lora.rank if config.lora else 0),
        *(runtime.shared.seed, runtime.run_id),
        note_progress=lambda: [runtime.watchdog.note_progress(each) for each in _STAGES],
    )
    return HostedRanks(site, config, service, StepBook(runtime.run_dir, runtime.run_id))


def _build_cluster(runtime: Runtime[LearnerConfig]) -> "RayCluster | None":
    """Plan the Ray cluster if the learner spans several machines. Raises ConfigError.

    The other machines reach its head and the first rank at the learner's own address."""
    if runtime.config.rank.nodes == 1:
        return None
    from flotilla_common.ray_cluster.ray_node import check_ray_is_installed
    from flotilla_learner.ranks.cluster import ClusterSite, RayCluster

    check_ray_is_installed(f"learner.rank.nodes = {runtime.config.rank.nodes}")
    host, _ = split_host_port(runtime.listen, "listen")
    if host == "0.0.0.0":
        raise ConfigError(
            f"--listen {runtime.listen}: with learner.rank.nodes above 1, listen on this machine's"
            " own address in the network that the machines share; ranks use no other"
        )
    site = ClusterSite(runtime.run_id, runtime.token, host, runtime.run_dir / "logs")
    return RayCluster(site, runtime.shared.policy, runtime.config.rank, runtime.drain)


def _make_exporter(policy: PolicyConfig) -> Callable[[Path, Path], None]:
    from flotilla_learner.checkpoints.adapters.model_assets import folder_under
    from flotilla_learner.checkpoints.export import export_model

    def write(checkpoint: Path, out: Path) -> None:
        export_model(checkpoint, folder_under(checkpoint, policy), policy, out)

    return write


def _build_dumps(runtime: Runtime[LearnerConfig]) -> "RunDumps | None":
    from flotilla_learner.dumps.run_dumps import RunDumps, dump_setup_of

    setup = dump_setup_of(runtime)
    return setup and RunDumps(setup, runtime.run_dir / "logs" / "learner-dumps.log")


def _build_teacher(runtime: Runtime[LearnerConfig], tokenizer: bytes) -> "VllmTeacher | None":
    config = runtime.config
    if config.teacher is None or config.mode == "eval":
        return None
    from flotilla_learner.teacher.adapters.vllm_teacher import VllmTeacher

    top_k = config.algorithm.distillation.top_k
    return VllmTeacher(config.teacher, top_k, runtime.shared.policy, tokenizer)


def _build_hints(runtime: Runtime[LearnerConfig]) -> "TemplateRenderer | None":
    teacher = runtime.config.teacher
    if teacher is None or teacher.hint is None or runtime.config.mode == "eval":
        return None
    from flotilla_learner.teacher.adapters.hint_renderer import TemplateRenderer

    return TemplateRenderer(teacher.hint, runtime.shared.policy)


def _build_judge(runtime: Runtime[LearnerConfig]) -> "GroupJudge | None":
    """Return who compares the attempts of the run's groups, if anybody does. Raises ConfigError."""
    config, policy = runtime.config.judge, runtime.shared.policy
    if config is None or runtime.config.mode == "eval":
        return None
    from flotilla_common.adapters.token_text import NoTokenizerError, load_decoder
    from flotilla_learner.judge.adapters.chat_judge import ChatJudge
    from flotilla_learner.judge.group_judge import open_group_judge

    try:
        decode = load_decoder(policy.model, policy.revision)
    except NoTokenizerError as error:
        raise ConfigError(f"learner.judge: it reads the policy's text: {error}") from error
    return open_group_judge(ChatJudge(config), config, decode)


def _open_remote_store(runtime: Runtime[LearnerConfig]) -> RemoteStore | None:
    """Open the store to which the run's checkpoints are uploaded, if there is one."""
    checkpoint = runtime.config.checkpoint
    if checkpoint.remote is None:
        return None
    from flotilla_learner.checkpoints.adapters.fsspec_store import open_store

    return open_store(f"{checkpoint.remote}/{runtime.run_id}", checkpoint.remote_options)


def main() -> NoReturn:
    """Run a learner from its command line, and exit the process."""
    run_service_process(
        "learner", LearnerConfig, _load_learner, doc=__doc__ or "", registry=load_registry
    )


if __name__ == "__main__":
    main()
