"""Arguments of the core's classes, as far as Python judges them: signatures of constructors, and the arrays of a plan.

The constructors pass their arguments to `Pool` and `Plan`. So the error of a wrong call says ``Pool()`` and not
``__cinit__()``.
"""

from typing import Any
from weakref import ref

import numpy as np

FIELDS = (
    *("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "indptr", "indices", "last_page_len"),
    "slot_ids",
)  # in the order of the enum in groups.pxd
FORMATS = {
    "block_tables": ("block_tables",),
    "seq_lens": ("seq_lens",),
    "slot_mapping": ("slot_mapping",),
    "positions": ("positions",),
    "cu_q_lens": ("cu_q_lens",),
    "csr": ("indptr", "indices", "last_page_len"),
    "slot_ids": ("slot_ids",),
    "page_batch_info": ("slot_ids", "block_tables", "seq_lens", "cu_q_lens", "slot_mapping"),
}
COMMON = ("positions", "cu_q_lens", "slot_ids")  # the other arrays are those of a layer group


def Pool(
    num_blocks,
    block_size,
    *,
    max_seqs=1024,
    max_blocks_per_seq=None,
    reserved_blocks=1,
    watermark=0,
    in_order=False,
    seed=None,
    prefix_cache=False,
    events=0,
    lookahead=0,
    groups=None,
    _hash_bits=32,
):
    return tuple(locals().values())


def Plan(
    pool,
    max_rows,
    max_tokens=None,
    *,
    formats=("block_tables", "seq_lens", "slot_mapping"),
    table_width=None,
    dtype="int32",
    pad=None,
    out=None,
    backend=None,
):
    return tuple(locals().values())


def show(value):
    """The value as a message shows it: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # a number of 5,000 digits, an object that cannot show itself
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


def formats_with(backend, pool, formats):
    """`formats` and those of a backend, if it has blocks like the pool's, or of a storage of the pool."""
    if hasattr(backend, "pool"):
        if backend.pool is not pool:
            raise ValueError("[Plan] the backend is of another pool")
    else:
        for name, theirs, ours in (
            ("block_size", backend.spec.block_size, pool.options.block_size),
            ("num_blocks", backend.num_blocks, pool.options.num_blocks),
        ):
            if theirs != ours:
                raise ValueError(f"[Plan] {name} is {theirs} in the backend, {ours} in the pool")
    return (*((formats,) if isinstance(formats, str) else formats), *backend.required_formats)


def known_formats(formats):
    """The formats that a plan is asked for, as a tuple."""
    if isinstance(formats, str):
        formats = (formats,)
    try:
        formats = tuple(formats)
    except TypeError:
        raise TypeError(f"[Plan] formats must be names, not {show(formats)}") from None
    for name in formats:
        if not isinstance(name, str):
            raise TypeError(f"[Plan] a format must be a str ({name!r})")
        if name not in FORMATS:
            raise ValueError(f"[Plan] no such format ({show(name)}), there are {', '.join(FORMATS)}")
    return formats


def named_arrays(formats, dtype, pad, out):
    """Names of the arrays of these formats; no option names another one."""
    names = tuple(name for name in FIELDS if any(name in FORMATS[f] for f in formats))
    for option, given in (("dtype", dtype), ("pad", pad), ("out", out)):
        if not isinstance(given, dict) and option != "dtype":
            raise TypeError(f"[Plan] {option} must be a dict, not {type(given).__name__} ({show(given)})")
        for name in given if isinstance(given, dict) else ():
            if name not in names:
                raise ValueError(f"[Plan] {option} names {name!r}, the arrays are {', '.join(names)}")
    return names


def itemsize(name, dtype):
    """Bytes of a number of an array, whose dtype may be given by name."""
    asked = dtype.get(name, "int32") if isinstance(dtype, dict) else dtype
    try:
        code = np.dtype(asked).name
    except TypeError:
        code = None
    if code not in ("int32", "int64"):
        raise ValueError(f"[Plan] dtype of {name} must be int32 or int64 ({show(asked)})")
    return 4 if code == "int32" else 8


def by_group(arrays, owners, num_groups, call):
    """Arrays of the caller by (part, name): in a pool of several groups a sequence has one for each.

    `owners`: by name the parts that have such an array, 0 is what is common, 1 .. the layer groups.
    """
    found = {}
    for name, given in arrays.items():
        if name in COMMON or num_groups == 1:
            if not owners[name]:
                raise ValueError(f"[{call}] {name} is not an array of a group of states")
            found[owners[name][0], name] = given
            continue
        if not isinstance(given, (list, tuple)) or len(given) != num_groups:
            raise TypeError(
                f"[{call}] {name} must be a sequence of {num_groups} arrays, one for each layer group, None where the "
                "plan keeps its own"
            )
        for k, array in enumerate(given):
            if array is not None and k + 1 not in owners[name]:
                raise ValueError(f"[{call}] {name}[{k}] is an array, layer group {k} has none of that name")
            if array is not None:
                found[k + 1, name] = array
    return found


def anchored(array, name, call):
    """A view of a caller's array, whose shape nobody else changes, and references that keep the memory in place.

    NumPy resizes an array on request, whoever else holds its memory, but none that has a weak reference.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"[{call}] {name} must be an ndarray, not {type(array).__name__}")
    array = np.ndarray.view(array, np.ndarray)
    owner: Any = array
    anchors = []
    while isinstance(owner, (np.ndarray, memoryview)):
        if isinstance(owner, np.ndarray):
            anchors.append(ref(owner))
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return array, anchors


def check_array(array, key, width, due, held, call):
    """All that can be wrong with a caller's array; `held` has the arrays it must not overlap."""
    name = key[1]
    if array.dtype.kind != "i" or array.dtype.itemsize != width:
        raise TypeError(f"[{call}] {name} must be int{8 * width} ({array.dtype})")
    if not array.dtype.isnative:
        raise ValueError(f"[{call}] {name} must be in native byte order ({array.dtype})")
    if array.shape != due:
        raise ValueError(f"[{call}] {name} has shape {array.shape}, it must be {due}")
    if not array.flags.c_contiguous or not array.flags.writeable or not array.flags.aligned:
        raise ValueError(f"[{call}] {name} must be C-contiguous, aligned and writable")
    for other, (taken, _) in held.items():
        if other != key and np.may_share_memory(array, taken):
            raise ValueError(f"[{call}] {name} overlaps {other[1]}")
