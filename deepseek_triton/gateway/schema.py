"""What clients may send, in OpenAI's names. Everything else is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
MAX_STOP_STRINGS = 64  # of the engine; OpenAI's API allows 4
MAX_TOKENS = 2**31 - 1
_MAX_SEED = 2**63


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    return value


Number = Annotated[float, BeforeValidator(_no_bool)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class Strict(BaseModel):
    """A JSON object of which every key is known."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(Strict):
    """A part of a message's content; there is only text."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class CalledFunction(Strict):
    """Which function was called, and with what."""

    name: str
    arguments: str


class ToolCall(Strict):
    """One call that the assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class SystemMessage(Strict):
    """Instructions; `developer` is OpenAI's newer name for them."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    """What the user said."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Strict):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    refusal: None = None


class ToolMessage(Strict):
    """What a called function returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class FunctionDefinition(Strict):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """Something that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Strict):
    """What a stream has beside its chunks."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Strict):
    """The schema that an answer must follow."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Some JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class SamplingFields(Strict):
    """What chat and text completions have in common."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        """Drop fields of OpenAI's API that ask for nothing here; refuse those that do."""
        if not isinstance(data, dict):
            return data
        for name in UNSUPPORTED.keys() & data.keys():
            if data[name] is not None and data[name] not in UNSUPPORTED[name]:
                raise PydanticCustomError(
                    "unsupported_parameter",
                    "{param}: not supported by this server",
                    {"param": name},
                )
        return {name: value for name, value in data.items() if name not in UNSUPPORTED}

    model: str
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    temperature: Number | None = Field(None, ge=0, le=2)
    top_p: Number | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    seed: int | None = Field(None, ge=-_MAX_SEED, lt=_MAX_SEED)
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # says who the end user is; changes nothing, nor does the next
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None  # equal ones go to the same server

    # Not OpenAI's: the engine's own.
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    repetition_penalty: Number | None = Field(None, ge=0.01, le=100)
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    ignore_eos: bool | None = None


class ChatRequest(SamplingFields):
    """The body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, str | bool | int | float | None] | None = None


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions. A prompt of numbers is one of token ids."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_CHOICES),
        ]
    )
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None


class TokenizeRequest(Strict):
    """The body of POST /tokenize: a text, or a conversation as the chat template renders it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, str | bool | int | float | None] | None = None


class DetokenizeRequest(Strict):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


# What OpenAI's API has and this one has not, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
