"""Trained models as files: dense, sparse, ONNX, or a table of coefficients.

A file is written under another name, read back and compared with the model it was made from: its tensors must be equal
to the model's (ONNX: not compared), its predictions equal up to rounding (:func:`fedcomposite.exporting.rounding`).
Only then does it get its name. Identical models give identical files.
"""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy import sparse
from torch import Tensor, nn

from fedcomposite import files
from fedcomposite._validation import Count, as_vector, buffers_of, renamed, suggest
from fedcomposite.data.sparse import dense as dense_rows
from fedcomposite.exporting.errors import ExportError, rounding
from fedcomposite.exporting.onnx import write_onnx
from fedcomposite.exporting.pruning import Pruned, fit, prune
from fedcomposite.exporting.quantizing import CALIBRATED
from fedcomposite.problems import NetworkProblem, Problem
from fedcomposite.results import Result
from fedcomposite.runtime.fit import check_given
from fedcomposite.runtime.history import DeadNetworkWarning

Format = Literal["state_dict", "safetensors", "onnx", "csr", "csv"]
State = dict[str, Tensor]

_CHECKED = 64  # samples on which a file is compared with its model


class Read(NamedTuple):
    """What a file gives back."""

    predictions: Tensor
    state: State | None  # None where a format does not keep the model's tensors


@dataclass(frozen=True, repr=False)
class Exported(Result):
    """What was written."""

    path: Path
    format: Format
    dense_bytes: int
    """Bytes of the model's tensors, zeros included."""
    file_bytes: int
    """Bytes of the file."""
    parameters: int
    nonzeros: int
    difference: float
    """Largest difference between the file's and the model's predictions."""
    pruned: Pruned | None = None
    """What became of the layers, where dead units were removed."""

    def figures(self) -> dict[str, Any]:
        """All of it but the pruned module, whose layers are told."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "pruned"}
        return found if self.pruned is None else found | {"layers": self.pruned.table().to_dict("records")}

    def to_frame(self) -> pd.DataFrame:
        """One row: the file, its size before and after, and how far its predictions are off."""
        return pd.DataFrame([{k: v for k, v in self.figures().items() if k != "layers"}])

    def _line(self) -> str:
        said = f"{self.path}, {self.format}: {self.nonzeros} of {self.parameters} parameters nonzero, "
        return said + f"{self.dense_bytes} bytes of tensors in {self.file_bytes}"


@renamed(run="x")
def export(
    problem: Problem,
    x: Any,
    path: str | Path,
    *,
    format: Format = "state_dict",
    buffers: Tensor | None = None,
    pruned: bool = False,
    multiple: Count = 1,
    int8: bool = False,
) -> Exported:
    """Write a trained model to a file, and check it.

    Parameters
    ----------
    problem : Problem
        What was solved; it knows the names and shapes.
    x : Tensor, array, Run or estimator
        A vector, or what has one: a run, whose solution (and a network's buffers) is written, a fitted estimator.
    path : path
        The file; an existing one is replaced, unless the export is refused.
    format : {"state_dict", "safetensors", "onnx", "csr", "csv"}
        A dictionary of tensors in torch's or the safetensors format, which ``load_state_dict`` takes (a linear model's
        fits ``torch.nn.Linear``); ONNX, if its packages are installed; an ``.npz`` archive with every weight as a
        CSR matrix (``NAME.data``, ``NAME.indices``, ``NAME.indptr``, ``NAME.shape``) and the rest dense, which
        :func:`read_csr` reads; or a table with a named coefficient per row, for linear models. The recipe that
        prepared the data, if any, is written beside it as ``NAME.recipe.json``.
    buffers : Tensor, optional
        Running statistics that belong to a vector x; a run brings its own.
    pruned : bool
        Whether a network's dead filters and neurons are removed first (:func:`prune`); ``parameters`` and ``nonzeros``
        are then those of the smaller network, whose tensors :func:`fit` puts into the whole one.
    multiple : int
        Of which the sizes of pruned layers are multiples: 8 for a GPU.
    int8 : bool
        Whether an ONNX graph computes in eight bits. Of a network with convolutions the ranges of what flows between
        layers are read off 256 of the problem's training samples. Predictions may differ by a quarter of the largest.

    Returns
    -------
    Exported
        Sizes before and after.

    Raises
    ------
    ExportError
        If the file's tensors or predictions differ from the model's; nothing is left behind.

    Examples
    --------
    >>> import tempfile, fedcomposite as fc
    >>> silos = fc.data.load("synthetic", clients=3, features=4, samples=10)
    >>> problem = fc.Problem(silos, loss="logistic")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = export(problem, torch.tensor([1.0, 0.0, 0.0, -2.0]), f"{folder}/model.csv", format="csv")
    >>> made.parameters, made.nonzeros
    (4, 2)
    """
    if isinstance(x, Problem) and not isinstance(problem, Problem):
        warnings.warn("export(run, problem, path) is now export(problem, run, path)", DeprecationWarning, stacklevel=3)
        problem, x = x, problem
    given = {"problem": problem, "path": path, "pruned": pruned, "buffers": buffers, "multiple": multiple}
    check_given(export, given | {"int8": int8}, *_refusals(problem, format, pruned, multiple, int8))
    buffers, x = buffers_of(x) if buffers is None else buffers, _vector(x)
    if x.shape != (problem.dimension,):
        raise ValueError(f"the model has shape {tuple(x.shape)}, the problem's has ({problem.dimension},)")
    if told := problem.dead(x, buffers):
        warnings.warn(told, DeadNetworkWarning, stacklevel=3)
    samples = dense_rows(problem.silos.features[:_CHECKED])
    whole = _state(x, problem, None if buffers is None else buffers.cpu())
    small: Pruned | None = None
    if pruned:
        small = _pruned(problem, fit(problem.module(x), whole), problem.options.inputs(samples, x.dtype), multiple)
    state = whole if small is None else {k: v.detach() for k, v in small.module.state_dict().items()}
    wanted = problem.predict(x, samples, buffers)
    target = Path(path)
    with _checked(target) as scratch:
        write = partial(_onnx, int8=True) if int8 else _WRITERS[format]
        read = write(state, x, problem, scratch, samples)
        difference = _compare(read, state, wanted, rounding(wanted, "int8" if int8 else format), target)
    if problem.silos.recipe is not None:  # a model without its preparation is of no use
        problem.silos.recipe.write(target.with_name(f"{target.name}.recipe.json"))
    dense, size = sum(t.nbytes for t in whole.values()), target.stat().st_size
    left = x if small is None else torch.cat([p.detach().reshape(-1) for p in small.module.parameters()])
    return Exported(target, format, dense, size, len(left), int((left != 0).sum()), difference, small)


def _pruned(problem: Problem, module: nn.Module, inputs: Tensor, multiple: int) -> Pruned:
    """A network without its dead units, also one that takes several inputs or gives an object."""
    assert isinstance(problem, NetworkProblem)
    plain = problem.plain(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeadNetworkWarning)  # it was told
        made, prefix = prune(plain, inputs, multiple=multiple), "module."
    layers = tuple(replace(one, name=one.name.removeprefix(prefix)) for one in made.layers)
    kept = tuple(replace(k, layer=k.layer.removeprefix(prefix), reason=k.reason.replace(prefix, "")) for k in made.kept)
    return replace(made, module=made.module.get_submodule("module"), layers=layers, kept=kept)


def _refusals(problem: Problem, format: str, pruned: bool, multiple: int, int8: bool) -> list[str]:
    """What does not go together, a line each."""
    network = isinstance(problem, Problem) and problem.model is not None
    linear = isinstance(problem, Problem) and problem.model is None
    found = {
        f"unknown format {format!r}{suggest(str(format), _WRITERS)} (known: {', '.join(_WRITERS)})": (
            format not in _WRITERS
        ),
        f"multiple = {multiple} is for pruned layers; add pruned = True": multiple != 1 and not pruned,
        f"int8 = True is for networks as ONNX graphs, not for {format}": int8 and (format != "onnx" or linear),
        "format = 'csv' is a table of coefficients, for linear models; take 'safetensors' or 'csr'": (
            format == "csv" and network
        ),
        "pruned = True is for networks; a linear model has no units between its inputs and outputs": pruned and linear,
    }
    return [line for line, holds in found.items() if holds]


@contextmanager
def _checked(target: Path) -> Iterator[Path]:
    """A name to write to, in the same folder, that becomes ``target`` if nothing is raised."""
    scratch = target.with_name(f".{target.stem}.{os.getpid()}.tmp{target.suffix}")
    made = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield scratch
        os.replace(scratch, target)
    except OSError as error:
        raise ExportError(f"{target}: cannot be written ({error.strerror or error})") from None
    finally:
        with suppress(OSError):  # a folder with the file in it, or with anything else, stays
            scratch.unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()


def _compare(read: Read, state: State, wanted: Tensor, allowed: float, target: Path) -> float:
    """The largest difference of the predictions; refuse a file that is not the model."""
    found = read.predictions
    if found.shape != wanted.shape:
        raise ExportError(f"{target}: its predictions have shape {tuple(found.shape)}, not {tuple(wanted.shape)}")
    difference = float((found.to(wanted) - wanted).abs().max())
    if not difference <= allowed:
        raise ExportError(
            f"{target}: its predictions differ from the model's by {difference:.2e}, rounding explains {allowed:.1e}; "
            "it was not written"
        )
    for name in state if read.state is not None else ():
        kept = (read.state or {}).get(name)
        if kept is None or kept.dtype != state[name].dtype or not torch.equal(kept, state[name]):
            raise ExportError(f"{target}: its tensor {name!r} is not the model's; it was not written")
    return difference


def _vector(x: Any) -> Tensor:
    point = as_vector(x).detach().cpu()
    if not bool(torch.isfinite(point).all()):
        raise ExportError("the model has NaN or infinite parameters")
    return point


def read_csr(path: str | Path) -> State:
    """The dictionary of tensors in a file of the format ``csr``."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ExportError(f"{path}: not a readable .npz file ({error})") from None
    state: State = {}
    for key, value in arrays.items():
        name, _, part = key.rpartition(".")
        if part == "shape" and f"{name}.indptr" in arrays:
            parts = (arrays[f"{name}.{p}"] for p in ("data", "indices", "indptr"))
            matrix = sparse.csr_array(tuple(parts), shape=(int(value[0]), int(np.prod(value[1:]))))
            state[name] = torch.from_numpy(matrix.toarray().reshape(value))
        elif not (part in ("data", "indices", "indptr") and f"{name}.shape" in arrays):
            state[key] = torch.from_numpy(value)
    return state


def _state(x: Tensor, problem: Problem, buffers: Tensor | None) -> State:
    """The module's state; a linear model's as ``torch.nn.Linear`` names and shapes it."""
    if problem.model is not None:
        return {k: v.detach().clone() for k, v in problem.module(x, buffers).state_dict().items()}
    parts = {s.name: x[s.start : s.stop].view(s.shape) for s in problem.layout}
    weight = parts["weight"].reshape(len(parts["weight"]), -1).t().contiguous()
    return {"weight": weight} | ({"bias": parts["bias"].clone()} if "bias" in parts else {})


def _read(state: State, x: Tensor, problem: Problem, samples: Tensor) -> Read:
    """The tensors of a file, and the outputs of the problem's model with them."""
    if isinstance(problem, NetworkProblem):
        module = fit(problem.module(x), state)
        return Read(problem.outputs(module, samples), state)
    parts = [state["weight"].t().reshape(-1), *([state["bias"]] if "bias" in state else [])]
    return Read(problem.predict(torch.cat(parts), samples), state)


def _torch(state: State, x: Tensor, problem: Problem, path: Path, samples: Tensor) -> Read:
    with path.open("wb") as file:  # given a path, torch would write its name into the file
        torch.save(state, file)
    return _read(torch.load(path, weights_only=True), x, problem, samples)


def _safetensors(state: State, x: Tensor, problem: Problem, path: Path, samples: Tensor) -> Read:
    path.write_bytes(files.pack(state))
    return _read(files.read(path)[0], x, problem, samples)


def _csr(state: State, x: Tensor, problem: Problem, path: Path, samples: Tensor) -> Read:
    arrays: dict[str, Any] = {}
    for name, tensor in state.items():
        if tensor.ndim < 2:
            arrays[name] = tensor.numpy()
            continue
        matrix = sparse.csr_array(tensor.flatten(1).numpy())
        arrays |= {f"{name}.{part}": getattr(matrix, part) for part in ("data", "indices", "indptr")}
        arrays[f"{name}.shape"] = np.asarray(tensor.shape)
    with path.open("wb") as file:  # a name without .npz stays as it is
        np.savez_compressed(file, **arrays)
    return _read(read_csr(path), x, problem, samples)


def _csv(state: State, x: Tensor, problem: Problem, path: Path, samples: Tensor) -> Read:
    table = pd.DataFrame({"name": problem.coordinate_names, "coefficient": x.double().numpy()})
    if (original := original_scale(problem, x)) is not None:
        table["original"] = original[0]
    table.to_csv(path, index=False, float_format="%.17g")
    read = [float(v) for v in pd.read_csv(path, dtype=str)["coefficient"]]  # float() reads every digit back
    point = torch.tensor(read, dtype=x.dtype)
    return Read(problem.predict(point, samples), _state(point, problem, None))


def original_scale(problem: Problem, x: Tensor) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
    """A linear model's coefficients for the features before they were standardized, and the intercept that they need.

    The first array has a number per coordinate of x; the intercept is there again for models that have none. None if no
    recipe prepared the data.
    """
    recipe = problem.silos.recipe
    if recipe is None or problem.model is not None:
        return None
    parts = {s.name: x[s.start : s.stop].view(s.shape).double().cpu().numpy() for s in problem.layout}
    weights, intercept = recipe.original(parts["weight"], parts.get("bias", 0.0))
    flat = [weights.reshape(-1), *([intercept.reshape(-1)] if "bias" in parts else [])]
    return np.concatenate(flat), intercept


def _onnx(state: State, x: Tensor, problem: Problem, path: Path, samples: Tensor, int8: bool = False) -> Read:
    if isinstance(problem, NetworkProblem):
        graph, held = problem.plain(fit(problem.module(x), state)), problem.silos.features
        each = torch.linspace(0, len(held) - 1, min(CALIBRATED, len(held)), dtype=torch.int64)  # of all clients
        ranges = problem.options.inputs(dense_rows(held[each]), x.dtype) if int8 else None
        return Read(write_onnx(graph, problem.options.inputs(samples, x.dtype), path, ranges), None)
    outputs, features = state["weight"].shape
    module = fit(torch.nn.Linear(features, outputs, bias="bias" in state), state)
    found = write_onnx(module, samples.to(x.dtype), path)
    return Read(found if outputs > 1 else found.squeeze(1), None)


_WRITERS: dict[str, Callable[[State, Tensor, Problem, Path, Tensor], Read]] = {
    "state_dict": _torch,
    "safetensors": _safetensors,
    "onnx": _onnx,
    "csr": _csr,
    "csv": _csv,
}
