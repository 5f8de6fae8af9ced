"""POST /tokenize: the token ids that a request's prompt would have, as vLLM's route of that name gives them.

The body is that of a completion or a chat completion (told apart by `messages`); what does not concern the prompt is
checked and not used. Whoever measures can so record what a chat template made of the messages, without generating.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from breakeven.engine.async_engine import AsyncEngine
from breakeven.engine.http.errors import answer_to
from breakeven.engine.http.generation import encode_prompts
from breakeven.engine.http.wire import ClientGoneError, read_body, send_answer, send_error
from breakeven.engine.openai_schema import ChatBody, CompletionBody, GenerationBody, ParameterError, parse_body


class TokenizeEndpoint:
    """An ASGI endpoint. The arguments are those of `GenerationEndpoint`."""

    def __init__(
        self, require_engine: Callable[[], AsyncEngine], model_name: Callable[[str | None], str], max_body_bytes: int
    ) -> None:
        self._require_engine = require_engine
        self._model_name = model_name
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            try:
                await self._serve(await read_body(scope, receive, self._max_body_bytes), send)
            except ClientGoneError:
                return
            except Exception as error:
                await send_error(send, answer_to(error, "a tokenisation"))
        except OSError:
            return  # the connection broke while we answered

    async def _serve(self, data: bytes, send: Send) -> None:
        engine = self._require_engine()
        body = _body(data)
        self._model_name(body.model)
        body.check(engine.engine.tokenizer.vocab_size)
        prompts = await encode_prompts(engine, body)
        if len(prompts) != 1:
            raise ParameterError(f"one prompt at a time is tokenised, not {len(prompts)}", "prompt")
        ids = list(prompts[0])
        answer = {"count": len(ids), "max_model_len": engine.engine.max_context, "tokens": ids}
        await send_answer(send, 200, json.dumps(answer).encode())


def _body(data: bytes) -> GenerationBody:
    """ParameterError for what neither route would take."""
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        given = None  # the parser says what is wrong with it
    if isinstance(given, dict) and "messages" in given:
        return parse_body(ChatBody, data)
    return parse_body(CompletionBody, data)
