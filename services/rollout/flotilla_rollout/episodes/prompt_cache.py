"""Prompts, each rendered and tokenised once for all attempts that share it, off the event loop."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from flotilla_common.aio.bounded_dict import BoundedDict
from flotilla_common.domain.messages import ChatMessage
from flotilla_common.images.picture import PlacedPicture
from flotilla_common.images.vision_family import VisionFamily
from flotilla_rollout.episodes.conversation import MessageReader
from flotilla_rollout.episodes.shown_pictures import move_text, place_pictures
from flotilla_rollout.ports import Dialect
from flotilla_rollout.types import EpisodeInfo, PromptFacts, Tool

# Prompts of so many concurrent groups, at 4 bytes per token.
MOST_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, messages, tools and places of pictures, with hex digests of ids with
    pictures and of tools. `tools_json` are the tools as the chat template was given them, if it
    was.

    All attempts share one tools object: dialects cache what they derive from it by identity."""

    token_ids: NDArray[np.int32]
    tools: tuple[Tool, ...]
    tool_schema_digest: str
    prompt_digest: str
    messages: tuple[ChatMessage, ...] = ()
    tools_json: bytes = b""
    # Of the pictures of the facts, which are not kept here: they may have 16 MB each.
    places: tuple[PlacedPicture, ...] = ()


class PromptCache:
    """Prompts of one dialect by facts and tools, in a least-recently-used cache. With pictures
    there is a `family`."""

    def __init__(
        self, dialect: Dialect, reader: MessageReader, family: VisionFamily | None = None
    ) -> None:
        self._dialect = dialect
        self._reader = reader
        self._family = family
        self._prompts: BoundedDict[tuple[str, str], asyncio.Task[Prompt]] = BoundedDict(
            MOST_PROMPTS
        )

    async def get_prompt(self, info: EpisodeInfo) -> Prompt:
        """Return the prompt of an episode; concurrent callers wait for the same one.

        Raises TemplateError."""
        key = await asyncio.to_thread(_make_key, info.facts, info.tools)
        prompt = self._prompts.get(key)
        # A failed one is retried: its error belongs to the callers that waited for it.
        if prompt is None or (prompt.done() and prompt.exception()):
            work = asyncio.to_thread(self._make_prompt, info.facts, info.tools, key[1])
            prompt = asyncio.create_task(work)
            # No caller may be left to retrieve its error.
            prompt.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._prompts[key] = prompt
        # A cancelled attempt must not cancel the others' prompt.
        return await asyncio.shield(prompt)

    def _make_prompt(
        self, facts: PromptFacts, tools: tuple[Tool, ...], tool_schema_digest: str
    ) -> Prompt:
        ids = self._dialect.prompt_ids(facts, tools)
        messages = self._reader.read_prompt(ids, facts, tools)
        token_ids, pictures, starts = place_pictures(ids, facts.pictures, self._family)
        if pictures:
            messages = [
                msgspec.structs.replace(
                    each, end=int(starts[each.end]), content=move_text(each.content, starts)
                )
                for each in messages
            ]
            seen = tuple(each.picture.sha256 for each in pictures)
            messages[-1] = msgspec.structs.replace(messages[-1], media=seen)
        token_ids.flags.writeable = False
        return Prompt(
            token_ids,
            tools,
            tool_schema_digest,
            _digest_prompt(token_ids, facts),
            tuple(messages),
            self._reader.encode_tools(tools),
            tuple(each.place for each in pictures),
        )


def _make_key(facts: PromptFacts, tools: Sequence[Tool]) -> tuple[str, str]:
    """Return digests of facts and tools. Tools are digested as the environment gave them, but in
    no order: servers shuffle their lists, and attempts with the same tools share one prompt."""
    given = [
        *(facts.prompt, facts.current_date, dict(facts.variables), facts.shown),
        [picture.sha256 for picture in facts.pictures],
    ]
    listed = [
        {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "read_only": tool.read_only,
        }
        for tool in sorted(tools, key=lambda tool: tool.name)
    ]
    return _digest(given), _digest(listed)


def _digest_prompt(token_ids: NDArray[np.int32], facts: PromptFacts) -> str:
    digest = hashlib.sha256(token_ids.astype("<i4").tobytes())
    for picture in facts.pictures:
        digest.update(bytes.fromhex(picture.sha256))
    return digest.hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
