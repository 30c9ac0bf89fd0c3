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

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  TORCH_CHECK_NOT_IMPLEMENTED(!source.is_meta(), "Cannot copy out of meta tensor; no data!");
  auto target = on_host(self);
  target.copy_(on_host(source));
  count_copy(source.device(), self.device(), static_cast<int64_t>(source.nbytes()));
  if (source.is_cpu() && is_ours(self) && non_blocking && current_stream[self.device().index()] != 0 &&
      PinnedMemory::contains(source.const_data_ptr())) {
    overlapping[self.device().index()] += static_cast<int64_t>(source.nbytes());
  }
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  count_copy(self.device(), at::kCPU, static_cast<int64_t>(self.element_size()));
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

void record_stream(at::Tensor&, at::Stream) {}

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
at::Generator get_new_generator(int64_t device) { return new_generator(static_cast<c10::DeviceIndex>(device)); }
at::Generator get_default_generator(int64_t device) { return default_generator(static_cast<c10::DeviceIndex>(device)); }

}  // namespace rig

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
  m.impl("record_stream", &rig::record_stream);
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
  m.def("default_generator(int device) -> Generator?", &rig::get_default_generator);
  m.def("new_generator(int device) -> Generator?", &rig::get_new_generator);
}

static const bool memory_registered = [] {
  c10::SetAllocator(rig::kDevice, &rig::device_memory(), 255);  // before that of libc10_cuda.so
  return true;
}();
