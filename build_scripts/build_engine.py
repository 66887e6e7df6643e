#!/usr/bin/env python3
"""Build an engine directory from a Hugging Face checkpoint."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path
from types import FrameType

from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.build.targets import TARGETS
from deepseek_triton.checkpoint.config import find_config
from deepseek_triton.errors import DeepseekTritonError
from deepseek_triton.text.tokenizer import Tokenizer


def main() -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True, help="folder with config.json")
    parser.add_argument("--engine", required=True, help="folder to make or to replace")
    parser.add_argument("--precision", default="fp32", help="default: %(default)s")
    parser.add_argument("--target", default="onnxruntime", help=f"one of {', '.join(TARGETS)}")
    parser.add_argument("--block-size", type=int, help="tokens; default: the target's")
    parser.add_argument(
        "--draft",
        default="",
        choices=["", "mtp"],
        help="mtp: speculative decoding with the checkpoint's multi-token-prediction layer",
    )
    args = parser.parse_args()
    if not args.checkpoint or not args.engine:
        print("usage: make engine CHECKPOINT=<folder> ENGINE=<folder>", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    signal.signal(signal.SIGTERM, _stop)  # so that what is half-written is removed
    try:
        find_config(args.checkpoint)
        Tokenizer.load(Path(args.checkpoint))  # before the long part: serving needs it
        manifest = build_engine(
            Path(args.checkpoint),
            Path(args.engine),
            target=args.target,
            precision=args.precision,
            block_size=args.block_size,
            draft=args.draft == "mtp",
        )
    except DeepseekTritonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was changed", file=sys.stderr)
        return 130
    size = sum(entry.size for entry in manifest.files)
    print(f"{args.engine}: {manifest.target} engine, {manifest.precision}, {size / 1e6:,.1f} MB")
    return 0


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
