"""Request bodies of OpenAI's completion routes, with the usual extensions of open servers, validated strictly.

Unknown fields are ignored, as OpenAI-compatible servers do. A known field that would change the result and is not
implemented is refused, so that nobody measures something other than what was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from breakeven.engine.request import SamplingParams

MAX_CHOICES = 128  # OpenAI's limit of n
MAX_STOP_STRINGS = 64
MAX_LOGIT_BIASES = 1024
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions
_INT32 = 2**31 - 1
_SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: choices of neighbouring seeds do not collide

Prompt: TypeAlias = str | tuple[int, ...]


class ParameterError(ValueError):
    """A request that is refused. `param` names the field in OpenAI's notation, None if it is the body itself."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def _is_int(value: object) -> bool:
    return type(value) is int


def _token_ids(value: list[Any]) -> tuple[int, ...]:
    if not value or not all(map(_is_int, value)):
        raise ValueError("a list of token ids must hold at least one integer and nothing else")
    if min(value) < 0 or max(value) > _INT32:
        raise ValueError("token ids must be between 0 and the vocabulary size")
    return tuple(value)


def _parse_prompt(value: Any) -> tuple[Prompt, ...]:
    """Text, token ids, or a list of either, as a tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _is_int(value[0]):
            return (_token_ids(value),)
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(isinstance(item, list) for item in value):
            return tuple(_token_ids(item) for item in value)
    raise ValueError("must be a string, a list of token ids, a list of strings, or a list of lists of token ids")


def _parse_stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise ValueError("must be a string or a list of strings")
    if not all(stops):
        raise ValueError("stop strings must not be empty")
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(stops)}")
    return tuple(stops)


def _parse_stop_ids(value: Any) -> tuple[int, ...]:
    if value is None or value == []:
        return ()
    if not isinstance(value, list):
        raise ValueError("must be a list of token ids")
    return _token_ids(value)


def _parse_logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("must map token ids to numbers")
    if len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"at most {MAX_LOGIT_BIASES} tokens, got {len(value)}")
    biases = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError("keys must be token ids")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError("values must be numbers between -100 and 100")
        biases[int(key)] = float(bias)
    return biases


def _finite_kwargs(value: Any) -> Any:
    """Refuse NaN and infinities, which are not JSON, anywhere in a free-form object."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("numbers must be finite")
    if isinstance(value, dict):
        for item in value.values():
            _finite_kwargs(item)
    elif isinstance(value, list):
        for item in value:
            _finite_kwargs(item)
    return value


def _off_if_negative(value: Any) -> Any:
    return 0 if _is_int(value) and value == -1 else value


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(_Body):
    """What a stream reports besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(_Body):
    """Fields that both routes share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, BeforeValidator(_off_if_negative), Field(ge=0, le=_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_parse_logit_bias)] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_parse_stop)] = ()
    stop_token_ids: Annotated[tuple[int, ...], PlainValidator(_parse_stop_ids)] = ()
    max_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_speculation: bool | None = None
    # known elsewhere, not implemented here: accepted only at the values that change nothing
    response_format: Any = None
    skip_special_tokens: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    def neutral_values(self) -> dict[str, tuple[Any, ...]]:
        """Per unsupported field, the values besides null that change nothing."""
        return {
            "response_format": ({"type": "text"}, {}),
            "skip_special_tokens": (True,),
            "best_of": (1,),
            "use_beam_search": (False,),
            "prompt_logprobs": (False,),
            "bad_words": ([],),
            "allowed_token_ids": (),
            "truncate_prompt_tokens": (),
            "structured_outputs": (),
            "guided_json": (),
            "guided_regex": (),
            "guided_choice": (),
            "guided_grammar": (),
        }

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def logprob_count(self) -> int | None:
        """The number of alternatives asked for; None if no logprobs were."""
        raise NotImplementedError

    @property
    def token_limit(self) -> int | None:
        raise NotImplementedError

    def check(self, vocab_size: int) -> None:
        """Rules that span fields or need the model. Raises `ParameterError`."""
        for name, neutral in self.neutral_values().items():
            value = getattr(self, name)
            if value is not None and not any(type(value) is type(item) and value == item for item in neutral):
                raise ParameterError(f"{name} is not supported by this server", name)
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options is only allowed when stream is true", "stream_options")
        limit = self.token_limit
        if limit is not None and self.min_tokens is not None and self.min_tokens > limit:
            raise ParameterError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({limit})", "min_tokens")
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", tuple(self.logit_bias))):
            if ids and max(ids) >= vocab_size:
                raise ParameterError(f"token id {max(ids)} is outside the vocabulary of {vocab_size} tokens", name)

    def sampling(self, choice: int) -> SamplingParams:
        """Parameters of the choice-th answer to a prompt. Choice 0 is what n = 1 gives; others derive their seed."""
        seed = self.seed
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self.logit_bias,
            seed=None if seed is None else (seed + choice * _SEED_STEP) % 2**63,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            max_tokens=self.token_limit,
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            logprobs=self.logprob_count,
        )


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_parse_prompt)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Any = None
    suffix: Any = None

    def neutral_values(self) -> dict[str, tuple[Any, ...]]:
        return super().neutral_values() | {"echo": (False,), "suffix": ("",)}

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def check(self, vocab_size: int) -> None:
        super().check(vocab_size)
        for prompt in self.prompt:
            if not isinstance(prompt, str) and max(prompt) >= vocab_size:
                raise ParameterError(
                    f"token id {max(prompt)} is outside the vocabulary of {vocab_size} tokens", "prompt"
                )


def _parse_content(value: Any) -> str:
    """A string, or a list of text parts (joined by newlines)."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        texts = []
        for part in value:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError('parts must be {"type": "text", "text": "..."}: only text is supported')
            texts.append(part["text"])
        return "\n".join(texts)
    raise ValueError("must be a string or a list of text parts")


def _no_tool_calls(value: Any) -> Any:
    if value:
        raise ValueError("tool calls are not supported by this server")
    return value


class ChatMessage(_Body):
    """One message of a conversation. The chat template decides which roles make sense."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str, PlainValidator(_parse_content)]
    name: str | None = None
    tool_calls: Annotated[Any, AfterValidator(_no_tool_calls)] = None

    def for_template(self) -> dict[str, str]:
        message = {"role": self.role, "content": self.content}
        return message if self.name is None else message | {"name": self.name}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_finite_kwargs)] | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    echo: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    documents: Any = None

    def neutral_values(self) -> dict[str, tuple[Any, ...]]:
        return super().neutral_values() | {
            "tools": ([],),
            "tool_choice": ("none", "auto"),
            "functions": ([],),
            "function_call": ("none", "auto"),
            "modalities": (["text"],),
            "audio": (),
            "echo": (False,),
            "continue_final_message": (False,),
            "chat_template": (),
            "documents": ([],),
        }

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self, vocab_size: int) -> None:
        super().check(vocab_size)
        if self.top_logprobs is not None and not self.logprobs:
            raise ParameterError("top_logprobs needs logprobs to be true", "top_logprobs")


Body = TypeVar("Body", bound=GenerationBody)


def _parameter_name(location: tuple[int | str, ...]) -> str | None:
    """("messages", 0, "content") → "messages[0].content"."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name or None


def parse_body(model: type[Body], data: bytes) -> Body:
    """Parse and validate a request body. Raises `ParameterError` that names the first field at fault."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        raise ParameterError(f"the request body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    param = _parameter_name(first["loc"])
    if param is None:
        raise ParameterError("the request body must be a JSON object")
    if first["type"] == "missing":
        raise ParameterError(f"missing required parameter: {param}", param)
    raise ParameterError(f"{param}: {first['msg'].removeprefix('Value error, ')}", param)
