"""Decoder blocks that torch compiles, one graph or a few for all blocks of a class.

What is compiled is a block's `forward` alone. Hooks around it stay as they are, such as those that
gather the parameters of a split model, and so do the names of parameters, and what computes a block
again in the backward pass. Attention is not compiled, nor are routers that follow an engine's
(`torch.compiler.disable`): they have other Python values in each pass, and torch compiles anew for
each. A block that cannot be compiled computes as it would without, and it is said why."""

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

from services.learner.rank.sharding import decoder_blocks

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_SWITCHES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
# Variants of one piece of code: with and without gradients, of policy, reference and critic, of
# one token and of many, of each kind of layer. Torch's own limit is 8.
_MOST_VARIANTS = 64
_LONGEST_REASON = 300
_Forward = Callable[..., Any]
# The rank's log is what its process prints.
_log = logging.getLogger(__name__)


class CompiledBlocks:
    """The decoder blocks of a rank's models, each compiled as it first computes something.

    A copy of a model has the blocks of the copy compiled, too."""

    def __init__(self, device: torch.device) -> None:
        """Make ready to compile for a device."""
        self._device = device
        self._compiled: dict[_Forward, _Forward] = {}
        self._ran: WeakSet[nn.Module] = WeakSet()
        self._refused: WeakSet[nn.Module] = WeakSet()
        self._settings = _ThreadSettings()
        self._counted: int = counters["stats"]["unique_graphs"]
        self.why_not: str | None = None
        os.environ.setdefault(CACHE_VARIABLE, str(default_cache()))
        _import_compiler()
        # Torch then compiles nothing, and says nothing.
        if switches := [name for name in _SWITCHES if os.environ.get(name) == "1"]:
            self._say_why_not("every block", f"{switches[0]} is 1")

    def add_model(self, model: nn.Module) -> None:
        """Have the model's decoder blocks compiled. Raises ValueError where it has none."""
        blocks = decoder_blocks(model)
        if not blocks:
            raise ValueError(f"{type(model).__name__} names no decoder blocks")
        for block in blocks:
            block.forward = MethodType(self._run_block, block)

    @property
    def uncompiled(self) -> int:
        """The number of blocks that compute uncompiled, for they could not be compiled."""
        return len(self._refused)

    def take_graph_count(self) -> int:
        """Return how many graphs this process has compiled since this was last asked."""
        total = counters["stats"]["unique_graphs"]
        new, self._counted = total - self._counted, total
        return new

    def _run_block(self, block: nn.Module, *arguments: Any, **named: Any) -> Any:
        own: _Forward = type(block).forward
        if self.why_not is not None and block not in self._ran:
            # It would fail as the one before has, and take long to.
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
        """Give up this block. Those that have computed compiled stay so: where the backward pass
        computes a block again, it must as the forward pass did."""
        self._refused.add(block)
        if self.why_not is None:
            self._say_why_not(type(block).__name__, _describe_failure(error))

    def _say_why_not(self, what: str, reason: str) -> None:
        self.why_not = reason
        _log.warning(
            "learner.rank.compile: %s computes uncompiled, for torch cannot compile it: %s",
            what,
            reason,
        )


class _ThreadSettings(threading.local):
    """Torch's settings of its compiler, which each thread has its own of.

    A GPU's backward pass, which may compute blocks again, runs in another."""

    applied = False

    def apply(self, device: torch.device) -> None:
        """Apply them to the thread that calls, once."""
        if self.applied:
            return
        self.applied = True
        compiler = _import_compiler()
        dynamo_settings.recompile_limit = _MOST_VARIANTS
        # It would else go on uncompiled, and say so where nobody looks.
        dynamo_settings.fail_on_recompile_limit_hit = True
        # A backward pass that cannot be compiled fails with its forward pass, which has a way out.
        autograd_settings.force_non_lazy_backward_lowering = True
        if device.type == "cpu":
            # Its other processes would wait for work that only GPUs have.
            compiler.compile_threads = 1
            # They would lie in a folder of /tmp whose name anybody can tell.
            compiler.cpp_cache_precompile_headers = False


def default_cache() -> Path:
    """Return the folder of compiled code, where the environment names none.

    It is the user's own: what lies there is run."""
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
    """Return the error without torch's advice on debugging, in one line."""
    first = str(error).partition("\n\n")[0]
    said = " ".join(first.split()) or type(error).__name__
    return said[:_LONGEST_REASON]
