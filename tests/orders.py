"""An order as a coordinator sends it, and a text nested deeper than any reader goes."""

from local_federation import method, write

DEEP = "[" * 20_000 + "]" * 20_000
CONFIG = write(method("FedAvg"), rounds=9)
SHAPE = {"features": [3], "dtype": "float64", "names": ["x", "y", "z"], "labels": [0.0, 1.0], "clients": 4}
ORDER = {
    "job": "job", "site": "a", "config": CONFIG, "shape": SHAPE, "client": 0, "round": 0, "last": -1, "position": 0,
    "cohort": 4, "train": True, "evaluate": True,
}  # fmt: skip
