// From a Python `mlx.core.array` to the C++ array inside, without nanobind.
//
// MLX's Python types are made by nanobind, and its casters work only between modules that were built with the same
// release of it. A C++ object is found without them: nanobind puts a header of eight bytes behind PyObject_HEAD, an
// offset to the object and a word of flags ("nb_inst", the same since its first release). That is not a promise of
// nanobind's, so `module.cpp` lets nobody in before the self-check of `native` has passed.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <locale>
#include <sstream>
#include <string>

#include "mlx/array.h"

namespace kvpool {

// A Python exception that is to be raised.
struct Refusal {
  PyObject* type;
  std::string text;
};

// Raises it, with a text of these parts.
template <typename... Parts>
[[noreturn]] void refuse(PyObject* type, const Parts&... parts) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  (text << ... << parts);
  throw Refusal{type, text.str()};
}

inline PyTypeObject* array_type = nullptr; // mlx.core.array, set by `bind`

inline mlx::core::array& array_of(PyObject* object, const char* call, const char* name) {
  constexpr uint32_t STATE = 3, READY = 2, DIRECT = 4;
  if (array_type == nullptr || !PyObject_TypeCheck(object, array_type)) {
    refuse(PyExc_TypeError, "[", call, "] ", name, " must be an mx.array, got ", Py_TYPE(object)->tp_name);
  }
  int32_t offset;
  uint32_t flags;
  auto* header = reinterpret_cast<char*>(object) + sizeof(PyObject);
  std::memcpy(&offset, header, sizeof offset);
  std::memcpy(&flags, header + sizeof offset, sizeof flags);
  // MLX makes all its arrays inside of their Python objects: nothing outside of those is read here.
  const auto room = Py_TYPE(object)->tp_basicsize - static_cast<Py_ssize_t>(sizeof(mlx::core::array));
  if ((flags & STATE) != READY || !(flags & DIRECT) || offset < Py_ssize_t(sizeof(PyObject) + 8) || offset > room) {
    refuse(PyExc_RuntimeError, "[", call, "] ", name, " is not laid out as MLX arrays are");
  }
  return *reinterpret_cast<mlx::core::array*>(reinterpret_cast<char*>(object) + offset);
}

} // namespace kvpool
