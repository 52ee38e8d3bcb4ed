// record(handles, reads, layer, step, copies, attention, k, v): runs `PoolOp::eval_gpu` on evaluated arrays, at once,
// and returns what it has encoded: launches as (function, text, {index: (is_output, address, nbytes, counted) or
// bytes}, grid, group), addresses of outputs without a launch, addresses of inputs. Memory of results stays until the
// next call.
#include <algorithm>
#include <stdexcept>

#include "array_access.h"
#include "mlx/backend/metal/device.h"
#include "pool_op.h"

namespace {

using namespace kvpool;

template <typename T>
std::shared_ptr<const T> held(PyObject* object) {
  if (object == Py_None) return nullptr;
  return *static_cast<std::shared_ptr<const T>*>(PyCapsule_GetPointer(object, PyCapsule_GetName(object)));
}

PyObject* sizes(const std::vector<size_t>& n) { return Py_BuildValue("(nnn)", n[0], n[1], n[2]); }

PyObject* addresses(const std::vector<const void*>& all) {
  PyObject* made = PyList_New(0);
  for (const void* one : all) {
    PyObject* number = PyLong_FromVoidPtr(const_cast<void*>(one));
    PyList_Append(made, number);
    Py_DECREF(number);
  }
  return made;
}

PyObject* described(const mx::metal::Launch& launch) {
  PyObject* bindings = PyDict_New();
  for (const auto& [index, binding] : launch.bindings) {
    PyObject* key = PyLong_FromLong(index);
    PyObject* value = binding.address == nullptr
        ? PyBytes_FromStringAndSize(binding.bytes.data(), Py_ssize_t(binding.bytes.size()))
        : Py_BuildValue("(iNnn)", int(binding.is_output), PyLong_FromVoidPtr(const_cast<void*>(binding.address)),
                        Py_ssize_t(binding.nbytes), Py_ssize_t(binding.counted));
    PyDict_SetItem(bindings, key, value);
    Py_DECREF(key);
    Py_DECREF(value);
  }
  return Py_BuildValue("(ssNNN)", launch.function.c_str(), launch.text.c_str(), bindings, sizes(launch.grid),
                       sizes(launch.group));
}

PyObject* record(PyObject*, PyObject* args) {
  PyObject *type, *handles, *reads, *layer, *step, *copies, *attention, *k, *v;
  if (!PyArg_ParseTuple(args, "O!O!O!OOOOOO", &PyType_Type, &type, &PyTuple_Type, &handles, &PyTuple_Type, &reads,
                        &layer, &step, &copies, &attention, &k, &v)) {
    return nullptr;
  }
  array_type = reinterpret_cast<PyTypeObject*>(type);
  try {
    PoolOp::Parts parts;
    parts.writes = k != Py_None;
    parts.layer = held<Layer>(layer);
    parts.step = held<Step>(step);
    parts.copies = held<Copies>(copies);
    parts.metal_attention = held<MetalAttention>(attention);
    parts.attends = parts.metal_attention != nullptr;
    std::vector<mx::array> inputs;
    static std::vector<mx::array> outputs;
    outputs = {mx::array(mx::Shape{0}, mx::float32, nullptr, {})};
    if (parts.attends) {
      const auto& last = parts.metal_attention->launches.back();
      outputs.push_back(mx::array(last.shape, last.dtype, nullptr, {}));
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(handles); i++) {
      inputs.push_back(array_of(PyTuple_GET_ITEM(handles, i), "record", "a handle"));
      outputs.push_back(mx::array(inputs.back().shape(), inputs.back().dtype(), nullptr, {}));
    }
    if (parts.writes) inputs.insert(inputs.end(), {array_of(k, "record", "k"), array_of(v, "record", "v")});
    parts.add_metal_inputs(inputs);
    for (auto& x : inputs) x.eval();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(reads); i++) {
      inputs.push_back(array_of(PyTuple_GET_ITEM(reads, i), "record", "a read"));
    }
    const auto stream = mx::default_stream(mx::Device::cpu);
    auto& encoder = mx::metal::get_command_encoder(stream);
    encoder = {};
    PoolOp(stream, std::move(parts)).eval_gpu(inputs, outputs);
    for (const void* bound : encoder.seen) {
      auto holds = [bound](const mx::array& x) { return x.data<char>() == bound; };
      const auto &kept = inputs, &temporaries = encoder.temporaries;
      if (std::none_of(kept.begin(), kept.end(), holds) &&
          std::none_of(temporaries.begin(), temporaries.end(), holds)) {
        throw std::runtime_error("a kernel reads an array that is no input of its node: nobody keeps it until then");
      }
    }
    PyObject* launches = PyList_New(0);
    for (const auto& launch : encoder.launches) {
      PyObject* one = described(launch);
      PyList_Append(launches, one);
      Py_DECREF(one);
    }
    return Py_BuildValue("(NNN)", launches, addresses(encoder.registered), addresses(encoder.seen));
  } catch (const Refusal& refusal) {
    PyErr_SetString(refusal.type, refusal.text.c_str());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// compiled(name): makes a kernel known, as MLX does when it compiles one.
PyObject* compiled(PyObject*, PyObject* name) {
  const std::string function = PyUnicode_AsUTF8(name);
  mx::metal::device(mx::Device::gpu).get_library(function, [] { return std::string(768, ' '); });
  Py_RETURN_NONE;
}

PyObject* limits(PyObject*, PyObject* name) {
  try {
    const auto [threads, lanes, nbytes] = metal_limits(PyUnicode_AsUTF8(name));
    return Py_BuildValue("iii", int(threads), int(lanes), int(nbytes));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyMethodDef methods[] = {{"record", record, METH_VARARGS, nullptr},
                         {"compiled", compiled, METH_O, nullptr},
                         {"metal_limits", limits, METH_O, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_recorder", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit__recorder() { return PyModule_Create(&module); }
