"""Structural pruning: a network without its dead filters and neurons, its layers smaller, its outputs the same.

A unit (see :mod:`fedcomposite.problems.network.units`) goes if every layer that reads it can do without: because its
weights for it are zero, because it is always zero there, or because it is always the same number, which is then added
to the layer's bias. The last is exact only without padding, at whose border that number would be missing. A layer that
has lost its readers frees what only it reads, and so on. The module's own code stays as it is; only tensors become
smaller.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor, nn

from fedcomposite._faults import first_line
from fedcomposite.exporting.errors import ExportError, full_precision, rounding
from fedcomposite.exporting.planning import Kept, Layer, PruningPlan, State, ValuedGraph
from fedcomposite.results import Result
from fedcomposite.runtime.history import DeadNetworkWarning


@dataclass(frozen=True, repr=False)
class Pruned(Result):
    """A smaller module, and what became of the layers of the one that it was made from."""

    module: nn.Module
    """A copy, in evaluation mode."""
    layers: tuple[Layer, ...]
    kept: tuple[Kept, ...]
    parameters: int
    """Numbers in all parameters, before."""
    pruned_parameters: int
    difference: float
    """Largest difference of the two modules' outputs on random inputs."""

    @property
    def flops(self) -> int:
        """Of all layers, for one sample, before."""
        return sum(layer.flops for layer in self.layers)

    @property
    def pruned_flops(self) -> int:
        """Of all layers, for one sample, after."""
        return sum(layer.pruned_flops for layer in self.layers)

    def table(self) -> pd.DataFrame:
        """A row per layer."""
        rows = [
            {
                "layer": layer.name,
                "weight": "x".join(map(str, layer.shape)),
                "pruned": "x".join(map(str, layer.pruned)),
                "flops": layer.flops,
                "pruned flops": layer.pruned_flops,
                "kept though dead": "; ".join(f"{k.count}: {k.reason}" for k in self.kept if k.layer == layer.name),
            }
            for layer in self.layers
        ]
        return pd.DataFrame(rows)

    def to_frame(self) -> pd.DataFrame:
        return self.table()

    def __str__(self) -> str:
        return self._line()

    def _line(self) -> str:
        return (
            f"{self.parameters} -> {self.pruned_parameters} parameters, {self.flops} -> {self.pruned_flops} flops per "
            f"sample, outputs differ by at most {self.difference:.2g}"
        )


@full_precision()  # numbers that are folded into biases, and the comparison
def prune(module: nn.Module, example: Tensor, *, multiple: int = 1) -> Pruned:
    """Remove dead filters and neurons of a module; its outputs in evaluation mode stay the same up to rounding.

    This holds for batches of any length whose samples are as large as the example's: what is constant in an image of
    one size (a mean over a map that padding changes at its border, say) can be another number in one of another size.

    Parameters
    ----------
    module : nn.Module
        Anything that :func:`torch.export.export` can follow; it is not changed.
    example : Tensor
        A batch of inputs. Outputs are compared on it, and on random inputs of its shape and spread.
    multiple : int
        As many dead units stay as make the sizes of layers multiples of this number. A GPU's tensor cores take sizes in
        steps of eight (in half precision), and other sizes can be slower than the whole network.

    Returns
    -------
    Pruned
        The smaller module, its layers before and after, and which dead units were kept and why.

    Raises
    ------
    ExportError
        If the module cannot be followed (its operations depend on the values of its input, say), or if outputs differ.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> module = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 2))
    >>> with torch.no_grad():
    ...     _ = module[0].weight[1:4].zero_()
    >>> print(prune(module, torch.randn(4, 8)).module)
    Sequential(
      (0): Linear(in_features=8, out_features=2, bias=True)
      (1): ReLU()
      (2): Linear(in_features=2, out_features=2, bias=True)
    )
    """
    if not isinstance(module, nn.Module):
        raise ExportError(f"pruning needs a module, and this is a {type(module).__name__}")
    if not isinstance(example, Tensor) or example.ndim < 1 or len(example) < 1:
        raise ExportError("pruning needs an example: a tensor with a batch of inputs")
    if type(multiple) is not int or multiple < 1:
        raise ExportError(f"multiple = {multiple!r}, must be a whole number of at least 1")
    batches = _batches(module, example)
    if all(len(wanted) > 1 and bool((wanted == wanted[:1]).all()) for _, wanted in batches):
        warnings.warn("the network is dead: its outputs are the same for all samples", DeadNetworkWarning, stacklevel=3)
    network = ValuedGraph(module, example)
    failed = ""
    for fixed in (False, True):  # the second time without a change of sizes that may be written down in the module
        plan = PruningPlan(network, fixed, multiple)
        pruned = fit(module, plan.state())
        try:
            difference = max(_difference(pruned, inputs, wanted) for inputs, wanted in batches)
        except Exception as error:  # of the module's own code
            failed = first_line(error)
            continue
        before, after = (sum(p.numel() for p in m.parameters()) for m in (module, pruned))
        return Pruned(pruned, plan.layers(), plan.kept(), before, after, difference)
    raise ExportError(f"the module does not work with smaller layers ({failed})")


def fit(module: nn.Module, state: State) -> nn.Module:
    """A copy of a module, in evaluation mode, with the tensors of ``state``, whose sizes may be smaller.

    Examples
    --------
    >>> from torch import nn
    >>> fit(nn.Linear(4, 3), {"weight": torch.ones(2, 4), "bias": torch.zeros(2)})
    Linear(in_features=4, out_features=2, bias=True)
    """
    made = copy.deepcopy(module).eval()
    known = made.state_dict(keep_vars=True)
    replaced: dict[int, nn.Parameter] = {}  # shared parameters stay shared
    for name, tensor in state.items():
        path, _, last = name.rpartition(".")
        if last == "_extra_state":  # the copy has its own
            continue
        try:
            owner = made.get_submodule(path)
        except AttributeError:
            raise ExportError(f"the module has no {path!r}, which the tensors of the pruned one name") from None
        old, like = known.get(name), next(iter(owner.parameters()), None)
        place = (old if old is not None else like if like is not None else tensor).device
        tensor = tensor.detach().to(place)
        if last in owner._buffers:
            owner._buffers[last] = tensor.clone()
        else:
            grad = old is None or old.requires_grad
            owner.register_parameter(last, replaced.setdefault(id(old), nn.Parameter(tensor.clone(), grad)))
            if old is None:
                del replaced[id(old)]
        _resized(owner)
    return made


def _resized(module: nn.Module) -> None:
    """Tell a layer the size of its tensors."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.modules.conv._ConvNd) and not module.transposed:
        if module.groups > 1:
            module.groups = module.weight.shape[0] * module.groups // module.out_channels
        module.out_channels, module.in_channels = module.weight.shape[0], module.weight.shape[1] * module.groups
    elif isinstance(module, nn.modules.conv._ConvNd) and module.groups == 1:
        module.in_channels, module.out_channels = module.weight.shape[:2]
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        size = weight if weight is not None else module.running_mean
        module.num_features = module.num_features if size is None else len(size)


def _batches(module: nn.Module, example: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The example and random inputs, each with the module's outputs."""
    if any(t.is_meta for t in (example, *module.parameters(), *module.buffers())):
        raise ExportError("the module or the example is on the device 'meta', which has no numbers")
    generator = torch.Generator(example.device).manual_seed(0)
    if example.is_floating_point():
        size = float(example.std()) if example.numel() > 1 else 1.0
        drawn = torch.randn(example.shape, generator=generator, dtype=example.dtype, device=example.device)
        drawn = drawn * (size or 1.0) + example.mean()
    else:
        drawn = example[torch.randperm(len(example), generator=generator, device=example.device)]
    try:
        original = copy.deepcopy(module).eval()
        with torch.no_grad():
            made = [(inputs, original(inputs)) for inputs in (example, drawn)]
    except Exception as error:
        raise ExportError(f"the module cannot be copied and called with the example: {first_line(error)}") from error
    outputs = made[0][1]
    if not isinstance(outputs, Tensor):
        raise ExportError(f"the module gives a {type(outputs).__name__}, not a tensor")
    if not outputs.is_floating_point():
        raise ExportError(f"the module gives {outputs.dtype}, and outputs are compared as floating-point numbers")
    if not bool(outputs.isfinite().any()):
        raise ExportError("none of the module's outputs for the example is a finite number")
    return made


def _difference(pruned: nn.Module, inputs: Tensor, wanted: Tensor) -> float:
    """The largest difference of outputs; refuse what rounding does not explain. NaN and infinity must be the same."""
    with torch.no_grad():
        found = pruned(inputs)
    if found.shape != wanted.shape:
        raise ValueError(f"outputs of shape {tuple(found.shape)}, not {tuple(wanted.shape)}")
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    difference, allowed = float((found - wanted).masked_fill(same, 0).abs().max()), rounding(wanted.nan_to_num(0, 0, 0))
    if not difference <= allowed:
        raise ExportError(f"outputs would differ by {difference:.2e}, of which rounding explains {allowed:.1e}")
    return difference
