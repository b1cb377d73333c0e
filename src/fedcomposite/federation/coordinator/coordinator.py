"""The coordinator's side of a run: it meets the sites, then drives the rounds as the simulator does."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedcomposite import algorithms, theory
from fedcomposite.algorithms.base import AnyAlgorithm, amplification
from fedcomposite.choice import AUTO, choose
from fedcomposite.data import FittedRecipe
from fedcomposite.experiments.config import Config, ConfigError
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator import secure_transport
from fedcomposite.federation.coordinator.delivery import Delivery, FederationError, Policy, Settings
from fedcomposite.federation.coordinator.secure_transport import SecureTransport
from fedcomposite.federation.coordinator.transport import JobParties, SiteTransport, check_refusal
from fedcomposite.federation.engines.engine import Engine
from fedcomposite.federation.orders import Introduction, Order, Shape
from fedcomposite.federation.secure import encoding
from fedcomposite.federation.secure.assembly import Assembly
from fedcomposite.federation.shape import agree, blank, misfits, write
from fedcomposite.federation.site.policy import pair
from fedcomposite.federation.wire import Content, WireError
from fedcomposite.privacy import SampleLevel, StudyBudget
from fedcomposite.problems import Problem
from fedcomposite.problems.base import measuring_step
from fedcomposite.runtime import Cohorts, Plan, Rounds
from fedcomposite.runtime.callbacks import Callback, OnRecord
from fedcomposite.runtime.certificate import certify
from fedcomposite.runtime.checkpoint import identity_of
from fedcomposite.runtime.fit import check_fit, check_steps
from fedcomposite.runtime.history import Record, Run
from fedcomposite.runtime.protection import Spending, check_aggregator, check_shares
from fedcomposite.runtime.transports import StoppedError


class Coordinator:
    """One experiment across registered sites.

    Parameters
    ----------
    engine : Engine
        What carries orders to the sites.
    sites : sequence of str
        All sites of the federation in their order: site i is client i.
    permitted : callable
        The sites that may take part, now.
    config : Config
        The experiment.
    job : str
        Its name at the sites; the same when it is resumed.
    settings : Settings
        Policy and timeouts.
    recipe : FittedRecipe, optional
        How the sites' tables become features, where the experiment has a recipe; see :func:`~.inquiry.learn`.
    log, stop : callable
        Receives one line per event; tells whether to stop.
    """

    def __init__(
        self,
        engine: Engine,
        sites: list[str],
        permitted: Callable[[], Collection[str]],
        config: Config,
        job: str,
        settings: Settings | None = None,
        *,
        recipe: FittedRecipe | None = None,
        log: Callable[[str], None] = lambda line: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.sites, self.config, self.job, self.settings = sites, config, job, settings or Settings()
        self._log, self._recipe = log, recipe
        self.post = Delivery(engine, permitted, self.settings, log, stop)
        self.assembly = Assembly(self.post, job)
        self.sums: encoding.IntroductionSums | None = None
        """What is known of all sites together where only sums are."""

    # -- before the first round ---------------------------------------------------------------------------------------

    def _gather(self, checkpoint: Path | None) -> None:
        """Hear the introductions of those who take part."""
        again = checkpoint is not None and checkpoint.exists()
        if again and checkpoint is not None:
            began = ast.literal_eval(identity_of(checkpoint).get("sites", "[]"))
            self.sites = [s for s in self.sites if s in began] or self.sites
        self.introductions = self._meet("wait" if again else self.settings.policy)
        if absent := [s for s in self.sites if s not in {i.site for i in self.introductions}]:
            self._log(f"this run is without {', '.join(absent)}")
        self.sites = [i.site for i in self.introductions]

    def prepare(self, checkpoint: Path | None = None) -> None:
        """Meet the sites, check that their data fit together, and set up the server's state.

        With "skip", sites that do not come, or do not fit to most others, take no part in the run. A run that has a
        checkpoint goes on with the sites it began with, and waits for them.
        """
        if self.settings.secure and self.config.run.aggregator is not None:
            raise ConfigError("--secure: [run] aggregator needs single replies; run without --secure")
        if self.config.budget is not None:
            raise ConfigError("[privacy] level = 'study' is for analyses; for the rounds of a run take 'sample'")
        self._gather(checkpoint)
        self.shape: Shape = agree(self.introductions)
        self.problem: Problem = self.config.make_problem(blank(self.shape, recipe=self._recipe))
        (spec,) = self.config.specs
        self.algorithm: AnyAlgorithm = self._method(spec)
        label = {"label": spec["label"]} if "label" in spec else {}
        self.config = self.config.only(algorithms.spec(self.algorithm) | label, self.config.seed)
        run, n = self.config.run, len(self.sites)
        cohorts = Cohorts(n, run.participation, seed=self.config.seed)
        check_fit(self.algorithm, self.problem, cohorts, clip_norm=self.config.run.clip_norm)
        check_steps(self.algorithm, self.problem.regularizer, cohorts, self.problem.dimension)
        if self.settings.policy == "skip" and not (self.algorithm.partial and self.algorithm.exchanges == 1):
            raise FederationError(
                f"{self.algorithm.name} needs every site in every round, so the policy must be 'wait'"
            )
        samples = [i.samples or 0 for i in self.introductions] if self.sums is None else []
        counted = [] if all(i.weight is None for i in self.introductions) else self._counted()
        prepared = "" if self._recipe is None else self._recipe.text
        heads = {one.site: one.head for one in self.introductions if one.head}
        parties = JobParties(self.job, self.sites, samples, write(self.config), self.shape, counted, prepared, heads)
        smooth = self.problem.smooth(self.config.dtype)
        start = smooth.start()
        privacy, aggregator = self.config.make_privacy(), self.config.make_aggregator()
        assert not isinstance(privacy, StudyBudget)  # it was refused
        carried = self.post, parties, self.algorithm, self.problem, start
        self.transport = (
            SiteTransport(*carried, aggregator=aggregator, private=privacy is not None)
            if self.sums is None
            else SecureTransport(*carried, self.assembly, self.sums.samples, private=privacy is not None)
        )
        check_aggregator(aggregator, privacy, self.algorithm, cohorts.size, self.problem.weighting)
        if isinstance(privacy, SampleLevel) and privacy.share < 1:
            check_shares(privacy, self.algorithm, self._worths(samples))
        self.rounds = Rounds(
            self.algorithm,
            self.problem.regularizer,
            self.transport,
            start,
            cohorts=cohorts,
            buffers=smooth.buffers(),
            stationarity_step=self._stationarity_step(),
            identity={
                "experiment": parties.config,
                "sites": repr(self.sites),
                "shape": self.shape.model_dump_json(),
                "samples": repr(samples if self.sums is None else self.sums.samples),
                **({"weights": repr(counted)} if counted else {}),
                **({"recipe": prepared} if prepared else {}),
            },
            spending=None
            if privacy is None
            else Spending(privacy, cohorts, self.algorithm.exchanges, everybody=True, parties=self._honest()),
        )

    def _meet(self, policy: Policy) -> list[Introduction]:
        """The introductions of the sites that take part."""
        text = write(self.config)
        recipe = "" if self._recipe is None else self._recipe.text
        orders = {s: Order(job=self.job, site=s, config=text, recipe=recipe) for s in self.sites}
        if self.settings.secure:
            met, self.sums = secure_transport.introductions(
                self.post, self.assembly, orders, policy, self._check_introduction
            )
            return [met[s] for s in self.sites if s in met]
        requests = {s: wire.content(order=o.model_dump_json()) for s, o in orders.items()}
        met = self.post.collect(requests, self._check_introduction, policy)
        if policy == "skip":
            for site, reason in misfits(list(met.values())).items():
                self.post.refuse(site, reason, policy)
                del met[site]
            self.post.check_enough(met, policy)
        if not met:
            raise FederationError("no site takes part")
        return [met[s] for s in self.sites if s in met]

    def _check_introduction(self, site: str, content: Content) -> Introduction:
        check_refusal(content)
        met = Introduction.read(wire.text(content, "introduction"))
        if met.site != site:
            raise WireError(f"introduces itself as {wire.clean(met.site, 60)!r}")
        if pair(self.config) and not any(set(met.labels) <= known for known in ({-1.0, 1.0}, {0.0, 1.0})):
            raise WireError(f"has labels {wire.clean(met.labels, 60)}; this loss is for -1 and 1, or 0 and 1")
        return met

    def _constants(self) -> tuple[list[float], list[float]]:
        """The sites' smoothness constants and scales; empty where a site has none.

        Of sums only the sum is known, an upper bound of each.
        """
        if self.sums is not None:
            return [v for v in (self.sums.smoothness,) if v is not None], [
                v for v in (self.sums.scale,) if v is not None
            ]
        found = [i.smoothness for i in self.introductions], [i.scale for i in self.introductions]
        smoothness, scale = ([v for v in one if v is not None] for one in found)
        n = len(self.sites)
        return smoothness if len(smoothness) == n else [], scale if len(scale) == n else []

    def _method(self, spec: dict[str, Any]) -> AnyAlgorithm:
        """The method; steps, or the method itself, may be chosen by the largest constants of the sites."""
        steps = spec.get("steps")
        fields = {k: v for k, v in spec.items() if k not in ("name", "label", "steps")}
        if spec["name"] == AUTO:
            share, known = self.config.run.participation, self._known(needed=False)
            return choose(self.problem, participation=share, constants=known, **fields).algorithm
        if steps is None:
            return self.config.make_algorithm(spec, None)
        return theory.choose(algorithms.lookup(spec["name"]), steps, self._known(), fields)

    def _worths(self, samples: list[int]) -> npt.NDArray[np.float64]:
        """What a sample of each site counts in a mean."""
        if self.sums is None:
            worths: npt.NDArray[np.float64] = self.transport.weights / np.asarray(samples, float)
            return worths
        if self.problem.weighting != "samples":
            raise ConfigError("[privacy] share: sites' sizes are not known here, so samples must count alike: "
                              "[problem] weights = 'samples'")  # fmt: skip
        return np.ones(len(self.sites))

    def _honest(self) -> int:
        """How many shares of noise protect a sample from whoever sees this run: one, unless only sums are seen."""
        return 1 if self.sums is None else min(i.honest or 1 for i in self.introductions)

    def _counted(self) -> list[float]:
        """What each site counts under ``weights = "samples"``: the sum of its samples' weights, or their number."""
        return [float(i.samples or 0) if i.weight is None else i.weight for i in self.introductions]

    def _known(self, needed: bool = True) -> theory.Constants | None:
        """The largest constants of the sites; None for a network, or a refusal where they are needed."""
        smoothness, scale = self._constants()
        if not scale:
            if needed:
                raise ConfigError("[algorithm] the smoothness of a network is unknown; give the steps yourself")
            return None
        n, run = len(self.sites), self.config.run
        cohort = Cohorts(n, run.participation).size
        if self.sums is not None and self.problem.weighting == "samples" and cohort < n:
            raise ConfigError("[algorithm] steps depend on each site's samples, which are not known; give the steps")
        by_samples = self.problem.weighting == "samples" and self.sums is None
        weights = self._counted() if by_samples else [1.0] * n
        return theory.Constants(
            L=max(smoothness) if smoothness else None,
            scale=max(scale),
            rho=self.problem.regularizer.rho,
            n=n,
            uniform=len(set(weights)) == 1,
            cohort=cohort,
            amplification=amplification(weights, cohort),
            batch=run.batch_size,
            rounds=run.rounds,
        )

    def _stationarity_step(self) -> float:
        """The step of the experiment; or 1/L with L the weighted mean of the sites' constants, an upper bound."""
        given = self.config.run.stationarity_step
        if given is not None:
            return given
        if self.problem.model is not None:
            return self.problem.default_step()
        if self.config.privacy is not None:  # the sites do not tell their constants
            return measuring_step(1.0, self.problem.regularizer.rho)
        if self.sums is not None:
            return measuring_step(self.sums.mean_constant(len(self.sites), self.problem.weighting),
                                  self.problem.regularizer.rho)  # fmt: skip
        smoothness, scale = self._constants()
        L = float(self.transport.weights @ (smoothness or scale))
        return measuring_step(L, self.problem.regularizer.rho)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def run(
        self,
        checkpoint: Path | None = None,
        on_record: Callable[[Record], None] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Run:
        """Do the rounds that are left; the state is written to ``checkpoint`` after each of them."""
        if checkpoint is not None and checkpoint.exists():
            self.rounds.resume(checkpoint)
            self._log(f"going on after round {self.rounds.round}")
        run, name = self.config.run, self.algorithm.name
        plan = Plan(
            run.rounds,
            run.evaluate_every,
            run.tolerance,
            checkpoint,
            checkpoint_every=1,
            callbacks=[*([] if on_record is None else [OnRecord(on_record)]), *callbacks],
            process_settings=False,
            blame=lambda r: f"{name} diverged in round {r}: try smaller steps",
            dead=self.problem.dead,
        )
        try:
            done = self.rounds.run(plan)
            certain = self.algorithm.info.second_order and self.config.privacy is None
            return self._certified(done) if certain else done
        except StoppedError:
            raise FederationError("stopped before the first model was measured") from None

    def _certified(self, done: Run) -> Run:
        """The run with a bound on its objective's distance from the best one, by a few more measurements."""
        if done.status not in ("completed", "converged"):
            return done
        x, look = done.solution.double(), self.rounds.look
        for with_gap in (True, False):  # sites may not answer at more models than those of the run
            try:
                found = certify(self.problem, x, look, with_gap=with_gap)
                return replace(done, certificate=found, message=f"{done.message}; {found}")
            except FederationError as refused:
                self._log(f"{'duality gap' if with_gap else 'certificate'} left out: {refused}")
        return done
