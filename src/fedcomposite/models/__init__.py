"""Networks by name; a problem takes any other ``torch.nn.Module`` as well."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedcomposite._validation import Count, Natural, refuse, suggest, wrong_arguments
from fedcomposite.data.silos import DataError, Silos
from fedcomposite.data.sparse import dense
from fedcomposite.models.mobilenet import MobileNetV3Small
from fedcomposite.models.resnet import ResNet18
from fedcomposite.models.small import SampleShape, cnn, linear, mlp, sigmoid_net, zhang_cnn
from fedcomposite.models.transformers import GPT, ViT
from fedcomposite.models.unet import UNet
from fedcomposite.registry import Registry, callable_only, fold

__all__ = ["GPT", "MODELS", "SHAPES", "MobileNetV3Small", "ResNet18", "UNet", "ViT", "build"]

MODELS: Registry[Callable[..., nn.Module]] = Registry(
    "model",
    {
        "linear": linear,
        "mlp": mlp,
        "cnn": cnn,
        "zhang-cnn": zhang_cnn,
        "resnet18": ResNet18,
        "sigmoid-net": sigmoid_net,
        "mobilenetv3-small": MobileNetV3Small,
        "unet": UNet,
        "vit-small": ViT,
        "gpt-small": GPT,
    },
    group="fedcomposite.models",
    accept=callable_only,
)
"""Functions of (shape of a sample, number of classes, options). In a federation every site runs only what is installed
there."""

SHAPES: dict[str, tuple[SampleShape, int]] = {
    "a9a": ((123,), 2),
    "mnist": ((1, 28, 28), 10),
    "fashion-mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "stories": ((32,), 120),
}
"""Shape of a sample and number of classes of the data sets of the papers, and of ours."""


def build(
    name: str | Callable[..., nn.Module],
    dataset: Silos | str,
    *,
    seed: Natural = 0,
    outputs: Count | None = None,
    **options: Any,
) -> nn.Module:
    """Make a network that fits a data set.

    Parameters
    ----------
    name : str or callable
        ``linear``, ``mlp``, ``cnn``, ``zhang-cnn``, ``resnet18``, ``sigmoid-net``, ``mobilenetv3-small``, ``unet``,
        ``vit-small``, ``gpt-small``, or one that an installed package offers (:mod:`fedcomposite.registry`); or such a
        function itself, of (shape of a sample, number of classes, options).
    dataset : Silos or str
        Silos with class labels, or the name of a data set of the papers (``a9a``, ``mnist``, ``fashion-mnist``,
        ``cifar10``), or ``stories``.
    seed : int
        Determines the initial parameters.
    outputs : int, optional
        How many outputs, where they are not the classes: 1 for ``loss="mse"``.
    **options
        Of the model: ``hidden`` (mlp, sigmoid-net), ``dropout`` (mobilenetv3-small), ``stem`` (resnet18), ``width`` and
        ``depth`` (unet, vit-small, gpt-small), ``heads`` (the last two), ``patch`` (vit-small).

    Examples
    --------
    >>> import fedcomposite as fc
    >>> sum(p.numel() for p in fc.models.build("mlp", "mnist").parameters())
    109386
    """
    factory = name if callable(name) else MODELS[name]
    key = getattr(name, "__name__", str(name)) if callable(name) else MODELS.canonical(name)
    known = list(inspect.signature(factory).parameters)[2:]
    said = ", ".join(known) or "none"
    strange = [given for given in options if given not in known]
    faults = [f"model {key!r} has no option {one!r}{suggest(one, known)} (its options: {said})" for one in strange]
    if factory.__module__.startswith(f"{__name__}."):
        maker: Any = vars(factory)["__init__"] if isinstance(factory, type) else factory
        faults += [f"model {key!r}: {line}" for line in wrong_arguments(maker, options)]
    refuse([*faults, *wrong_arguments(build, {"seed": seed, "outputs": outputs})])
    shape, classes = _fit(dataset, outputs)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return factory(shape, classes, **options)


def _fit(dataset: Silos | str, outputs: int | None) -> tuple[SampleShape, int]:
    if isinstance(dataset, str):
        shapes = {fold(k): v for k, v in SHAPES.items()}
        if fold(dataset) not in shapes:
            raise ValueError(
                f"unknown data set {dataset!r}{suggest(dataset, SHAPES)} (known: {', '.join(SHAPES)}); "
                "give the silos themselves"
            )
        shape, classes = shapes[fold(dataset)]
        return shape, outputs or classes
    if not isinstance(dataset, Silos):
        raise ValueError(f"dataset = {dataset!r:.60}, must be Silos, or the name of a data set: {', '.join(SHAPES)}")
    shape = tuple(dataset.features.shape[1:])
    if outputs is not None:
        return shape, outputs
    if dataset.targets.ndim > 1 and not dataset.targets.is_floating_point():
        last = int(dataset.targets.max())
        words = dataset.features.dtype == torch.int64 and dataset.features.shape == dataset.targets.shape
        return shape, max(last, int(dense(dataset.features).max()) if words else 0) + 1
    if dataset.classes is None:
        raise DataError("these targets are not classes; build a module with outputs=1 and take loss='mse'")
    labels = set(dataset.classes.tolist())
    return shape, 2 if labels <= {-1, 1} else int(max(labels)) + 1
