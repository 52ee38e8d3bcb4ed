"""Look into a directory of blocks: list it, check every byte, make room, copy a part."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any

from kvpool.cli.console import CommandError, nbytes, progress


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="what `kvpool serve --store DIR` was given")


def _command(summary: str, call: Callable[[Any, argparse.Namespace], int], declare: Any = _declare) -> Any:
    """A stand-in for a module of `kvpool.cli`: `call` gets the open directory."""

    def run(args: argparse.Namespace) -> int:
        from kvpool.store.disk import Folder

        try:
            with closing(Folder(args.directory, "kvpool store", create=False)) as folder:
                return call(folder, args)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise CommandError(str(error).removeprefix("[kvpool store] ")) from None

    return SimpleNamespace(__doc__=summary, add_arguments=declare, run=run)


def _segments(folder: Any) -> list[Any]:
    return sorted(folder.segments(), key=lambda each: (each.used, each.name))


def _read(segments: list[Any], args: argparse.Namespace) -> Iterator[Any]:
    """Yield the segments, and show on a terminal which one is read."""
    with progress(len(segments), args.json or not sys.stderr.isatty()) as show:
        for each in segments:
            show(each.name)
            yield each


def _layout(folder: Any) -> dict[str, Any]:
    from kvpool.store.blocks import digest_of

    try:
        found: dict[str, Any] = folder.read_json("layout.json")
        text = found.get("text")
        if not isinstance(text, list) or found.get("layout") != digest_of(map(str, text)).hex():
            raise ValueError("its digest is not that of its text")
        return found
    except (OSError, ValueError) as error:
        raise CommandError(f"{folder.path}/layout.json cannot be read: {error}") from None


def _records(folder: Any, each: Any, payloads: bool = True) -> Iterator[tuple[int, Any, str]]:
    """The records of a segment, none if it has left, and what is wrong; OSError and ValueError if it cannot be read."""
    from kvpool.store.segment_format import examine, read_header

    digest = _layout(folder)["layout"]
    with suppress(FileNotFoundError), os.fdopen(folder.open_segment(each.stem), "rb") as file:
        fd = file.fileno()
        if each.nbytes >= 64 and digest != read_header(fd)[1].hex():
            yield 0, None, "the segment has another layout than the directory"
        yield from examine(fd, os.fstat(fd).st_size, each.is_sealed, payloads)


def _examined(folder: Any, each: Any, payloads: bool = True) -> Iterator[tuple[int, Any, str]]:
    """The same; that a segment cannot be read is one thing that is wrong."""
    try:
        yield from _records(folder, each, payloads)
    except (OSError, ValueError) as error:
        yield 0, None, str(error)


def _is_damaged(folder: Any, each: Any) -> bool:
    """Whether bytes are wrong. A segment that this process cannot read is left to one that can, and is named."""
    from kvpool.store.segment_format import UnknownFormat

    try:
        return any(wrong for _, _, wrong in _records(folder, each))
    except (OSError, UnknownFormat) as error:
        print(f"{each.name} is left as it is: {error}", file=sys.stderr)
        return False
    except ValueError:
        return True


def _ls(folder: Any, args: argparse.Namespace) -> int:
    now, rows = time.time_ns(), []
    for each in _segments(folder):
        unused = max(now - each.used, 0) // 10**9
        rows.append({"segment": each.name, "bytes": each.nbytes, "sealed": each.is_sealed, "unused_seconds": unused})
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        state = "" if row["sealed"] else "  open"
        print(f"{row['segment']:32} {row['bytes']:>14,} bytes  last of use {row['unused_seconds']:>9,} s ago{state}")
    print(f"{len(rows)} segments, {sum(row['bytes'] for row in rows):,} bytes")
    return 0


def _stat(folder: Any, args: argparse.Namespace) -> int:
    layout = _layout(folder)
    groups: Counter[int] = Counter()
    namespaces: Counter[str] = Counter()
    payload, segments = 0, _segments(folder)
    for each in _read(segments, args):
        for _, head, wrong in _examined(folder, each, payloads=False):
            if head is not None and not wrong:
                groups[head.group] += 1
                namespaces[head.namespace.hex()] += 1
                payload += head.nbytes
    facts = {
        "layout": layout["layout"],
        "text": layout["text"],
        "segments": len(segments),
        "bytes": sum(each.nbytes for each in segments),
        "payload_bytes": payload,
        "blocks": sum(groups.values()),
        "blocks_of_groups": {str(group): groups[group] for group in sorted(groups)},
        "blocks_of_namespaces": dict(namespaces.most_common()),
    }
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    print(*layout["text"], sep="\n")
    print(f"{facts['blocks']:,} blocks, {payload:,} bytes, in {len(segments)} segments of {facts['bytes']:,} bytes")
    for group in sorted(groups):
        print(f"  group {group}: {groups[group]:,} blocks")
    for name, count in namespaces.most_common():
        print(f"  namespace {name}: {count:,} blocks")
    return 0


def _verify(folder: Any, args: argparse.Namespace) -> int:
    from kvpool.store.disk import NEW

    problems, count = [], 0
    try:
        _layout(folder)
    except CommandError as error:
        problems.append({"segment": "layout.json", "offset": 0, "problem": str(error)})
    for each in _read(_segments(folder) if not problems else [], args):
        for offset, head, wrong in _examined(folder, each):
            count += head is not None
            if wrong:
                problems.append({"segment": each.name, "offset": offset, "problem": wrong})
    names = set(os.listdir(folder.fd))
    names -= {each.name for each in folder.segments()} | {"lock", "layout.json", "layout.json" + NEW}
    for name in sorted(names & {*os.listdir(folder.fd)}):  # a server may have sealed or deleted some
        problems.append({"segment": name, "offset": 0, "problem": "this is not a file of a store"})
    if args.json:
        print(json.dumps({"records": count, "problems": problems}, indent=2))
    else:
        for found in problems:
            print(f"{found['segment']}, byte {found['offset']}: {found['problem']}")
        print(f"{count:,} records, {len(problems)} problems")
    return 1 if problems else 0


def _declare_prune(parser: argparse.ArgumentParser) -> None:
    _declare(parser)
    parser.add_argument("--max", metavar="SIZE", help="delete least recently used segments until this much is left")
    parser.add_argument("--damaged", action="store_true", help="delete the segments that have damaged bytes")


def _prune(folder: Any, args: argparse.Namespace) -> int:
    if args.max is None and not args.damaged:
        raise CommandError("say what to delete: --max SIZE, --damaged")
    most = None if args.max is None else nbytes("--max", args.max)
    read = _read([each for each in _segments(folder) if each.is_sealed], args) if args.damaged else ()
    gone = [each for each in read if _is_damaged(folder, each)]
    with folder.lock():  # now that everything is read: who writes waits for the lock
        gone = [each for each in gone if folder.remove(each.name)]
        if most is not None:
            gone += folder.make_room(0, most, set())
    facts = {"segments": [each.name for each in gone], "bytes": sum(each.nbytes for each in gone)}
    print(json.dumps(facts, indent=2) if args.json else f"{len(gone)} segments deleted, {facts['bytes']:,} bytes")
    return 0


def _declare_export(parser: argparse.ArgumentParser) -> None:
    _declare(parser)
    parser.add_argument("to", metavar="NEW", help="the directory to make")
    parser.add_argument("--namespace", metavar="HEX", help="only the blocks of this namespace, as `stat` names it")


def _export(folder: Any, args: argparse.Namespace) -> int:
    """Copy whole records, segment by segment."""
    from kvpool.store.disk import Folder

    layout, count, written = _layout(folder), 0, 0
    if os.path.lexists(args.to):
        raise CommandError(f"{args.to} exists already: name a new directory")
    with closing(Folder(args.to, "kvpool store")) as target:
        target.write_json("layout.json", layout)
        for each in _read(_segments(folder), args):
            chosen = [
                (offset, head)
                for offset, head, wrong in _examined(folder, each)
                if head is not None and not wrong and args.namespace in (None, head.namespace.hex())
            ]
            if chosen:
                written += _copy(folder, each.stem, target, chosen)
                count += len(chosen)
    facts = {"blocks": count, "bytes": written}
    print(json.dumps(facts, indent=2) if args.json else f"{count:,} blocks, {written:,} bytes in {args.to}")
    return 0


def _copy(source: Any, stem: str, target: Any, chosen: list[tuple[int, Any]]) -> int:
    """Write one sealed segment with these records of another; return its bytes."""
    import numpy as np

    from kvpool.store import segment_format as form

    with os.fdopen(source.open_segment(stem), "rb") as file:
        fd = file.fileno()
        header = os.pread(fd, form.HEADER.size, 0)
        kind, layout = form.read_header(fd)
        stem, out = target.create(header)
        try:
            entries, end = np.zeros(len(chosen), form.FOOTER), len(header)
            for number, (offset, head) in enumerate(chosen):
                os.pwrite(out, os.pread(fd, head.end, offset), end)
                entries[number] = (form.name_of(head.key, head.group), end)
                end += head.end
            footer = form.packed_footer(layout, entries, end, kind)
            os.pwrite(out, footer, end)
            target.seal(stem)
            return end + len(footer)
        finally:
            os.close(out)


COMMANDS = {
    "ls": _command("List the segments, least recently used first.", _ls),
    "stat": _command("Show what the blocks belong to: layout, groups, namespaces.", _stat),
    "verify": _command("Read every byte and say what is damaged; if anything is, the exit status is 1.", _verify),
    "prune": _command("Delete segments.", _prune, _declare_prune),
    "export": _command("Copy all blocks, or those of a namespace, to a new directory.", _export, _declare_export),
}
