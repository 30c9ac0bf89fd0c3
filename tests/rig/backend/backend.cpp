// Two fake CUDA devices for a CPU-only torch: registers the memory (memory.h), the runtime (runtime.h) and the
// operators (fallback.h and the few below that create, copy or re-seat tensors) under torch's CUDA keys.
#include "fallback.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/set_native.h>

namespace torch::utils {
void set_requires_device_init(at::DeviceType, bool);  // libtorch_python; its header wants Python.h
}

namespace rig {

C10_REGISTER_GUARD_IMPL(RIG_AS, DeviceGuard);

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
  CurrentDevice guard(device);
  return at::detail::empty_generic(size, &device_memory(), kDeviceKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
  CurrentDevice guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory(), kDeviceKeys, c10::dtype_or_default(dtype));
}

// As CUDA's own kernel does it: what must be converted is no single copy, and only pinned memory may be copied later.
void copy_in_time(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  auto& late = Late::get();
  const auto target_range = range_of(self), source_range = range_of(source);
  const bool is_single = self.dtype() == source.dtype() && self.sizes() == source.sizes() &&
      self.strides() == source.strides() && self.is_non_overlapping_and_dense() &&
      self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  const auto run = [&] {
    at::DisableRecordFunctionGuard unseen;  // by watch_host()
    on_host(self).copy_(on_host(source));
  };
  if (is_ours(self) && is_ours(source)) {
    const int from = source.device().index(), to = self.device().index();
    if (from != to) late.stream_waits_for(from, current_stream[from], late.mark(to, current_stream[to]));
    const auto copy = late.begin(from, current_stream[from], "aten::copy_");
    late.touch(copy, memory_of(source.storage().data_ptr()), source_range, false);
    late.touch(copy, memory_of(self.storage().data_ptr()), target_range, true);
    run();
    if (from != to) late.stream_waits_for(to, current_stream[to], late.mark(from, current_stream[from]));
    return;
  }
  const bool arrives = is_ours(self);
  const int device = (arrives ? self : source).device().index();
  const auto stream = current_stream[device];
  const auto pinned = PinnedMemory::find((arrives ? source : self).storage().data());
  const auto memory = memory_of((arrives ? self : source).storage().data_ptr());
  if (non_blocking && is_single && pinned && memory) {
    return arrives ? late.copy_later(device, stream, pinned, source_range, memory, target_range)
                   : late.copy_later(device, stream, memory, source_range, pinned, target_range);
  }
  const auto copy = late.begin(device, stream, "aten::copy_");
  late.touch(copy, memory, arrives ? target_range : source_range, arrives);
  if (!arrives || !non_blocking) {
    if (is_single && pinned) late.touch(copy, pinned, arrives ? source_range : target_range, !arrives);
    run();
    late.host_waits_for_stream(device, stream);
    if (is_single || !pinned) return;
  } else {
    run();  // pageable memory was read when the call returns
  }
  if (pinned) late.host_touches(*pinned, arrives ? source_range : target_range, !arrives, "aten::copy_");
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  TORCH_CHECK_NOT_IMPLEMENTED(!source.is_meta(), "Cannot copy out of meta tensor; no data!");
  if (Late::watches()) {
    copy_in_time(self, source, non_blocking);
  } else {
    auto target = on_host(self);
    target.copy_(on_host(source));
  }
  count_copy(source.device(), self.device(), static_cast<int64_t>(source.nbytes()));
  if (source.is_cpu() && is_ours(self) && non_blocking && current_stream[self.device().index()] != 0 &&
      PinnedMemory::contains(source.const_data_ptr())) {
    overlapping[self.device().index()] += static_cast<int64_t>(source.nbytes());
  }
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  count_copy(self.device(), at::kCPU, static_cast<int64_t>(self.element_size()));
  if (Late::watches()) {
    const int device = self.device().index();
    const auto read = Late::get().begin(device, current_stream[device], "aten::_local_scalar_dense");
    Late::get().touch(read, memory_of(self.storage().data_ptr()), range_of(self), false);
    Late::get().host_waits_for_stream(device, current_stream[device]);
  }
  return on_host(self).item();
}

at::Tensor& set_storage_with_shape(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  if (stride.data()) {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  } else {
    self.unsafeGetTensorImpl()->set_storage_offset(offset);
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage_with_shape(self, std::move(source), 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return self.is_same(source)
      ? self
      : set_storage_with_shape(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  CurrentDevice guard(self.device());
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, device_memory().allocate(0), &device_memory(), true);
  return set_storage_with_shape(self, std::move(nothing), 0, {0}, {});
}

void record_stream_of_tensor(at::Tensor& self, at::Stream stream) { record_stream(self.storage().data_ptr(), stream); }

// CUDA's kernel leaves tensors of several devices to copy_().
void foreach_copy(at::TensorList self, at::TensorList source, bool non_blocking) {
  TORCH_CHECK(self.size() == source.size(), "Tensor lists must have the same number of tensors, got ", self.size(), " and ",
              source.size());
  for (size_t i = 0; i < self.size(); ++i) const_cast<at::Tensor&>(self[i]).copy_(source[i], non_blocking);
}

// Later releases ask the hooks, for any device type.
bool is_pinned(const at::Tensor& self, std::optional<at::Device>) {
  return self.is_cpu() && PinnedMemory::contains(self.storage().data());
}
at::Tensor pin_memory(const at::Tensor& self, std::optional<at::Device>) {
  TORCH_CHECK(self.is_cpu(), "cannot pin '", self.toString(), "' only dense CPU tensors can be pinned");
  auto bytes = static_cast<int64_t>(at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.dtype().itemsize()));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, pinned_memory().allocate(bytes), &pinned_memory(), false);
  auto pinned = at::empty({0}, self.options()).set_(storage, 0, self.sizes(), self.strides());
  return pinned.copy_(self);
}

// The schema of an operator that itself reads or writes memory of the host; others call such ones.
std::optional<c10::FunctionSchema> host_schema(const at::RecordFunction& call) {
  const auto name = call.operator_name();
  if (!name) return std::nullopt;
  const auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op || !touches_memory(op->schema())) return std::nullopt;
  if (name->name == "aten::copy_") {
    for (const c10::IValue& value : call.inputs()) {
      if (value.isTensor() && !value.toTensor().is_cpu()) return std::nullopt;  // a copy to or from a device
    }
  } else if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
    return std::nullopt;
  }
  return op->schema();
}

// ---- what tests/rig/*.py calls, as torch.ops.diffusers_quantfix_rig.*

void enable(bool on) {
  if (on == enabled.exchange(on)) {
    return;
  }
  on ? become<Hooks>() : become<NoHooks>();
  torch::utils::set_requires_device_init(kDevice, true);
}

// Storages have no operator for this; torch's own UntypedStorage.resize_ knows real CUDA only.
void resize_storage(const at::Tensor& tensor, int64_t bytes) {
  CurrentDevice guard(tensor.device());
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto data = device_memory().allocate(bytes);
  if (Late::watches()) {
    const auto copied = std::min<size_t>(bytes, storage->nbytes());
    const auto copy = Late::get().begin(current_device, current_stream[current_device], "resize_");
    Late::get().touch(copy, memory_of(storage->data_ptr()), {0, copied}, false);
    Late::get().touch(copy, memory_of(data), {0, copied}, true);
  }
  memcpy(data.get(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

// Gives an operator the fallback as its kernel for the devices, ahead of a kernel that suits every backend (such a
// kernel would compute on the devices, where its intermediate results count as allocated) or in place of CUDA's.
std::vector<c10::RegistrationHandleRAII>& host_kernels() {
  static auto* handles = new std::vector<c10::RegistrationHandleRAII>;
  return *handles;
}
void use_host_kernel(std::string name, std::string overload) {
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}  // that there is a kernel already
  } silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  host_kernels().push_back(c10::Dispatcher::singleton().registerImpl(
      c10::OperatorName(std::move(name), std::move(overload)), c10::DispatchKey::RIG_AS,
      c10::KernelFunction::makeFromBoxedFunction<&fallback>(), std::nullopt, nullptr, "tests/rig"));
}
void forget_host_kernels() { host_kernels().clear(); }

// The host's own operators, wherever they run: whether they touch pinned memory.
std::unique_ptr<at::ObserverContext> watch_host(const at::RecordFunction& call) {
  if (!Late::watches()) return nullptr;
  std::optional<c10::FunctionSchema> schema;
  size_t i = 0;
  for (const c10::IValue& value : call.inputs()) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || tensor.key_set().has(c10::DispatchKey::Python) || !tensor.is_cpu() || !tensor.has_storage()) return;
      const auto pinned = PinnedMemory::find(tensor.storage().data());
      if (!pinned) return;
      if (!schema && !(schema = host_schema(call))) return;
      if (i >= schema->arguments().size()) return;
      const auto* alias = schema->arguments()[i].alias_info();
      Late::get().host_touches(*pinned, range_of(tensor), alias != nullptr && alias->isWrite(), schema->name());
    });
    ++i;
  }
  return nullptr;
}

int64_t get_current_device() { return current_device; }
void set_current_device(int64_t device) { DeviceGuard().setDevice({kDevice, static_cast<c10::DeviceIndex>(device)}); }
int64_t get_allocated(int64_t device) { check_ordinal(device); return allocated[device]; }
int64_t get_peak(int64_t device) { check_ordinal(device); return peak[device]; }
void reset_peak(int64_t device) { device_memory().reset_peak(static_cast<c10::DeviceIndex>(device)); }
int64_t get_traffic(int64_t from, int64_t to) { return traffic.at(from + 1).at(to + 1); }  // -1 is the host
int64_t get_overlapping(int64_t device) { check_ordinal(device); return overlapping[device]; }
void reset_traffic() {
  for (auto& bytes : overlapping) bytes = 0;
  for (auto& row : traffic) {
    for (auto& bytes : row) bytes = 0;
  }
}

// From now on copies that need not block run late. Frames of files whose path begins so are not named as places.
at::CallbackHandle watching = 0;
void unwatch() {
  if (!Late::watches()) return;
  at::removeCallback(watching);
  Late::get().stop();
}
void watch(std::vector<std::string> left_out) {
  unwatch();
  Places::get().leave_out(std::move(left_out));
  Late::get().start();
  watching = at::addGlobalCallback(
      at::RecordFunctionCallback(watch_host).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}
std::vector<std::string> get_hazards() { return Late::get().hazards(); }

at::Generator get_new_generator(int64_t device) { return new_generator(static_cast<c10::DeviceIndex>(device)); }
at::Generator get_default_generator(int64_t device) { return default_generator(static_cast<c10::DeviceIndex>(device)); }

}  // namespace rig

extern "C" void rig_synchronize() { rig::synchronize(-1); }
extern "C" void rig_empty_cache() {
  if (!rig::Late::watches()) return;
  for (int device = 0; device < rig::kDevices; ++device) rig::Late::get().cache_emptied(device);
}
// A host's own way to the memory of a tensor, such as NumPy's.
extern "C" void rig_host_touches(uintptr_t address, int64_t bytes, int64_t write) {
  const auto* begin = reinterpret_cast<const char*>(address);
  const auto pinned = rig::Late::watches() ? rig::PinnedMemory::find(begin) : nullptr;
  if (!pinned) return;
  const auto offset = static_cast<size_t>(begin - static_cast<const char*>(pinned->data));
  rig::Late::get().host_touches(*pinned, {offset, offset + bytes}, write != 0, "the host");
}

// The streams, for ctypes: a test that counts operators must not see these calls. `device` is one that exists.
extern "C" int64_t rig_current_stream(int64_t device) { return rig::current_stream[device]; }
extern "C" void rig_set_stream(int64_t device, int64_t id) {
  rig::current_device = static_cast<c10::DeviceIndex>(device);
  rig::current_stream[device] = id;
}

TORCH_LIBRARY_IMPL(_, RIG_AS, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&rig::fallback>()); }

TORCH_LIBRARY_IMPL(aten, RIG_AS, m) {
  m.impl("empty.memory_format", &rig::empty);
  m.impl("empty_strided", &rig::empty_strided);
  m.impl("copy_", &rig::copy_);
  m.impl("_local_scalar_dense", &rig::local_scalar_dense);
  m.impl("set_.source_Storage_storage_offset", &rig::set_storage_with_shape);
  m.impl("set_.source_Storage", &rig::set_storage);
  m.impl("set_.source_Tensor", &rig::set_tensor);
  m.impl("set_", &rig::set_empty);
  m.impl("record_stream", &rig::record_stream_of_tensor);
  m.impl("_foreach_copy_", &rig::foreach_copy);
  // Without a kernel of its own it becomes mean.out, which torch 2.5's CPU kernel gets wrong for half precision.
  m.impl("mean.dim", torch::CppFunction::makeFromBoxedFunction<&rig::fallback>());
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 7
  m.impl("is_pinned", &rig::is_pinned);
  m.impl("_pin_memory", &rig::pin_memory);
#endif
}

TORCH_LIBRARY(diffusers_quantfix_rig, m) {
  m.def("enable(bool on) -> ()", &rig::enable);
  m.def("resize_storage(Tensor tensor, int bytes) -> ()", &rig::resize_storage);
  m.def("use_host_kernel(str name, str overload) -> ()", &rig::use_host_kernel);
  m.def("forget_host_kernels() -> ()", &rig::forget_host_kernels);
  m.def("current_device() -> int", &rig::get_current_device);
  m.def("set_current_device(int device) -> ()", &rig::set_current_device);
  m.def("allocated(int device) -> int", &rig::get_allocated);
  m.def("peak(int device) -> int", &rig::get_peak);
  m.def("reset_peak(int device) -> ()", &rig::reset_peak);
  m.def("traffic(int source, int target) -> int", &rig::get_traffic);
  m.def("overlapping(int device) -> int", &rig::get_overlapping);
  m.def("reset_traffic() -> ()", &rig::reset_traffic);
  m.def("watch(str[] left_out) -> ()", &rig::watch);
  m.def("unwatch() -> ()", &rig::unwatch);
  m.def("hazards() -> str[]", &rig::get_hazards);
  m.def("default_generator(int device) -> Generator?", &rig::get_default_generator);
  m.def("new_generator(int device) -> Generator?", &rig::get_new_generator);
}

static const bool memory_registered = [] {
  c10::SetAllocator(rig::kDevice, &rig::device_memory(), 255);  // before that of libc10_cuda.so
  return true;
}();
