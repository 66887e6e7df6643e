"""Guided answers and drafts on a GPU, through a real server: answers must keep to their form.

    python perf/gpu/guide_check.py            # models/demo, bf16, without and with drafts

Requests with a guide and without run beside each other, greedy and drawn.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client"))

from grpc_stream import stream_grpc  # noqa: E402

from deepseek_triton.build.pipeline import build_engine  # noqa: E402
from deepseek_triton.server import ServerOptions, running_server  # noqa: E402

DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["read", "write"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
GUIDES = (("regex", DATE), ("json_schema", json.dumps(SCHEMA)), (None, None))
REPEATS = 8


def ask(url: str, index: int) -> dict[str, Any]:
    """Send a request; return its kind, its text and whether that is as its guide says."""
    kind, guide = GUIDES[index % len(GUIDES)]
    inputs: dict[str, Any] = {"max_tokens": 48}
    if kind is not None:
        inputs |= {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    if index % 2:
        inputs |= {"temperature": 0.9, "seed": index}
    chunks = list(stream_grpc(f"# {index}\ndef f(path):\n", url=url, **inputs))
    text = "".join(chunk.text for chunk in chunks)
    right = bool(text)
    if kind == "regex":
        right = re.fullmatch(DATE, text) is not None
    elif kind == "json_schema":
        answer = json.loads(text)
        right = set(answer) == {"name", "size"} and answer["name"] in ("read", "write")
    return {"kind": kind, "text": text, "right": right}


def answers(folder: Path, *, draft: bool) -> list[dict[str, Any]]:
    """Serve the demo model from the GPU and send all requests at once."""
    build_engine(ROOT / "models" / "demo", folder, target="cuda", precision="bf16", draft=draft)
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    options = ServerOptions(engine_dir=folder, **ports)
    log = folder.with_suffix(".log")
    with running_server(options, log_path=log) as server, ThreadPoolExecutor(24) as pool:
        return list(pool.map(lambda i: ask(server.grpc_url, i), range(REPEATS * len(GUIDES))))


def main() -> int:
    """Print one JSON line a server; 1 if an answer does not keep to its form."""
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for draft in (False, True):
            received = answers(Path(folder) / f"draft-{draft}", draft=draft)
            wrong = [answer for answer in received if not answer["right"]]
            examples = {str(answer["kind"]): answer["text"] for answer in received}
            print(
                json.dumps({"draft": draft, "answers": len(received), "wrong": wrong, **examples})
            )
            failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
