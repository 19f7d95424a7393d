"""Pictures of requests to vLLM.

vLLM is given pixels and the places of their tokens, not files: its own processor would take another
backend than the ranks, and expand the prompt itself."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flotilla_common.images.picture import ShownPicture
from flotilla_common.images.pixels import PixelReader
from flotilla_common.images.placeholders import check_places
from flotilla_common.images.vision_family import VisionFamily, load_vision_family
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.ports import EngineError

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1.engine.async_llm import AsyncLLM

    # By SHA-256.
    Items = dict[str, MultiModalKwargsItem]

# vLLM's name for such items.
IMAGE = "image"
# Threads that compute pixels.
READERS = 2


class EnginePictures:
    """Pictures of one engine's requests.

    vLLM's core keeps the pixels that it has been sent, by the picture's hash, and this process
    mirrors which: a conversation that shows them again sends only their hashes."""

    def __init__(
        self, llm: "AsyncLLM", family: VisionFamily, reader: PixelReader, *, trained: bool
    ) -> None:
        """Build it; if `trained`, features of a picture change with the policy."""
        self._llm = llm
        self._family = family
        self._reader = reader
        self._trained = trained
        self._held = llm.renderer.mm_processor_cache
        self._threads = ThreadPoolExecutor(READERS, "pixels")
        self._reading: dict[str, asyncio.Future[MultiModalKwargsItem]] = {}
        # The label of the policy that answers new requests.
        self.served = ""
        if trained:
            # By this name vLLM caches features. Pixels keep the name of the picture alone.
            vars(llm.input_processor)["_get_mm_identifier"] = self._name_features

    async def forget_features(self, *, reloaded: bool) -> None:
        """Forget features between two engine steps, before other weights are served.

        Requests in flight that vLLM computes anew, after it has preempted them, would otherwise
        find those of older weights under their own names. With `reloaded` the weights that are
        replaced have the name of the new ones."""
        if self._trained or reloaded:
            await self._llm.reset_encoder_cache()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_places(self, token_ids: NDArray[np.int32], shown: Sequence[ShownPicture]) -> None:
        """Check that a prompt is the expanded one of its pictures. Raises EngineError."""
        try:
            check_places(token_ids, [each.place for each in shown], self._family)
        except ValueError as error:
            raise EngineError(str(error)) from error

    def is_held(self, sha256: str) -> bool:
        """Return True if the core has a picture's pixels."""
        return self._held is not None and self._held.is_cached_item(sha256)

    async def read_picture(self, shown: ShownPicture) -> "MultiModalKwargsItem":
        """Return a picture's pixels, computed once for all requests that wait for them: attempts at
        one task begin with the same screen. Raises EngineError."""
        name = shown.picture.sha256
        if name not in self._reading:
            loop = asyncio.get_running_loop()
            reading = loop.run_in_executor(self._threads, self._make_item, shown)
            reading.add_done_callback(lambda _: self._reading.pop(name))
            self._reading[name] = reading
        return await asyncio.shield(self._reading[name])

    def _make_item(self, shown: ShownPicture) -> "MultiModalKwargsItem":
        import torch
        from transformers import BatchFeature
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

        name = shown.picture.sha256
        try:
            pixels = self._reader.read(shown.picture.data)
        except ValueError as error:
            raise EngineError(f"picture {name}: {error}") from error
        if pixels.grid != shown.place.grid:
            raise EngineError(
                f"picture {name} has {self._family.count(shown.place.grid)} tokens in the sequence,"
                f" and {self._family.count(pixels.grid)} by the model's processor"
            )
        values = {
            # As the tower would convert them; they are fewer bytes to send.
            "pixel_values": torch.from_numpy(pixels.values).to(self._llm.model_config.dtype),
            "image_grid_thw": torch.tensor([pixels.grid]),
        }
        patches = torch.tensor([len(pixels.values)])
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes(IMAGE, patches),
            "image_grid_thw": MultiModalFieldConfig.batched(IMAGE, keep_on_cpu=True),
        }
        return MultiModalKwargsItems.from_hf_inputs(BatchFeature(values), fields)[IMAGE][0]

    def note_given(
        self, names: Sequence[str], items: "Items"
    ) -> "list[MultiModalKwargsItem | None] | None":
        """Return what the core is to be given of each picture, None for what it holds, and note
        that it will hold all. If one is neither held nor in `items`, return None."""
        held = self._held
        if held is None:
            return [items[name] for name in names] if items.keys() >= set(names) else None
        # In the order in which the core does the same.
        for name in names:
            held.touch_sender_cache_item(name)
        given: list[MultiModalKwargsItem | None] = []
        for name in names:
            item = items.get(name)
            if item is None and not held.is_cached_item(name):
                # Driven out, perhaps by those before it, which are not sent now.
                for before in names[: len(given)]:
                    held.invalidate(before)
                return None
            entry = (item, ()) if item is not None else None
            given.append(held.get_and_update_item(entry, name)[0])
        return given

    def count(self, shown: ShownPicture) -> int:
        """Return the number of a picture's tokens."""
        return self._family.count(shown.place.grid)

    def _name_features(self, sha256: str, adapter: object) -> str:
        del adapter
        return f"{sha256} {self.served}"


class RequestPictures:
    """Pictures of one request, and the pixels of those that the core did not hold."""

    def __init__(self, pictures: EnginePictures, shown: Sequence[ShownPicture]) -> None:
        self._pictures = pictures
        self._shown = shown
        self._items: Items = {}

    async def read_unheld(self) -> None:
        """Read those that the core does not hold. Raises EngineError."""
        unread = {
            each.picture.sha256: each
            for each in self._shown
            if each.picture.sha256 not in self._items
            and not self._pictures.is_held(each.picture.sha256)
        }
        read = await asyncio.gather(*map(self._pictures.read_picture, unread.values()))
        self._items.update(zip(unread, read, strict=True))

    async def make_features(self, token_ids: NDArray[np.int32]) -> dict[str, Any]:
        """Return what vLLM's input has beside the tokens, which are the expanded ones.

        The request must be submitted at once: the core forgets pixels in the order of requests.
        Raises EngineError."""
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        self._pictures.check_places(token_ids, self._shown)
        names = [each.picture.sha256 for each in self._shown]
        while (given := self._pictures.note_given(names, self._items)) is None:
            await self.read_unheld()
        places = [
            PlaceholderRange(each.place.offset, self._pictures.count(each)) for each in self._shown
        ]
        return {
            "type": "multimodal",
            "mm_kwargs": MultiModalKwargsItems({IMAGE: given}),
            "mm_hashes": {IMAGE: names},
            "mm_placeholders": {IMAGE: places},
        }


def load_pictures(llm: "AsyncLLM", model: ServedModel) -> EnginePictures | None:
    """Return what shows pictures to an engine of `model`; None if that reads text only.

    Raises ConfigError."""
    vision = model.policy.vision
    if vision is None:
        return None
    family = load_vision_family(model.folder, vision)
    reader = PixelReader(model.folder, family)
    return EnginePictures(llm, family, reader, trained=vision.is_trained)


async def read_pictures(
    pictures: EnginePictures | None, shown: Sequence[ShownPicture]
) -> RequestPictures | None:
    """Return the pictures of a request, read as far as vLLM's core does not hold them; None if it
    has none. Raises EngineError."""
    if not shown:
        return None
    if pictures is None:
        raise EngineError("the engine is shown no pictures: policy.vision is not set")
    request = RequestPictures(pictures, shown)
    await request.read_unheld()
    return request
