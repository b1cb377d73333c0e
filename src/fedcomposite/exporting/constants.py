"""What a network computes whatever its input is: every value of its graph, with NaN where it depends on the input.

A filter of zeros gives its bias, batch norm and an activation make another constant of it, a padded convolution of a
constant is a constant map that differs at the border. All of these come out as numbers here, because the operations
themselves are carried out; only products need care, since NaN times 0 is 0 here: also where a batch norm has no gain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fedcomposite.problems.network.units import CONTRACTIONS, ELEMENTWISE, KNOWN, operation, pool, pooled

Known = Tensor | None  # None: integers or anything else that depends on the input and cannot be NaN


def constants(graph: fx.Graph, given: dict[fx.Node, Tensor]) -> dict[fx.Node, Any]:
    """Values of all nodes, of which parameters and buffers are ``given``."""
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node in given:
            values[node] = given[node].detach().clone()  # an operation may write into it
        elif node.op == "call_function" and all(values[a] is not None for a in node.all_input_nodes):
            values[node] = _carry_out(node, values)
        else:
            values[node] = _anything(node)
    return values


def _anything(node: fx.Node) -> Known:
    """A value that depends on the input in every entry."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    strides: tuple[int, ...] = value.stride()  # in memory as it is there: views depend on it
    order = sorted(range(value.ndim), key=lambda i: -strides[i])
    made = torch.full([value.shape[i] for i in order], torch.nan, dtype=value.dtype)
    return made.permute([order.index(i) for i in range(value.ndim)])


def _carry_out(node: fx.Node, values: dict[fx.Node, Any]) -> Known:
    name, target = operation(node), node.target
    assert callable(target)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: values[a])
    tensors = [values[a] for a in node.all_input_nodes]
    if pooled(node) and node.args[1] == 0:
        maxima: Known = tensors[0]
        return maxima
    if not all(isinstance(t, Tensor) for t in tensors) or not (name in KNOWN or pool(name)):
        return _anything(node)
    if name in CONTRACTIONS and len(args) >= 2:
        return _contract(target, args, kwargs)
    some = any(bool(t.isnan().any()) for t in tensors)
    if name == "batch_norm":
        args = _scaled(args)
    out: Tensor = target(*args, **kwargs)
    if isinstance(out, tuple):  # a maximum with its places
        out = out[0]
    if some and not out.is_floating_point():
        return None
    if some and name in ELEMENTWISE:
        unknown = torch.zeros((), dtype=torch.bool)
        for tensor in tensors:
            unknown = unknown | tensor.isnan()
        if name == "mul" and len(tensors) == 2:
            unknown = unknown & (tensors[0] != 0) & (tensors[1] != 0)
            out.masked_fill_(~unknown & out.isnan(), 0)
        out.masked_fill_(unknown.expand_as(out), torch.nan)
    return out


def _scaled(args: Any) -> Any:
    """The arguments of a batch norm, whose unknown channels count only where their gain is not zero."""
    x, gain, *rest = args
    if gain is not None:
        x = x.masked_fill((gain == 0).view(-1, *[1] * (x.ndim - 2)) & x.isnan(), 0)
    return (x, gain, *rest)


def _contract(target: Any, args: Any, kwargs: Any) -> Tensor:
    """Sums in which an unknown entry counts only where its weight is not zero."""
    x, weight, *rest = args
    out: Tensor = target(x.nan_to_num(0), weight, *rest, **kwargs)
    without = [None, *rest[1:]] if rest else []
    kwargs = {k: v for k, v in kwargs.items() if k != "bias"}
    reached: Tensor = target(x.isnan().to(x.dtype), (weight != 0).to(weight.dtype), *without, **kwargs)
    return out.masked_fill(reached > 0, torch.nan)
