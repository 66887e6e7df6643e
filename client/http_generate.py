#!/usr/bin/env python3
"""Generate over HTTP, at once or streamed. Copy this file: it needs the standard library alone.

python client/http_generate.py --prompt "What is deep learning?" --max-tokens 32 --stream

From code: `generate("Hello", max_tokens=32)["text_output"]`, or
`for event in generate_stream("Hello", max_tokens=32): print(event["text_output"], end="")`.
Closing the generator closes the connection, which cancels the request on the server.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import http.client
import json
import re
import sys
import urllib.parse
from collections.abc import Iterable, Iterator
from typing import Any


class GenerationError(Exception):
    """The server's answer to a request that failed; `status` is the HTTP status, if there is one.

    An error after streaming began has no status of its own: the server has already said 200.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def generate(
    prompt: str,
    *,
    url: str = "localhost:8000",
    model: str = "ensemble",
    max_tokens: int = 64,
    timeout_s: float | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Return the whole answer: "text_output", "finish_reason" and the other outputs.

    `fields` are further inputs (temperature, top_k, top_p, seed, stop_words …); None leaves one
    out. The server is not told when this client goes away: bound the work by max_tokens or by
    the server's deadline setting. Raises GenerationError with the server's message.
    """
    body = {"text_input": prompt, "max_tokens": max_tokens, "stream": False, **fields}
    with _post(url, f"/v2/models/{model}/generate", body, timeout_s) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def generate_stream(
    prompt: str,
    *,
    url: str = "localhost:8000",
    model: str = "ensemble",
    max_tokens: int = 64,
    timeout_s: float | None = None,
    **fields: Any,
) -> Iterator[dict[str, Any]]:
    """Yield one answer for each piece of text, as `generate` returns them."""
    body = {"text_input": prompt, "max_tokens": max_tokens, "stream": True, **fields}
    with _post(url, f"/v2/models/{model}/generate_stream", body, timeout_s) as response:
        for data in server_sent_events(iter(lambda: response.read1(65536), b"")):
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                raise GenerationError(event["error"])
            yield event


def server_sent_events(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each event in a byte stream, however the stream is cut into pieces.

    The format is that of the WHATWG HTML standard, section 9.2.6: a line ends with LF, CR LF or
    CR; several data lines of one event are joined by LF; a blank line ends an event, and an
    event that is not ended is dropped.
    """
    data: list[str] = []
    for line in _lines(pieces):
        name, _, value = line.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data.clear()


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    pending = ""
    for piece in pieces:
        pending += decoder.decode(piece)
        # A CR at the end may be the first half of a CR LF: wait for what follows.
        while match := re.search(r"\r\n|\n|\r(?!$)", pending):
            yield pending[: match.start()]
            pending = pending[match.end() :]
    if pending.endswith("\r"):
        yield pending[:-1]


@contextlib.contextmanager
def _post(
    url: str, path: str, body: dict[str, Any], timeout_s: float | None
) -> Iterator[http.client.HTTPResponse]:
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    secure = parts.scheme == "https"
    connection_class = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = connection_class(parts.netloc, timeout=timeout_s)
    sent = {name: value for name, value in body.items() if value is not None}
    with contextlib.closing(connection):
        try:
            payload = json.dumps(sent).encode()
            connection.request("POST", path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
        except TimeoutError as error:
            raise GenerationError(f"no answer from {url} within {timeout_s} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise GenerationError(f"no server at {url}: {error}; start it: make serve") from error
        try:
            if response.status != http.client.OK:
                raise GenerationError(_error_text(response), response.status)
            yield response
        except TimeoutError as error:
            raise GenerationError(f"{url} sent nothing for {timeout_s} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise GenerationError(f"lost the connection to {url}: {error}") from error


def _error_text(response: http.client.HTTPResponse) -> str:
    text = response.read().decode(errors="replace")
    # An error of generate_stream comes as an event, one of generate as plain JSON.
    for candidate in (text.removeprefix("data:"), text):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(candidate)["error"])
    return text or response.reason


def main() -> int:
    """Print the completion; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="localhost:8000", help="host:port (default: %(default)s)")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--stream", action="store_true", help="print the text as it arrives")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, help="0 (the default) takes the likeliest")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int, help="the same seed gives the same text")
    parser.add_argument("--stop", action="append", help="end before this text; may be repeated")
    parser.add_argument("--timeout", type=float, dest="timeout_s", help="in seconds")
    arguments = vars(parser.parse_args())
    prompt, streamed = arguments.pop("prompt"), arguments.pop("stream")
    arguments["stop_words"] = arguments.pop("stop")
    arguments["exclude_input_in_output"] = True
    try:
        events = generate_stream if streamed else lambda *a, **k: iter([generate(*a, **k)])
        for event in events(prompt, **arguments):
            print(event["text_output"], end="", flush=True)
    except GenerationError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
