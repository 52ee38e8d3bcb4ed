"""kvpool.h read as text, and its table of functions as ctypes, for tests of the C interface that compile nothing.

`call` holds the GIL, as a caller has to; `call_without_gil` does not.
"""

import ctypes
import re
from pathlib import Path

import kvpool

HEADER = Path(kvpool.__file__).parent / "include" / "kvpool.h"
NUMBERS = {"int": ctypes.c_int} | {
    name: getattr(ctypes, f"c_{name[:-2]}") for name in ("int32_t", "int64_t", "uint32_t", "uint64_t")
}
ERRORS = (
    *(kvpool.OutOfBlocks, kvpool.OutOfSequences, kvpool.StaleHandle, kvpool.errors.ForeignHandle),
    *(kvpool.CapacityExceeded, kvpool.PlanStateError, kvpool.errors.ConcurrentUse, kvpool.errors.PoolClosed),
    *(ValueError, TypeError, MemoryError),
)
KV_TO_PYTHON = dict(enumerate(ERRORS, 1))


def clean(text):
    """Return the header without comments, lines of the preprocessor and the functions at its end."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text.split("#ifdef Py_PYTHON_H")[0], flags=re.DOTALL)
    return re.sub(r"^#.*$", " ", text, flags=re.MULTILINE)


def members(text, name):
    """Return the declarations in ``typedef struct name {...}``, in order, spaces normalized."""
    body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", clean(text), re.DOTALL)[1]
    return [" ".join(part.split()) for part in body.split(";") if part.strip()]


def constants(text):
    """Return name -> value of every enumerator and of the version."""
    found = {name: int(value) for name, value in re.findall(r"\b(KVPOOL_\w+) = (\d+)", clean(text))}
    found["KVPOOL_ABI_VERSION"] = int(re.search(r"#define KVPOOL_ABI_VERSION (\d+)", text)[1])
    return found


def member_name(declaration):
    return re.search(r"\(\*(\w+)\)|(\w+)$", declaration).group(1) or declaration.split()[-1].lstrip("*")


def ctype(declaration):
    """Return the ctypes type of a parameter or a member: pointers are void pointers."""
    words = declaration.replace("const ", "")
    return ctypes.c_void_p if "*" in words else NUMBERS[words.split()[0]]


def prototype(declaration):
    """Return (result, parameters) of a pointer to a function."""
    result, parameters = re.fullmatch(r"(.*?)\(\*\w+\)\((.*)\)", declaration).groups()
    result = ctypes.c_char_p if "char" in result else ctypes.py_object if "void" in result else ctypes.c_int
    return result, [] if parameters == "void" else [ctype(part.strip()) for part in parameters.split(",")]


def structure(name):
    """Return a ctypes structure of the header's; functions are addresses."""
    fields = [(member_name(m), ctypes.c_void_p if "(*" in m else ctype(m)) for m in members(HEADER.read_text(), name)]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


C = constants(HEADER.read_text())
Array, Stats, Api = structure("kvpool_array"), structure("kvpool_stats"), structure("kvpool_api")
Keep = structure("kvpool_keep")
_get = ctypes.pythonapi.PyCapsule_GetPointer
_get.restype, _get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
api = Api.from_address(_get(kvpool._C_API, b"kvpool._C_API"))
_prototypes = {member_name(m): prototype(m) for m in members(HEADER.read_text(), "kvpool_api") if "(*" in m}


def function(name, kind=ctypes.PYFUNCTYPE):
    result, parameters = _prototypes[name]
    return kind(result, *parameters)(getattr(api, name))


def at(value):
    """Return what a parameter takes: the address of an object, of an array, of a ctypes variable; or a number."""
    if isinstance(value, kvpool.Pool | kvpool.Plan):
        return id(value)
    if isinstance(value, ctypes._SimpleCData | ctypes.Structure):
        return ctypes.addressof(value)
    return value.ctypes.data if hasattr(value, "ctypes") else value


def call(name, *arguments):
    """Return the status of a call."""
    return function(name)(*map(at, arguments))


def call_without_gil(name, *arguments):
    return function(name, ctypes.CFUNCTYPE)(*map(at, arguments))


def message():
    return function("error_message")().decode()
