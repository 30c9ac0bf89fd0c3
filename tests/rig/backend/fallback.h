// Runs every operator that has no kernel of its own on the CPU kernel, over the very same memory: device tensors are
// presented to it as CPU tensors that alias them, and what it returns is presented as device tensors again. Nothing is
// copied, so only results are counted as allocated and nothing is counted as traffic.
#pragma once

#include "runtime.h"

#include <torch/library.h>

#include <unordered_map>
#include <unordered_set>

namespace rig {

inline const c10::DispatchKeySet kCpuKeys(c10::DispatchKey::CPU);
inline const c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::RIG_AS);

inline at::Tensor same_shape_over(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& tensor) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return result;
}

// What torch's own view operators return: a tensor with the dispatch keys of its base.
inline at::Tensor view_of(const at::Tensor& base, const at::Tensor& tensor) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return result;
}

// A CPU storage over the memory of a device storage. It may be resized: then it has new memory, see take_back().
inline c10::Storage host_storage_over(const c10::Storage& storage) {
  return c10::Storage(
      c10::Storage::use_byte_size_t(),
      storage.nbytes(),
      c10::DataPtr(const_cast<void*>(storage.data()), c10::Device(c10::DeviceType::CPU)),
      c10::GetAllocator(c10::DeviceType::CPU),
      /*resizable=*/true);
}

inline at::Tensor on_host(const at::Tensor& tensor) {
  return is_ours(tensor) ? same_shape_over(host_storage_over(tensor.storage()), kCpuKeys, tensor) : tensor;
}

// Index tensors may stay on the CPU in CUDA's own kernels of these operators.
inline bool takes_host_indices(const std::string& name) {
  static const std::unordered_set<std::string> names{
      "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
      "aten::_unsafe_index_put"};
  return names.count(name) != 0;
}

// Collectives have such arguments, no other operators.
inline bool is_list_of_tensor_lists(const c10::IValue& value) {
  return value.isList() && !value.toListRef().empty() && value.toListRef().front().isTensorList();
}

template <class Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) for_each_tensor(item, visit);
  }
}

// Whether an operator reads or writes what is in its tensors: not those that make views or look at sizes.
inline bool touches_memory(const c10::FunctionSchema& schema) {
  static const std::unordered_set<std::string> names{
      "aten::set_", "aten::resize_", "aten::resize_as_", "aten::is_pinned", "aten::_pin_memory", "aten::record_stream",
      "aten::is_set_to", "aten::_resize_output_"};
  for (const auto& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return false;
  }
  return names.count(schema.name()) == 0;
}

class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, torch::jit::Stack& stack) : op_(op), stack_(stack) {}

  void run() {
    if (move_indices_to_host()) {
      op_.callBoxed(&stack_);
      return;
    }
    choose_device();
    CurrentDevice guard(device_);
    const auto& arguments = op_.schema().arguments();
    const size_t first = stack_.size() - arguments.size();
    const bool watched = Late::watches() && touches_memory(op_.schema());
    Late::Operation operation;
    if (watched) {
      operation = Late::get().begin(current_device, current_stream[current_device], op_.schema().name());
      for (size_t i = 0; i < arguments.size(); ++i) touch(operation, stack_[first + i], arguments[i]);
    }
    const bool waits = watched && lets_the_host_wait(first);
    for (size_t i = 0; i < arguments.size(); ++i) {
      stack_[first + i] = to_host(std::move(stack_[first + i]), arguments[i]);
    }
    op_.redispatchBoxed(kCpuKeys, &stack_);
    take_back();
    for (size_t i = stack_.size() - op_.schema().returns().size(); i < stack_.size(); ++i) {
      stack_[i] = to_device(std::move(stack_[i]));
      if (watched) touch(operation, stack_[i], op_.schema().returns()[i + op_.schema().returns().size() - stack_.size()], true);
    }
    if (waits) Late::get().host_waits_for_stream(current_device, current_stream[current_device]);
  }

 private:
  // Tells the model of time which memory an argument or a new result is.
  static void touch(
      const Late::Operation& operation, const c10::IValue& value, const c10::Argument& argument, bool is_new = false) {
    if (is_new && argument.alias_info() != nullptr) return;
    const bool write = is_new || (argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (tensor.defined() && is_ours(tensor)) {
        Late::get().touch(operation, memory_of(tensor.storage().data_ptr()), range_of(tensor), write);
      }
    });
  }
  // Those whose results have a size, or are a number for the host, that depends on values.
  bool lets_the_host_wait(size_t first) const {
    static const std::unordered_set<std::string> names{
        "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim",
        "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::_unique", "aten::bincount",
        "aten::repeat_interleave"};
    const auto& name = op_.schema().name();
    if (names.count(name)) return true;
    if (!takes_host_indices(name)) return false;
    bool found = false;
    for (size_t i = first; i < stack_.size() && !found; ++i) {
      if (!stack_[i].isList()) continue;
      for_each_tensor(stack_[i], [&](const at::Tensor& tensor) {
        found |= tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
      });
    }
    return found;
  }
  // What is written to a tensor of the host by indices of a device: CUDA's own kernels move the indices.
  bool move_indices_to_host() {
    static const std::unordered_set<std::string> names{
        "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"};
    if (names.count(op_.schema().name()) == 0) return false;
    const size_t first = stack_.size() - op_.schema().arguments().size();
    if (!stack_[first].toTensor().is_cpu()) return false;
    bool moved = false;
    c10::List<std::optional<at::Tensor>> indices;
    for (const std::optional<at::Tensor> tensor : stack_[first + 1].toOptionalTensorList()) {
      const bool ours = tensor && tensor->defined() && is_ours(*tensor);
      indices.push_back(ours ? std::optional(tensor->cpu()) : tensor);
      moved |= ours;
    }
    if (moved) stack_[first + 1] = indices;
    return moved;
  }
  // The common device of the tensors, or CUDA's complaint. A zero-dimensional CPU tensor may join any device.
  void choose_device() {
    const auto& arguments = op_.schema().arguments();
    const size_t first = stack_.size() - arguments.size();
    for (bool complain : {false, true}) {
      for (size_t i = 0; i < arguments.size(); ++i) {
        const auto& value = stack_[first + i];
        const auto visit = [&](const at::Tensor& tensor) {
          complain ? check_device(tensor, arguments[i].name()) : note_device(tensor);
        };
        if (value.isTensor()) {
          visit(value.toTensor());
        } else if (value.isTensorList()) {
          for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
        } else if (is_list_of_tensor_lists(value)) {
          for (const c10::IValue& list : value.toListRef()) {
            for (const at::Tensor& tensor : list.toTensorVector()) visit(tensor);
          }
        } else if (value.isOptionalTensorList()) {
          for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
            if (tensor) visit(*tensor);
          }
        } else if (value.isDevice() && is_ours(value.toDevice())) {
          device_ = value.toDevice();
        }
      }
    }
  }
  void note_device(const at::Tensor& tensor) {
    if (tensor.defined() && is_ours(tensor) && !device_) {
      device_ = tensor.device();
    }
  }
  void check_device(const at::Tensor& tensor, const std::string& argument) const {
    if (!tensor.defined() || !device_ || tensor.device() == *device_ || (tensor.is_cpu() && tensor.dim() == 0)) {
      return;
    }
    const auto& name = op_.schema().name();
    if (argument == "indices" && takes_host_indices(name)) {
      TORCH_CHECK(tensor.is_cpu(), "indices should be either on cpu or on the same device as the indexed tensor (",
                  *device_, ")");
      return;
    }
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *device_,
                " and ", tensor.device(), "! (when checking argument for argument ", argument,
                " in method wrapper_CUDA_", name.substr(name.find("::") + 2), ")");
  }

  c10::IValue to_host(c10::IValue value, const c10::Argument& argument) {
    if (value.isTensor()) {
      return to_host(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> result;
      for (const at::Tensor& tensor : value.toTensorVector()) result.push_back(to_host(tensor));
      return result;
    }
    if (is_list_of_tensor_lists(value)) {
      auto result = value.toList().copy();
      for (size_t i = 0; i < result.size(); ++i) result.set(i, to_host(result.get(i), argument));
      return result;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> result;
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        result.push_back(tensor ? std::optional(to_host(*tensor)) : std::nullopt);
      }
      return result;
    }
    if (value.isDevice() && is_ours(value.toDevice())) {
      return c10::Device(c10::DeviceType::CPU);
    }
    if (value.isGenerator() || (value.isNone() && argument.name() == "generator")) {
      return replace_generator(value);
    }
    return value;
  }

  at::Tensor to_host(const at::Tensor& tensor) {
    if (!tensor.defined() || !is_ours(tensor)) {
      return tensor;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, "the rig has strided tensors only");
    for (const auto& [host, device] : tensors_) {  // the same tensor twice must stay the same tensor
      if (device.is_same(tensor)) return host;
    }
    const auto& storage = tensor.storage();
    auto [known, is_new] = storages_.try_emplace(storage.unsafeGetStorageImpl());
    if (is_new) {
      known->second = host_storage_over(storage);
      devices_.emplace(known->second.unsafeGetStorageImpl(), storage);
    }
    auto host = same_shape_over(known->second, kCpuKeys, tensor);
    tensors_.emplace_back(host, tensor);
    return host;
  }

  // Without a generator CUDA draws from the device's own, which keeps the CPU's random state untouched.
  static c10::IValue replace_generator(const c10::IValue& value) {
    const auto generator = value.isNone() ? default_generator(-1) : value.toGenerator();
    TORCH_CHECK(is_ours(generator.device()), "Expected a 'cuda' device type for generator but found '",
                generator.device().type(), "'");
    return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
  }

  // Writes back what an in-place or out= kernel did to the metadata or the memory of its arguments.
  void take_back() {
    for (const auto& [impl, device] : devices_) {
      const auto host = storages_.at(device.unsafeGetStorageImpl());
      if (host.data() != device.data() || host.nbytes() != device.nbytes()) {
        auto* target = device.unsafeGetStorageImpl();
        target->set_data_ptr_noswap(
            make_block(const_cast<void*>(host.data()), host.nbytes(), device.device().index(), host));
        target->set_nbytes(host.nbytes());
      }
    }
    for (const auto& [host, device] : tensors_) {
      if (host.sizes() != device.sizes() || host.strides() != device.strides() ||
          host.storage_offset() != device.storage_offset()) {
        device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
      }
    }
  }

  c10::IValue to_device(c10::IValue value) {
    if (value.isTensor()) {
      return to_device(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> result;
      for (const at::Tensor& tensor : value.toTensorVector()) result.push_back(to_device(tensor));
      return result;
    }
    if (is_list_of_tensor_lists(value)) {
      auto result = value.toList().copy();
      for (size_t i = 0; i < result.size(); ++i) result.set(i, to_device(result.get(i)));
      return result;
    }
    return value;
  }

  at::Tensor to_device(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) {
      return tensor;
    }
    for (const auto& [host, device] : tensors_) {  // self, or an out= argument
      if (host.is_same(tensor)) return device;
    }
    const auto& storage = tensor.storage();
    auto known = devices_.find(storage.unsafeGetStorageImpl());  // a view, or several results over one storage
    if (known == devices_.end()) {
      c10::Storage taken_over(
          c10::Storage::use_byte_size_t(),
          storage.nbytes(),
          make_block(const_cast<void*>(storage.data()), storage.nbytes(), current_device, storage),
          &device_memory(),
          /*resizable=*/true);
      known = devices_.emplace(storage.unsafeGetStorageImpl(), std::move(taken_over)).first;
    }
    if (c10::InferenceMode::is_enabled()) {
      for (const auto& [host, device] : tensors_) {
        // In inference mode too, a view of a normal tensor is a normal one.
        if (!device.is_inference() && device.storage().is_alias_of(known->second)) return view_of(device, tensor);
      }
    }
    return same_shape_over(known->second, kDeviceKeys, tensor);
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::optional<c10::Device> device_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;  // device storage -> CPU storage over it
  std::unordered_map<c10::StorageImpl*, c10::Storage> devices_;   // CPU storage -> device storage
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;        // CPU tensor, device tensor
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { HostCall(op, *stack).run(); }

}  // namespace rig
