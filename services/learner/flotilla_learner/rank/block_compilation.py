"""Decoder blocks that torch compiles, one graph or a few for all blocks of a class.

Only a block's `forward` is compiled. Hooks around it, such as those that gather the parameters of
a split model, stay as they are, as do parameter names and the recomputation of a block in the
backward pass. Attention and routers that follow an engine's are not compiled
(`torch.compiler.disable`): their Python values differ in each pass, and torch would recompile for
each. A block that cannot be compiled runs uncompiled, and the reason is logged."""

import importlib
import logging
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch._dynamo import config as dynamo_settings
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from torch._functorch import config as autograd_settings

from flotilla_learner.rank.sharding import decoder_blocks

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
# Variants of one piece of code: with and without gradients, of policy, reference and critic, for
# one token and for many, of each kind of layer. Torch's own limit is 8.
_MOST_VARIANTS = 64
_LONGEST_REASON = 300
_Forward = Callable[..., Any]
# The process's output is the rank's log.
_log = logging.getLogger(__name__)


class CompiledBlocks:
    """Decoder blocks of a rank's models, each compiled when it first computes something.

    Copying a model also has the blocks of the copy compiled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compiled: dict[_Forward, _Forward] = {}
        self._ran: WeakSet[nn.Module] = WeakSet()
        self._refused: WeakSet[nn.Module] = WeakSet()
        self._settings = _ThreadSettings()
        self._counted: int = counters["stats"]["unique_graphs"]
        self.why_not: str | None = None
        os.environ.setdefault(CACHE_VARIABLE, str(default_cache()))
        _import_compiler()
        # With these switches torch silently compiles nothing.
        if switches := [name for name in _SWITCHES if os.environ.get(name) == "1"]:
            self._log_refusal("every block", f"{switches[0]} is 1")

    def add_model(self, model: nn.Module) -> None:
        """Have the model's decoder blocks compiled. Raises ValueError if it has none."""
        blocks = decoder_blocks(model)
        if not blocks:
            raise ValueError(f"{type(model).__name__} names no decoder blocks")
        for block in blocks:
            block.forward = MethodType(self._run_block, block)

    @property
    def uncompiled(self) -> int:
        """Number of blocks that run uncompiled because they could not be compiled."""
        return len(self._refused)

    def take_graph_count(self) -> int:
        """Return how many graphs this process has compiled since the last call."""
        total = counters["stats"]["unique_graphs"]
        new, self._counted = total - self._counted, total
        return new

    def _run_block(self, block: nn.Module, *arguments: Any, **named: Any) -> Any:
        own: _Forward = type(block).forward
        if self.why_not is not None and block not in self._ran:
            # It would fail like the previous one, after a long time.
            self._refused.add(block)
        if block in self._refused:
            return own(block, *arguments, **named)
        self._settings.apply(self._device)
        try:
            found = self._compile(own)(block, *arguments, **named)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            self._refuse(block, error)
            return own(block, *arguments, **named)
        self._ran.add(block)
        return found

    def _compile(self, forward: _Forward) -> _Forward:
        if forward not in self._compiled:
            self._compiled[forward] = torch.compile(forward, dynamic=True)
        return self._compiled[forward]

    def _refuse(self, block: nn.Module, error: Exception) -> None:
        """Stop compiling this block. Those that have run compiled stay compiled, because a block's
        recomputation in the backward pass must match its forward pass."""
        self._refused.add(block)
        if self.why_not is None:
            self._log_refusal(type(block).__name__, _describe_failure(error))

    def _log_refusal(self, what: str, reason: str) -> None:
        self.why_not = reason
        _log.warning(
            "learner.rank.compile: %s runs uncompiled, because torch cannot compile it: %s",
            what,
            reason,
        )


class _ThreadSettings(threading.local):
    """Settings of torch's compiler, which are thread-local.

    A GPU's backward pass, which may recompute blocks, runs in another thread."""

    applied = False

    def apply(self, device: torch.device) -> None:
        """Apply them to the calling thread, once."""
        if self.applied:
            return
        self.applied = True
        compiler = _import_compiler()
        dynamo_settings.recompile_limit = _MOST_VARIANTS
        # By default torch continues uncompiled, with an easily missed message.
        dynamo_settings.fail_on_recompile_limit_hit = True
        # Makes an uncompilable backward pass fail with its forward pass, which can recover.
        autograd_settings.force_non_lazy_backward_lowering = True
        if device.type == "cpu":
            # Its other processes would wait for work that only GPUs have.
            compiler.compile_threads = 1
            # They would be in a folder of /tmp with a predictable name.
            compiler.cpp_cache_precompile_headers = False


def default_cache() -> Path:
    """Return the folder of compiled code for when the environment names none.

    It belongs to the user, because its content is executed."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "flotilla" / "compiled"


def _import_compiler() -> Any:
    """Import torch's compiler, which takes seconds; return its settings."""
    with warnings.catch_warnings():
        # Parts of torch that torch itself calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._inductor.compile_fx")
    return importlib.import_module("torch._inductor.config")


def _describe_failure(error: Exception) -> str:
    """Return the error in one line, without torch's advice on debugging."""
    first = str(error).partition("\n\n")[0]
    text = " ".join(first.split()) or type(error).__name__
    return text[:_LONGEST_REASON]
