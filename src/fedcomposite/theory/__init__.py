"""What the papers prove: step-size conditions and convergence bounds, as functions of a problem's constants.

    c = constants(problem, rounds=200, solution=x_star)      # measure L, rho, G, ...
    method = build("Zhang", **steps("Zhang", c))             # the largest steps its theorem allows
    outside(method, c)                                       # [] or a sentence per violated condition
    bound(run, method, c)                                    # the theorem's right-hand side, per record
    corrections(method, c)                                   # constants that the paper prints otherwise than it proves

The theorems of the five papers are read from them; those on SCAFFOLD, ProxSkip and FedDR are restated as generally
published.

Theory steps are safe and small; :func:`auto` gives the practical ones. Every theorem is a class, with its number and
formula, in the file of its paper; x+ is the next model, tau = ``local_steps``, eta = ``step``, eta_g = ``server_step``,
b the batch size, and sigma^2 the variance of a gradient on one sample (zero with full gradients). The theorems are
about equal weights, w_i = 1/n. Methods without an entry in :data:`THEOREMS` have none that could be stated with all its
constants.
"""

from fedcomposite.theory.base import Bounded, Correction, Floats, Theorem
from fedcomposite.theory.beck import ProximalGradientDescent
from fedcomposite.theory.choosing import THEOREMS, auto, bound, choose, corrections, find, outside, steps
from fedcomposite.theory.fedcanon import FedCanon1, FedCanon2
from fedcomposite.theory.feddr import DouglasRachford
from fedcomposite.theory.fedmls import FedMLS32
from fedcomposite.theory.fedprox import FedMSPP3, FedProx1, ProximalPointNonSmooth
from fedcomposite.theory.measured import Constants, constants, subgradient_bound
from fedcomposite.theory.proxskip import ProxSkip
from fedcomposite.theory.scaffold import Scaffold
from fedcomposite.theory.zhang import Zhang35, Zhang36, Zhang38

__all__ = [
    "THEOREMS",
    "Bounded",
    "Constants",
    "Correction",
    "DouglasRachford",
    "FedCanon1",
    "FedCanon2",
    "FedMLS32",
    "FedMSPP3",
    "FedProx1",
    "Floats",
    "ProxSkip",
    "ProximalGradientDescent",
    "ProximalPointNonSmooth",
    "Scaffold",
    "Theorem",
    "Zhang35",
    "Zhang36",
    "Zhang38",
    "auto",
    "bound",
    "choose",
    "constants",
    "corrections",
    "find",
    "outside",
    "steps",
    "subgradient_bound",
]
