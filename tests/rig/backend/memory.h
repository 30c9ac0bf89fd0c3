// Memory of the fake devices: host memory that says it is on cuda:N, counted byte by byte.
#pragma once

#include "late.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/GPUTrace.h>
#include <torch/version.h>

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
#define RIG_HAS_DEVICE_ALLOCATOR
#include <c10/core/CachingDeviceAllocator.h>
#endif

// The accelerator under whose name the devices go, see tests/rig/accelerator.py.
#ifndef RIG_AS
#define RIG_AS CUDA
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>

namespace rig {

constexpr auto kDevice = c10::DeviceType::RIG_AS;
constexpr int kDevices = 2;
constexpr size_t kTotalMemory = size_t(16) << 30;

inline thread_local c10::DeviceIndex current_device = 0;  // per thread, as in the CUDA runtime
inline thread_local std::array<c10::StreamId, kDevices> current_stream{};
inline std::atomic<bool> enabled{false};

inline std::array<std::atomic<int64_t>, kDevices> allocated{};
inline std::array<std::atomic<int64_t>, kDevices> peak{};
// Bytes copied, [from][to]; row and column 0 are the host, i + 1 is cuda:i.
inline std::array<std::array<std::atomic<int64_t>, kDevices + 1>, kDevices + 1> traffic{};
// Bytes copied from the host to cuda:i in a way that lets a GPU compute meanwhile.
inline std::array<std::atomic<int64_t>, kDevices> overlapping{};

inline bool is_ours(c10::Device device) { return device.type() == kDevice; }
inline bool is_ours(const at::Tensor& tensor) { return tensor.device().type() == kDevice; }

inline void check_ordinal(int64_t index) {
  TORCH_CHECK(index < kDevices, "CUDA error: invalid device ordinal");
}

inline void count_allocation(int device, int64_t bytes) {
  const int64_t now = (allocated[device] += bytes);
  int64_t highest = peak[device];
  while (highest < now && !peak[device].compare_exchange_weak(highest, now)) {
  }
}

inline void count_copy(c10::Device from, c10::Device to, int64_t bytes) {
  traffic[is_ours(from) ? from.index() + 1 : 0][is_ours(to) ? to.index() + 1 : 0] += bytes;
}

// Makes `device` the current one for a scope; refuses a device that does not exist before anything is allocated.
class CurrentDevice {
 public:
  explicit CurrentDevice(std::optional<c10::Device> device) : previous_(current_device) {
    if (device && device->index() >= 0) {
      check_ordinal(device->index());
      current_device = device->index();
    }
  }
  ~CurrentDevice() { current_device = previous_; }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  c10::DeviceIndex previous_;
};

// One counted block. Either it owns `data`, or `host` does: the result of a CPU kernel is taken over as it is.
struct Block {
  SharedMemory memory;
};

// What torch's own stream sanitizer listens to, see second_opinion.py.
template <typename Event>
void tell_sanitizer(Event event) {
  if (const auto* python = c10::impl::GPUTrace::get_trace()) event(**python);
}

inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  auto& memory = *block->memory;
  tell_sanitizer([&](const auto& python) {
    python.trace_gpu_memory_deallocation(kDevice, reinterpret_cast<uintptr_t>(memory.data));
  });
  allocated[memory.device] -= static_cast<int64_t>(memory.bytes);
  if (Late::watches()) Late::get().freed(memory);
  delete block;
}

inline c10::DataPtr make_block(void* data, size_t bytes, int device, c10::Storage host) {
  const auto stream = current_stream[device];
  if (Late::watches()) Late::get().allocated(device, stream, bytes);
  auto* block = new Block{std::make_shared<Memory>(data, bytes, std::move(host), device, stream)};
  count_allocation(device, static_cast<int64_t>(bytes));
  tell_sanitizer(
      [&](const auto& python) { python.trace_gpu_memory_allocation(kDevice, reinterpret_cast<uintptr_t>(data)); });
  return {data, block, &free_block, c10::Device(kDevice, static_cast<c10::DeviceIndex>(device))};
}

inline SharedMemory memory_of(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context())->memory : nullptr;
}

inline void record_stream(const c10::DataPtr& data, c10::Stream stream) {
  const auto memory = memory_of(data);
  if (memory && Late::watches()) Late::get().record_stream(*memory, stream.device_index(), stream.id());
}

#ifdef RIG_HAS_DEVICE_ALLOCATOR
using AllocatorBase = c10::DeviceAllocator;
#else
using AllocatorBase = c10::Allocator;
#endif

class DeviceMemory final : public AllocatorBase {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(enabled, "Torch not compiled with CUDA enabled");  // a tensor that outlived the devices
    return make_block(bytes ? c10::alloc_cpu(bytes) : nullptr, bytes, current_device, {});
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }

  void reset_peak(c10::DeviceIndex device) {
    check_ordinal(device);
    peak[device] = allocated[device].load();
  }

#ifdef RIG_HAS_DEVICE_ALLOCATOR
  // What torch.accelerator's memory functions ask.
  bool initialized() override { return enabled; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_stream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    check_ordinal(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* of : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*of)[0].current = allocated[device];
      (*of)[0].peak = peak[device];
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {  // of the base class since torch 2.10
    check_ordinal(device);
    return {kTotalMemory - static_cast<size_t>(allocated[device].load()), kTotalMemory};
  }
#endif
};

// Page-locked host memory is ordinary memory whose address range is remembered, so that is_pinned() is truthful.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(std::max<size_t>(bytes, 1));
    std::lock_guard lock(mutex());
    ranges()[data] = std::make_shared<Memory>(data, bytes, c10::Storage(), -1, 0);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }

  static bool contains(const void* address) { return find(address) != nullptr; }

  // The pinned memory that an address lies in, or none.
  static SharedMemory find(const void* address) {
    std::lock_guard lock(mutex());
    auto after = ranges().upper_bound(const_cast<void*>(address));
    if (after == ranges().begin()) {
      return nullptr;
    }
    const auto& [begin, memory] = *--after;
    const auto* end = static_cast<const char*>(begin) + std::max<size_t>(memory->bytes, 1);
    return static_cast<const char*>(address) < end ? memory : nullptr;
  }

 private:
  // Leaked on purpose: pinned tensors may be freed while the process ends.
  static std::map<void*, SharedMemory>& ranges() {
    static auto* map = new std::map<void*, SharedMemory>;
    return *map;
  }
  static std::mutex& mutex() {
    static auto* lock = new std::mutex;
    return *lock;
  }
  static void release(void* data) {
    std::lock_guard lock(mutex());
    ranges().erase(data);  // a copy that has not run keeps the memory
  }
};

inline DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory;
  return *memory;
}
inline PinnedMemory& pinned_memory() {
  static auto* memory = new PinnedMemory;
  return *memory;
}

}  // namespace rig
