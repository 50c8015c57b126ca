"""The command line: ``retrograd cache ls``, ``clear`` and ``verify`` look after the compiled plans on disk.

The plans are those of $RETROGRAD_CACHE_DIR, else of $XDG_CACHE_HOME/retrograd, else of ~/.cache/retrograd. There are at
most 2,000 plans of 2.1 GB together; $RETROGRAD_CACHE_LIMIT (as in 500M or 4G) sets another size.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(argv: list[str] | None = None) -> int:
    """Runs one command. 0: done; 1: it could not be done, or damaged plans are left; 2: wrong arguments."""
    arguments = _parser().parse_args(argv)
    try:
        from retrograd._load import C
    except ImportError as error:
        return _fail(str(error))
    folder = arguments.folder or C.PlanStore.default_folder()
    if folder is None:
        return _fail("the plan store is turned off, or you have no home folder: name one with --folder.")
    try:
        code = arguments.run(C.PlanStore(folder), arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--folder", type=Path, help="the store's folder, instead of the one from the environment")
    parser = argparse.ArgumentParser(prog="retrograd", description="Look after retrograd's compiled plans on disk.")
    groups = parser.add_subparsers(title="commands", required=True, metavar="cache")
    cache = groups.add_parser("cache", help="the plan store").add_subparsers(required=True, metavar="ls|clear|verify")

    command = cache.add_parser("ls", parents=[common], help="list the plans, last used first")
    command.set_defaults(run=_ls)
    command = cache.add_parser(
        "clear", parents=[common], help="remove all plans; running programs keep what they loaded"
    )
    command.set_defaults(run=_clear)
    command = cache.add_parser("verify", parents=[common], help="compare all plans with their checksums")
    command.add_argument("--remove", action="store_true", help="remove the damaged ones")
    command.set_defaults(run=_verify)
    return parser


def _ls(store: Any, _: argparse.Namespace) -> int:
    entries, reason = store.list()
    if reason:
        return _fail(reason)
    rows = [
        (
            entry["name"],
            _size(entry["bytes"]),
            _age(time.time() - entry["last_use"]),
            f"(unusable: {entry['problem']})" if entry["problem"] else _title(entry["metadata"]),
            _printable(entry["environment"]),
        )
        for entry in entries
    ]
    if rows:
        _print_table([("PLAN", "SIZE", "LAST USED", "NAME", "ENVIRONMENT"), *rows])
    print(f"{_plans(len(entries))}, {_size(sum(entry['bytes'] for entry in entries))}, in {store.folder}")
    if problem := store.limit_problem():
        print(f"retrograd: {problem}", file=sys.stderr)
    print(f"at most {_size(store.max_bytes)} and {_plans(store.max_plans)}; the least recently used ones go first")
    return 0


def _clear(store: Any, _: argparse.Namespace) -> int:
    cleared = store.clear()
    if cleared["plans"] or not cleared["reason"]:
        print(f"removed {_plans(cleared['plans'])}, {_size(cleared['bytes'])}, from {store.folder}")
    if cleared["leased"]:
        print(f"left {_plans(cleared['leased'])} that running programs are loading: try again")
    return _fail(cleared["reason"]) if cleared["reason"] else 0


def _verify(store: Any, arguments: argparse.Namespace) -> int:
    verified = store.verify(remove=arguments.remove)
    for bad in verified["bad"]:
        print(f"{bad['name']}: {bad['reason']}{' (removed)' if bad['removed'] else ''}")
    left = sum(not bad["removed"] for bad in verified["bad"])
    if verified["reason"]:
        return _fail(verified["reason"])
    print(f"{verified['good']} good, {len(verified['bad'])} damaged, in {store.folder}")
    if left and not arguments.remove:
        print("damaged plans are never loaded, and replaced when they are needed; --remove deletes them now")
    return 1 if left else 0


def _title(metadata: bytes) -> str:
    """The plan's name for people, which is in the metadata's first line (engine/plan_text.cpp)."""
    what, _, name = metadata.partition(b"\n")[0].decode(errors="replace").partition(" ")
    return _printable(name) if what == "name" else "-"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _plans(count: int) -> str:
    return f"{count} plan{'' if count == 1 else 's'}"


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _fail(sentence: str) -> int:
    print(f"retrograd: {sentence}", file=sys.stderr)
    return 1
