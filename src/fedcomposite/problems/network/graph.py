"""A module as a graph of operations, and which entries of its tensors belong to which unit.

What :func:`fedcomposite.prune` cuts out is decided on it, and which weights become zero together where whole filters
are to (:class:`fedcomposite.regularizers.UnitTarget`).
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, fx, nn

from fedcomposite._faults import first_line
from fedcomposite.problems.base import Slot
from fedcomposite.problems.network.units import CONTRACTIONS, ELEMENTWISE, TRANSPOSED, VIEWS, Labels, Units, operation
from fedcomposite.regularizers.connected import Connected, Piece

SAMPLES = 2  # in a graph; one would be taken for an axis that is repeated


class UntraceableError(ValueError):
    """A module whose operations cannot be listed ahead."""


class ModuleGraph:
    """The graph of a module, with its tensors by name."""

    def __init__(self, module: nn.Module, example: Tensor) -> None:
        inputs = example[torch.arange(SAMPLES) % len(example)].detach().cpu()
        try:
            self.module = copy.deepcopy(module).cpu().eval().requires_grad_(False)
            with torch.no_grad():  # what the module does under it would be an operation without a rule otherwise
                program = torch.export.export(self.module, (inputs,))
        except Exception as error:
            raise UntraceableError(f"the module's operations cannot be listed ahead: {first_line(error)}") from error
        self.graph = program.graph
        for node in self.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            if schema is not None and schema.is_mutable and operation(node) not in ELEMENTWISE:
                raise UntraceableError(
                    f"the module writes into a tensor in place ({schema.name}), which cannot be followed"
                )
        signature = program.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        placeholders = {n.name: n for n in self.graph.nodes if n.op == "placeholder"}
        self.names = {placeholders[key]: str(name) for key, name in names.items()}
        state = self.module.state_dict(keep_vars=True)
        self.state = {k: v for k, v in state.items() if not k.endswith("_extra_state")}  # a module's own, of any type
        tensors = {**dict(self.module.named_buffers(remove_duplicate=False)), **self.state}
        self.tensors = {node: tensors[name] for node, name in self.names.items()}
        fixed = signature.inputs_to_lifted_tensor_constants
        self.given = {**self.tensors, **{placeholders[k]: program.constants[v] for k, v in fixed.items()}}

    def owner(self, node: fx.Node) -> nn.Module | None:
        """The layer whose ``weight`` a node is."""
        path, _, last = self.names.get(node, "").rpartition(".")
        return self.module.get_submodule(path) if last == "weight" else None

    def called(self, weight: fx.Node) -> str:
        """The name of the layer with this weight."""
        name = self.names.get(weight, weight.name)
        return name.removesuffix(".weight") if name != "weight" else "(the module)"

    def calls(self, node: fx.Node, weight: fx.Node) -> bool:
        """Whether an operation with a layer's weight is the layer's own, and not one of another module's code."""
        stack = list(node.meta.get("nn_module_stack", {}).values())
        return bool(stack) and stack[-1][0] == self.names[weight].rpartition(".")[0]

    def once(self, node: fx.Node) -> bool:
        """Whether a parameter is read by one operation only, under one name."""
        names = [n for n, tensor in self.state.items() if tensor is self.tensors.get(node)]
        return len(names) == 1 and len(node.users) == 1

    def weighed(self) -> Iterable[tuple[fx.Node, fx.Node, int]]:
        """Every linear layer and convolution: its node, its weight's, and how often a sample uses each weight."""
        for node in self.graph.nodes:
            weight = node.args[1] if operation(node) in CONTRACTIONS else None
            if isinstance(weight, fx.Node) and weight in self.tensors:
                turned = operation(node) in TRANSPOSED  # its weight's first axis is that of the inputs
                seen = node.args[0] if turned else node
                yield node, weight, seen.meta["val"].numel() // (SAMPLES * len(self.tensors[weight]))

    def units(self, fixed: bool = False) -> Units:
        """Labels of all tensors; see :class:`Units` for ``fixed``."""
        units = Units(lambda weight: isinstance(self.owner(weight), nn.modules.conv._ConvNd), fixed)
        shared: dict[int, list[Labels]] = {}
        for node in self.graph.nodes:
            if node in self.tensors:
                tensor = self.tensors[node]
                axes = shared.setdefault(id(tensor), [units.fresh(n) for n in tensor.shape])
                units.axes[node] = axes
                if self.names[node] not in self.state:
                    units.pin(axes, "it belongs to a buffer that is not saved")
            elif node.op == "placeholder":
                value = node.meta.get("val")
                units.axes[node] = [np.zeros(n, dtype=np.int64) for n in getattr(value, "shape", ())]
            elif node.op == "call_function":
                units.visit(node)
            elif node.op == "output":
                for argument in node.all_input_nodes:
                    units.pin(units.axes[argument], "it is an output of the network")
        return units


def connected(module: nn.Module, example: Tensor, layout: Sequence[Slot]) -> Connected:
    """The units of a module whose parameters lie in a vector as ``layout`` says; names may have a prefix in the graph.

    A unit is one that nothing pins and that some layer reads: what :func:`fedcomposite.prune` can cut out.
    """
    graph = ModuleGraph(module, example)
    units, uses = graph.units(), Counter[int]()
    for _, weight, each in graph.weighed():
        uses[id(graph.tensors[weight])] += each
    read = [int(u) for c in units.contractions for u in units.roots(units.axes[c.weight][c.reads])]
    free = dict.fromkeys(unit for unit in read if units.pinned(unit) is None)
    number = {unit: i for i, unit in enumerate(free)}
    known = {id(graph.tensors[node]): units.axes[node] for node in graph.tensors}
    parameters = dict(graph.module.named_parameters())
    pieces = []
    for name, start, stop, shape in layout:
        tensor = next(p for k, p in parameters.items() if k.removeprefix("module.") == name)
        if len(shape) > 1 and id(tensor) in known:
            labels = [units.roots(axis) for axis in known[id(tensor)][:2]]
            rows, columns = (tuple(number.get(int(unit), -1) for unit in axis) for axis in labels)
            if max(*rows, *columns) >= 0:
                size = (shape[0], shape[1], math.prod(shape[2:]))
                pieces.append(Piece(start, stop, size, rows, columns, uses[id(tensor)]))
    moved = np.zeros(len(number))
    for node in graph.graph.nodes:
        if node.op == "call_function" and operation(node) not in VIEWS and isinstance(node.meta.get("val"), Tensor):
            for axis in units.axes[node]:
                each = node.meta["val"].numel() / (SAMPLES * max(1, len(axis)))
                for unit in units.roots(axis):
                    if int(unit) in number:
                        moved[number[int(unit)]] += each
    if not pieces:
        raise UntraceableError("no filter or neuron of the module can go: none is read by a layer alone")
    return Connected(tuple(pieces), tuple(moved.tolist()), layout[-1].stop)
