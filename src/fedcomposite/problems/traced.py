"""A function of tensors as the list of operations it consists of: without modules, autograd and vmap, whose bookkeeping
takes longer than small operations do.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import fx


def trace(function: Callable[..., Any], *examples: torch.Tensor) -> Callable[..., Any]:
    """The same function for tensors of the examples' shapes.

    Tensors that it takes from elsewhere are kept by reference. Nothing in it may depend on the values of tensors (which
    is refused) or on other things that change from call to call (which are frozen).
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second, which short runs need not wait for

    with torch.enable_grad():
        module = make_fx(lambda *tensors: function(*tensors))(*examples)
    _simplify(module.graph)
    module.recompile()
    run: Callable[..., Any] = module.forward
    return run


def trace_if_possible(function: Callable[..., Any], *examples: torch.Tensor) -> Callable[..., Any]:
    """The list of a function's operations; itself, where a module does what cannot be listed."""
    try:
        return trace(function, *examples)
    except Exception:
        return function


def _simplify(graph: fx.Graph) -> None:
    """Compute what is computed twice once, and leave out what nobody reads; not where something is written in place."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if any(not _pure(node.target) for node in calls):
        return
    seen: dict[Any, fx.Node] = {}
    for node in [node for node in graph.nodes if node.op in ("call_function", "get_attr")]:
        first = seen.setdefault((node.target, _frozen(node.args), _frozen(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _pure(target: Any) -> bool:
    if target is operator.getitem:
        return True
    random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return hasattr(target, "_schema") and not target._schema.is_mutable and not random


def _frozen(value: Any) -> Any:
    """Arguments as something that can be looked up; numbers with their type, since 0 and 0.0 and False are equal."""
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(_frozen(v) for v in value)
    return (type(value), value)
