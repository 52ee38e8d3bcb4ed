"""Specs, layouts, pool sizing and model configs, against sizes worked out by hand."""

import errno
import json
from itertools import product

import numpy as np
import pytest
from configs import LLAMA_8B

from kvpool import config
from kvpool.config import LAYOUTS, KVSpec, blocks_for, describe_plan, parse_nbytes

METAL = {
    "device_name": "Apple M4",
    "max_recommended_working_set_size": 16 * 2**30,
    "max_buffer_length": 9 * 2**30,
    "memory_size": 24 * 2**30,
}


# ---------------------------------------------------------------------- KVSpec


def test_spec_counts_the_bytes_of_both_planes():
    spec = KVSpec(num_layers=32, num_kv_heads=8, head_dim=128, dtype="float16", block_size=16)
    assert (spec.token_nbytes, spec.block_nbytes, spec.pool_nbytes(8192)) == (128 * 1024, 2 * 2**20, 16 * 2**30)
    spec = KVSpec(2, 3, 192, "float32", 4, v_head_dim=128)
    assert spec.token_nbytes == 2 * 3 * (192 + 128) * 4 and spec.planes == (("k", 192), ("v", 128))
    assert KVSpec(2, 1, 512, v_head_dim=64, latent=True).token_nbytes == 2 * 576 * 2
    assert KVSpec(np.int64(2), np.int32(2), 64, block_size=np.uint8(7)) == KVSpec(2, 2, 64, block_size=7)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_layers": 0}, ValueError, "num_layers is 0"),
        ({"num_kv_heads": -1}, ValueError, "num_kv_heads is -1"),
        ({"head_dim": 64.0}, TypeError, "head_dim must be an int, got float"),
        ({"block_size": True}, TypeError, "block_size must be an int, got bool"),
        ({"block_size": None}, TypeError, "block_size must be an int, got NoneType"),
        ({"block_size": 2**63}, ValueError, "the range is"),
        ({"block_size": 2**62}, ValueError, "one block has"),
        ({"v_head_dim": 0}, ValueError, "v_head_dim is 0"),
        ({"dtype": "float64"}, ValueError, "dtype is 'float64', known are float32, float16, bfloat16"),
        ({"dtype": np.float32}, TypeError, "dtype must be a str"),
        ({"layout": "nhd"}, ValueError, "layout is 'nhd'"),
        ({"latent": True}, ValueError, "latent attention has 1 KV head, not num_kv_heads 2"),
        ({"latent": 1}, TypeError, "latent must be a bool, got int (1)"),
    ],
)
def test_spec_with_bad_field_is_refused(fields, error, message):
    with pytest.raises(error, match=r"^\[KVSpec\] ") as caught:
        KVSpec(**({"num_layers": 2, "num_kv_heads": 2, "head_dim": 64} | fields))
    assert message in str(caught.value)


# ---------------------------------------------------------------------- layouts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_gives_every_element_an_address_of_its_own(layout):
    """Walk every (layer, block, slot, head, d) of both planes: all elements of all base arrays, each once."""
    spec, blocks = KVSpec(2, 3, 4, block_size=5, layout=layout), 6
    width = 2 if layout == "block" else 1  # its base array has bytes, an element two of them
    seen: dict[tuple[str, int], list[int]] = {}
    sizes = {}
    for plane, dim in spec.planes:
        at = spec.plane_layout(plane, blocks)
        for layer, block, slot, head, d in product(range(2), range(blocks), range(5), range(3), range(dim)):
            key = (at.array, layer if at.per_layer else 0)
            sizes[key] = int(np.prod(at.shape))
            strides = layer * at.layer_stride + block * at.block_stride + slot * at.slot_stride
            element = at.offset + strides + head * at.head_stride + d
            seen.setdefault(key, []).extend(range(width * element, width * (element + 1)))
    for key, addresses in seen.items():
        assert sorted(addresses) == list(range(sizes[key])), f"{layout}: base array {key}"


@pytest.mark.parametrize(
    ("layout", "plane", "index", "shape"),
    [
        ("NHD", "k", (5, 3, 1, 2), (9, 4, 2, 8)),
        ("HND", "v", (5, 1, 3, 2), (9, 2, 4, 5)),
        ("block", "v", (5, 2 * 4 * 2 * 13 + 4 * 2 * 8 + 3 * 2 * 5 + 5 + 2), (9, 3 * 4 * 2 * 13)),  # elements of 2 bytes
    ],
)
def test_layout_has_the_documented_axes(layout, plane, index, shape):
    """Layer 2, block 5, slot 3, head 1, element 2 is the documented entry of the base array."""
    at = KVSpec(3, 2, 8, block_size=4, v_head_dim=5, layout=layout).plane_layout(plane, 9)
    address = at.offset + 2 * at.layer_stride + 5 * at.block_stride + 3 * at.slot_stride + at.head_stride + 2
    assert at.shape == (shape if at.per_layer else (9, 2 * shape[1])) and at.per_layer == (layout != "block")
    assert address == np.ravel_multi_index(index, shape)


def test_layout_block_refuses_planes_that_would_not_be_aligned():
    aligned = KVSpec(2, 1, 34, "float16", 1, 32, "block", v_bits=4, quant_group_size=32)
    assert aligned.plane_layout("v", 2).offset * 4 == 68
    with pytest.raises(ValueError, match=r"\[KVSpec\] layout 'block' cannot align words .*head_dim 33"):
        KVSpec(2, 1, 33, "float16", 1, 32, "block", v_bits=4, quant_group_size=32)


def test_plane_layout_of_an_unknown_plane_is_refused():
    with pytest.raises(ValueError, match="plane is 'scale'"):
        KVSpec(1, 1, 8).plane_layout("scale", 2)


# ---------------------------------------------------------------------- blocks_for


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("16GiB", 16 * 2**30), ("512MB", 512 * 10**6), ("1.5 KiB", 1536), ("2tb", 2 * 10**12), ("7B", 7), (4096, 4096)],
)
def test_parse_nbytes_knows_units(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    ("memory", "error", "said"),
    [
        *((text, ValueError, "") for text in ("16", "16G", "GiB", "-1GiB", "1e3MB", "", "16 GiB free")),
        *((value, TypeError, "") for value in (True, 1.5, None, [1])),
        *(
            (value, ValueError, "limit is 2^63 - 1 bytes")
            for value in (2**63, "99999999999999999999TiB", "9" * 400 + "B")
        ),
    ],
)
def test_parse_nbytes_of_no_size_or_too_much_is_refused(memory, error, said):
    with pytest.raises(error, match=r"^\[memory\]") as caught:
        parse_nbytes(memory)
    assert str(caught.value).endswith(said) and len(str(caught.value)) < 160


def test_blocks_for_a_size_divides_it():
    spec = KVSpec(32, 8, 128)
    size = blocks_for("16GiB", spec)
    assert (size.num_blocks, size.reserved_blocks, size.num_tokens) == (8192, 1, 8191 * 16)
    assert size.pool_nbytes == 16 * 2**30
    assert blocks_for(16 * 2**30 - 1, spec).num_blocks == 8191


SMALL_METAL = {"max_recommended_working_set_size": 4 * 2**30}


@pytest.mark.parametrize(
    ("options", "budget"),
    [  # a share of the machine, less what is in use, less max(1 GiB, 10 %) of overhead
        ({"device_info": METAL, "active_nbytes": 3 * 2**30}, int(0.8 * 2**34) - 3 * 2**30 - 2**34 // 10),
        ({"device_info": METAL | {"active_nbytes": 2**30}}, int(0.8 * 2**34) - 2**30 - 2**34 // 10),
        ({"device_info": METAL | {"active_nbytes": 2**30}, "active_nbytes": 0}, int(0.8 * 2**34) - 2**34 // 10),
        ({"device_info": SMALL_METAL, "fraction": 0.5}, 2 * 2**30 - 2**30),
        ({"device_info": {"device_name": "cpu"}}, 5 * 2**30 - 2**30),  # of the RAM: no GiB at least
    ],
)
def test_blocks_for_a_machine_has_a_share_of_it(monkeypatch, options, budget):
    monkeypatch.setattr(config, "available_memory_nbytes", lambda: 10 * 2**30)
    size = blocks_for("auto", KVSpec(32, 8, 128), **options)
    assert size.budget_nbytes == budget == sum(nbytes for _, nbytes in size.breakdown)
    assert size.num_blocks == budget // (2 * 2**20)
    device = options["device_info"].get("device_name", "Metal").replace("cpu", "available RAM")
    for part in (device, "of ", "overhead", f"{size.num_blocks} blocks"):
        assert part in size.how
    assert ("already in use" in size.how) == (len(size.breakdown) == 3)


def test_blocks_for_respects_the_largest_array_of_the_device_and_int32_slots():
    """The layout of whole blocks puts all layers, keys and values, into one array."""
    device = {"max_buffer_length": 4 * 2**30}
    assert blocks_for("15GiB", KVSpec(32, 8, 128), device_info=device).limited_by == "the budget"
    for layout, blocks in (("NHD", 2**17), ("HND", 2**17), ("block", 2**11)):
        size = blocks_for("900GiB", KVSpec(32, 8, 128, layout=layout), device_info=device)
        assert size.num_blocks == blocks and "max_buffer_length 4.00 GiB" in size.how
    size = blocks_for("1000TiB", KVSpec(1, 1, 1, block_size=16))
    assert size.num_blocks * 16 <= 2**31 - 1 < (size.num_blocks + 1) * 16 and size.limited_by == "int32 slots"


def test_available_memory_is_limited_by_the_cgroup(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 99 kB\nMemAvailable:    8388608 kB\n",
        "/sys/fs/cgroup/memory.max": f"{3 * 2**30}\n",
        "/sys/fs/cgroup/memory.current": f"{2**30}\n",
    }
    monkeypatch.setattr(config, "read_text", lambda path: files.get(path, ""))
    assert config.available_memory_nbytes() == 2 * 2**30
    files["/sys/fs/cgroup/memory.stat"] = f"anon 5\ninactive_file {2**29}\n"  # files that the cgroup caches
    assert config.available_memory_nbytes() == 5 * 2**29
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert config.available_memory_nbytes() == 8 * 2**30
    files["/proc/self/cgroup"] = "4:memory:/other\n0::/one.slice/two.service\n"
    for place, most in (("one.slice", 2**28), ("one.slice/two.service", 2**27)):
        files |= {f"/sys/fs/cgroup/{place}/memory.max": f"{most}", f"/sys/fs/cgroup/{place}/memory.current": "7"}
        assert (config.available_memory_nbytes(), config.memory_nbytes()) == (most - 7, most)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_memory_that_cannot_be_read_for_now_is_not_taken_for_all_of_it(monkeypatch, number):
    def failing(path):
        raise OSError(number, "planted")

    monkeypatch.setattr(config.Path, "read_text", failing)
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    with pytest.raises(OSError, match="planted"):
        config.available_memory_nbytes()


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        (0, {}),
        (-5, {}),
        ("1MiB", {}),
        ("2MiB", {}),  # one block, and it is reserved
        ("auto", {"device_info": METAL, "active_nbytes": 20 * 2**30}),  # a negative budget
        ("auto", {"device_info": METAL, "overhead_nbytes": 2**40}),
    ],
)
def test_blocks_for_no_usable_block_raises_with_the_calculation(memory, options):
    with pytest.raises(ValueError, match=r"^\[blocks_for\] no usable block") as caught:
        blocks_for(memory, KVSpec(32, 8, 128), **options)
    assert "= budget for blocks" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, (-1, 1.5, True, "1")) for name in ("active_nbytes", "overhead_nbytes", "reserved_blocks")),
        ("fraction", (0, -0.1, 1.01, float("nan"), True, "half")),
    ],
)
def test_blocks_for_a_bad_number_is_refused(name, wrong):
    for value in wrong:
        error = (ValueError, TypeError) if name == "fraction" else ValueError if value == -1 else TypeError
        with pytest.raises(error, match=rf"^\[blocks_for\] {name}"):
            blocks_for("auto", KVSpec(1, 1, 8), device_info=METAL, **{name: value})
    with pytest.raises(TypeError, match="spec must be a KVSpec"):
        blocks_for("1GiB", {"num_layers": 2})


# ---------------------------------------------------------------------- describe_plan


def test_describe_plan_counts_the_sequences_that_fit():
    needed = describe_plan(LLAMA_8B, "16GiB", max_len=4100)[0]["sequence_nbytes"]
    assert needed == {"kvpool": 4112 * 131072, "layer_groups": 4112 * 131072}
    facts, text = describe_plan(LLAMA_8B, "16GiB", max_len=4096)
    assert facts["token_nbytes"] == 131072 and facts["num_blocks"] == 8192
    assert [counts["kvpool"] for counts in facts["num_sequences"].values()] == [8191 // 32, 8191 // 128, 8191 // 256]
    assert facts["num_sequences"]["4096"] == {"kvpool": 31, "layer_groups": 32}
    assert json.loads(json.dumps(facts)) == facts
    for part in ("every token                  32        8 x 128           131072", "8192 blocks", "16.00 GiB"):
        assert part in text


def test_describe_plan_gives_machines_the_whole_calculation():
    facts, text = describe_plan(LLAMA_8B, "auto", device_info=METAL, active_nbytes=5 * 2**30)
    assert [term["what"] for term in facts["breakdown"]] == [
        "0.8 of 16.00 GiB recommended working set",
        "already in use (weights and caches)",
        "overhead (activations, temporaries)",
    ]
    assert sum(term["nbytes"] for term in facts["breakdown"]) == facts["budget_nbytes"]
    assert facts["source"] in text and all(term["what"] in text for term in facts["breakdown"])
    assert json.loads(json.dumps(facts)) == facts
