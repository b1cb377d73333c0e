"""Linear layers that compute with the nonzeros of their weights only: CSR on a CPU, the 2:4 pattern on a GPU."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Literal

import pandas as pd
import torch
from torch import Tensor, nn

from fedcomposite._validation import Probability, refuse, suggest, wrong_arguments
from fedcomposite.exporting.errors import ExportError
from fedcomposite.results import Result, counted

Kind = Literal["csr", "2:4"]
KINDS = ("csr", "2:4")

_ROWS, _COLUMNS = 32, 64  # multiples that every 2:4 kernel of torch takes in half precision


@dataclass(frozen=True, repr=False)
class Converted(Result):
    """A module with sparse layers, and which those are."""

    module: nn.Module
    """A copy, in evaluation mode."""
    layers: tuple[str, ...]
    """Names of the layers that are sparse now."""
    left: dict[str, str]
    """Linear layers that stayed as they were, and why."""

    def to_frame(self) -> pd.DataFrame:
        """A row per linear layer: whether it is sparse now, and why not."""
        rows = [(name, True, "") for name in self.layers] + [(name, False, why) for name, why in self.left.items()]
        return pd.DataFrame(rows, columns=["layer", "sparse", "reason"])

    def _line(self) -> str:
        return f"{len(self.layers)} of {counted(len(self.layers) + len(self.left), 'linear layer')} sparse"


class CSRLinear(nn.Module):
    """x W' + b, where only the nonzeros of W are kept and multiplied."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight: Tensor
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls CSR a beta
            self.register_buffer("weight", layer.weight.detach().to_sparse_csr())
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The product from the left, which is the one that is fast; samples are columns meanwhile."""
        out = (self.weight @ x.reshape(-1, x.shape[-1]).t()).t().reshape(*x.shape[:-1], self.weight.shape[0])
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        """Sizes, and the share of weights that are kept."""
        rows, columns = self.weight.shape
        kept = self.weight.values().numel() / (rows * columns)
        return f"in_features={columns}, out_features={rows}, bias={self.bias is not None}, density={kept:.3g}"


def sparse_layers(
    module: nn.Module, kind: Kind = "csr", *, density: Probability = 0.05, dtype: torch.dtype = torch.float16
) -> Converted:
    """A copy of a module, for inference, whose linear layers use the zeros of their weights where that pays.

    Parameters
    ----------
    module : nn.Module
        A trained module; it is not changed.
    kind : {"csr", "2:4"}
        ``"csr"``: layers with few nonzeros anywhere, on a CPU. ``"2:4"``: layers with at most two nonzeros in every
        four consecutive weights, as :class:`fedcomposite.regularizers.Sparsity2to4` makes them, by the sparse tensor
        cores of a GPU (:func:`torch.sparse.to_sparse_semi_structured`); the module must be on it already.
    density : float
        CSR pays where at most this share of the weights is not zero.
    dtype : torch.dtype
        To which the module is converted for 2:4, which takes ``float16`` and ``bfloat16``.

    Returns
    -------
    Converted
        The module, the names of its sparse layers, and why others stayed dense.

    Examples
    --------
    >>> from torch import nn
    >>> layer = nn.Linear(100, 20)
    >>> with torch.no_grad():
    ...     _ = layer.weight[:, 3:].zero_()
    >>> sparse_layers(nn.Sequential(layer, nn.ReLU(), nn.Linear(20, 2))).left
    {'2': '100% of its weights are not zero, more than 5%'}
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}{suggest(str(kind), KINDS)} (known: {', '.join(KINDS)})")
    if not isinstance(module, nn.Module):
        raise ValueError(f"sparse layers are those of a module, and this is a {type(module).__name__}")
    refuse(wrong_arguments(sparse_layers, {"density": density}))
    made = copy.deepcopy(module).eval().requires_grad_(False)
    if kind == "2:4":
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype = {dtype}, must be torch.float16 or torch.bfloat16")
        if not all(p.is_cuda for p in made.parameters()):
            raise ExportError("2:4 kernels are a GPU's; move the module to one first (module.cuda())")
        made = made.to(dtype)
    layers: list[str] = []
    left: dict[str, str] = {}
    new: dict[nn.Module, nn.Module] = {}  # a layer may have several names
    fused = {id(m) for t in made.modules() if isinstance(t, nn.TransformerEncoderLayer) for m in t.children()}
    for name, layer in list(made.named_modules(remove_duplicate=False)):
        if not isinstance(layer, nn.Linear):
            continue
        if type(layer) is not nn.Linear:
            left[name] = f"it is a {type(layer).__name__}, which may do more than a linear layer"
        elif id(layer) in fused:
            left[name] = "its TransformerEncoderLayer reads its weights by itself"
        elif layer not in new and (
            reason := _dense(layer.weight, density) if kind == "csr" else unsuited(layer.weight)
        ):
            left[name] = reason
        else:
            layers.append(name)
            if layer not in new:
                new[layer] = CSRLinear(layer) if kind == "csr" else _compressed(layer)
            made = _replace(made, name, new[layer])
    return Converted(made, tuple(layers), left)


def _dense(weight: Tensor, density: float) -> str:
    if weight.is_cuda:
        return "its weights are on a GPU"
    if weight.dtype not in (torch.float32, torch.float64):
        return f"its weights are {weight.dtype}, and products with CSR matrices take float32 and float64"
    share = int((weight != 0).sum()) / weight.numel()
    return f"{share:.0%} of its weights are not zero, more than {density:.0%}" if share > density else ""


def unsuited(weight: Tensor) -> str:
    """Why a weight matrix cannot be run by 2:4 kernels; empty if it can."""
    rows, columns = weight.shape
    if rows % _ROWS or columns % _COLUMNS:
        return f"{rows}x{columns} is not a multiple of {_ROWS}x{_COLUMNS}"
    full = int(((weight.reshape(rows, -1, 4) != 0).sum(2) > 2).sum())
    return f"{full} of {rows * columns // 4} groups of four have more than two nonzeros" if full else ""


def _replace(module: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    if not name:
        return layer
    module.set_submodule(name, layer)
    return module


def _compressed(layer: nn.Linear) -> nn.Linear:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this interface a prototype
        compressed = torch.sparse.to_sparse_semi_structured(layer.weight.detach().contiguous())
    layer.weight = nn.Parameter(compressed, requires_grad=False)
    return layer
