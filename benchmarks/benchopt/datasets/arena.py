"""The problems of ``fedcomposite referee``."""

from benchopt import BaseDataset

from fedcomposite.testing.arena import ARENA, optimum


class Dataset(BaseDataset):
    """A problem of the arena."""

    name = "arena"
    parameters = {"problem": list(ARENA)}  # noqa: RUF012

    def get_data(self):
        """The problem, how rounds are carried out on it, and its optimal value."""
        bout = ARENA[self.problem]
        return {"problem": bout.make(), "options": dict(bout.options), "optimum": optimum(self.problem).value}
