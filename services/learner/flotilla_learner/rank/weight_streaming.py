"""Substitute weights that a model computes with in place of its own, one decoder block at a time.

The device never holds a second copy of the model: a block's substitutes arrive when it is computed,
and are freed after it. The model's own weights are not overwritten, so they need no copy."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.sharding import decoder_blocks
from flotilla_learner.rank.text_part import find_tower

# Maps (canonical name, the model's own tensor) to the tensor to compute with.
TensorChoice = Callable[[str, Tensor], Tensor]


class _Exchange:
    """Tensors of a module, and their own content while substitutes are in place."""

    def __init__(self, tensors: dict[str, Tensor], choose: TensorChoice) -> None:
        self._tensors = tensors
        self._choose = choose
        self._own: dict[str, Tensor] = {}

    def put_others(self, *_: object) -> None:
        self._own = {name: tensor.data for name, tensor in self._tensors.items()}
        for name, tensor in self._tensors.items():
            tensor.data = self._choose(name, self._own[name])

    def restore_own(self, *_: object) -> None:
        for name, data in self._own.items():
            self._tensors[name].data = data
        self._own = {}


@contextmanager
def streamed_weights(policy: Policy, choose: TensorChoice) -> Generator[None]:
    """Have the policy compute with what `choose` returns while the block runs, without gradients.

    It is called again at every pass. The head's substitutes stay all the time."""
    head: Any = policy.model.get_output_embeddings()
    named = [*policy.named_parameters().items(), *policy.model.named_buffers()]
    left = {id(tensor): name for name, tensor in named}
    lasting = {left.pop(id(head.weight)): head.weight}
    with ExitStack() as stack:
        for unit, tensors in _computed_units(policy.model):
            exchange = _Exchange({left[id(t)]: t for t in tensors if id(t) in left}, choose)
            # Before the hooks of others, and even if one of them fails.
            enter = unit.register_forward_pre_hook(exchange.put_others, prepend=True)
            leave = unit.register_forward_hook(exchange.restore_own, always_call=True)
            for handle in (enter, leave):
                stack.callback(handle.remove)
        exchange = _Exchange(lasting, choose)
        stack.callback(exchange.restore_own)
        exchange.put_others()
        yield


def _computed_units(model: Any) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Yield decoder blocks and a tower with their tensors, and surrounding modules with their
    own."""
    tower = find_tower(model)
    blocks = [*decoder_blocks(model), *([] if tower is None else [tower])]
    inner = {id(module) for block in blocks for module in block.modules()}
    for block in blocks:
        yield block, [*block.parameters(), *block.buffers()]
    for module in model.base_model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and id(module) not in inner:
            yield module, own
