"""A method's local round with all that happens between two gradients in one compiled function.

The rule is carried out once on stand-ins, while its operations are listed; gradients stay what they are, and the
stretches between them are compiled. Stretches that differ in numbers only, as those of most local steps do, are one
function. A step of a large model is a few passes over memory in place of one for every operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedcomposite.algorithms.base import AnyAlgorithm, Gradient
from fedcomposite.problems.base import UnsuitableError
from fedcomposite.problems.traced import pure, trace
from fedcomposite.regularizers.base import Regularizer, Step
from fedcomposite.regularizers.wrapped import Wrapped

if TYPE_CHECKING:
    from torch import fx

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
_NUMBERS = ("mul.Tensor", "div.Tensor", "add.Tensor", "sub.Tensor")  # operations whose second argument may be a number
_FILLED = ("full_like.default", "full.default")
_SMALL = 1 << 16  # entries up to which a tensor of one number is made once and kept
_KEPT: dict[tuple[Any, ...], Callable[..., Any]] = {}  # compiled stretches; a step that changes is no other stretch
_MOST = 256


@torch.library.custom_op("fedcomposite::gradient", mutates_args=())
def _gradient(x: Tensor, k: int, full: bool, call: int) -> Tensor:
    """Stand in for a gradient at x; ``call`` makes every one different."""
    return torch.zeros_like(x)


class _Marks:
    """An oracle that leaves marks where gradients are asked for."""

    def __init__(self, cohort: int, device: torch.device) -> None:
        self.cohort, self._device, self._calls = cohort, device, 0

    def _mark(self, x: Tensor, k: int, full: bool) -> Tensor:
        self._calls += 1
        gradient: Tensor = _gradient(x, k, full, self._calls)
        return gradient

    def __call__(self, x: Tensor, k: int) -> Tensor:
        return self._mark(x, k, False)

    def full(self, x: Tensor) -> Tensor:
        return self._mark(x, 0, True)

    def loss(self, x: Tensor) -> Tensor:
        raise UnsuitableError("a loss is no gradient")

    def hessian(self, x: Tensor, where: Tensor) -> Tensor:
        raise UnsuitableError("a Hessian is no gradient")

    def uniform(self, k: int, count: int = 1) -> Tensor:
        raise UnsuitableError("coins change from round to round")

    @property
    def position(self) -> Tensor:
        return torch.arange(self.cohort, device=self._device).unsqueeze(1)


class _Formulas(Wrapped):
    """h whose proxes are written out, with steps that are tensors: another step is no other formula."""

    def __init__(self, h: Regularizer) -> None:
        super().__init__(h)
        self._steps: dict[float, Tensor] = {}

    def prox(self, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        if not isinstance(step, Tensor):
            self.h.check_step(step)
            if step not in self._steps:
                self._steps[step] = torch.full((1,), step, dtype=v.dtype, device=v.device)
            step = self._steps[step]
        result = self.h.formula(v, step.to(v.dtype))
        return result if out is None else out.copy_(result)


class _Stretch(NamedTuple):
    """Operations between two gradients: a function, and the names of what it takes and gives."""

    function: Callable[..., Any]
    given: list[str]
    found: list[str]


class _Call(NamedTuple):
    """A gradient: where, in which local step (None for a full one), and the name of the result."""

    x: str
    k: int | None
    found: str


class Fused:
    """The local round of an algorithm, for messages and states of these shapes."""

    def __init__(
        self, algorithm: AnyAlgorithm, message: NamedTuple, clients: NamedTuple, h: Regularizer, compile: Compile
    ) -> None:
        tensors = (*message, *clients)
        cohort, first = len(clients[0]) if clients else len(message[0]), tensors[0]
        self._first, self._kinds = first, (message, clients)

        formulas = _Formulas(h)

        def round(*given: Tensor) -> tuple[Tensor, ...]:
            parts = message._make(given[: len(message)]), clients._make(given[len(message) :])
            replies, new = algorithm.local_round(*parts, _Marks(cohort, first.device), formulas)
            self._kinds = replies, new
            return *replies, *new

        round(*tensors)  # steps become tensors here: what is made while operations are listed is one of them
        module = trace(round, *tensors).__self__  # type: ignore[attr-defined]
        self._compile = compile
        self._constants: dict[str, Tensor] = {}
        self._read(module)

    def _read(self, module: fx.GraphModule) -> None:
        """Cut the graph at the gradients."""
        nodes = list(module.graph.nodes)
        self._given = [n.name for n in nodes if n.op == "placeholder"]
        self._constants |= {n.name: getattr(module, n.target) for n in nodes if n.op == "get_attr"}
        self._found = [n.name for n in nodes[-1].args[0]]
        self._steps: list[_Stretch | _Call] = []
        stretch: list[fx.Node] = []
        for node in nodes:
            mark = node.op == "call_function" and node.target is torch.ops.fedcomposite.gradient.default
            if mark or node.op == "output":
                if stretch:
                    self._steps.append(self._stretch(stretch))
                stretch = []
            elif node.op == "call_function" and not self._keep(node):
                stretch.append(node)
            if mark:
                x, k, full, _ = node.args
                self._steps.append(_Call(x.name, None if full else k, node.name))
        self._last_uses()

    def _keep(self, node: fx.Node) -> bool:
        """Whether the node is a small tensor of one number, which may change with the steps: it is a constant then."""
        if _name(node) not in _FILLED or any(not pure(user.target) for user in node.users if user.op != "output"):
            return False
        like, number = node.meta["val"], node.args[1]
        if like.numel() > _SMALL or not isinstance(number, float | int):
            return False
        self._constants[node.name] = torch.full(like.shape, number, dtype=like.dtype, device=self._first.device)
        return True

    def _stretch(self, nodes: Sequence[fx.Node]) -> _Stretch:
        """Nodes as a compiled function of what comes from elsewhere."""
        from torch import fx

        graph, inside, given = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, fx.Node]()

        def outer(name: str) -> fx.Node:
            if name not in given:
                given[name] = graph.placeholder(f"given_{len(given)}")
            return given[name]

        for node in nodes:
            args = node.args
            if _name(node) in _NUMBERS and isinstance(args[1], float):
                name = f"{node.name}: {args[1]}"  # one for every place, since others may have another number there
                self._constants[name] = torch.full((), args[1], dtype=self._first.dtype, device=self._first.device)
                args = args[0], outer(name)
            own, named = fx.map_arg(
                (args, node.kwargs), lambda n: inside[n] if n in inside else n if n.graph is graph else outer(n.name)
            )
            inside[node] = graph.create_node("call_function", node.target, own, named)
        kept = [n for n in nodes if any(user not in inside for user in n.users)]
        graph.output(tuple(inside[n] for n in kept))
        key = str(graph), self._first.shape, self._first.dtype, self._first.device, self._compile
        if key not in _KEPT:
            if len(_KEPT) == _MOST:
                _KEPT.clear()
            _KEPT[key] = self._compile(fx.GraphModule({}, graph))
        return _Stretch(_KEPT[key], list(given), [n.name for n in kept])

    def _last_uses(self) -> None:
        """What is not needed after each step."""
        needed, self._dead = set(self._found) | set(self._constants), list[list[str]]()
        for step in reversed(self._steps):
            used = {step.x} if isinstance(step, _Call) else set(step.given)
            made = [step.found] if isinstance(step, _Call) else step.found
            self._dead.insert(0, [*(used - needed), *(name for name in made if name not in needed)])
            needed |= used

    def __call__(self, message: Any, clients: Any, grad: Gradient, h: Regularizer) -> tuple[Any, Any]:
        """As the algorithm's own; ``h`` is the one that was given before."""
        known = self._constants | dict(zip(self._given, (*message, *clients), strict=True))
        for step, dead in zip(self._steps, self._dead, strict=True):
            if isinstance(step, _Call):
                x = known[step.x]
                known[step.found] = grad.full(x) if step.k is None else grad(x, step.k)
            else:
                known |= zip(step.found, step.function(*(known[n] for n in step.given)), strict=True)
            for name in dead:
                del known[name]
        found, (replies, new) = [known[n] for n in self._found], self._kinds
        return replies._make(found[: len(replies)]), new._make(found[len(replies) :])


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.")
