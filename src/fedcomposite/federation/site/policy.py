"""What a site agrees to, whatever an experiment says: judged from an order's numbers, before anything is allocated.

The defaults are for linear models with full gradients. What they let through and what they do not is written, with
numbers, in ``docs/federation.md``; the attacks they are made against are in ``tests/test_federation_attacks.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from fedcomposite import algorithms, models
from fedcomposite.choice import AUTO
from fedcomposite.data.spec import RecipeSpec
from fedcomposite.experiments.config import Config, ConfigError
from fedcomposite.federation.orders import Order, Shape
from fedcomposite.federation.shape import blank
from fedcomposite.privacy import SampleLevel, StudyBudget
from fedcomposite.problems.losses import LOSSES, Cox, LeastSquares, Loss, Multinomial
from fedcomposite.problems.metrics import METRICS
from fedcomposite.problems.network import needs
from fedcomposite.registry import fold

_COPIES = 24  # vectors as long as the model that a method's round may hold at once, generously
_DRAWN = 104  # bytes of random words behind one drawn sample
_CONFIG = 65536  # characters of an experiment
PER_CLASS = ("balanced_accuracy", "f1")
"""Metrics whose counts are those of single classes."""


class RefusalError(ValueError):
    """A site will not do what it was asked; the text is one line and goes to the server.

    ``here`` is what the data have to do with it: it goes to the site's own log and its audit log, and nowhere else.
    """

    def __init__(self, text: str, here: str = "") -> None:
        super().__init__(text)
        self.here = here


class DataRefusalError(RefusalError):
    """A refusal that hangs on the site's samples, and so says something about them: the ledger counts those."""


class UnapprovedError(RefusalError):
    """A site will not do it before its people have said yes; it may be asked again."""


class Limits(BaseModel):
    """``[limits]`` of site.toml: what this site agrees to, whatever an experiment says."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    # -- which experiments
    max_rounds: int = Field(default=100_000, ge=1)
    """Rounds of a run."""
    max_local_steps: int = Field(default=10_000, ge=1)
    """Gradients in one round."""
    methods: list[str] = []
    """Allowed methods; empty allows all."""
    losses: list[str] = ["least_squares", "logistic", "multinomial", "cox"]
    """Allowed losses of linear models; empty allows all. The others single samples out more easily."""
    metrics: list[str] = ["accuracy", "balanced_accuracy", "f1", "log_loss", "brier", "r2"]
    """Allowed metrics; empty allows all. The others are histograms of single samples, or as good as that."""
    networks: bool = False
    """Whether models other than linear ones are allowed: a network's gradient can hold samples one by one."""
    models: list[str] = []
    """Allowed networks, where they are; empty allows all."""
    max_width: int = Field(default=4096, ge=1)
    """Widest layer of a network."""
    # -- how much one number may say about one sample
    min_samples: int = Field(default=10, ge=1)
    """Fewest samples with which this site takes part."""
    min_class: int = Field(default=5, ge=1)
    """Fewest samples of a class that occurs here."""
    min_count: int = Field(default=5, ge=1)
    """Fewest rows behind a count: of a description, a recipe, a bin of scores."""
    min_events: int = Field(default=10, ge=1)
    """Fewest events behind a sum over times to an event; fewest of a part that is left out: ``min_class``."""
    min_at_risk: int = Field(default=5, ge=1)
    """Fewest samples at risk at an event that counts: what an experiment's ``least_at_risk`` must be at least."""
    min_batch: int = Field(default=10, ge=1)
    """Smallest minibatch: a gradient is a mean over at least so many samples."""
    min_evaluation: int = Field(default=10, ge=1)
    """Fewest samples on which a model is evaluated: of the training, the validation and the test part."""
    parameter_share: float = Field(default=1 / 3, gt=0)
    """Most parameters of a linear model, per sample (as in DataSHIELD)."""
    max_margin: float = Field(default=10.0, gt=0)
    """Largest a'x of a sample at which a gradient is given, where the loss is not quadratic; a random bit more."""
    exact_counts: bool = False
    """Whether counts at a model, and the largest margin, are exact; otherwise they have noise by a secret."""
    reproducible_batches: bool = False
    """Whether minibatches follow from the experiment's seed alone, so that the coordinator knows their rows.

    Otherwise they are of whole blocks of ``min_count`` rows or more, which a secret makes.
    """
    reproducible_parts: bool = False
    """The same for folds, halves and bootstrap weights, which otherwise are of blocks that a secret makes."""
    foreign_reading: bool = False
    """Whether an experiment may say how this site's file is written, and what its columns are called and mean."""
    epsilon: float | None = Field(default=None, gt=0)
    """Privacy budget of this site's samples, over all jobs there will ever be; experiments then need ``[privacy]``."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """Delta at which the budget is meant."""
    # -- how often
    gradients_per_job: int = Field(default=100_000, ge=1)
    """Gradients of a job, counted as they are computed."""
    gradients_per_day: int = Field(default=200_000, ge=1)
    """Gradients of all jobs in a day."""
    evaluations_per_job: int = Field(default=2_000, ge=1)
    """Evaluated models of a job."""
    evaluations_per_day: int = Field(default=5_000, ge=1)
    """Evaluated models of all jobs in a day."""
    jobs_per_day: int = Field(default=100, ge=1)
    """Jobs that are begun in a day."""
    score_tables: int = Field(default=20, ge=1)
    """Tables of noised counts of scores, of all jobs there will ever be: the quality of a model is one."""
    refusals: int = Field(default=100, ge=1)
    """Refusals that hang on the samples (margins, rare classes and columns), of all jobs there will ever be."""
    models_per_round: int = Field(default=2, ge=1)
    """Different models that are answered in one round of a job; a lost answer is asked for again with the same one."""
    # -- with whom
    secure: Literal["allowed", "required"] = "allowed"
    """Whether this site takes part in secure sums only."""
    min_parties: int = Field(default=3, ge=1)
    """Fewest sites of an experiment, of a round, and of a secure sum: of two, each can tell the other's numbers."""
    honest_parties: int | None = Field(default=None, ge=1)
    """How many sites of a secure sum, this one included, are assumed to keep their shares of the noise to themselves.

    Sums with shared noise are refused where this is not said.
    """
    left_out: bool = False
    """Whether secure sums may be over all sites but one, and over that one: how good the others' model is there.

    Who has these and the sum over all knows each site's own sums, as if they were told plainly; no other rule changes.
    """
    changing_cohorts: bool = False
    """Whether a job's secure sums may be over different sites: the difference of two of them is about few."""
    # -- how large
    max_message_mb: float = Field(default=1024.0, gt=0)
    """Largest message taken from the server."""
    max_parameters: int = Field(default=50_000_000, ge=1)
    """Parameters of a model."""
    max_clients: int = Field(default=10_000, ge=1)
    """Clients of an experiment."""
    max_memory_mb: float = Field(default=4096.0, gt=0)
    """Memory that an experiment may need beside the samples, as estimated from its numbers."""


def permit(limits: Limits, config: Config, order: Order) -> None:
    """Refuse what can be seen from the experiment's text and the order's numbers alone."""
    rounds = max(config.run.rounds, order.round)
    if rounds > limits.max_rounds:
        raise RefusalError(f"{rounds} rounds are over this site's max_rounds = {limits.max_rounds}")
    if order.round > config.run.rounds or (order.train and order.round == config.run.rounds):
        raise RefusalError(f"round {order.round + 1} of an experiment of {config.run.rounds} rounds")
    chosen = config.specs[0]["name"]
    if chosen != AUTO:
        listed(algorithms.lookup(chosen).__name__, limits.methods, "methods")
    elif order.shape is not None:  # before the first round it may be open
        raise RefusalError("the coordinator has not said which method it chose")
    size, steps = config.run.batch_size, config.specs[0].get("local_steps")
    if size is not None and size < limits.min_batch:
        raise RefusalError(f"batch_size = {size} is below this site's min_batch = {limits.min_batch}")
    if isinstance(steps, int) and steps > limits.max_local_steps:
        raise RefusalError(f"local_steps = {steps} is over this site's max_local_steps = {limits.max_local_steps}")
    private(limits, config, order)
    for metric in config.problem.metrics:
        listed(METRICS.canonical(metric), limits.metrics, "metrics")
    if config.model is None:
        listed(LOSSES.canonical(config.problem.loss or "logistic"), limits.losses, "losses")
        at_risk(limits, config.make_loss())
    elif not limits.networks:
        raise RefusalError("this site allows linear models only (networks = true in its [limits] would allow others)")
    else:
        listed(models.MODELS.canonical(config.model.name), limits.models, "models")
    every, last = config.run.evaluate_every, config.run.rounds
    if order.evaluate and order.round % every and order.round != last:
        raise RefusalError(f"round {order.round} is not one in which this experiment evaluates (every {every})")
    if (shape := order.shape) is not None:
        if shape.clients > limits.max_clients:
            raise RefusalError(f"{shape.clients} clients are over this site's max_clients = {limits.max_clients}")
        if (
            shape.sites
            and order.tells
            and (
                len(shape.sites) != shape.clients
                or len(set(shape.sites)) != shape.clients
                or shape.sites[order.client : order.client + 1] != [order.site]
            )
        ):
            raise RefusalError("the names of the clients, their number and this client's do not fit together")
        fewest = min(shape.clients, order.cohort) if order.train else shape.clients
        if order.tells and fewest < limits.min_parties:
            raise RefusalError(
                f"{fewest} sites are below this site's min_parties = {limits.min_parties}: the others could tell its "
                "numbers from the mean"
            )
        if not (order.client < shape.clients and order.position < order.cohort <= shape.clients):
            raise RefusalError("the numbers of this client, its place and its cohort do not fit together")


def at_risk(limits: Limits, loss: Loss) -> None:
    """Refuse times to an event where an event with few others at risk would count."""
    if isinstance(loss, Cox) and loss.least_at_risk < limits.min_at_risk:
        raise RefusalError(
            f"events with fewer than min_at_risk = {limits.min_at_risk} samples at risk would count; put least_at_risk "
            f"= {limits.min_at_risk} under [problem.loss_options] in the experiment"
        )


def check_plain(limits: Limits) -> None:
    """Refuse numbers of this site alone, where it takes part in secure sums only."""
    if limits.secure == "required":
        raise RefusalError('this site takes part in secure sums only (secure = "required"): run with --secure')


def studied(config: Config, order: Order) -> None:
    """Refuse what a budget for a study is not for, as far as the experiment says it."""
    if order.train or order.evaluate or order.analysis is None:
        raise RefusalError("[privacy] level = 'study' is for analyses; for the rounds of a run take 'sample'")
    if config.problem.weights != "samples":
        raise RefusalError("[privacy] level = 'study': samples have to count alike, weights = 'samples'")
    recipe = config.recipe or {}
    if recipe.get("time") is not None and (recipe.get("entry") is not None or recipe.get("strata") is not None):
        raise RefusalError("[privacy] level = 'study': there are no late entries and no strata of times to an event")
    if config.recipe is not None:
        # a recipe that can fail on single rows, or looks at many rows for one, would tell on them
        wanted = {"missing_target": "drop", "unknown": "reference", "rare": 0}
        for name, value in wanted.items():
            if recipe.get(name, RecipeSpec.model_fields[name].default) != value:
                raise RefusalError(f"[privacy] level = 'study': [recipe] {name} = {value!r} is needed")


def private(limits: Limits, config: Config, order: Order) -> None:
    """Refuse an experiment without noise where there is a budget, and with noise what cannot be noised."""
    privacy = config.make_privacy()
    if privacy is None:
        if limits.epsilon is not None:
            raise RefusalError(f"this site has a privacy budget (epsilon = {limits.epsilon:g}): [privacy] is needed")
        return
    if isinstance(privacy, StudyBudget):
        return studied(config, order)
    if not isinstance(privacy, SampleLevel):
        raise RefusalError("[privacy] level = 'client' is for simulations; sites protect their samples")
    if config.run.batch_size is not None:
        raise RefusalError("with [privacy] samples are drawn one by one; leave batch_size out and set rate")
    if config.problem.metrics:
        raise RefusalError(f"with [privacy] only loss and accuracy are told, not {config.problem.metrics[0]}")


def allows(name: str, allowed: Sequence[str]) -> bool:
    """Whether something is in a list, or that is empty."""
    return not allowed or fold(name) in map(fold, allowed)


def listed(name: str, allowed: Sequence[str], kind: str) -> None:
    """Refuse what is not in a list that has something in it."""
    if not allows(name, allowed):
        raise RefusalError(f"{name} is not among this site's {kind} ({', '.join(allowed)})")


def short(text: str) -> str:
    """An experiment's text, unless it is longer than any experiment."""
    if len(text) > _CONFIG:
        raise RefusalError(f"an experiment of {len(text)} characters; at most {_CONFIG} are read")
    return text


def affine(loss: Loss) -> bool:
    """Whether a loss's derivative is linear in the margin, so that gradients at any models give X'X and X'y only."""
    return isinstance(loss, LeastSquares)


def classifies(config: Config) -> bool:
    """Whether the experiment's targets are class labels, or may be."""
    if config.model is None:
        return config.make_loss().classifier
    return needs(config.problem.loss) != "numbers"


def may_be_numbers(config: Config) -> bool:
    """Whether the experiment takes numbers as well as class labels."""
    return config.model is not None and needs(config.problem.loss) in ("flags", "either")


def pair(config: Config) -> bool:
    """Whether the experiment is about two classes, by its loss."""
    return config.model is None and classifies(config) and not isinstance(config.make_loss(), Multinomial)


def judge(limits: Limits, config: Config, shape: Shape, sizes: Mapping[str, int]) -> int:
    """Refuse what is too large for this site's samples or memory; returns the most local steps there is memory for.

    ``sizes`` are the samples of the parts "train", "validation" and "test".
    """
    count, width = _count(config, shape)
    if count > limits.max_parameters:
        raise RefusalError(f"{count} parameters are over this site's max_parameters = {limits.max_parameters}")
    if config.model is None:
        most = math.floor(limits.parameter_share * sizes["train"]) if limits.parameter_share < math.inf else count
        if count > most:
            raise DataRefusalError(
                f"{count} parameters are more than this site's samples allow "
                f"(parameter_share = {limits.parameter_share:.3g})",
                f"they allow {most}",
            )
    else:
        if width > limits.max_width:
            raise RefusalError(f"a layer of width {width} is over this site's max_width = {limits.max_width}")
        _enough(limits, config.model.evaluation_samples, shape.clients, sizes)
    return _remember(limits, config, shape, count)


def _enough(limits: Limits, asked: int, clients: int, sizes: Mapping[str, int]) -> None:
    """Refuse evaluations on too few samples."""
    each = -(-asked // clients) if asked else max(sizes.values())
    if (least := min(min(each, size) for size in sizes.values())) < limits.min_evaluation:
        raise DataRefusalError(
            f"evaluation_samples = {asked} of {clients} clients are below this site's min_evaluation = "
            f"{limits.min_evaluation}",
            f"{least} here",
        )


def _count(config: Config, shape: Shape) -> tuple[int, int]:
    """Parameters of the model, and its widest layer; no tensor of its size is made."""
    if config.model is None:
        loss = config.make_loss()
        outputs = len(loss.labels or shape.labels) if isinstance(loss, Multinomial) else loss.outputs
        width = math.prod(shape.features) + config.problem.bias
        return width * max(1, outputs), width
    silos = blank(shape)
    try:
        with torch.device("meta"):
            made = config.make_module(silos)
    except RuntimeError as error:
        raise ConfigError(f"[model] {error}") from None
    tensors = [*made.parameters(), *made.buffers()]
    return sum(t.numel() for t in tensors), max((t.shape[0] for t in tensors if t.ndim > 1), default=1)


def _remember(limits: Limits, config: Config, shape: Shape, count: int) -> int:
    """The most local steps for which the memory lasts."""
    item = config.dtype.itemsize
    batch = config.run.batch_size or 0
    needed = _COPIES * count * item + 3 * batch * math.prod(shape.features) * item
    room = limits.max_memory_mb * 1e6 - needed
    steps = limits.max_local_steps if batch == 0 else int(room // (batch * _DRAWN))
    if room < 0 or steps < 1:
        raise RefusalError(
            f"{count} parameters with batches of {batch or 'all'} samples need more than this site's "
            f"max_memory_mb = {limits.max_memory_mb:g}"
        )
    return min(steps, limits.max_local_steps)
