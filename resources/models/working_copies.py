"""Mixed precision on one rank: float32 masters, and copies of them in the arithmetic's dtype while passes run.

FSDP2 does the same when it gathers, but through a flat buffer, a collective among one rank and a reduction that divides
by 1 (docs/benchmarks.md).
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn


class WorkingCopies:
    """Stands copies of `module`'s parameters in their places from a forward pass until `put_back`.

    Gradients of the copies are added up in float32 on the masters, as each of them is ready, so that no two whole sets
    of gradients exist. Parameters that are one tensor under two names stay one.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._places = [(part, name) for part in module.modules() for name in part._parameters]
        self._masters: list[tuple[nn.Module, str, nn.Parameter]] = []
        """What stands elsewhere while its copy is in use."""
        module.register_forward_pre_hook(self._take_up)

    def _take_up(self, *_: Any) -> None:
        if self._masters:
            return
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for part, name in self._places:
            master = part._parameters[name]
            if master is None or not master.is_floating_point():
                continue
            if master not in copies:
                copies[master] = self._copy(master)
            part._parameters[name] = copies[master]
            self._masters.append((part, name, master))

    def _copy(self, master: nn.Parameter) -> nn.Parameter:
        copy = nn.Parameter(master.detach().to(self._dtype), requires_grad=master.requires_grad)
        if copy.requires_grad:
            owner = weakref.ref(master)  # A cycle would keep both until a garbage collection.
            copy.register_post_accumulate_grad_hook(lambda used: _hand_over(used, owner()))
        return copy

    def put_back(self) -> None:
        """The masters in their places again, the copies gone. Nothing to do where no pass has run."""
        for part, name, master in self._masters:
            part._parameters[name] = master
        self._masters.clear()


def _hand_over(copy: Tensor, master: nn.Parameter | None) -> None:
    assert master is not None, "the module goes before its copies"
    assert copy.grad is not None
    gradient = copy.grad.to(master.dtype)
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    copy.grad = None
