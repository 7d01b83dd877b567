"""Mixed precision on one rank: float32 masters, and copies of them in the arithmetic's dtype while passes run.

FSDP2 does the same when it gathers, but through a flat buffer, a collective among one rank and a reduction that divides
by 1 (docs/benchmarks.md).
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

_Seen = tuple[int, int]
"""Where a master's bytes lie, and how often they were written in place: a copy of the same is as new as its master."""


class WorkingCopies:
    """Stands copies of `module`'s parameters in their places from a forward pass until `put_back`.

    Gradients of the copies are added up in float32 on the masters, as each of them is ready, so that no two whole sets
    of gradients exist. Parameters that are one tensor under two names stay one.

    With `keeps` the copies outlive `put_back`, and those whose masters have not changed are used again: the weights
    that go to the engines, the pass that checks them there, and the next update are casts of the same numbers.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, *, keeps: bool = False) -> None:
        self.dtype = dtype
        self._keeps = keeps
        self._places = [(part, name) for part in module.modules() for name in part._parameters]
        self._masters: list[tuple[nn.Module, str, nn.Parameter]] = []
        """What stands elsewhere while its copy is in use."""
        self._copies: dict[nn.Parameter, tuple[_Seen, nn.Parameter]] = {}
        module.register_forward_pre_hook(self._take_up)

    def _take_up(self, *_: Any) -> None:
        if self._masters:
            return
        for part, name in self._places:
            master = part._parameters[name]
            if _is_cast(master):
                part._parameters[name] = self._copy_of(master)
                self._masters.append((part, name, master))

    def in_place_of(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """`named`, each master given by the copy that is kept of it: read it, never write."""
        kept = self._places if self._keeps and not self._masters else []
        masters = {one.data_ptr(): one for part, name in kept if _is_cast(one := part._parameters[name])}
        for name, tensor in named:
            own = masters.get(tensor.data_ptr())
            if own is not None and (own.shape, own.dtype) == (tensor.shape, tensor.dtype):
                yield name, self._copy_of(own).detach()
            else:
                yield name, tensor

    def _copy_of(self, master: nn.Parameter) -> nn.Parameter:
        seen = (master.data_ptr(), master._version)
        known = self._copies.get(master)
        if known is not None and known[0] == seen:
            return known[1]
        copy = nn.Parameter(master.detach().to(self.dtype), requires_grad=master.requires_grad)
        if copy.requires_grad:
            owner = weakref.ref(master)  # A cycle would keep both until a garbage collection.
            copy.register_post_accumulate_grad_hook(lambda used: _hand_over(used, owner()))
        self._copies[master] = (seen, copy)
        return copy

    def put_back(self) -> None:
        """The masters in their places again, the copies gone unless kept. Nothing to do where no pass has run."""
        for part, name, master in self._masters:
            part._parameters[name] = master
        self._masters.clear()
        if not self._keeps:
            self._copies.clear()

    def drop(self) -> None:
        """`put_back`, and free what is kept: the masters are about to change."""
        self.put_back()
        self._copies.clear()


def _is_cast(parameter: nn.Parameter | None) -> TypeGuard[nn.Parameter]:
    return parameter is not None and parameter.is_floating_point()


def _hand_over(copy: Tensor, master: nn.Parameter | None) -> None:
    assert master is not None, "the module goes before its copies"
    assert copy.grad is not None
    gradient = copy.grad.to(master.dtype)
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    copy.grad = None
