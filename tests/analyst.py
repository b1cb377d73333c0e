"""Questions of an analyst to sites in this process, and what compares their answers."""

import numpy as np
import pytest
import torch
from local_federation import LocalSites

import fedcomposite as fc
from fedcomposite.federation.coordinator.inquiry import Inquiry
from fedcomposite.federation.shape import parse
from fedcomposite.runtime import Driver

PLAIN = """
seed = 3
[problem]
loss = "logistic"
bias = true
weights = "samples"
[regularizer]
name = "L1"
lam = 0.02
[algorithm]
name = "ProxNewton"
[run]
rounds = 1
"""


def inquiry(sites, text=PLAIN, **options):
    grid = LocalSites(sites)
    one = Inquiry(grid, [s.name for s in sites], grid.permitted, parse(text, recipe=True), "job", **options)
    return one, grid


def same(a, b, tolerance=1e-10):
    np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=tolerance, atol=tolerance)


def compare(found, expected, tolerance=1e-10, where=""):
    """Two trees of numbers are the same, by default to ten digits."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            compare(found[key], value, tolerance, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            compare(a, b, tolerance, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True), where
    else:
        assert found == expected, where


def question(sites, name="newton", rows=None, text=PLAIN, **arrays):
    """Ask one question and give the answers or the refusal."""
    asking, grid = inquiry(sites, text)
    there = asking.meet()
    x = torch.zeros(there.dimension, dtype=torch.float64)
    given = {"x": x, "working": x.bool(), **arrays} if name == "newton" else {"x": x, **arrays}
    return Driver(asking).each([fc.analysis.Request(name, given, {}, rows or fc.analysis.Rows())]), grid
