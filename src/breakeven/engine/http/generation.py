"""The two generating routes: from a validated body to engine requests, and from their outputs to the client."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence

from starlette.types import Receive, Scope, Send

from breakeven.engine.async_engine import AsyncEngine, GenerationRequest, RequestFailed, RequestStream
from breakeven.engine.http.errors import answer_to
from breakeven.engine.http.formats import DONE, Choice, ResponseFormat, Usage, add_speculation
from breakeven.engine.http.wire import ClientGoneError, read_body, run_until_disconnect, send_answer, send_error
from breakeven.engine.openai_schema import ChatBody, CompletionBody, GenerationBody, ParameterError, parse_body
from breakeven.engine.request import RequestOutput, SpeculationStats

_LONG_TEXT = 16_384  # characters from which tokenising leaves the event loop
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class GenerationEndpoint:
    """An ASGI endpoint. `require_engine` gives the engine or raises the 503; `model_name` checks the body's model."""

    def __init__(
        self,
        body_type: type[CompletionBody] | type[ChatBody],
        require_engine: Callable[[], AsyncEngine],
        model_name: Callable[[str | None], str],
        max_body_bytes: int,
    ) -> None:
        self._body_type = body_type
        self._require_engine = require_engine
        self._model_name = model_name
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            try:
                data = await read_body(scope, receive, self._max_body_bytes)
                await run_until_disconnect(receive, self._serve(data, send))
            except ClientGoneError:
                return
            except Exception as error:
                await send_error(send, answer_to(error, "a request"))
        except OSError:
            return  # the connection broke while we answered

    async def _serve(self, data: bytes, send: Send) -> None:
        engine = self._require_engine()
        tokenizer = engine.engine.tokenizer
        body = parse_body(self._body_type, data)
        model = self._model_name(body.model)
        body.check(tokenizer.vocab_size)
        prompts = await encode_prompts(engine, body)
        copies = body.choices_per_prompt
        chat = isinstance(body, ChatBody)
        response_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        choices = [
            Choice(index, prompts[index // copies], counts_prompt=index % copies == 0)
            for index in range(len(prompts) * copies)
        ]
        requests = [
            GenerationRequest(f"{response_id}-{choice.index}", choice.prompt_ids, body.sampling(choice.index % copies))
            for choice in choices
        ]
        layout = ResponseFormat(
            response_id=response_id,
            created=int(time.time()),
            model=model,
            chat=chat,
            tokenizer=tokenizer,
            logprobs=body.logprob_count,
            token_ids=bool(body.return_token_ids),
            speculation=bool(body.return_speculation),
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
        )
        by_request = {request.request_id: choice for request, choice in zip(requests, choices, strict=True)}
        usage = Usage(prompt_tokens=sum(len(prompt) for prompt in prompts))
        outputs = await engine.generate_batch(requests)
        try:
            if body.stream:
                await _stream(outputs, by_request, layout, usage, send)
            else:
                answer = await _collect(outputs, by_request, layout, usage)
                await send_answer(send, 200, answer)
        finally:
            outputs.close()


async def encode_prompts(engine: AsyncEngine, body: GenerationBody) -> Sequence[Sequence[int]]:
    """Token ids per prompt. Raises `ParameterError` where the text or the conversation cannot be encoded."""
    tokenizer = engine.engine.tokenizer

    def encode_all() -> list[Sequence[int]]:
        if isinstance(body, ChatBody):
            if not tokenizer.has_chat_template:
                raise ParameterError("the model has no chat template; use /v1/completions", "messages")
            try:
                text = tokenizer.render_chat(
                    [message.for_template() for message in body.messages],
                    add_generation_prompt=body.add_generation_prompt is not False,
                    **(body.chat_template_kwargs or {}),
                )
            except Exception as error:  # templates raise what they like, on purpose and not
                raise ParameterError(f"the chat template refused the messages: {error}", "messages") from error
            return [tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))]
        assert isinstance(body, CompletionBody)
        special = body.add_special_tokens is not False
        return [
            tokenizer.encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
            for prompt in body.prompt
        ]

    if isinstance(body, ChatBody):
        length = sum(len(message.content) for message in body.messages)
    else:
        assert isinstance(body, CompletionBody)
        length = sum(len(prompt) for prompt in body.prompt if isinstance(prompt, str))
    if length < _LONG_TEXT:
        return encode_all()
    return await asyncio.to_thread(encode_all)


def _check(output: RequestOutput) -> None:
    if output.finish_reason in ("error", "abort"):
        raise RequestFailed(output.error or "the engine gave the request up")


async def _collect(
    outputs: RequestStream, by_request: dict[str, Choice], layout: ResponseFormat, usage: Usage
) -> bytes:
    """Wait for all answers; the response's body."""
    speculation: SpeculationStats | None = None
    keep_tokens = layout.logprobs is not None or layout.token_ids
    async for output in outputs:
        _check(output)
        choice = by_request[output.request_id]
        usage.add(choice, output)
        choice.texts.append(output.text)
        if keep_tokens:
            choice.tokens.extend(output.tokens)
        if output.finish_reason is not None:
            choice.finish_reason = output.finish_reason
            choice.stop_reason = output.stop_reason
            speculation = add_speculation(speculation, output.speculation)
    return layout.response(list(by_request.values()), usage, speculation)


async def _stream(
    outputs: RequestStream, by_request: dict[str, Choice], layout: ResponseFormat, usage: Usage, send: Send
) -> None:
    """Send one event per engine step and answer. A failure midway is an error event, and no [DONE] follows it."""
    speculation: SpeculationStats | None = None
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
    try:
        async for output in outputs:
            _check(output)
            if output.finish_reason is not None:
                speculation = add_speculation(speculation, output.speculation)
            event = layout.event(by_request[output.request_id], output, usage, speculation)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        last = layout.usage_event(usage) + DONE if layout.include_usage else DONE
    except OSError:
        raise
    except Exception as error:
        last = b"data: " + answer_to(error, "a stream").json() + b"\n\n"
    await send({"type": "http.response.body", "body": last, "more_body": False})
