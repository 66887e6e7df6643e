#!/usr/bin/env python3
"""Quantise a Hugging Face checkpoint to INT4 (AWQ or round-to-nearest)."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from deepseek_triton.arguments import ArgumentParser, choice, end_as_by_ctrl_c, whole_number
from deepseek_triton.calibrate.quantize import (
    GROUP_SIZES,
    METHODS,
    QuantizeOptions,
    quantize_checkpoint,
)
from deepseek_triton.checkpoint.config import find_config
from deepseek_triton.errors import ConfigError, DeepseekTritonError
from deepseek_triton.text.documents import read_documents, standard_library


def main() -> int:
    """Run the command line; return its exit status."""
    args = _parse()
    if not args.checkpoint or not args.out:
        print("usage: make quantize CHECKPOINT=<folder> OUT=<folder>", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    end_as_by_ctrl_c()
    try:
        documents = (
            read_documents(Path(args.calibration), "CALIBRATION")
            if args.calibration
            else standard_library()
        )
        find_config(args.checkpoint)
        options = QuantizeOptions(
            args.method,
            int(args.group),
            args.symmetric == "1",
            args.windows,
            args.window_length,
        )
        if args.calibration and args.method == "rtn":
            raise ConfigError(
                f"CALIBRATION: METHOD=rtn reads no text, so {args.calibration} would not be used; "
                "leave it out, or take METHOD=awq"
            )
        report = quantize_checkpoint(Path(args.checkpoint), Path(args.out), options, documents)
    except DeepseekTritonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; the same command goes on from there", file=sys.stderr)
        return 130
    before, after = report["bytes_before"] / 1e6, report["bytes_after"] / 1e6
    count, left = len(report["linears"]), len(report["left_in_floating_point"])
    print(f"{args.out}: {before:,.1f} MB → {after:,.1f} MB, {count} linear layers in INT4")
    if left:
        print(
            f"{left} more stay in floating point: groups of {args.group} do not fill their inputs"
        )
    if widened := report["widened_by_make_engine"]:
        print(
            f"{widened[0]}* and as many of {len(widened)} layers in all: make engine computes the "
            "experts of a layer in one way, and widens those in INT4; take a GROUP that fills all"
        )
    if report["without_tokens"]:
        print(f"{len(report['without_tokens'])} saw no token and were rounded to nearest")
    return 0


def _parse() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    sizes = tuple(map(str, GROUP_SIZES))
    parser.add_argument("--checkpoint", required=True, help="folder with config.json")
    parser.add_argument("--out", required=True, help="folder to make")
    parser.add_argument("--method", default="awq", help=f"one of {', '.join(METHODS)}")
    parser.add_argument(
        "--group",
        type=choice(*sizes),
        default="128",
        help=f"input channels a scale: {', '.join(sizes)}",
    )
    parser.add_argument("--symmetric", type=choice("0", "1"), default="0", help="1: no zero points")
    parser.add_argument(
        "--calibration",
        default="",
        help="text file, folder or wheel to calibrate with (this Python's standard library)",
    )
    parser.add_argument("--windows", type=whole_number(1), default=64, help="of calibration text")
    parser.add_argument("--window-length", type=whole_number(1), default=512, help="tokens in each")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
