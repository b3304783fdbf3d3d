"""Batches for tests: their lines, and answers without what no two runs have in common."""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire import AsyncLLM
from quire.server.batches.answer import Answer, Answerer
from quire.server.batches.answer_file import AnswerFile
from quire.server.batches.lines import read_lines
from quire.server.batches.run import LineRunner
from quire.server.keys import Caller
from quire.server.openai.request_body import BodyReader
from quire.server.service import Service


def completion(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": 4} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write_jsonl(path: Path, lines: Sequence[Any]) -> Path:
    """Lines that are text are written as they are."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_answers(path: Path | bytes) -> list[dict[str, Any]]:
    """The answers of a file, without their times and what the prefix cache had of them."""
    content = path if isinstance(path, bytes) else path.read_bytes()
    answers = [json.loads(line) for line in content.splitlines()]
    for answer in answers:
        body = (answer["response"] or {}).get("body", {})
        body.pop("created", None)
        body.get("usage", {}).pop("prompt_tokens_details", None)
    return answers


async def answer_file(
    engine: AsyncLLM, given: Path, output: Path, *, in_flight: int = 4, batch: str = "", **how: Any
) -> list[Answer]:
    """Answer what is left of a file, as the command does; returns the answers in the order they were written."""
    service = Service(engine, "toy", int(time.time()))
    runner_args = {name: how.pop(name) for name in ("max_cost",) if name in how}
    answerer = Answerer(service, BodyReader(strict=False), Caller(), counts_cost="max_cost" in runner_args, **how)
    file, written = AnswerFile(output), []

    def write(answer: Answer) -> None:
        file.write(answer)
        written.append(answer)

    try:
        with given.open("rb") as source:
            lines = read_lines(source, batch)
            file.skip_answered(lines)
            await LineRunner(answerer, write, asyncio.Semaphore(in_flight), **runner_args).run(lines)
    finally:
        file.close()
        service.close()
    return written
