"""Write a DeepSeek checkpoint with random weights, in Hugging Face form."""

from __future__ import annotations

import sys
from pathlib import Path

from deepseek_triton.arguments import ArgumentParser, choice, end_as_by_ctrl_c, label, whole_number
from deepseek_triton.checkpoint.fields import read_json_object
from deepseek_triton.checkpoint.presets import PRESETS, preset_config
from deepseek_triton.checkpoint.random import WEIGHT_DTYPES, write_random_checkpoint
from deepseek_triton.errors import DeepseekTritonError


def main() -> int:
    """Parse the command line, write the folder, return the exit status."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--arch", default="", help=f"one of {', '.join(PRESETS)} (v2-lite)")
    parser.add_argument(
        "--config", default="", help="in its place: a model's published config.json"
    )
    parser.add_argument(
        "--seed", type=whole_number(0), default=0, help="the same seed gives the same bytes"
    )
    parser.add_argument("--dtype", default="float32", type=choice(*WEIGHT_DTYPES))
    parser.add_argument(
        "--shards", type=whole_number(1), default=1, help="weight files to split into"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace another random checkpoint at OUT"
    )
    args = parser.parse_args()
    if not args.out:
        kinds = "|".join(PRESETS)
        parser.error(f"{label('--out')}: empty; make checkpoint OUT=dir [ARCH={kinds}] [SEED=0]")
    if args.arch and args.config:
        parser.error(f"{label('--config')}: takes the place of {label('--arch')}; give one of them")
    arch = args.arch or "v2-lite"
    end_as_by_ctrl_c()
    try:
        config = read_json_object(Path(args.config)) if args.config else preset_config(arch)
        path = write_random_checkpoint(
            Path(args.out),
            config,
            args.seed,
            dtype=args.dtype,
            num_shards=args.shards,
            overwrite=args.overwrite,
        )
    except DeepseekTritonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was changed", file=sys.stderr)
        return 130
    print(f"{path}: a {args.config or arch} checkpoint with random weights, seed {args.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
