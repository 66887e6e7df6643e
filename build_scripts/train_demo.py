"""Make the demo model (models/demo): corpus, training, export, evaluation; see docs/demo-model.md.

    train_demo.py corpus   --wheels DIR --docs DIR --out CORPUS    # on any machine
    train_demo.py train    --corpus CORPUS --state FILE            # on a GPU; resumable
    train_demo.py export   --corpus CORPUS --state FILE --out DIR
    train_demo.py evaluate --corpus CORPUS --checkpoint DIR --out FILE

Training needs torch and numpy; `corpus` and `evaluate` tokenizers as well.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path


def main() -> None:
    """Run one step."""
    args = _parser().parse_args()
    {"corpus": _corpus, "train": _train, "export": _export, "evaluate": _evaluate}[args.step](args)


def _corpus(args: argparse.Namespace) -> None:
    from training.corpus import build_corpus

    build_corpus(args.wheels, args.docs, args.out)


def _train(args: argparse.Namespace) -> None:
    from training.loop import TrainOptions, train

    named = {each.name for each in fields(TrainOptions)}
    options = {name: value for name, value in vars(args).items() if name in named}
    train(args.corpus, args.state, TrainOptions(**options), args.minutes)


def _export(args: argparse.Namespace) -> None:
    from training.export import write_checkpoint
    from training.loop import load_trained

    model, curve = load_trained(args.state)
    write_checkpoint(model, args.corpus / "tokenizer.json", args.out)
    if args.curve:
        args.curve.write_text(json.dumps(curve, indent=1) + "\n")


def _evaluate(args: argparse.Namespace) -> None:
    from training.evaluate import evaluate

    report = evaluate(args.checkpoint, args.corpus, args.heads, args.temperatures, args.device)
    args.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for part in report.values():
        if isinstance(part, dict):
            part.pop("examples", None)
    print(json.dumps(report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    corpus = steps.add_parser("corpus", help="clean, de-duplicate, split and tokenise the sources")
    corpus.add_argument("--wheels", type=Path, required=True)
    corpus.add_argument("--docs", type=Path, required=True)
    corpus.add_argument("--out", type=Path, required=True)

    train = steps.add_parser("train", help="train, or go on with an interrupted training")
    train.add_argument("--corpus", type=Path, required=True)
    train.add_argument("--state", type=Path, required=True)
    train.add_argument("--steps", type=int, default=13_000, help="of the whole schedule")
    train.add_argument("--minutes", type=float, default=1e9, help="stop this call after so long")
    train.add_argument("--batch", type=int, default=64, help="windows of 2048 tokens a step")
    train.add_argument("--matrix-lr", type=float, default=1e-2)
    train.add_argument("--other-lr", type=float, default=3e-3)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--device", default="cuda")

    export = steps.add_parser("export", help="write the Hugging Face checkpoint")
    export.add_argument("--corpus", type=Path, required=True)
    export.add_argument("--state", type=Path, required=True)
    export.add_argument("--out", type=Path, required=True)
    export.add_argument("--curve", type=Path, help="write the loss curve here")

    evaluate = steps.add_parser("evaluate", help="held-out loss, completions, draft acceptance")
    evaluate.add_argument("--corpus", type=Path, required=True)
    evaluate.add_argument("--checkpoint", type=Path, required=True)
    evaluate.add_argument("--out", type=Path, required=True)
    evaluate.add_argument("--heads", type=int, default=500)
    evaluate.add_argument("--temperatures", type=float, nargs="*", default=[0, 0.2, 0.5, 0.8])
    evaluate.add_argument("--device", default="cuda")
    return parser


if __name__ == "__main__":
    main()
