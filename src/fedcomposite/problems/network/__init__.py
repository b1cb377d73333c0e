"""Networks: any ``torch.nn.Module`` as the clients' functions, its parameters one flat vector.

Stacked gradients
-----------------
The gradients of m clients at their own parameters, ``(m, d)``, come from one vectorised pass (``torch.func.vmap``) or
from one pass per client. The rule depends on the module and on shapes, never on a timing, so that a resumed run repeats
every bit: one pass per client for a single client, for layers that draw random numbers, for modules that vmap refuses
(data-dependent branches, writing into unbatched tensors), and on a CPU for models with convolutions and a million
parameters; vectorised otherwise. ``gradients="vmap"`` or ``"loop"`` forces it.

On a CPU, two-dimensional convolutions and pooling of smaller models in float32 keep channels last in memory
(:mod:`fedcomposite.problems.layers`), unless the module takes views that this layout does not allow; other
convolutions are vectorised for batches up to 12 only. A pass that is asked for again and again is turned into the list
of its operations (:mod:`fedcomposite.problems.traced`), if that gives the same bits.

Training and evaluation
-----------------------
Gradients are taken in training mode, where batch norm uses the statistics of the minibatch (of the whole silo for a
full gradient) and updates its buffers; evaluation uses the buffers. Persistent buffers travel as one vector beside x;
integer ones (``num_batches_tracked``) are rounded when they are read.

Random numbers
--------------
Dropout and augmentation draw from torch's generator, which is seeded before each client's pass by the counter-based
stream ``Use.MODEL`` of (seed, client, round, k). A run is thus a function of its seed, whatever the
backend; torch's own streams differ between a CPU and a GPU.
"""

from fedcomposite.problems.network.evaluation import spread
from fedcomposite.problems.network.flat import layout
from fedcomposite.problems.network.gradients import LoopWarning
from fedcomposite.problems.network.named_losses import MODEL_LOSSES, CrossEntropy, named_loss, needs
from fedcomposite.problems.network.options import (
    IGNORED,
    ModelLoss,
    NetworkOptions,
    Plain,
    model_loss,
)
from fedcomposite.problems.network.smooth import Network

__all__ = [
    "IGNORED",
    "MODEL_LOSSES",
    "CrossEntropy",
    "LoopWarning",
    "ModelLoss",
    "Network",
    "NetworkOptions",
    "Plain",
    "layout",
    "model_loss",
    "named_loss",
    "needs",
    "spread",
]
