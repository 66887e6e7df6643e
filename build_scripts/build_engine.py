#!/usr/bin/env python3
"""Build an engine directory from a Hugging Face checkpoint."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from deepseek_triton.arguments import (
    ArgumentParser,
    choice,
    end_as_by_ctrl_c,
    whole_number,
    whole_number_or_empty,
)
from deepseek_triton.build import graph_report
from deepseek_triton.build.engine_dir import EngineDir
from deepseek_triton.build.limits import CallLimits
from deepseek_triton.build.parallel import Parallel
from deepseek_triton.build.pipeline import build_engine
from deepseek_triton.build.targets import TARGETS
from deepseek_triton.checkpoint.config import find_config
from deepseek_triton.errors import DeepseekTritonError
from deepseek_triton.runner.ort_memory import memory_for_weights
from deepseek_triton.text.tokenizer import Tokenizer


def main() -> int:
    """Run the command line; return its exit status."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True, help="folder with config.json")
    parser.add_argument("--engine", required=True, help="folder to make or to replace")
    parser.add_argument("--precision", default="fp32", help="default: %(default)s")
    parser.add_argument("--target", default="onnxruntime", help=f"one of {', '.join(TARGETS)}")
    parser.add_argument(
        "--block-size", type=whole_number(1, 1024), help="tokens; default: the target's"
    )
    parser.add_argument(
        "--draft",
        default="",
        type=choice("", "mtp"),
        help="mtp: speculative decoding with the checkpoint's multi-token-prediction layer",
    )
    parser.add_argument(
        "--int4-accuracy",
        default="",
        type=choice("", "0", "4"),
        help="of INT4 on ONNX Runtime: 4 (default) rounds activations to 8 bits, 0 does not",
    )
    parser.add_argument("--provider", default="", help="of ONNX Runtime: cpu (default) or cuda")
    _add_limits(parser)
    args = parser.parse_args()
    if not args.checkpoint or not args.engine:
        print("usage: make engine CHECKPOINT=<folder> ENGINE=<folder>", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger(graph_report.__name__).setLevel(logging.INFO)
    end_as_by_ctrl_c()
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
            limits=_limits(args),
            timing_cache=Path(args.timing_cache) if args.timing_cache else None,
            parallel=_parallel(args),
            int4_accuracy_level=int(args.int4_accuracy) if args.int4_accuracy else None,
            provider=args.provider or None,
        )
    except DeepseekTritonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was changed", file=sys.stderr)
        return 130
    size = sum(entry.size for entry in manifest.files)
    print(f"{args.engine}: {manifest.target} engine, {manifest.precision}, {size / 1e6:,.1f} MB")
    if needed := memory_for_weights(EngineDir(Path(args.engine), manifest)):
        print(f"to serve it, its weights take {needed / 1e6:,.0f} MB of memory")
    return 0


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options of targets that compile; an empty value is the default."""
    group = parser.add_argument_group("targets tensorrt and tensorrt_rtx")
    size = whole_number_or_empty(0)
    group.add_argument("--max-batch", type=size, help="rows of a decode call")
    group.add_argument("--max-prefill", type=size, help="rows of a prefill call")
    group.add_argument("--max-chunk", type=size, help="tokens of a row in a prefill call")
    group.add_argument("--max-context", type=size, help="tokens, prompt and output together")
    group.add_argument("--sm", default="", help="compute capabilities, such as 86,89 (RTX only)")
    count = whole_number_or_empty(1)
    group.add_argument("--tp", type=count, help="GPUs that share each layer (tensorrt_llm)")
    group.add_argument("--pp", type=count, help="stages that share the layers (tensorrt_llm)")
    group.add_argument("--ep", type=count, help="of --tp, how many share the experts by number")
    group.add_argument("--timing-cache", default="", help="file to start from and to update")


def _limits(args: argparse.Namespace) -> CallLimits:
    given = {
        "max_batch_size": args.max_batch,
        "max_prefill_rows": args.max_prefill,
        "max_chunk_len": args.max_chunk,
        "max_context_len": args.max_context,
    }
    sizes = {name: value for name, value in given.items() if value is not None}
    names = tuple(name.strip() for name in args.sm.split(",") if name.strip())
    return CallLimits(**sizes, compute_capabilities=names)


def _parallel(args: argparse.Namespace) -> Parallel:
    given = {"tp": args.tp, "pp": args.pp, "ep": args.ep}
    return Parallel(**{name: value for name, value in given.items() if value is not None})


if __name__ == "__main__":
    sys.exit(main())
