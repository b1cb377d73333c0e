"""F(x) = mean_i f_i(x) + h(x): the gap to the certified optimum, the stationarity, nonzeros."""

import torch
from benchopt import BaseObjective


class Objective(BaseObjective):
    """A composite federated problem."""

    name = "composite federated learning"
    min_benchopt_version = "1.7"

    def set_data(self, problem, options, optimum):
        """Take a problem of the arena."""
        self.problem, self.options, self.optimum = problem, options, optimum

    def get_objective(self):
        """What a solver is given."""
        return {"problem": self.problem, "options": self.options}

    def get_one_result(self):
        """A model of the right size."""
        return {"x": torch.zeros(self.problem.dimension, dtype=torch.float64)}

    def evaluate_result(self, x):
        """Measure a model."""
        x = x.double()
        value = float(self.problem.objective(x))
        return {
            "value": value - self.optimum,
            "objective": value,
            "stationarity": float(self.problem.stationarity(x)),
            "nonzeros": int((x != 0).sum()),
        }
