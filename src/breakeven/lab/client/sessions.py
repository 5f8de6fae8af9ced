"""Multi-turn sessions: a turn is sent when the answer before it has come and its think time has passed.

An agent's session is a dialogue in which the other side is a tool: each turn's text is the tool's output, its think
time is how long the tool ran, and the context grows by what the model itself answered (or by a recorded answer, so that
all arms get the same context whatever they wrote). A stream runs one session to its end, then takes the next.

The next turn is made between two reads, so its answer is parsed while others stream: about 10 µs per event of it. Turns
are far apart and the send lag shows what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from breakeven.lab.client.generator import ClosedLoop
from breakeven.lab.client.parse import parse_exchange
from breakeven.lab.client.types import Endpoint, LoadResult, RequestSpec

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Turn:
    """What is said next, after `think_s` seconds. `answer`: goes into the context instead of the model's own answer."""

    text: str
    think_s: float = 0.0
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """A dialogue: an optional system message, and at least one turn. The first turn's think time is not waited for."""

    id: str
    turns: tuple[Turn, ...]
    system: str | None = None
    prompt_id: str | None = None  # of its requests; None: the session's own id

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError(f"session {self.id!r} has no turns")
        if any(not 0 <= turn.think_s < float("inf") for turn in self.turns):
            raise ValueError(f"session {self.id!r} has a think time that is negative or infinite")


def run_sessions(
    endpoint: Endpoint,
    sessions: Sequence[Session],
    concurrency: int,
    body: Callable[[Messages, str], bytes],
    *,
    timeout_s: float = 600,
    deadline_s: float | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> LoadResult:
    """Runs `sessions` over `concurrency` streams. `body` makes a request of the messages so far and its name.

    A turn is a request named SESSION/NUMBER (from 1); its intended send time is the end of the answer before plus the
    think time. A session ends early where a turn fails. The other arguments are as in `run_closed_loop`.
    """
    if concurrency < 1 or timeout_s <= 0:
        raise ValueError(f"concurrency ({concurrency}) must be at least 1, and timeout_s ({timeout_s}) positive")
    loop = _SessionLoop(endpoint, sessions, min(concurrency, max(1, len(sessions))), timeout_s, body)
    return loop.run_alone(deadline_s, on_progress, should_stop)


@dataclass(slots=True)
class _Dialogue:
    session: Session
    messages: list[Mapping[str, str]]
    turn: int = 0  # turns sent so far


class _SessionLoop(ClosedLoop):
    def __init__(
        self,
        endpoint: Endpoint,
        sessions: Sequence[Session],
        streams: int,
        timeout_s: float,
        body: Callable[[Messages, str], bytes],
    ) -> None:
        self._specs: list[RequestSpec] = []  # grows by one with every turn
        super().__init__(endpoint, self._specs, range(streams), timeout_s)
        self._waiting = iter(sessions)
        self._under_way: dict[int, _Dialogue] = {}
        self._body = body

    def _take(self, planned: int, intended_ns: int) -> tuple[int, int] | None:
        dialogue = self._under_way.get(planned)
        if dialogue is None:
            session = next(self._waiting, None)
            if session is None:
                return None
            system = [{"role": "system", "content": session.system}] if session.system is not None else []
            dialogue = self._under_way[planned] = _Dialogue(session, list(system))
        dialogue.messages.append({"role": "user", "content": dialogue.session.turns[dialogue.turn].text})
        dialogue.turn += 1
        name = f"{dialogue.session.id}/{dialogue.turn}"
        prompt_id = dialogue.session.prompt_id or dialogue.session.id
        self._specs.append(RequestSpec(name, prompt_id, self._body(dialogue.messages, name)))
        return planned, len(self._specs) - 1

    def _freed(self, stream: int, end_ns: int) -> None:
        dialogue = self._under_way[stream]
        turns = dialogue.session.turns
        result = parse_exchange(self._finished[-1].raw())
        if result.error is not None or dialogue.turn == len(turns):
            del self._under_way[stream]
            self._due(stream, end_ns)
            return
        recorded = turns[dialogue.turn - 1].answer
        dialogue.messages.append({"role": "assistant", "content": result.text if recorded is None else recorded})
        self._due(stream, end_ns + round(turns[dialogue.turn].think_s * 1e9))

    def _due(self, stream: int, moment_ns: int) -> None:
        """Into its place by time: think times differ, so what was added last is not what is due last."""
        place = len(self._ready)
        while place and self._ready[place - 1][1] > moment_ns:
            place -= 1
        self._ready.insert(place, (stream, moment_ns, None))
