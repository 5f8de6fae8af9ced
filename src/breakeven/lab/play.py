"""Prompts of several turns as sessions to play: who says what, after how long, with which seed. Pure.

A prompt's user messages are the turns (an agent's are its tools' outputs), its assistant messages the recorded answers.
Everything is a function of the campaign's seed, so all arms of a block play the same sessions at the same pace.
"""

from __future__ import annotations

import math

from breakeven.lab.campaign import Sessions
from breakeven.lab.client.sessions import Session, Turn
from breakeven.lab.design import stable_hash
from breakeven.lab.workload.prompt import Prompt

_SEEDS = 2**31  # as `design.request_seed`


def turns_in(prompt: Prompt, sessions: Sessions) -> int:
    """How many turns a prompt has when it is played."""
    count = sum(message["role"] == "user" for message in prompt.messages)
    return count if sessions.max_turns is None else min(count, sessions.max_turns)


def session_of(prompt: Prompt, session_id: str, sessions: Sessions, draw: int) -> Session:
    """The session of a prompt. `draw`: of its think times (a hash of what is the same for all arms).

    With recorded answers a turn carries the assistant's message that follows it in the prompt; the last one has none,
    and needs none.
    """
    messages = list(prompt.messages)
    system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
    turns = []
    for number in range(turns_in(prompt, sessions)):
        following = messages[2 * number + 1]["content"] if 2 * number + 1 < len(messages) else None
        turns.append(
            Turn(
                messages[2 * number]["content"],
                _think_s(sessions, draw, number),
                following if sessions.answers == "recorded" else None,
            )
        )
    return Session(session_id, tuple(turns), system, prompt.id)


def _think_s(sessions: Sessions, draw: int, number: int) -> float:
    """Before turn `number` (from 0; the first waits for nobody): the mean, or an exponential draw with that mean."""
    if sessions.think_spread == "constant" or number == 0:
        return sessions.think_s if number else 0.0
    uniform = (stable_hash("think", draw, number) % 2**53 + 1) / 2**53  # in (0, 1]
    return -sessions.think_s * math.log(uniform)


def turn_seed(seed: int | None, turn: int, *, per_request: bool) -> int | None:
    """The sampling seed of a turn (from 1) of a session with this seed; a fixed seed is every turn's."""
    if seed is None or turn == 1 or not per_request:
        return seed
    return stable_hash("turn", seed, turn) % _SEEDS


def turn_of(request_id: str) -> int:
    """The number of a request's turn in its session, from 1; 1 for a request that is not of a session."""
    _, slash, number = request_id.rpartition("/")
    return int(number) if slash and number.isdigit() else 1
