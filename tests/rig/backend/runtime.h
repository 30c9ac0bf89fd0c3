// What torch asks a device runtime for: the current device, streams, events, random generators, "is there a GPU?".
// Everything runs at once on the calling thread, so streams are names and events are points in time, unless late.h
// watches.
#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <new>

namespace rig {

inline std::atomic<c10::StreamId> last_stream{0};

inline c10::Stream make_stream(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, index), id);
}

// The host waits for all streams of a device.
inline void synchronize(c10::DeviceIndex device) {
  if (Late::watches()) Late::get().host_waits_for_device(device < 0 ? current_device : device);
  tell_sanitizer([](const auto& python) { python.trace_gpu_device_synchronization(kDevice); });
}

class DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  using Clock = std::chrono::steady_clock;
  struct Event {
    Clock::time_point time;
    Late::Mark mark;
  };

  c10::DeviceType type() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(c10::Device device) const override {
    check_ordinal(device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices) {
      current_device = device.index();
    }
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = getDevice();
    setDevice(device);
    return previous;
  }

  c10::Stream getStream(c10::Device device) const noexcept override {
    const auto index = device.index() < 0 ? current_device : device.index();
    check_ordinal(index);
    return make_stream(index, current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return make_stream(device.index(), 0); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    const auto index = device.index() < 0 ? current_device : device.index();
    check_ordinal(index);
    const auto stream = make_stream(index, ++last_stream);
    tell_sanitizer(
        [&](const auto& python) { python.trace_gpu_stream_creation(kDevice, static_cast<uintptr_t>(stream.id())); });
    return stream;
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    const auto previous = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return previous;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const { return reinterpret_cast<void*>(stream.id()); }
  // Whoever asks is told that it is done, and may rely on that.
  bool queryStream(const c10::Stream& stream) const override { return synchronizeStream(stream), true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (Late::watches()) Late::get().host_waits_for_stream(stream.device_index(), stream.id());
    tell_sanitizer([&](const auto& python) {
      python.trace_gpu_stream_synchronization(kDevice, static_cast<uintptr_t>(stream.id()));
    });
  }
  void synchronizeDevice(const c10::DeviceIndex device) const { synchronize(device); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) {
      *event = new Event;
      tell_sanitizer([&](const auto& python) {
        python.trace_gpu_event_creation(kDevice, reinterpret_cast<uintptr_t>(*event));
      });
    }
    auto& recorded = *static_cast<Event*>(*event);
    recorded.time = Clock::now();
    if (Late::watches()) recorded.mark = Late::get().mark(stream.device_index(), stream.id());
    tell_sanitizer([&](const auto& python) {
      python.trace_gpu_event_record(
          kDevice, reinterpret_cast<uintptr_t>(*event), static_cast<uintptr_t>(stream.id()));
    });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event && Late::watches()) {
      Late::get().stream_waits_for(stream.device_index(), stream.id(), static_cast<Event*>(event)->mark);
    }
    if (event) {
      tell_sanitizer([&](const auto& python) {
        python.trace_gpu_event_wait(
            kDevice, reinterpret_cast<uintptr_t>(event), static_cast<uintptr_t>(stream.id()));
      });
    }
  }
  bool queryEvent(void* event) const override { return synchronizeEvent(event), true; }
  void synchronizeEvent(void* event) const override {
    if (event && Late::watches()) Late::get().host_waits_for(static_cast<Event*>(event)->mark);
    if (event) {
      tell_sanitizer([&](const auto& python) {
        python.trace_gpu_event_synchronization(kDevice, reinterpret_cast<uintptr_t>(event));
      });
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event) {
      tell_sanitizer([&](const auto& python) {
        python.trace_gpu_event_deletion(kDevice, reinterpret_cast<uintptr_t>(event));
      });
    }
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto passed = static_cast<Event*>(to)->time - static_cast<Event*>(from)->time;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }
};

// A generator that says it is on cuda:N. The CPU kernels draw from `host`, see replace_generator() in fallback.h.
struct DeviceGenerator final : c10::GeneratorImpl {
  DeviceGenerator(c10::DeviceIndex index, at::Generator drawn_from)
      : GeneratorImpl(c10::Device(kDevice, index), c10::DispatchKeySet(c10::DispatchKey::RIG_AS)),
        host(std::move(drawn_from)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(host).seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }

  at::Generator host;

 private:
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device_.index(), host.clone()); }
};

inline at::Generator new_generator(c10::DeviceIndex index) {
  const auto device = index < 0 ? current_device : index;
  check_ordinal(device);
  return at::make_generator<DeviceGenerator>(device, at::detail::createCPUGenerator());
}

inline const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = new std::array<at::Generator, kDevices>{new_generator(0), new_generator(1)};
  const auto device = index < 0 ? current_device : index;
  check_ordinal(device);
  return (*generators)[device];
}

#define RIG_JOIN(a, b, c) a##b##c
#define RIG_NAME(a, b, c) RIG_JOIN(a, b, c)
using NoHooks = at::RIG_NAME(, RIG_AS, HooksInterface);

struct Hooks final : NoHooks {  // no `override`: which of these there are depends on the release
  void init() const {}
  void initCUDA() const {}
  const at::Generator& getDefaultCUDAGenerator(c10::DeviceIndex index) const { return default_generator(index); }
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasCUDA() const { return true; }
  bool hasXPU() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const { return true; }
  decltype(std::declval<const NoHooks&>().getNumGPUs()) getNumGPUs() const { return kDevices; }
  c10::DeviceIndex deviceCount() const { return kDevices; }
  c10::DeviceIndex current_device() const { return rig::current_device; }
  c10::DeviceIndex getCurrentDevice() const { return rig::current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const { exchangeDevice(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const {
    check_ordinal(index);
    return maybeExchangeDevice(index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const {
    const auto previous = rig::current_device;
    if (index >= 0 && index < kDevices) {
      rig::current_device = index;
    }
    return previous;
  }
  void deviceSynchronize(c10::DeviceIndex device) const { synchronize(device); }
  c10::Allocator* getCUDADeviceAllocator() const { return &device_memory(); }
  c10::Allocator* getPinnedMemoryAllocator() const { return &pinned_memory(); }
  bool isPinnedPtr(const void* address) const { return PinnedMemory::contains(address); }
  c10::Device getDeviceFromPtr(void*) const { return {kDevice, rig::current_device}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const { return new_generator(index); }
};

// torch creates its one hooks object at the first question and keeps it for good, so registering another class works
// only before that. Changing the class of the object in place works at any time and can be taken back.
template <class NewHooks>
void become() {
  static_assert(sizeof(NewHooks) == sizeof(NoHooks));
  auto* hooks = const_cast<NoHooks*>(&at::detail::RIG_NAME(get, RIG_AS, Hooks)());
  hooks->~NoHooks();
  new (hooks) NewHooks();
}

}  // namespace rig
