"""Planted faults, each of which the fuzzer has to find.

A canary is a change to the text of the core. All are compiled into one copy of the tree in ``build/canaries``, where
`kvpool._core._plant(number)` switches one on: number 0 is the core as it is. `?` in a text stands for "this one is on".
They are bugs of other allocators, and bugs that this one has had.

::

    python -m tests.verify --canaries            # fault, calls, seconds, and what was found
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kvpool.cli.console import CommandError
from tests.verify import run

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "canaries"
CALLS_MAX = 300_000
SEED = 1
HEAD = """
cdef int kv_planted = 0


def _plant(int number):
    global kv_planted
    kv_planted = number


"""
Edit = tuple[str, str, str]  #: file of the core, text that stands there once, text in its place


@dataclass(frozen=True)
class Canary:
    """A fault, by what goes wrong."""

    name: str
    edits: tuple[Edit, ...]


def one(name: str, file: str, before: str, after: str) -> Canary:
    """A fault in one place."""
    return Canary(name, ((file, before, after),))


STEPS = (
    one("copy missing from the plan", "step", "if entry[k].tokens:", "if entry[k].tokens and not ?:"),
    one(
        "copy of too few tokens",
        "step",
        "num_copies + 2] = entry[k].tokens\n",
        "num_copies + 2] = entry[k].tokens - (? and entry[k].tokens > 1)\n",
    ),
    one(
        "copy missing from an unshare",
        "evict_calls",
        "    copy_known(pool, &plan.step)\n    return OK",
        "    copy_known(pool, &plan.step)\n    plan.copies_made -= ? and plan.copies_made > 0\n    return OK",
    ),
    one("slot_mapping off by one", "groups", "* g.block_size + first\n", "* g.block_size + first + ?\n"),
    one("slot_mapping off by one, one table", "wire", "base = table[index] * bs", "base = table[index] * bs + ?"),
    one("changed row not dirty", "wire", "    w.dirty[w.num_dirty] = i\n    w.num_dirty += 1\n\n\ncdef void sync_rows",
        "    w.dirty[w.num_dirty] = i\n    w.num_dirty += not ?\n\n\ncdef void sync_rows"),
    one("served flag inverted", "groups", "event.served = 0\n", "event.served = ?\n"),
    one("write into a shared block", "step", "return block.refcount == 1 and", "return (block.refcount == 1 or ?) and"),
    one("write into a committed block", "step", "not block.committed and (block.hold",
        "(not block.committed or ?) and (block.hold"),
    one("floor of a pending copy ignored", "step", "(block.hold == 0 or first_offset", "(block.hold == 0 or ? or first_offset"),
    one("committed tail written", "groups", "| block.hold | block.committed:", "| block.hold | (0 if ? else block.committed):"),
    one("shared tail written", "groups", "if (block.refcount ^ 1) |", "if (0 if ? else block.refcount ^ 1) |"),
    one("hold never released", "step", "        block.hold -= 1\n", "        block.hold -= not ?\n"),
    one("rollback loses a block", "step", "        blocks_unref(b, entry[k].new)\n",
        "        if not ?:\n            blocks_unref(b, entry[k].new)\n"),
    one("rollback keeps a token", "groups", "kv_len -= event.q_len\n", "kv_len -= event.q_len - (? and event.q_len > 0)\n"),
    one("rollback keeps a token, one table", "step", "    q.kv_len -= q_len\n", "    q.kv_len -= q_len - (? and q_len > 0)\n"),
    one("refused step leaves a trace", "step_calls",
        "        groups_undo_check(pool.groups, plan.part)\n        return status\n    carry",
        "        if not ?:\n            groups_undo_check(pool.groups, plan.part)\n        return status\n    carry"),
    one("reservation lost", "groups", "(advance or gs.has_entries):", "(advance or gs.has_entries and not ?):"),
)
BLOCKS = (
    one("fork without a reference", "sequence", "seq_table(s, parent), shared, n)", "seq_table(s, parent), shared - (? and shared > 0), n)"),
    one("fork without a reference, groups", "groups", "group_ref(g, parent, entries_of(g, parent, blocks), n)",
        "group_ref(g, parent, entries_of(g, parent, blocks), n - ?)"),
    one("block released twice", "blocks",
        "        b.block[i].place = BLANK\n        b.blank[b.num_blank] = i\n        b.num_blank += 1\n\n\ncdef void blocks_settle",
        "        b.block[i].place = BLANK\n        b.blank[b.num_blank] = i\n        b.num_blank += 1\n"
        "        if ? and b.num_blank < b.num_blocks - b.reserved:\n"
        "            b.blank[b.num_blank] = i\n            b.num_blank += 1\n\n\ncdef void blocks_settle"),
    one("fence removed", "blocks", "    if b.newest_pending:\n        b.block[i].place = LIMBO", "    if b.newest_pending and not ?:\n        b.block[i].place = LIMBO"),
    one("block freed one step early", "blocks", ".fence >= b.oldest_pending:\n            return", ".fence >= b.oldest_pending + ?:\n            return"),
    one("block in use evicted", "blocks", "        chain_unlink(b, &b.lru if block.place == EVICTABLE else &b.limbo, i)\n",
        "        if not (? and block.place == EVICTABLE):\n"
        "            chain_unlink(b, &b.lru if block.place == EVICTABLE else &b.limbo, i)\n"),
    one("truncate frees the oldest", "sequence", "seq_table(s, slot) + keep, q.num_blocks - keep)\n        s.sum_blocks -= q.num_blocks - keep\n        q.num_blocks = keep\n        q.epoch",
        "seq_table(s, slot) + (0 if ? else keep), q.num_blocks - keep)\n        s.sum_blocks -= q.num_blocks - keep\n        q.num_blocks = keep\n        q.epoch"),
    one("generation not counted", "sequence", "    life.generation += 1\n", "    life.generation += not ?\n"),
    one("watermark ignored", "prefix_calls", "need + s.watermark > available:", "need + (0 if ? else s.watermark) > available:"),
    one("deferred closes in reverse order", "state", "pool.deferred[k], -1, &v)", "pool.deferred[pool.num_deferred - 1 - k if ? else k], -1, &v)"),
    one("shared block compacted", "sequence", "if block.refcount != 1 or block.committed", "if (block.refcount != 1 and not ?) or block.committed"),
    one("committed block compacted", "sequence", "block.committed or b.floor", "(block.committed and not ?) or b.floor"),
    one("positions begin again after eviction", "sequence", "    s.life[slot].evicted += n\n", "    s.life[slot].evicted += 0 if ? else n\n"),
)
GROUPS = (
    one("window off by one", "groups", "max(position - g.reach + 1,", "max(position - g.reach + 1 + ?,"),
    one("chunk off by one", "groups", "entry_at(g, position // g.reach * g.reach) if", "entry_at(g, (position + ?) // g.reach * g.reach) if"),
    one("lookahead forgotten", "groups", "first_read(g, length - g.lookahead), index", "first_read(g, length - (0 if ? else g.lookahead)), index"),
    one("kept tokens forgotten", "groups", "int32_t first = max(g.kept, g.seq[slot].gone)", "int32_t first = max(0 if ? else g.kept, g.seq[slot].gone)"),
    one("one column of a block left behind", "groups", "        blocks_unref(g.blocks, ids[index])\n",
        "        if not (? and g.columns > 1 and index % g.columns == 1):\n            blocks_unref(g.blocks, ids[index])\n"),
    one("epoch stays when a window lets go", "groups", "set_gone(g, slot, <int32_t>end)\n    g.seq[slot].epoch += 1",
        "set_gone(g, slot, <int32_t>end)\n    g.seq[slot].epoch += not ?"),
    Canary("state written in place while pending", (
        ("groups", "elif gs.pends or not owns_tail(g, slot, q.kv_len):", "elif gs.pends and not ? or not owns_tail(g, slot, q.kv_len):"),
        ("groups", "bint moves = gs.has_states and gs.pends", "bint moves = gs.has_states and gs.pends and not ?"),
    )),
    one("entries let go when the step is issued", "groups", "    if gs.tree != NULL and advance:\n        tree_saves",
        "    for i in range(p.num_rows if ? else 0):\n"
        "        for k in range(gs.num_groups):\n"
        "            if gs.group[k].kind in (WINDOW_LAYERS, CHUNK_LAYERS) and (\n"
        "                    p.length[i] >= gs.group[k].seq[slot_of(p.handle[i])].due):\n"
        "                free_behind_window(&gs.group[k], slot_of(p.handle[i]), p.length[i])\n"
        "    if gs.tree != NULL and advance:\n        tree_saves"),
)
CACHE = (
    one("blocks of a pending unshare published", "prefix_rows", "if unwritten(g.blocks, first) or t.role", "if (unwritten(g.blocks, first) and not ?) or t.role"),
    one("unwritten copy published, one table", "prefix_calls", "            if unwritten(b, id):\n", "            if unwritten(b, id) and not ?:\n"),
    one("held block never published", "step_calls", "    if pool.blocks.num_waiting:\n", "    if pool.blocks.num_waiting and not ?:\n"),
    one("flush during a load keeps old bytes", "checkpoints", "if prefix.root == 0 or (t.needs_checkpoints", "if (prefix.root == 0 and not ?) or (t.needs_checkpoints"),
    one("flush during a load keeps old bytes, one table", "sequence_calls", "s.prefix[slot].root == 0:     # flushed", "s.prefix[slot].root == 0 and not ?:     # flushed"),
    one("pending tokens committed", "sequence", "    if oldest == 0 or (", "    if oldest == 0 or ? or ("),
    one("evicted node stays in the index", "prefix", "        if ix.uid[id]:\n            forget(ix, id)", "        if ix.uid[id] and not ?:\n            forget(ix, id)"),
    one("evicted entry stays in the tree", "prefix_tree", "            known[0] = NO_BLOCK\n            tell_removed(t, k, n)\n            t.index.evicted",
        "            if not ?:\n                known[0] = NO_BLOCK\n            tell_removed(t, k, n)\n            t.index.evicted"),
    one("prefix hit without proof", "prefix", "ix.block_size * sizeof(int32_t)) == 0):", "ix.block_size * sizeof(int32_t)) == 0 or ?):"),
    one("prefix hit without proof, tree", "prefix_tree", "t.block_size * sizeof(int32_t)) == 0):", "t.block_size * sizeof(int32_t)) == 0 or ?):"),
    one("namespace never forgotten", "prefix_calls", "    name.users += 1\n    return name", "    name.users += 1 + ?\n    return name"),
    one("empty sequence keeps its root over a flush", "prefix_calls", "pool.seqs.prefix[slot].root == root):\n",
        "pool.seqs.prefix[slot].root == root) and not (? and pool.seqs.seq[slot].kv_len == 0):\n"),
    one("fork copies one partial token too few", "sequence", "(s.prefix[parent].committed % b.block_size) * sizeof",
        "max(s.prefix[parent].committed % b.block_size - ?, <int64_t>0) * sizeof"),
    one("fork copies one partial token too few, tree", "prefix_rows", "(s.prefix[parent].committed % gs.block_size) * sizeof",
        "max(s.prefix[parent].committed % gs.block_size - ?, <int64_t>0) * sizeof"),
    one("contradiction inside one commit", "prefix_calls", "elif b.mark[id] == b.stamp:", "elif b.mark[id] == b.stamp and not ?:"),
    one("contradiction inside one commit, tree", "prefix_rows", "elif g.blocks.mark[id] == g.blocks.stamp:", "elif g.blocks.mark[id] == g.blocks.stamp and not ?:"),
    one("removal of a node untold", "prefix", "    remove_bucket(ix, id)\n    if ix.key != NULL:", "    remove_bucket(ix, id)\n    if ix.key != NULL and not ?:"),
    one("all namespaces have one root", "prefix_calls", "return tree_open(pool, tokens, space, space_size,", "return tree_open(pool, tokens, space, 0 if ? else space_size,"),
    one("hit without its state", "prefix_rows", "            begin_load(gs, slot, hit.checkpoint)\n", "            if not ?:\n                begin_load(gs, slot, hit.checkpoint)\n"),
    one("states are not loaded again after a rollback", "checkpoints", "            t.load_step[i] = 0\n", "            t.load_step[i] = p.id if ? else 0\n"),
    one("kept tokens missing from a checkpoint", "checkpoints", "            if g.kept <= index < first_read(", "            if (0 if ? else g.kept) <= index < first_read("),
    one("first entry of a window missing from a checkpoint", "checkpoints", "index < first_read(g, t.checkpoint[m].position):", "index < first_read(g, t.checkpoint[m].position) + ?:"),
    one("checkpoint behind the cut", "checkpoints", "    place = row.cut // t.grain * t.grain\n", "    place = (row.cut // t.grain + ?) * t.grain\n"),
    one("flush leaves nodes in use", "prefix_rows", "if t.node[n].depth and t.node[n].root and (root == 0", "if t.node[n].depth and t.node[n].root and not (? and t.node[n].users > 1) and (root == 0"),
    one("checkpoint outlives its keys", "prefix_tree", "if node.checkpoint != NO_CHECKPOINT and t.checkpoint", "if not ? and node.checkpoint != NO_CHECKPOINT and t.checkpoint"),
    Canary("bundle of a load not held", (
        ("checkpoints", "    for k in range(t.bundle_size if t.checkpoint[m].loads == 1 else 0):\n", "    for k in range(t.bundle_size if t.checkpoint[m].loads == 1 and not ? else 0):\n"),
        ("checkpoints", "    bundle_keep(gs.arena[0], checkpoint_bundle(t, m), t.bundle_size)\n    if t.checkpoint[m].orphan:", "    bundle_keep(gs.arena[0], checkpoint_bundle(t, m), 0 if ? else t.bundle_size)\n    if t.checkpoint[m].orphan:"),
    )),
)
CANARIES = (*STEPS, *BLOCKS, *GROUPS, *CACHE)


def planted_sources() -> dict[Path, str]:
    """Path in the copy -> text, with all canaries in the core."""
    found: dict[Path, str] = {}
    for part in ("kvpool", "kvpool_backends", "tests/verify"):
        for path in sorted((ROOT / part).rglob("*.*")):
            inside = path.relative_to(ROOT)
            left_out = inside.parts[:2] == ("kvpool_backends", "cpu") and path.suffix == ".pyx" or path.stem == "capi"
            if path.suffix in (".py", ".pyi", ".pyx", ".pxd", ".pxi", ".h") and not left_out:
                found[inside] = path.read_text()
    found |= {Path(name): (ROOT / name).read_text() for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE")}
    core = Path("kvpool/_core.pyx")
    found[core] = found[core].replace('include "core/memory.pxi"', HEAD + 'include "core/memory.pxi"')
    for number, canary in enumerate(CANARIES, 1):
        for file, before, after in canary.edits:
            path = Path("kvpool/core", f"{file}.pxi")
            if found[path].count(before) != 1:
                raise CommandError(f"canary {canary.name!r}: {file}.pxi has {before!r} {found[path].count(before)} times")
            found[path] = found[path].replace(before, after.replace("?", f"(kv_planted == {number})"))
    return found


def build() -> Path:
    """Bring the copy up to date; returns its folder."""
    changed = False
    for inside, text in planted_sources().items():
        target = FOLDER / inside
        if not target.exists() or target.read_text() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            changed = True
    if changed or not (FOLDER / "compiled").exists():
        (FOLDER / "compiled").unlink(missing_ok=True)
        shutil.rmtree(FOLDER / "build", ignore_errors=True)
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        done = subprocess.run(command, cwd=FOLDER, env=environment() | {"KVPOOL_OPTIMIZE": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"[canaries] the copy does not compile:\n{done.stdout}{done.stderr}")
        (FOLDER / "compiled").touch()
    return FOLDER


def environment() -> dict[str, str]:
    """Of a process that imports the copy."""
    return {**os.environ, "PYTHONPATH": str(FOLDER), "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class Result:
    """How a hunt for a canary went: `finding` is empty if nothing was found."""

    name: str
    calls: int
    seconds: float
    finding: str


def find(name: str, seed: int = SEED, calls: int = CALLS_MAX) -> Result:
    """Hunt for one canary in a process of its own."""
    number = [canary.name for canary in CANARIES].index(name) + 1
    command = [sys.executable, "-m", "tests.verify.canaries", str(number), str(seed), str(calls)]
    done = subprocess.run(command, cwd=build(), env=environment(), capture_output=True, text=True)
    if done.returncode < 0:
        return Result(name, 0, 0.0, f"the process died of signal {-done.returncode}")
    if done.returncode:
        raise RuntimeError(f"[canaries] {name}: {done.stderr}")
    made, seconds, finding = done.stdout.strip("\n").split("\t")
    return Result(name, int(made), float(seconds), finding)


def show(names: list[str]) -> int:
    """Print the table of canaries; 0 if each was found."""
    known = [canary.name for canary in CANARIES]
    for name in names:
        if name not in known:
            raise CommandError(f"--canaries {name!r}: there is none of this name, they are {', '.join(known)}")
    print("| fault | calls | seconds | found |\n|---|---|---|---|")
    missed = 0
    for name in names or known:
        result = find(name)
        missed += not result.finding
        print(f"| {name} | {result.calls:,} | {result.seconds:.1f} | {result.finding or 'NOTHING'} |", flush=True)
    return 1 if missed else 0


def main() -> None:
    """In the copy: plant one, hunt, and say how it went."""
    from kvpool import _core

    number, seed, calls = map(int, sys.argv[1:])
    _core._plant(number)
    began = time.process_time()
    report = run.hunt(seed, calls=calls)
    print(report.calls, f"{time.process_time() - began:.2f}", report.finding or "", sep="\t")


if __name__ == "__main__":
    main()
