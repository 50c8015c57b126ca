"""The command line of the demo; see ``python -m retrograd.demo --help``."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = {"numpy": "numpy", "sklearn": "scikit-learn", "matplotlib": "matplotlib", "tqdm": "tqdm"}


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m retrograd.demo",
        description="Train two jobs with PyTorch's stock backward engine and with retrograd, and compare them.",
    )
    parser.add_argument("--job", choices=["digits", "text", "all"], default="all", help="which job (default: all)")
    parser.add_argument("--steps", type=_positive, help="steps of each job on each engine (default: the job's own)")
    parser.add_argument(
        "--backend", choices=["inductor", "schedule"], default="inductor", help="what runs a cached backward"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("retrograd_demo.png"),
        help="where the loss curves go (default: ./retrograd_demo.png)",
    )
    return parser.parse_args(argv)


def _check_packages(job: str) -> str | None:
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        return f"the demo needs {', '.join(missing)}: run `{sys.executable} -m pip install {' '.join(missing)}`."
    if job != "digits" and find_spec("pydoc_data") is None:
        return "the demo reads Python's documentation topics (pydoc_data), which this Python lacks; use --job digits."
    return None


def _cannot_write(path: Path, error: OSError) -> int:
    print(
        f"retrograd.demo: cannot write {path} ({error.strerror}): name a file in a folder that you may write to.",
        file=sys.stderr,
    )
    return 1


def main(argv: list[str] | None = None) -> int:
    """Run the chosen jobs; 0 when the losses agree and retrograd ran every backward call, compiled if asked to."""
    arguments = _arguments(argv)
    try:
        with arguments.output.open("ab"):  # now, not after the training
            pass
    except OSError as error:
        return _cannot_write(arguments.output, error)
    problem = _check_packages(arguments.job)
    if problem:
        print(f"retrograd.demo: {problem}", file=sys.stderr)
        return 1

    from retrograd.demo import digits, report, text

    jobs = {"digits": (digits, digits.DigitsTrainer), "text": (text, text.TextTrainer)}
    chosen = list(jobs) if arguments.job == "all" else [arguments.job]
    comparisons = []
    for name in chosen:
        module, trainer = jobs[name]
        steps = arguments.steps or module.STEPS
        comparisons.append(report.compare(name, module.TITLE, trainer, steps, arguments.backend))

    print(report.table(comparisons))
    for comparison in comparisons:
        print(comparison.summary)
    print(report.LEGEND)
    try:
        report.save_curves(comparisons, arguments.output)
    except OSError as error:
        return _cannot_write(arguments.output, error)
    print(f"loss curves: {arguments.output}")
    problems = [sentence for sentence in (comparison.problem() for comparison in comparisons) if sentence]
    for sentence in problems:
        print(f"retrograd.demo: {sentence}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("retrograd.demo: interrupted.", file=sys.stderr)
        sys.exit(130)
