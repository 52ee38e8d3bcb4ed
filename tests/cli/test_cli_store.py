"""``kvpool store``: what it says about a directory, and that `verify` finds every damaged byte."""

import errno
import json
import os
from contextlib import closing

import pytest

from kvpool.cli import build_parser, main
from kvpool.store import BlockLayout, DiskStore, Layout
from kvpool.store.disk import Folder
from kvpool.testing import stores as kit

LAYOUT = Layout((BlockLayout(2, 50, "full"), BlockLayout(4, 70, "state")), "w")
NAMESPACES = (b"a", b"b")
PARSER = build_parser()


@pytest.fixture
def directory(tmp_path):
    """Two sealed segments: ten blocks of two namespaces in one, five in the other."""
    path = tmp_path / "store"
    for names in (NAMESPACES, NAMESPACES[:1]):
        store = DiskStore(str(path), LAYOUT, 1 << 20, segment_nbytes=1 << 14)
        store.ready.wait()
        for name in names:
            for blocks in LAYOUT.blocks(kit.prompt(len(names), 8), name):
                kit.stores(store, blocks[:3])
        store.close()
    return path


def said(capsys, *arguments):
    """Status and the JSON of a command."""
    args = PARSER.parse_args(["store", *map(str, arguments), "--json"])
    status = args.run(args)
    return status, json.loads(capsys.readouterr().out)


def found(path, seed, name):
    store = DiskStore(str(path), LAYOUT, 1 << 20, segment_nbytes=1 << 14)
    store.ready.wait()
    try:
        return [int(kit.loads(store, blocks[:3]).sum()) for blocks in LAYOUT.blocks(kit.prompt(seed, 8), name)]
    finally:
        store.close()


def test_ls_and_stat_tell_what_is_there(directory, capsys):
    status, rows = said(capsys, "ls", directory)
    sizes = {file.name: file.stat().st_size for file in directory.glob("*.kvpool")}
    assert status == 0 and {row["segment"]: row["bytes"] for row in rows} == sizes and len(sizes) == 2
    status, facts = said(capsys, "stat", directory)
    assert (status, facts["blocks"], facts["segments"]) == (0, 15, 2)
    assert facts["blocks_of_groups"] == {"0": 9, "1": 6} and facts["payload_bytes"] == 9 * 50 + 6 * 70
    assert sorted(facts["blocks_of_namespaces"].values()) == [5, 10] and facts["layout"] == LAYOUT.digest.hex()
    assert main(["store", "ls", str(directory)]) == main(["store", "stat", str(directory)]) == 0
    printed = capsys.readouterr().out
    assert "2 segments" in printed and "15 blocks" in printed and "weights 77" in printed


def test_stat_reads_no_payload(tmp_path, capsys, monkeypatch):
    layout, path, read, counts = Layout((BlockLayout(2, 10_000, "full"),), "w"), tmp_path / "store", os.pread, []
    store = DiskStore(str(path), layout, 1 << 20)
    kit.stores(store, layout.blocks(kit.prompt(1, 20))[0])
    store.close()
    monkeypatch.setattr(os, "pread", lambda fd, size, at: (counts.append(size), read(fd, size, at))[1])
    status, facts = said(capsys, "stat", path)
    assert (status, facts["blocks"], facts["payload_bytes"]) == (0, 10, 100_000)
    assert sum(counts) < 10_000


@pytest.mark.long
def test_verify_finds_every_flipped_byte(directory, capsys):
    assert said(capsys, "verify", directory) == (0, {"records": 15, "problems": []})
    file = min(directory.glob("*.kvpool"), key=lambda file: file.stat().st_size)
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        status, facts = said(capsys, "verify", directory)
        assert status == 1 and facts["problems"], f"byte {at} of {file.name}"
        assert {problem["segment"] for problem in facts["problems"]} == {file.name}
    file.write_bytes(whole)
    assert said(capsys, "verify", directory)[0] == 0
    (directory / "layout.json").write_text("{")
    assert said(capsys, "verify", directory)[1]["problems"][0]["segment"] == "layout.json"


def test_commands_close_what_they_open(directory, capsys, tmp_path, files_open):
    for arguments in (["ls"], ["stat"], ["verify"], ["prune", "--damaged"], ["export", tmp_path / "new"]):
        assert said(capsys, arguments[0], directory, *arguments[1:])[0] == 0
    assert files_open() == []


def test_verify_finds_what_is_cut_added_swapped_or_foreign(directory, capsys, tmp_path):
    one, two = sorted(directory.glob("*.kvpool"))
    whole = one.read_bytes()
    for data in (whole[:-1], whole[:-200], whole[:500], whole[:64], whole[:10], b"", whole + b"\0", whole + whole):
        one.write_bytes(data)
        assert said(capsys, "verify", directory)[0] == 1, len(data)
    one.write_bytes(whole[:64] + whole[320:576] + whole[64:320] + whole[576:])  # two records changed places
    assert said(capsys, "verify", directory)[0] == 1
    one.write_bytes(whole)
    for make in (
        lambda: one.chmod(0o644),
        lambda: (directory / "notes.txt").touch(),
        lambda: os.mkfifo(directory / ("a" * 16 + ".kvpool")),
        lambda: (directory / ("b" * 16 + ".kvpool")).symlink_to(one),
    ):
        make()
        status, facts = said(capsys, "verify", directory)
        assert status == 1 and len(facts["problems"]) == 1
        one.chmod(0o600)
        for file in directory.iterdir():
            if file not in (one, two) and file.name not in ("layout.json", "lock"):
                file.unlink()
    other = DiskStore(str(tmp_path / "other"), Layout(LAYOUT.groups, "v"), 1 << 20)
    kit.stores(other, LAYOUT.blocks(kit.prompt(1, 8))[0])
    other.close()
    (foreign,) = (tmp_path / "other").glob("*.kvpool")
    foreign.rename(directory / foreign.name)
    status, facts = said(capsys, "verify", directory)
    assert status == 1 and "another layout" in facts["problems"][0]["problem"]


def test_file_that_a_killed_process_left_is_no_problem_and_is_overwritten(tmp_path, capsys):
    path = tmp_path / "store"
    for _ in range(2):
        store = DiskStore(str(path), LAYOUT, 1 << 20, segment_nbytes=1 << 14)
        kit.stores(store, LAYOUT.blocks(kit.prompt(1, 8))[0])
        store.close()
        (path / "layout.json.new").write_text("{")
        assert said(capsys, "verify", path) == (0, {"records": 4, "problems": []})
    Folder(str(path), "test").write_json("layout.json", {})
    assert not (path / "layout.json.new").exists()


@pytest.mark.parametrize("command", ["verify", "export"])
def test_segments_that_a_server_seals_or_deletes_meanwhile_are_no_problem(directory, capsys, monkeypatch, command):
    store, listed = DiskStore(str(directory), LAYOUT, 1 << 20, segment_nbytes=1 << 14), Folder.segments
    kit.stores(store, LAYOUT.blocks(kit.prompt(9, 8))[0])  # four blocks in a segment that grows
    ended = min(directory.glob("*.kvpool"), key=lambda file: file.stat().st_size)  # with five blocks

    def segments(folder, *known):
        found = listed(folder, *known)
        store.close()
        ended.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Folder, "segments", segments)
    status, facts = said(capsys, command, directory, *([directory.parent / "new"] if command == "export" else []))
    assert (status, facts.get("problems", []), facts.get("records", facts.get("blocks"))) == (0, [], 14)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_segment_that_is_read_is_shown_on_a_terminal(directory, capsys, monkeypatch, is_terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # without rich: a line for each
    for command in (["stat"], ["verify"], ["prune", "--damaged"], ["export", str(directory.parent / "new")]):
        assert main(["store", command[0], str(directory), *command[1:]]) == 0
        shown = capsys.readouterr().err.splitlines()
        names = [file.name for file in directory.glob("*.kvpool")] if is_terminal else []
        assert sorted(line.partition("] ")[2] for line in shown) == sorted(names)


def test_prune_deletes_the_damaged_and_the_least_used(directory, capsys):
    one, two = sorted(directory.glob("*.kvpool"))
    assert said(capsys, "prune", directory, "--damaged") == (0, {"segments": [], "bytes": 0})
    one.write_bytes(one.read_bytes()[:-1])
    assert said(capsys, "prune", directory, "--damaged")[1]["segments"] == [one.name]
    assert said(capsys, "prune", directory, "--max", "1GB")[1]["segments"] == []
    assert said(capsys, "prune", directory, "--max", "0")[1]["segments"] == [two.name]
    assert not list(directory.glob("*.kvpool"))


def test_prune_leaves_segments_that_cannot_be_read_here(directory, capsys, monkeypatch):
    def failing(fd, size, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name, missing in (("kvpool.store.segment_format.can_check", lambda kind: False), ("os.pread", failing)):
        with monkeypatch.context() as here:
            here.setattr(name, missing)
            assert said(capsys, "verify", directory)[0] == 1
            assert said(capsys, "prune", directory, "--damaged") == (0, {"segments": [], "bytes": 0})
    assert said(capsys, "verify", directory) == (0, {"records": 15, "problems": []})


def test_prune_deletes_no_segment_because_the_layout_file_is_damaged(directory, capsys):
    file, segments = directory / "layout.json", sorted(directory.glob("*.kvpool"))
    whole = file.read_bytes()
    for damaged in (whole.replace(LAYOUT.digest.hex().encode(), b"0" * 32), b'{"text": 5}', b'{"text": ["w"]}'):
        file.write_bytes(damaged)
        assert main(["store", "prune", str(directory), "--damaged"]) == 2
        assert "its digest is not that of its text" in capsys.readouterr().err
        assert said(capsys, "verify", directory)[0] == 1
        assert sorted(directory.glob("*.kvpool")) == segments


def test_prune_reads_without_the_lock_that_writers_need(directory, capsys, monkeypatch):
    def examine(*args):
        with closing(Folder(str(directory), "a writer")) as other, other.lock():
            yield 0, None, "planted"

    monkeypatch.setattr("kvpool.store.segment_format.examine", examine)
    assert len(said(capsys, "prune", directory, "--damaged")[1]["segments"]) == 2


def test_export_copies_a_namespace_byte_for_byte(directory, capsys, tmp_path):
    name = LAYOUT.blocks(kit.prompt(1, 8), b"a")[0].namespace.hex()
    status, facts = said(capsys, "export", directory, tmp_path / "new", "--namespace", name)
    assert (status, facts["blocks"]) == (0, 10)
    assert said(capsys, "verify", tmp_path / "new") == (0, {"records": 10, "problems": []})
    assert found(tmp_path / "new", 2, b"a") == found(tmp_path / "new", 1, b"a") == [3, 2]
    assert found(tmp_path / "new", 2, b"b") == [0, 0]
    assert said(capsys, "export", directory, tmp_path / "all")[1]["blocks"] == 15


REFUSED = {
    "there is no directory": ["ls", "nowhere"],
    "layout.json cannot be read": ["stat", "empty"],
    "say what to delete": ["prune", "store"],
    "is not a size": ["prune", "store", "--max", "much"],
    "exists already": ["export", "store", "empty"],
    "others may use": ["verify", "open"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_command_that_cannot_be_done_says_why(directory, tmp_path, capsys, words):
    (tmp_path / "empty").mkdir(mode=0o700)
    (tmp_path / "open").mkdir(mode=0o755)
    known = {"nowhere", "store", "empty", "open"}
    arguments = [str(tmp_path / word) if word in known else word for word in REFUSED[words]]
    assert main(["store", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not list((tmp_path / "empty").iterdir())
