"""How far another machine's clock is from ours, how well we know that, and its times in ours. Pure.

The formula is NTP's (RFC 5905, section 8): we send at t0 and have the answer at t3 by our clock, the other side hears
at t1 and answers at t2 by its own. Then

    offset = ((t1 − t0) + (t2 − t3)) / 2        delay = (t3 − t0) − (t2 − t1)

Whatever the two ways took, the true offset is within delay / 2 of that. Of several round trips the one of the smallest
delay is kept (section 10, the clock filter), because it bounds the offset best.

Offsets are measured before and after each run. A request's own times all come from one clock, so its TTFT, TPOT and
gaps hold no error of this kind; what the bound limits is the comparison between workers: the common start, the steady
window, the streams in flight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from breakeven.lab.client.types import LoadResult, RawExchange, WorkerClock


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """One question and answer, in nanoseconds: sent (ours), heard (theirs), answered (theirs), received (ours)."""

    sent_ns: int
    heard_ns: int
    answered_ns: int
    received_ns: int

    @property
    def delay_ns(self) -> int:
        return (self.received_ns - self.sent_ns) - (self.answered_ns - self.heard_ns)


@dataclass(frozen=True, slots=True)
class Offset:
    """Their clock minus ours, at `at_ns` of ours; the truth is within `bound_ns` of it."""

    at_ns: int
    offset_ns: int
    bound_ns: int


def estimate(trips: Iterable[RoundTrip]) -> Offset:
    """The offset by the quickest of the round trips. ValueError if there is none in which time went forwards."""
    possible = [trip for trip in trips if trip.delay_ns >= 0]
    if not possible:
        raise ValueError("no round trip in which time went forwards: a clock was set while they were compared")
    best = min(possible, key=lambda trip: trip.delay_ns)
    twice = (best.heard_ns - best.sent_ns) + (best.answered_ns - best.received_ns)
    return Offset((best.sent_ns + best.received_ns) // 2, twice // 2, -(-best.delay_ns // 2) + 1)  # + 1: rounding


@dataclass(frozen=True, slots=True)
class ClockMap:
    """Another clock's times in ours, over a run: the offset goes in a straight line from `before` to `after`."""

    before: Offset
    after: Offset

    @property
    def drift_ns(self) -> int:
        """How far the clock moved against ours from one comparison to the other."""
        return self.after.offset_ns - self.before.offset_ns

    @property
    def bound_ns(self) -> int:
        """The largest error of a time mapped, if the true offset stayed between its values at the two comparisons."""
        return max(self.before.bound_ns, self.after.bound_ns) + abs(self.drift_ns)

    def offset_at(self, theirs_ns: int) -> int:
        """The offset at a moment of their clock; before and after the comparisons it is that of the nearer one."""
        span = self.after.at_ns - self.before.at_ns
        since = theirs_ns - self.before.offset_ns - self.before.at_ns
        if span <= 0 or since <= 0:
            return self.before.offset_ns
        return self.before.offset_ns + self.drift_ns * min(since, span) // span

    def exchange(self, theirs: RawExchange) -> RawExchange:
        """An exchange in our clock. All of its times move alike, so what it took stays as its own clock has it."""
        shift = self.offset_at(theirs.intended_send_ns)
        return replace(
            theirs,
            intended_send_ns=theirs.intended_send_ns - shift,
            send_ns=theirs.send_ns - shift,
            reads=[(time_ns - shift, end) for time_ns, end in theirs.reads],
            end_ns=theirs.end_ns - shift,
        )

    def result(self, theirs: LoadResult, worker: int, node: str) -> LoadResult:
        """A worker's result in our clock, with what is known of its clock."""
        exchanges = [self.exchange(exchange) for exchange in theirs.exchanges]
        start_ns = theirs.start_ns - self.offset_at(theirs.start_ns)
        end_ns = theirs.end_ns - self.offset_at(theirs.end_ns)
        known = WorkerClock(worker, node, self.before.offset_ns / 1e6, self.bound_ns / 1e6, self.drift_ns / 1e6)
        return replace(
            theirs,
            exchanges=exchanges,
            start_ns=start_ns,
            end_ns=max(start_ns, end_ns, *(exchange.end_ns for exchange in exchanges)),
            clocks=(known,),
        )
