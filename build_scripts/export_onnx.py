"""Export a Hugging Face checkpoint to the portable ONNX model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deepseek_triton.checkpoint.config import read_model_spec
from deepseek_triton.checkpoint.names import validate_checkpoint
from deepseek_triton.errors import DeepseekTritonError
from deepseek_triton.export.portable import export_portable
from deepseek_triton.export.precision import PRECISIONS
from deepseek_triton.quantize.checkpoint import open_checkpoint


def main() -> int:
    """Parse the command line and export; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--precision", default="fp32", choices=sorted(PRECISIONS))
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a KV block")
    args = parser.parse_args()
    try:
        spec = read_model_spec(args.checkpoint)
        reader = open_checkpoint(args.checkpoint, spec)
        validate_checkpoint(reader, spec)
        model = export_portable(
            spec, reader, args.out, precision=args.precision, block_size=args.block_size
        )
    except DeepseekTritonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
