"""Construction of the dispatcher, with the state that an earlier start left in the journal."""

from collections.abc import Sequence

from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.groups.batcher import Batcher
from flotilla_learner.groups.dispatcher import GroupDispatcher
from flotilla_learner.groups.leases import LeaseBook
from flotilla_learner.groups.open_groups import LeaseRules
from flotilla_learner.groups.policy_history import PolicyLineage
from flotilla_learner.groups.task_groups import FreshGroups
from flotilla_learner.journal.curriculum_tables import (
    drawn_tasks,
    opened_environments,
    stored_curriculum,
)
from flotilla_learner.journal.row_codec import (
    count_fates,
    next_sequence_number,
    replaced_groups,
    unfinished_groups,
)
from flotilla_learner.journal.store import Journal
from flotilla_learner.sampling.curriculum import Curriculum, NoTasksError
from flotilla_learner.sampling.environment_mix import MixtureError
from flotilla_learner.sampling.tasks import Task


async def start_dispatcher(
    config: LearnerConfig, journal: Journal, tasks: Sequence[Task], seed: int
) -> GroupDispatcher:
    """Begin a run epoch. Raises ConfigError if the tasks cannot be drawn as configured."""
    curriculum = await _build_curriculum(config, journal, tasks, seed)
    # The launcher assigns no epoch yet, so the journal's count is the only one.
    run_epoch = await journal.begin_epoch(at_least=1)
    fresh = FreshGroups(
        curriculum,
        size=config.group_size,
        temperature=config.temperature,
        top_k=config.top_k or 0,
        top_p=config.top_p,
    )
    dispatcher = GroupDispatcher(
        LeaseBook(_lease_rules(config), fresh),
        Batcher(
            groups_per_step=config.groups_per_step,
            max_staleness=config.max_staleness,
            without_signal=config.constant_groups,
            max_refill=config.max_refill,
        ),
        journal,
        PolicyLineage(await journal.list_publications(), await journal.load_forks()),
        fresh,
        run_epoch=run_epoch,
        seed=seed,
        max_requeues=config.max_requeues,
        opened=await journal.run_read(opened_environments),
    )
    dispatcher.intake.judged = config.judge is not None
    await journal.drop_evals("eval_interrupted")
    if config.mode == "train":
        for stored in await journal.run_read(replaced_groups):
            await dispatcher.restore_replaced(stored)
        for stored in await journal.run_read(unfinished_groups):
            await dispatcher.restore_group(stored)
    dispatcher.tally.received_before = (await journal.run_read(count_fates))["acknowledged"]
    return dispatcher


async def _build_curriculum(
    config: LearnerConfig, journal: Journal, tasks: Sequence[Task], seed: int
) -> Curriculum:
    """Build the curriculum, at the draw where an earlier start would have continued."""
    try:
        curriculum = Curriculum(
            tasks,
            config.sampling,
            seed=seed,
            window=config.groups_per_step,
            steps_before=config.warm_steps,
            stored=await journal.run_read(stored_curriculum),
            seen=await journal.run_read(drawn_tasks),
        )
    except (MixtureError, NoTasksError) as error:
        raise ConfigError(str(error)) from error
    curriculum.catch_up(await journal.run_read(next_sequence_number))
    return curriculum


def _lease_rules(config: LearnerConfig) -> LeaseRules:
    return LeaseRules(
        train_slots=(config.max_staleness + 1) * config.groups_per_step,
        eval_slots=config.eval.slots,
        ttl_s=config.lease_ttl_s,
        group_deadline_s=config.group_deadline_s,
        max_tries=config.max_tries,
        min_group=config.min_group,
    )
