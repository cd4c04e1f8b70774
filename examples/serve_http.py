"""Serve a character model over HTTP with Starlette: a session per user, whose state stays on the server.

    pip install "torchrum[train,serve]"
    python examples/serve_http.py [RUN]        (default: the small model that comes with the package)

    curl -X POST localhost:8000/sessions                                  {"session": "kX3..."}
    curl localhost:8000/sessions/kX3... -d '{"text": "Alice was ", "length": 40}'
    curl -X DELETE localhost:8000/sessions/kX3...

The second request reads the text and continues it; the next one goes on from there. Sessions live in this process:
behind a proxy, several processes need every session's requests at the same one. The proxy also has to end slow
connections, encrypt, and know the users: a session's name is the only key to it.
"""

import argparse
import asyncio
import codecs
import json
import math
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from torchrum import Stream
from torchrum.lab.models import CharModel
from torchrum.lab.tasks import CharLM
from torchrum.lab.trained import ALICE
from torchrum.lab.training import load_model, read_config


@dataclass(frozen=True)
class Limits:
    """What a client may ask for."""

    body: int = 16_384
    """Bytes of a request."""
    text: int = 2_000
    """Characters that one request reads."""
    length: int = 500
    """Characters that one request writes."""
    rate: float = 500.0
    """Characters per second and session, read and written, after a first request of full size."""
    sessions: int = 1_000
    """Sessions at one time."""
    idle: float = 600.0
    """Seconds after which an unused session ends."""
    age: float = 3_600.0
    """Seconds after which a session ends."""


class Session:
    """A user's stream, and what the user may still ask for."""

    def __init__(self, model: CharModel, task: CharLM, limits: Limits, now: float) -> None:
        self.stream, self.task, self.limits = Stream(model), task, limits
        self.logits: torch.Tensor | None = None  # (V,), of the next symbol
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may have several symbols
        self.begun = self.used = now
        self.credit = float(limits.text + limits.length)
        self.busy = False

    def over(self, now: float) -> bool:
        """Return whether the session has ended."""
        return now - self.begun > self.limits.age or (not self.busy and now - self.used > self.limits.idle)

    def wait(self, count: int, now: float) -> float:
        """Take ``count`` characters from the credit; return the seconds to wait if it has fewer."""
        full = self.limits.text + self.limits.length
        self.credit = min(full, self.credit + self.limits.rate * (now - self.used))
        self.used = now
        if count > self.credit:
            return (count - self.credit) / self.limits.rate
        self.credit -= count
        return 0.0

    def reply(self, text: str, length: int, temperature: float) -> str:
        """Read the text and write ``length`` symbols."""
        if text or self.logits is None:
            self.read(self.task.ids(text))
        symbols, pieces = self.task.facts.symbols, []
        for _ in range(length):
            symbol = int(self.logits.argmax())
            if temperature > 0:
                scaled = (self.logits - self.logits.max()).double() / temperature
                symbol = int(torch.multinomial(scaled.softmax(-1), 1))
            pieces.append(self.decoder.decode(symbols[symbol : symbol + 1]))
            self.read([symbol])
        return "".join(pieces)

    def read(self, symbols: list[int]) -> None:
        self.logits = self.stream(torch.tensor([symbols]))[0, -1]


def check(body: object, limits: Limits) -> tuple[str, int, float]:
    """Return the text, the length and the temperature of a request."""
    fields = {"text": "", "length": 0, "temperature": 0.8}
    if not isinstance(body, dict) or not body.keys() <= fields.keys():
        raise HTTPException(400, f"the body must be a JSON object with some of {', '.join(fields)}")
    text, length, temperature = (fields | body).values()
    if not isinstance(text, str) or len(text) > limits.text:
        raise HTTPException(400, f"text must be a string of at most {limits.text} characters")
    if type(length) is not int or not 0 <= length <= limits.length:
        raise HTTPException(400, f"length must be an integer from 0 to {limits.length}")
    if type(temperature) not in (int, float) or not 0 <= temperature <= 10:
        raise HTTPException(400, "temperature must be a number from 0 to 10")
    return text, length, temperature


def serve(run: Path = ALICE, limits: Limits = Limits(), clock: Callable[[], float] = time.monotonic) -> Starlette:  # noqa: B008
    """Build the application that serves a run folder."""
    task, model = read_config(run).task, load_model(run)
    if not isinstance(task, CharLM) or not isinstance(model, CharModel):
        raise SystemExit(f"{run} was trained on {type(task).__name__}, not on text; serve a run such as char-rum's")
    sessions: dict[str, Session] = {}
    worker = ThreadPoolExecutor(1)  # threads that step at the same time would only wait for the interpreter

    async def begin(request: Request) -> Response:
        now = clock()
        for name in [name for name, session in sessions.items() if session.over(now)]:
            del sessions[name]
        if len(sessions) >= limits.sessions:
            raise HTTPException(503, "all sessions are taken; try again later", {"Retry-After": "60"})
        name = secrets.token_urlsafe(16)
        sessions[name] = Session(model, task, limits, now)
        return JSONResponse({"session": name}, 201)

    async def go_on(request: Request) -> Response:
        raw = bytearray()
        async for part in request.stream():  # a body without an announced size ends here too
            raw += part
            if len(raw) > limits.body:
                raise HTTPException(413, f"the body has more than {limits.body} bytes")
        try:
            text, length, temperature = check(json.loads(raw), limits)
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the body is not JSON ({error})") from error
        session, now = find(request), clock()
        if session.busy:
            raise HTTPException(409, "the session's last request is not answered yet")
        if seconds := session.wait(len(text) + length, now):
            raise HTTPException(
                429, f"more than {limits.rate:g} characters per second", {"Retry-After": str(math.ceil(seconds))}
            )
        session.busy = True
        try:
            loop = asyncio.get_running_loop()
            written = await loop.run_in_executor(worker, session.reply, text, length, temperature)
        except ValueError as error:  # characters that the model does not know
            raise HTTPException(400, str(error)) from error
        finally:
            session.busy = False
        return JSONResponse({"text": written})

    async def end(request: Request) -> Response:
        find(request)
        del sessions[request.path_params["name"]]
        return Response(status_code=204)

    def find(request: Request) -> Session:
        name = request.path_params["name"]
        session = sessions.get(name)
        if session is not None and session.over(clock()):
            del sessions[name]
            session = None
        if session is None:
            raise HTTPException(404, "no such session; it may have ended")
        return session

    def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    routes = [
        Route("/sessions", begin, methods=["POST"]),
        Route("/sessions/{name}", go_on, methods=["POST"]),
        Route("/sessions/{name}", end, methods=["DELETE"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: refuse})


if __name__ == "__main__":
    import uvicorn

    parser = argparse.ArgumentParser(description="Serve a character model over HTTP.")
    parser.add_argument("run", type=Path, nargs="?", default=ALICE)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a step is too small to share
    uvicorn.run(serve(options.run), host=options.host, port=options.port, limit_concurrency=200)
