// What Python sees: capsules that hold what nodes share, and `run`, which puts one node into MLX's graph.
//
// Arguments are checked here, before anything has changed; what the owner of the pool (`native.pool`) makes itself,
// such as layouts and tuples of handles, is believed.
#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "array_access.h"
#include "mlx/device.h"
#include "mlx/fast_primitives.h"
#include "mlx/ops.h"
#include "mlx/stream.h"
#include "mlx/version.h"
#include "pool_op.h"

namespace kvpool {
namespace {

// ------------------------------------------------------------------------------------------- helpers

// Runs `body` and turns what it throws into a Python exception.
template <typename Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (const Refusal& refusal) {
    PyErr_SetString(refusal.type, refusal.text.c_str());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

struct Raised : std::exception {}; // a Python exception is set already

template <typename T>
PyObject* capsule(const char* name, std::shared_ptr<const T> value) {
  auto* held = new std::shared_ptr<const T>(std::move(value));
  PyObject* made = PyCapsule_New(held, name, [](PyObject* self) {
    delete static_cast<std::shared_ptr<const T>*>(PyCapsule_GetPointer(self, PyCapsule_GetName(self)));
  });
  if (made == nullptr) delete held;
  return made;
}

// The value of a capsule; null for None.
template <typename T>
std::shared_ptr<const T> held(PyObject* object, const char* name) {
  if (object == Py_None) return nullptr;
  auto* value = static_cast<std::shared_ptr<const T>*>(PyCapsule_GetPointer(object, name));
  if (value == nullptr) throw Raised();
  return *value;
}

constexpr const char *LAYER = "kvpool.Layer", *STEP = "kvpool.Step", *ATTENTION = "kvpool.Attention",
                     *COPIES = "kvpool.Copies", *METAL = "kvpool.MetalTexts",
                     *METAL_ATTENTION = "kvpool.MetalAttention";

// The elements of a C-contiguous buffer; empty for None.
template <typename T>
std::vector<T> elements_of(PyObject* object) {
  if (object == Py_None) return {};
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_C_CONTIGUOUS) != 0) throw Raised();
  std::vector<T> elements(view.len / sizeof(T));
  const bool fits = view.itemsize == Py_ssize_t(sizeof(T));
  if (fits) std::copy_n(static_cast<const T*>(view.buf), elements.size(), elements.data());
  PyBuffer_Release(&view);
  if (!fits) refuse(PyExc_TypeError, "[kvpool] an array has elements of another size");
  return elements;
}

std::string shape_text(const mx::array& x) {
  std::string text = "[";
  for (size_t i = 0; i < x.ndim(); i++) text += (i ? ", " : "") + std::to_string(x.shape(int(i)));
  return text + "]";
}

// Raises unless x is [num_tokens, heads, dim] of floats; a size < 0 may be any.
void check_tokens(const char* call, const char* name, const mx::array& x, int64_t num_tokens, int64_t heads,
                  int64_t dim) {
  auto differs = [](int64_t wanted, int64_t found) { return wanted >= 0 && wanted != found; };
  if (x.ndim() != 3 || differs(num_tokens, x.shape(0)) || differs(heads, x.shape(1)) || differs(dim, x.shape(2))) {
    auto size = [](int64_t n, const char* letter) { return n < 0 ? std::string(letter) : std::to_string(n); };
    refuse(PyExc_ValueError, "[", call, "] ", name, " must have shape [", size(num_tokens, "T"), ", ",
           size(heads, "Hq"), ", ", size(dim, "D"), "], got ", shape_text(x));
  }
  if (x.dtype() != mx::float32 && x.dtype() != mx::float16 && x.dtype() != mx::bfloat16) {
    refuse(PyExc_TypeError, "[", call, "] ", name, " must be float32, float16 or bfloat16");
  }
  if (x.is_tracer()) {
    refuse(PyExc_RuntimeError, "[", call, "] ", name,
           " has no content yet, as inside mx.compile or mx.vmap; call it outside of them");
  }
}

// --------------------------------------------------------------------------------- what is made once

PyObject* bind(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject* type;
    unsigned long long write, attend, nbytes, copy;
    if (!PyArg_ParseTuple(args, "O!KKKK", &PyType_Type, &type, &write, &attend, &nbytes, &copy)) return nullptr;
    kernels.write = reinterpret_cast<decltype(kernels.write)>(write);
    kernels.attend = reinterpret_cast<decltype(kernels.attend)>(attend);
    kernels.attend_scratch_nbytes = reinterpret_cast<decltype(kernels.attend_scratch_nbytes)>(nbytes);
    kernels.copy_blocks = reinterpret_cast<decltype(kernels.copy_blocks)>(copy);
    Py_INCREF(type);
    array_type = reinterpret_cast<PyTypeObject*>(type);
    Py_RETURN_NONE;
  });
}

// Reads a side of a layer: (dim, bits, group_size), then the places of its rows as (array, offset, block, slot and head
// stride): one of floats or words, one of scales, one of biases. bits is 0 for plain floats.
void read_side(PyObject* side, kv_plane& plane, std::array<Rows, 3>& rows) {
  auto &a = rows[0], &b = rows[1], &c = rows[2];
  if (!PyArg_ParseTuple(side, "LLL(iLLLL)(iLLLL)(iLLLL)", &plane.dim, &plane.bits, &plane.group_size, &a.array,
                        &a.layout[0], &a.layout[1], &a.layout[2], &a.layout[3], &b.array, &b.layout[0], &b.layout[1],
                        &b.layout[2], &b.layout[3], &c.array, &c.layout[0], &c.layout[1], &c.layout[2],
                        &c.layout[3])) {
    throw Raised();
  }
  auto part = [](const Rows& at) { return kv_part{nullptr, at.layout[1], at.layout[2], at.layout[3]}; };
  plane.block_stride = a.layout[1];
  plane.slot_stride = a.layout[2];
  plane.head_stride = a.layout[3];
  a.length = plane.bits == 0 ? plane.dim : plane.dim * plane.bits / 32;
  b.length = c.length = kv_groups(&plane);
  if (plane.bits != 0) plane.scales = part(b), plane.biases = part(c);
}

PyObject* layer(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    auto made = std::make_shared<Layer>();
    unsigned long long isa;
    int dtype;
    PyObject *k, *v, *addresses, *metal;
    auto& planes = made->planes;
    planes = {};
    if (!PyArg_ParseTuple(args, "KiLLLO!O!O!O", &isa, &dtype, &planes.num_blocks, &planes.block_size,
                          &planes.num_kv_heads, &PyTuple_Type, &k, &PyTuple_Type, &v, &PyTuple_Type, &addresses,
                          &metal)) {
      return nullptr;
    }
    made->isa = reinterpret_cast<const kv_isa*>(isa);
    planes.dtype = static_cast<kv_dtype>(dtype);
    read_side(k, planes.k, made->rows[0]);
    read_side(v, planes.v, made->rows[1]);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(addresses); i++) {
      void* address = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, i));
      if (PyErr_Occurred()) return nullptr;
      made->addresses.push_back(address);
    }
    made->metal = held<MetalTexts>(metal, METAL);
    return capsule<Layer>(LAYER, made);
  });
}

MetalText text_of(PyObject* pair) {
  const char *function, *text;
  if (!PyTuple_Check(pair) || !PyArg_ParseTuple(pair, "ss", &function, &text)) {
    refuse(PyExc_TypeError, "[metal_texts] a kernel is (function, text)");
  }
  return {function, text};
}

// metal_texts(writes, floats, words, factors): kernels as (function, text). Those that write come in tuples of six,
// by dtype and then by vectors (no, yes).
PyObject* metal_texts(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    auto made = std::make_shared<MetalTexts>();
    PyObject *writes, *floats, *words, *factors;
    if (!PyArg_ParseTuple(args, "O!OOO", &PyTuple_Type, &writes, &floats, &words, &factors)) return nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(writes); i++) {
      PyObject* kernels = PyTuple_GET_ITEM(writes, i);
      if (!PyTuple_Check(kernels) || PyTuple_GET_SIZE(kernels) != 6) {
        refuse(PyExc_TypeError, "[metal_texts] kernels that write come in tuples of six");
      }
      auto& texts = made->write.emplace_back();
      for (int j = 0; j < 6; j++) {
        texts[{static_cast<kv_dtype>(j / 2), j % 2 == 1}] = text_of(PyTuple_GET_ITEM(kernels, j));
      }
    }
    made->copy_floats = text_of(floats);
    made->copy_words = text_of(words);
    made->copy_factors = text_of(factors);
    return capsule<MetalTexts>(METAL, made);
  });
}

// -------------------------------------------------------------------------------- what is made per step

void check_lengths(const Step& step, int64_t num_tokens, int64_t block_size) {
  const auto &lens = step.seq_lens, &cu = step.cu_q_lens;
  if (cu.size() != lens.size() + 1 || cu[0] != 0) {
    refuse(PyExc_ValueError, "[attend] cu_q_lens must have shape [", lens.size() + 1, "] and begin with 0, got ",
           cu.size(), " entries");
  }
  for (size_t row = 0; row < lens.size(); row++) {
    const int64_t num_queries = cu[row + 1] - cu[row];
    if (num_queries < 0 || (num_tokens >= 0 && cu[row + 1] > num_tokens)) {
      refuse(PyExc_ValueError, "[attend] cu_q_lens[", row + 1, "] is ", cu[row + 1], ", the range is ", cu[row], " .. ",
             num_tokens);
    }
    if (lens[row] < num_queries) {
      refuse(PyExc_ValueError, "[attend] seq_lens[", row, "] is ", lens[row], ", the row has ", num_queries,
             " queries");
    }
    const int64_t blocks = lens[row] / block_size + (lens[row] % block_size != 0);
    if (num_queries > 0 && blocks > step.table_stride) {
      refuse(PyExc_ValueError, "[attend] seq_lens[", row, "] is ", lens[row], ", a table of ", step.table_stride,
             " blocks holds ", step.table_stride * block_size, " tokens");
    }
  }
}

void check_tables(const Step& step, int64_t num_blocks, int64_t block_size) {
  for (size_t row = 0; row < step.seq_lens.size(); row++) {
    if (step.cu_q_lens[row + 1] == step.cu_q_lens[row]) continue; // not read
    const int64_t blocks = (step.seq_lens[row] - 1) / block_size + 1;
    const int32_t* table = step.tables.data() + row * step.table_stride;
    for (int64_t i = 0; i < blocks; i++) {
      if (table[i] < 0 || table[i] >= num_blocks) {
        refuse(PyExc_IndexError, "[attend] block_tables[", row, ", ", i, "] is ", table[i],
               ", the pool has blocks 0 .. ", num_blocks - 1);
      }
    }
  }
}

// step(num_threads, num_blocks, block_size, slots, table_width, tables, seq_lens, cu_q_lens): int64, tables int32; None
// for slots, or for the last three, where nothing is written or read.
PyObject* step(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    auto made = std::make_shared<Step>();
    long long num_blocks, block_size, table_width;
    PyObject *slots, *tables, *seq_lens, *cu_q_lens;
    if (!PyArg_ParseTuple(args, "iLLOLOOO", &made->num_threads, &num_blocks, &block_size, &slots, &table_width, &tables,
                          &seq_lens, &cu_q_lens)) {
      return nullptr;
    }
    if (slots != Py_None) {
      const auto numbers = elements_of<int64_t>(slots);
      for (size_t i = 0; i < numbers.size(); i++) {
        if (numbers[i] >= num_blocks * block_size) {
          refuse(PyExc_IndexError, "[write] slots[", i, "] is ", numbers[i], ", the pool has slots 0 .. ",
                 num_blocks * block_size - 1);
        }
      }
      made->slots.emplace(numbers.begin(), mx::Shape{int(numbers.size())}, mx::int64);
    }
    if (tables != Py_None) {
      made->tables = elements_of<int32_t>(tables);
      made->seq_lens = elements_of<int64_t>(seq_lens);
      made->cu_q_lens = elements_of<int64_t>(cu_q_lens);
      made->table_stride = table_width;
      if (int64_t(made->tables.size()) < table_width * int64_t(made->seq_lens.size())) {
        refuse(PyExc_ValueError, "[attend] block_tables must have shape [", made->seq_lens.size(),
               ", W], it has fewer rows");
      }
      check_lengths(*made, -1, block_size);
      check_tables(*made, num_blocks, block_size);
    }
    return capsule<Step>(STEP, made);
  });
}

PyObject* attention(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    auto made = std::make_shared<Attention>();
    long long window, token_stride, head_stride;
    PyObject *sinks, *slopes, *mask;
    if (!PyArg_ParseTuple(args, "ffLOOOLL", &made->scale, &made->soft_cap, &window, &sinks, &slopes, &mask,
                          &token_stride, &head_stride)) {
      return nullptr;
    }
    made->window = window;
    made->sinks = elements_of<float>(sinks);
    made->slopes = elements_of<float>(slopes);
    made->mask = elements_of<float>(mask);
    made->mask_token_stride = token_stride;
    made->mask_head_stride = head_stride;
    return capsule<Attention>(ATTENTION, made);
  });
}

// Notes a launch of MLX's metal_kernel by its output, behind the one whose output it takes. `ids` are of the inputs
// that are known so far: of those that each layer has of its own, then of those that all share.
void note_launch(const mx::array& out, MetalAttention& made, std::vector<std::uintptr_t>& ids) {
  static std::map<std::string, std::shared_ptr<const MetalText>> kernels_by_name; // under the lock of Python
  const auto described = static_cast<const mx::fast::CustomKernel&>(out.primitive()).state();
  const auto &name = std::get<0>(described), &source = std::get<1>(described);
  if (std::get<6>(described).has_value() || out.siblings().size() > 0) {
    refuse(PyExc_ValueError, "[metal_attention] a launch has more outputs, or sets them before");
  }
  auto& kernel = kernels_by_name[name];
  if (kernel == nullptr || kernel->text != source) kernel = std::make_shared<MetalText>(MetalText{name, source});
  auto numbers = [](const auto& size) {
    return std::array<int, 3>{std::get<0>(size), std::get<1>(size), std::get<2>(size)};
  };
  MetalLaunch launch{kernel, numbers(std::get<2>(described)), numbers(std::get<3>(described)),
                     {}, std::get<4>(described), out.shape(), out.dtype()};
  for (const auto& x : out.inputs()) {
    const auto found = std::find(ids.begin(), ids.end(), x.id());
    launch.sources.push_back(int(found - ids.begin()));
    if (found != ids.end()) continue;
    if (x.has_primitive() && std::string_view(x.primitive().name()) == "CustomKernel") {
      launch.sources.back() = MetalLaunch::FORMER;
      note_launch(x, made, ids);
    } else {
      ids.push_back(x.id());
      made.shared.push_back(x);
    }
  }
  made.launches.push_back(std::move(launch));
}

// metal_attention(result, handles, varying): the launches that `result` comes from, unevaluated, for layers that have
// other handles and other arrays in place of `varying`, and nothing else.
PyObject* metal_attention(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject *result, *handles, *varying;
    if (!PyArg_ParseTuple(args, "OO!O!", &result, &PyTuple_Type, &handles, &PyTuple_Type, &varying)) return nullptr;
    const auto& out = array_of(result, "metal_attention", "result");
    if (!out.has_primitive() || std::string_view(out.primitive().name()) != "CustomKernel") {
      refuse(PyExc_TypeError, "[metal_attention] the result is not of a metal_kernel");
    }
    std::vector<std::uintptr_t> ids;
    for (PyObject* arrays : {handles, varying}) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arrays); i++) {
        ids.push_back(array_of(PyTuple_GET_ITEM(arrays, i), "metal_attention", "an input").id());
      }
    }
    auto made = std::make_shared<MetalAttention>();
    const int num_handles = int(PyTuple_GET_SIZE(handles)), num_own = int(ids.size());
    made->num_varying = num_own - num_handles;
    note_launch(out, *made, ids);
    for (auto& launch : made->launches) {
      for (int& source : launch.sources) { // what all share comes before what varies
        if (source >= num_own) source -= int(made->num_varying);
        else if (source >= num_handles) source += int(made->shared.size());
      }
    }
    return capsule<MetalAttention>(METAL_ATTENTION, made);
  });
}

// copies(num_threads, rows): int64 [K, 3], checked by the caller.
PyObject* copies(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    auto made = std::make_shared<Copies>();
    PyObject* rows;
    if (!PyArg_ParseTuple(args, "iO", &made->num_threads, &rows)) return nullptr;
    made->rows = elements_of<int64_t>(rows);
    made->ids.emplace(made->rows.begin(), mx::Shape{int(made->rows.size() / 3), 3}, mx::int32);
    return capsule<Copies>(COPIES, made);
  });
}

// ------------------------------------------------------------------------------------------- the node

enum Argument { ON_GPU, HANDLES, READS, LAYER_, STEP_, COPIES_, ATTENTION_, K, V, Q, TOKEN, RESULT, NUM_ARGUMENTS };

void add_tokens(std::vector<mx::array>& inputs, PyObject* const* args, const PoolOp::Parts& parts) {
  const kv_layer& planes = parts.layer->planes;
  const auto &k = array_of(args[K], "write", "k"), &v = array_of(args[V], "write", "v");
  const int64_t num_tokens = int64_t(parts.step->slots->size());
  check_tokens("write", "k", k, num_tokens, planes.num_kv_heads, planes.k.dim);
  check_tokens("write", "v", v, num_tokens, planes.num_kv_heads, planes.v.dim);
  inputs.push_back(k);
  inputs.push_back(args[ON_GPU] == Py_True ? mx::astype(v, k.dtype()) : v); // the Metal kernel takes one dtype
}

void add_queries(std::vector<mx::array>& inputs, PyObject* const* args, const PoolOp::Parts& parts) {
  const kv_layer& planes = parts.layer->planes;
  const auto& q = array_of(args[Q], "attend", "q");
  check_tokens("attend", "q", q, -1, -1, planes.k.dim);
  if (q.shape(1) < 1 || q.shape(1) % planes.num_kv_heads) {
    refuse(PyExc_ValueError, "[attend] q has ", q.shape(1), " heads, it must be a multiple of the ",
           planes.num_kv_heads, " KV heads");
  }
  check_lengths(*parts.step, q.shape(0), planes.block_size);
  inputs.push_back(q);
}

// run(on_gpu, handles, reads, layer, step, copies, attention, k, v, q, token, result): builds a node. The arrays in
// `handles`, `token`, and `result` if it attends, become its outputs; nothing has changed if it raises. It attends to q
// on the CPU; on the GPU as `attention` says, and `reads` are what varies there.
PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  return guarded([&]() -> PyObject* {
    if (num_args != NUM_ARGUMENTS || !PyTuple_Check(args[HANDLES]) || !PyTuple_Check(args[READS])) {
      refuse(PyExc_TypeError, "[run] wrong number or kinds of arguments");
    }
    PoolOp::Parts parts;
    parts.layer = held<Layer>(args[LAYER_], LAYER);
    parts.step = held<Step>(args[STEP_], STEP);
    parts.copies = held<Copies>(args[COPIES_], COPIES);
    if (args[ON_GPU] == Py_True) parts.metal_attention = held<MetalAttention>(args[ATTENTION_], METAL_ATTENTION);
    else parts.attention = held<Attention>(args[ATTENTION_], ATTENTION);
    parts.writes = args[K] != Py_None;
    parts.attends = args[Q] != Py_None || parts.metal_attention != nullptr;

    std::vector<mx::array*> targets{&array_of(args[TOKEN], "run", "token")};
    std::vector<mx::array> inputs;
    std::vector<mx::Shape> shapes{{0}};
    std::vector<mx::Dtype> dtypes{mx::float32};
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[HANDLES]); i++) {
      inputs.push_back(array_of(PyTuple_GET_ITEM(args[HANDLES], i), "run", "a handle"));
    }
    const size_t num_handles = inputs.size();
    if (num_handles != size_t(parts.layer->num_arrays())) {
      refuse(PyExc_ValueError, "[run] another number of handles than the layer has arrays");
    }
    if (parts.writes) add_tokens(inputs, args, parts);
    if (args[ON_GPU] == Py_True) parts.add_metal_inputs(inputs);
    if (parts.attends) targets.push_back(&array_of(args[RESULT], "run", "result"));
    if (parts.metal_attention != nullptr) {
      const auto& last = parts.metal_attention->launches.back();
      if (size_t(PyTuple_GET_SIZE(args[READS])) != parts.metal_attention->num_varying) {
        refuse(PyExc_ValueError, "[run] another number of arrays than attention takes");
      }
      check_tokens("attend", "q", array_of(PyTuple_GET_ITEM(args[READS], 0), "attend", "q"), -1, -1, -1);
      shapes.push_back(last.shape);
      dtypes.push_back(last.dtype);
    } else if (parts.attends) {
      add_queries(inputs, args, parts);
      const auto& q = inputs.back();
      shapes.push_back({q.shape(0), q.shape(1), int(parts.layer->planes.v.dim)});
      dtypes.push_back(q.dtype());
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[READS]); i++) {
      inputs.push_back(array_of(PyTuple_GET_ITEM(args[READS], i), "run", "a result"));
    }
    for (size_t i = 0; i < num_handles; i++) {
      targets.push_back(&array_of(PyTuple_GET_ITEM(args[HANDLES], Py_ssize_t(i)), "run", "a handle"));
      shapes.push_back(inputs[i].shape());
      dtypes.push_back(inputs[i].dtype());
    }
    // A node of a GPU can be built without one, but not run.
    const bool on_gpu = args[ON_GPU] == Py_True && mx::is_available(mx::Device::gpu);
    const auto stream = mx::default_stream(on_gpu ? mx::Device::gpu : mx::Device::cpu);
    const auto outputs = mx::array::make_arrays(
        std::move(shapes), dtypes, std::make_shared<PoolOp>(stream, std::move(parts)), inputs);
    for (size_t i = 0; i < outputs.size(); i++) targets[i]->overwrite_descriptor(outputs[i]);
    Py_RETURN_NONE;
  });
}

// --------------------------------------------------------------------------------------- the self-check

// shape(array): as seen from here.
PyObject* shape(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    const auto& x = array_of(object, "shape", "array");
    PyObject* made = PyTuple_New(Py_ssize_t(x.ndim()));
    for (size_t i = 0; made != nullptr && i < x.ndim(); i++) {
      PyTuple_SET_ITEM(made, Py_ssize_t(i), PyLong_FromLong(x.shape(int(i))));
    }
    return made;
  });
}

// address(array): of an evaluated array's first element.
PyObject* address(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    const auto& x = array_of(object, "address", "array");
    if (x.status() == mx::array::Status::unscheduled) {
      refuse(PyExc_ValueError, "[address] the array has not been evaluated");
    }
    return PyLong_FromVoidPtr(const_cast<void*>(static_cast<const void*>(x.data<char>())));
  });
}

// share(array, other): `array` becomes the same MLX array as `other`.
PyObject* share(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject *object, *other;
    if (!PyArg_ParseTuple(args, "OO", &object, &other)) return nullptr;
    auto& target = array_of(object, "share", "array");
    target.overwrite_descriptor(array_of(other, "share", "other"));
    Py_RETURN_NONE;
  });
}

// metal_limits(function): see the function of this name.
PyObject* limits(PyObject*, PyObject* function) {
  return guarded([&]() -> PyObject* {
    const char* name = PyUnicode_AsUTF8(function);
    if (name == nullptr) return nullptr;
    const auto [threads, lanes, nbytes] = metal_limits(name);
    return Py_BuildValue("LLL", (long long)threads, (long long)lanes, (long long)nbytes);
  });
}

PyObject* mlx_version(PyObject*, PyObject*) {
  return PyUnicode_FromString(mx::version());
}

PyMethodDef methods[] = {
    {"bind", bind, METH_VARARGS, nullptr},
    {"layer", layer, METH_VARARGS, nullptr},
    {"metal_texts", metal_texts, METH_VARARGS, nullptr},
    {"step", step, METH_VARARGS, nullptr},
    {"attention", attention, METH_VARARGS, nullptr},
    {"metal_attention", metal_attention, METH_VARARGS, nullptr},
    {"copies", copies, METH_VARARGS, nullptr},
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run)), METH_FASTCALL, nullptr},
    {"shape", shape, METH_O, nullptr},
    {"address", address, METH_O, nullptr},
    {"share", share, METH_VARARGS, nullptr},
    {"metal_limits", limits, METH_O, nullptr},
    {"mlx_version", mlx_version, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kvpool_mlx", "Nodes of MLX's graph that work on a pool in place.", -1,
                      methods, nullptr, nullptr, nullptr, nullptr};

} // namespace
} // namespace kvpool

PyMODINIT_FUNC PyInit__kvpool_mlx() {
  return PyModule_Create(&kvpool::module);
}
