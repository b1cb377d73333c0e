"""Every method of the package with its practical steps; an iteration is a round."""

import warnings

from benchopt import BaseSolver

import fedcomposite as fc
from fedcomposite import theory
from fedcomposite.algorithms import REGISTRY


class Solver(BaseSolver):
    """A method of fedcomposite."""

    name = "fedcomposite"
    parameters = {"method": list(REGISTRY)}  # noqa: RUF012
    sampling_strategy = "iteration"

    def skip(self, problem, options):
        """Leave out what the method cannot take, with the reason."""
        try:
            self.set_objective(problem, options)
            self.run(0)
        except (ValueError, TypeError) as error:
            return True, str(error).splitlines()[0]
        return False, None

    def set_objective(self, problem, options):
        """Take a problem and choose steps."""
        self.problem, self.options = problem, options
        known = theory.constants(
            problem, batch=options.get("batch_size"), participation=options.get("participation", 1.0)
        )
        self.algorithm = theory.choose(REGISTRY[self.method], "auto", known, {})

    def run(self, n_iter):
        """Do so many rounds."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            every = max(1, n_iter)
            run = fc.simulate(
                self.problem, self.algorithm, rounds=n_iter, evaluate_every=every, progress=False, **self.options
            )
        self.x = run.solution

    def get_result(self):
        """The model."""
        return {"x": self.x}
