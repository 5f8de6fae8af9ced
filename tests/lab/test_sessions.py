"""Multi-turn sessions: turns wait for answers and for thinking, and contexts hold what was said."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from breakeven.lab.client import Endpoint, parse_exchange
from breakeven.lab.client.sessions import Messages, Session, Turn, run_sessions
from breakeven.lab.mock import MockScript, MockServer
from breakeven.lab.play import turn_of


@pytest.fixture
def server() -> Iterator[MockServer]:
    found = MockServer(MockScript(first_chunk_s=0.005, gap_s=0.001, chunks=3, bytes_per_chunk=0))
    thread = threading.Thread(target=found.serve)
    thread.start()
    yield found
    found.stop()
    thread.join(5)


def test_a_turn_follows_the_answer_after_its_think_time_with_the_answer_in_its_context(server: MockServer) -> None:
    seen: list[list[dict[str, str]]] = []

    def body(messages: Messages, name: str) -> bytes:
        seen.append([dict(m) for m in messages])
        return json.dumps({"messages": seen[-1], "stream": True, "stream_options": {"include_usage": True}}).encode()

    turns = (Turn("list", 9.0, answer="ls"), Turn("a.py", 0.05), Turn("done?", 0.02))
    sessions = [Session("a", turns, system="Shell."), Session("b", turns[:2]), Session("c", turns[:1])]
    result = run_sessions(Endpoint(f"{server.url}/v1/chat/completions"), sessions, 2, body)
    results = [parse_exchange(e) for e in result.exchanges]
    assert [r.error for r in results] == [None] * 6
    found = {r.request_id: r for r in results}
    assert sorted(found) == ["a/1", "a/2", "a/3", "b/1", "b/2", "c/1"]
    for session, turn, think_s in (("a", 2, 0.05), ("a", 3, 0.02), ("b", 2, 0.05)):
        gap = found[f"{session}/{turn}"].intended_send_ns - found[f"{session}/{turn - 1}"].end_ns
        assert gap == round(think_s * 1e9)
        assert found[f"{session}/{turn}"].send_ns >= found[f"{session}/{turn}"].intended_send_ns
    longest = max(seen, key=len)
    assert [m["role"] for m in longest] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert longest[2]["content"] == "ls"  # recorded
    assert longest[4]["content"] == found["a/2"].text  # the model's own
    assert sorted(turn_of(r.request_id) for r in results) == [1, 1, 1, 2, 2, 3]


def test_a_session_ends_where_a_turn_fails() -> None:
    sessions = [Session("a", (Turn("x"), Turn("y"))), Session("b", (Turn("x"),))]
    result = run_sessions(Endpoint("http://127.0.0.1:9/v1/chat/completions"), sessions, 1, lambda messages, name: b"{}")
    assert [e.request_id for e in result.exchanges] == ["a/1", "b/1"]
    assert all("refused" in str(e.error) for e in result.exchanges)


def test_a_session_that_cannot_be_played_is_refused() -> None:
    with pytest.raises(ValueError, match="has no turns"):
        Session("a", ())
    with pytest.raises(ValueError, match="negative or infinite"):
        Session("a", (Turn("x", -1.0),))
