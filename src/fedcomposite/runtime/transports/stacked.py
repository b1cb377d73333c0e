"""All clients of a round at once: one stacked tensor program, recorded or compiled on a GPU."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from torch import Tensor

from fedcomposite import rng
from fedcomposite.algorithms.base import AnyAlgorithm
from fedcomposite.problems.base import UnsuitableError
from fedcomposite.regularizers import Regularizer
from fedcomposite.runtime import messages
from fedcomposite.runtime.program import EagerWarning, Mode, Program
from fedcomposite.runtime.protocol import Round
from fedcomposite.runtime.transports.in_process import LocalTransport

_STAY = 10  # rounds that scheduled steps must stay the same for a recording to pay
_NEAR = 3  # participants more or fewer than usual for whom a process of several has a recording
_ROOM = 1 << 22  # entries of a stacked vector up to which temporaries stay near the cores, on a CPU


class Stacked(LocalTransport):
    """Clients as rows of ``(m, d)`` tensors."""

    def __init__(self, *given: Any, mode: Mode = "eager", **named: Any) -> None:
        super().__init__(*given, **named)
        self.mode: Mode = mode
        self._programs: dict[int, Program] = {}  # by the number of clients
        self._now, self._warned = self._rules(0), False

    def _carry_out(
        self, who: rng.Ints, message: NamedTuple, request: Round, place: tuple[int, int]
    ) -> tuple[NamedTuple, Tensor]:
        rows = None if self._everyone else who
        mine = self.rows.take(rows)
        program = self._recorded(message, mine, request, who, place)
        if program is None:
            cpu = self.smooth.device.type == "cpu"
            per = max(1, _ROOM // self.smooth.dimension) if cpu else len(who)
            chunks = [slice(a, a + per) for a in range(0, len(who), per)]
            parts = [self._together(who[c], message, mine, c, request, place) for c in chunks]
            replies, new, buffers = parts[0] if len(parts) == 1 else map(messages.join, zip(*parts, strict=True))
        else:
            self.problem.regularizer.turn(request.round)
            replies, new, buffers = program(message, mine, request.buffers, who, request.round, place[0])
            self.counter.gradients += program.gradients
            self.counter.proxes += program.proxes
        self.rows.put(rows, new)
        stacked: NamedTuple = replies
        return stacked, buffers

    def _together(
        self,
        who: rng.Ints,
        message: NamedTuple,
        mine: NamedTuple,
        chunk: slice,
        request: Round,
        place: tuple[int, int],
    ) -> tuple[NamedTuple, NamedTuple, Tensor]:
        """Replies, states and buffers of some clients, as one stacked computation."""
        grad = self.gradients(who, request.round, request.buffers, (place[0] + chunk.start, place[1]))
        states = messages.each(mine, lambda t: t[chunk])
        rules = self.algorithm.at(request.round)
        replies, new = rules.local_round(messages.stack(message, len(who)), states, grad, self.h.during(request.round))
        self._expect = grad.steps_used
        self._asked = max(self._asked, grad.queries)
        return replies, new, grad.buffers

    def _recorded(
        self, message: NamedTuple, mine: NamedTuple, request: Round, who: rng.Ints, place: tuple[int, int]
    ) -> Program | None:
        """The round as one program, made when it is first needed; None where it is carried out eagerly."""
        if self.mode == "eager" or not self._usual(len(who)):
            return None
        now = self._rules(request.round)
        if now != self._now:
            self._programs.clear()  # the old ones give their memory back first
            self._now = now
        if len(who) not in self._programs:
            if not self._stays(request.round):
                changing = [*self.algorithm.schedules, *(["the strength of h"] if now[1] is not self.h.h else [])]
                self._warn(f"{', '.join(changing)} changes from round to round")
                return None
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "TensorFloat32", UserWarning)  # the compiler's: exact is meant
                    self._programs[len(who)] = Program(
                        now[0], self.smooth, now[1], self.batches, message, mine,
                        request.buffers, who, place, everyone=self._everyone, compile=self.mode == "compile",
                    )  # fmt: skip
            except UnsuitableError as reason:
                self.mode = "eager"
                self._warn(str(reason))
        return self._programs.get(len(who))

    def _usual(self, count: int) -> bool:
        """Whether a process of several has about as many participants as it has on average; never by what went before.

        One program for each number of them is recorded, so that there must not be too many.
        """
        expected = round(self._cohort * (self.span.stop - self.span.start) / self.clients)
        return self.group.size == 1 or abs(count - expected) <= _NEAR

    def _warn(self, reason: str) -> None:
        """Say once why rounds are not recorded."""
        if not self._warned:
            name = type(self.algorithm).__name__
            warnings.warn(f"{name} runs step by step on the GPU: {reason}", EagerWarning, stacklevel=8)
        self._warned = True

    def _rules(self, round: int) -> tuple[AnyAlgorithm, Regularizer]:
        """The method and h with the numbers of a round."""
        return self.algorithm.at(round), self.problem.regularizer.recorded(round)

    def _stays(self, round: int) -> bool:
        """Whether what is scheduled keeps its value for long enough to be recorded; a function of the round alone."""
        rules, at = self._rules(round), self._rules
        before = next((j for j in range(_STAY) if round - j == 0 or at(round - j - 1) != rules), _STAY)
        after = next((j for j in range(_STAY) if at(round + j + 1) != rules), _STAY)
        return before + 1 + after >= _STAY

    @property
    def remark(self) -> str:
        if not self._programs:
            return ""
        done = "compiled" if self.mode == "compile" else "recorded"
        return f"rounds {done} for the GPU in {sum(p.seconds for p in self._programs.values()):.1f} s"
