"""Who compares the attempts of groups, and how it reads them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.episodes.episode_rows import message_rows
from flotilla_common.episodes.episode_text import Decode, read_episode
from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.config.judge import JudgeConfig
from flotilla_learner.group_types import GroupSpec
from flotilla_learner.judge.question import INSTRUCTIONS, Question, make_question
from flotilla_learner.ports import Judge


@dataclass(frozen=True, slots=True)
class GroupJudge:
    """A judge with what it is told; `decode` reads the policy's tokens."""

    judge: Judge
    decode: Decode
    instructions: str
    transcript_bytes: int

    async def close(self) -> None:
        await self.judge.close()

    def make_question(self, group: GroupSpec, attempts: Sequence[Trajectory]) -> Question:
        """Make the question about the attempts of a group."""
        task = json.loads(group.task.json)
        return make_question(
            group.group_id,
            str(task.get("prompt") or ""),
            [message_rows(read_episode(each, self.decode), each) for each in attempts],
            instructions=self.instructions,
            most_bytes=self.transcript_bytes,
        )


def open_group_judge(judge: Judge, config: JudgeConfig, decode: Decode) -> GroupJudge:
    """Return the judge with the spec's instructions. Raises ConfigError if they cannot be read."""
    text = INSTRUCTIONS
    if (path := config.instructions) is not None:
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"learner.judge.instructions: {path}: {error}") from error
        if not text:
            raise ConfigError(f"learner.judge.instructions: {path} is empty")
    return GroupJudge(judge, decode, text, config.transcript_bytes)
