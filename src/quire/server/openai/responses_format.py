"""Formats responses as OpenAI's `/v1/responses` does: items, and the typed events of a stream.

A whole response is the last event of its own stream, so that both say the same.
"""

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.async_llm.stream import Stream
from quire.async_llm.updates import Update
from quire.server.errors import ApiError
from quire.server.openai import schema
from quire.server.openai.answer_parser import TokenParser
from quire.server.openai.format import ChatFormatter, NewParser
from quire.server.openai.json_parts import parts_of
from quire.server.service import Service
from quire.text.detokenizer import Detokenizer
from quire.text.reasoning import Part

ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""The codes that clients know for a response that failed; `server_error` for the rest."""


class ResponsesFormatter(ChatFormatter):
    """Formats the response to `/v1/responses`: `response`. It has one sequence."""

    object_name = "response"
    id_prefix = "resp_"
    ends_with_done = False
    num_copies = 5  # once as it is generated, and when the text, its part, its item and the response are done

    def __init__(
        self,
        service: Service,
        body: schema.ResponsesRequest,
        chat: schema.ChatRequest,
        new_parser: NewParser,
    ) -> None:
        super().__init__(service, chat, new_parser)
        self._tokens: TokenParser | None = None
        """Reads the answer; there from its first token on."""
        self._echoed = _echoed(body)
        self._output: list[dict[str, Any]] = []
        """The items so far. The last may be a message, or reasoning, that is still being written."""
        self._texts: list[str] = []
        """The text of that item, in pieces: joining at each would copy all of it again."""
        self._is_open = False
        self._sequence_number = 0
        self._status = "in_progress"

    def response(self, streams: list[Stream], wholes: list[list[Update]]) -> dict[str, Any]:
        """The whole response."""
        return self.events(0, streams[0], wholes[0][0])[-1]["response"]

    def parts(self, streams: list[Stream], wholes: list[list[Update]]) -> Iterator[bytes]:
        """Yield the JSON of the whole response."""
        return parts_of(self.response(streams, wholes))

    def first_events(self, streams: list[Stream]) -> list[dict[str, Any]]:
        """The response, without any output."""
        return [
            self._event("response.created", response=self._response(streams[0])),
            self._event("response.in_progress", response=self._response(streams[0])),
        ]

    def events(self, prompt: int, stream: Stream, update: Update) -> list[dict[str, Any]]:
        """What is new: thoughts, text, calls, the end."""
        tokens = self._token_parser(stream)
        events: list[dict[str, Any]] = []
        for part, logprobs in tokens.feed(update):
            if part.kind == "reasoning":
                events += self._add_reasoning(part.text)
            elif part.kind == "content":
                events += self._add_text(part.text, self._logprobs(logprobs))
            else:
                events += [*self._close_item("completed"), *self._add_call(part)]
        if update.finish_reason:
            events += self._end(stream, update, tokens)
        return events

    def _token_parser(self, stream: Stream) -> TokenParser:
        if self._tokens is None:
            detokenizer = Detokenizer(
                self.service.tokenizer,
                keeps_space=stream.grammar is not None,
                skip_special=stream.request.params.skip_special,
            )
            self._tokens = TokenParser(self._parsers[0], detokenizer)
        return self._tokens

    def last_events(self, streams: list[Stream]) -> list[dict[str, Any]]:
        """None: the last update ends the response."""
        return []

    def error_events(self, streams: list[Stream], error: ApiError) -> list[dict[str, Any]]:
        """What went wrong, and the response as far as it came."""
        told = error.body["error"]
        self._status = "failed"
        events = self._close_item("incomplete")
        failed = self._response(streams[0]) | {
            "error": {"code": ERROR_CODES.get(error.status, "server_error"), "message": told["message"]}
        }
        return [
            *events,
            self._event("error", code=told["code"], message=told["message"], param=told["param"]),
            self._event("response.failed", response=failed),
        ]

    # -- parts --------------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number = self._sequence_number
        self._sequence_number += 1
        return {"type": kind, "sequence_number": number} | fields

    def _open_item(self, item: dict[str, Any], part: dict[str, Any]) -> list[dict[str, Any]]:
        """Go on with the item that is being written, if it is of this type; else end it and begin another."""
        if self._is_open and self._output[-1]["type"] == item["type"]:
            return []
        events = self._close_item("completed")
        self._is_open = True
        item |= {"status": "in_progress"}
        self._output.append(item | {"content": [part]})
        return [
            *events,
            self._event("response.output_item.added", item=item | {"content": []}, **self._where()),
            self._event("response.content_part.added", part=dict(part), **self._where(in_part=True)),
        ]

    def _add_reasoning(self, text: str) -> list[dict[str, Any]]:
        item = {"id": _new_id("rs"), "type": "reasoning", "summary": []}
        events = self._open_item(item, {"type": "reasoning_text", "text": ""})
        self._texts.append(text)
        return [*events, self._event("response.reasoning_text.delta", delta=text, **self._where(in_part=True))]

    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        item = {"id": _new_id("msg"), "type": "message", "role": "assistant"}
        events = self._open_item(item, _part("", []))
        self._texts.append(text)
        self._output[-1]["content"][0]["logprobs"] += logprobs
        where = self._where(in_part=True)
        return [*events, self._event("response.output_text.delta", delta=text, logprobs=logprobs, **where)]

    def _close_item(self, status: str) -> list[dict[str, Any]]:
        """End the item that is being written, if one is."""
        if not self._is_open:
            return []
        item, where = self._output[-1], self._where(in_part=True)
        item["status"] = status
        (part,) = item["content"]
        part["text"] = "".join(self._texts)
        self._is_open = False
        self._texts.clear()
        done = {"text": part["text"]} | ({"logprobs": part["logprobs"]} if "logprobs" in part else {})
        return [
            self._event(f"response.{part['type']}.done", **done, **where),
            self._event("response.content_part.done", part=part, **where),
            self._event("response.output_item.done", item=item, output_index=where["output_index"]),
        ]

    def _add_call(self, call: Part) -> list[dict[str, Any]]:
        """A call, whose arguments are complete when they are known to be a call's."""
        arguments = call.text
        item = {"id": _new_id("fc"), "type": "function_call", "status": "completed", "call_id": _new_id("call")}
        item |= {"name": call.function, "arguments": arguments}
        self._output.append(item)
        started = item | {"status": "in_progress", "arguments": ""}
        where = {"item_id": item["id"], "output_index": len(self._output) - 1}
        return [
            self._event("response.output_item.added", item=started, output_index=where["output_index"]),
            self._event("response.function_call_arguments.delta", delta=arguments, **where),
            self._event("response.function_call_arguments.done", name=item["name"], arguments=arguments, **where),
            self._event("response.output_item.done", item=item, output_index=where["output_index"]),
        ]

    def _where(self, *, in_part: bool = False) -> dict[str, Any]:
        where: dict[str, Any] = {"output_index": len(self._output) - 1}
        return where | {"item_id": self._output[-1]["id"], "content_index": 0} if in_part else where

    def _end(self, stream: Stream, update: Update, tokens: TokenParser) -> list[dict[str, Any]]:
        self._status = "incomplete" if update.finish_reason == "length" else "completed"
        left = self._logprobs(tokens.take_left())
        is_message = self._is_open and self._output[-1]["type"] == "message"
        # A response without any item has a message, even if there is nothing in it.
        events = self._add_text("", left) if not self._output or (left and is_message) else []
        events += self._close_item(self._status)
        response = self._response(stream) | {"usage": _usage(stream, tokens.num_reasoning_tokens)}
        response |= self._extras(stream, update, is_whole=True)
        return [*events, self._event(f"response.{self._status}", response=response)]

    def _response(self, stream: Stream) -> dict[str, Any]:
        params = stream.request.params
        reason = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return self._echoed | {
            "id": self.id,
            "object": self.object_name,
            "created_at": self.created,
            "model": self.service.model_name,
            "status": self._status,
            "error": None,
            "incomplete_details": reason,
            "output": list(self._output),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "usage": None,
        }


def _echoed(body: schema.ResponsesRequest) -> dict[str, Any]:
    """The fields of a response that say what was asked for."""
    form = body.text.format if body.text else None
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": msgspec.to_builtins(form or schema.TextFormat())},
        "tools": msgspec.to_builtins(body.tools or []),
        "tool_choice": msgspec.to_builtins(body.tool_choice or "auto"),
        "top_logprobs": body.top_logprobs or 0,
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
        "user": body.user,
        "service_tier": "default",
        "truncation": "disabled",
        # Nothing is kept.
        "store": False,
        "background": False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
    }


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _usage(stream: Stream, num_reasoning_tokens: int) -> dict[str, Any]:
    num_input, num_output = len(stream.request.prompt_token_ids), stream.num_output_tokens
    return {
        "input_tokens": num_input,
        # Writing to the cache costs nothing, and is not counted.
        "input_tokens_details": {"cached_tokens": stream.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": num_input + num_output,
    }
