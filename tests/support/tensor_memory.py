"""Bytes of the tensors that a block of code holds at once."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakTensorBytes(TorchDispatchMode):
    """Count storages that operations make while the mode is active, those of views once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._seen: dict[int, object] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Inputs of an operation existed before it, or are counted already.
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage(), new=False)
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage(), new=True)
        return found

    def _watch(self, storage: torch.UntypedStorage, *, new: bool) -> None:
        key, size = storage._cdata, storage.nbytes() if new else 0  # pyright: ignore[reportPrivateUsage]
        if key in self._seen:
            return

        def forget(_: object) -> None:
            del self._seen[key]
            self._now -= size

        self._seen[key] = weakref.ref(storage, forget)
        self._now += size
        self.peak = max(self.peak, self._now)
