"""Stacked vectors as a GPU's libraries take them: every tensor at an aligned address, images' weights channels last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedcomposite.problems.base import Slot

_UNIT = 64  # numbers between addresses that are aligned in every dtype


class Aligned:
    """Tensors that lie one after another in a vector, moved to places of their own, for many clients at once.

    A kernel takes about two microseconds to start, whatever it copies: tensors whose numbers keep their order are
    copied together, and weights that change theirs in one kernel for all clients.
    """

    def __init__(self, slots: Sequence[Slot], *, channels_last: bool) -> None:
        self._slots, self._last = tuple(slots), channels_last
        self._at = [0]
        for slot in slots:
            self._at.append(self._at[-1] + -(-(slot.stop - slot.start) // _UNIT) * _UNIT)

    def spread(self, x: Tensor) -> Tensor:
        """The tensors of all rows of ``x`` ``(m, d)`` at their new places, ``(m, w)``."""
        wide = x.new_empty(len(x), self._at[-1])
        to: list[Tensor] = []
        given: list[Tensor] = []
        for slot, at in zip(self._slots, self._at[:-1], strict=True):
            old, new = x[:, slot.start : slot.stop], wide[:, at : at + slot.stop - slot.start]
            if self._last and _moves(slot.shape):
                _as(new, slot.shape, last=True).copy_(_as(old, slot.shape, last=False))
            else:
                to += new.unbind()
                given += old.unbind()
        if to:
            torch._foreach_copy_(to, given)
        return wide

    def tensors(self, wide: Tensor) -> dict[str, Tensor]:
        """The tensors in one row of :meth:`spread`, by name: to autograd they have nothing to do with each other."""
        return {
            slot.name: _as(
                wide[None, at : at + slot.stop - slot.start], slot.shape, last=self._last and len(slot.shape) == 4
            )[0].data
            for slot, at in zip(self._slots, self._at[:-1], strict=True)
        }

    def gather(self, tensors: Iterable[Tensor], out: Tensor) -> None:
        """Write tensors of these shapes to their old places in the vector ``out``."""
        to, given = [], []
        for slot, tensor in zip(self._slots, tensors, strict=True):
            place = out[slot.start : slot.stop].view(slot.shape)
            if tensor.is_contiguous():
                to.append(place)
                given.append(tensor.view(slot.shape))
            else:
                place.copy_(tensor)
        if to:
            torch._foreach_copy_(to, given)


def _moves(shape: tuple[int, ...]) -> bool:
    """Whether channels last changes the order of the numbers."""
    return len(shape) == 4 and shape[1] > 1 and shape[2] * shape[3] > 1


def _as(rows: Tensor, shape: tuple[int, ...], *, last: bool) -> Tensor:
    """Rows ``(m, size)`` as ``(m, *shape)``."""
    if not last:
        return rows.view(len(rows), *shape)
    o, i, h, w = shape
    return rows.view(len(rows), o, h, w, i).permute(0, 1, 4, 2, 3)
