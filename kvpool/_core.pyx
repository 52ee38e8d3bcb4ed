"""The core: one extension module, whose parts stand in `core`, each behind those that it uses.

A part says in its ``.pxd`` what others see of it, here and in `kvpool.capi`. `docs/development.md` says what the parts
are.
"""
cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_STRIDES,
    Py_buffer,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItemWithError, PyDict_SetDefault
from cpython.exc cimport PyErr_CheckSignals
from cpython.list cimport PyList_GET_SIZE, PyList_New, PyList_SET_ITEM
from cpython.long cimport PyLong_AsLongLong, PyLong_CheckExact, PyLong_FromLong
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from cpython.tuple cimport PyTuple_GET_SIZE
from cython cimport critical_section
from libc.stdint cimport INT32_MAX, INT64_MAX, INT64_MIN
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memmove, memset

import gc
import os
from inspect import signature

import numpy as np

from kvpool import _arguments
from kvpool._arguments import COMMON, FIELDS, show
from kvpool.errors import (
    CapacityExceeded,
    ConcurrentUse,
    CorruptState,
    DoubleFree,
    ForeignHandle,
    OutOfBlocks,
    OutOfSequences,
    PlanStateError,
    PoolClosed,
    StaleHandle,
)
from kvpool.groups import arena_sizes, arenas_of, read_groups, resized
from kvpool.retention import Keep
from kvpool.stats import PlanLimits, PoolOptions, PoolStats, PrefixStats

include "core/memory.pxi"
include "core/lock.pxi"
include "core/sha256.pxi"
include "core/args.pxi"
include "core/blocks.pxi"
include "core/names.pxi"
include "core/sequence.pxi"
include "core/events.pxi"
include "core/prefix.pxi"
include "core/groups.pxi"
include "core/wire.pxi"
include "core/step.pxi"
include "core/audit.pxi"
include "core/prefix_tree.pxi"
include "core/retention.pxi"
include "core/checkpoints.pxi"
include "core/prefix_rows.pxi"
include "core/refuse.pxi"
include "core/state.pxi"
include "core/block_calls.pxi"
include "core/sequence_calls.pxi"
include "core/plan.pxi"
include "core/prefix_calls.pxi"
include "core/step_calls.pxi"
include "core/evict_calls.pxi"
include "core/resize.pxi"
include "core/keys.pxi"
include "core/pool.pxi"
