// Runs torch's operators of CUDA tensors on the CPU, over the same memory: device memory of the stub is host
// memory. Loaded at the end of `import torch` (entry point `torch.backends`). Memory is that of the results alone:
// temporaries within a CUDA kernel are not allocated.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <cstdlib>
#include <memory>
#include <set>

#include "settings.h"

namespace {

using c10::IValue;

// Operators that need no kernel, or ask the runtime alone: torch's own work.
const std::set<std::string> LEFT_ALONE = {
    "aten::_fused_sdp_choice", "aten::_local_scalar_dense", "aten::_pin_memory", "aten::_reshape_alias",
    "aten::as_strided", "aten::empty.memory_format", "aten::empty_strided", "aten::is_pinned", "aten::is_set_to",
    "aten::record_stream", "aten::resize_", "aten::set_", "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor", "aten::unfold", "aten::view",
    "aten::view_as_complex", "aten::view_as_real",
};
const std::set<std::string> MATRIX_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};

// The same memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const auto& storage = tensor.storage();
  const size_t bytes = storage.nbytes();
  if (bytes == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  c10::Storage same(c10::Storage::use_byte_size_t(), bytes,
                    c10::DataPtr(const_cast<void*>(storage.data()), c10::Device(c10::kCPU)), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

IValue on_cpu(const IValue& value) {
  if (value.isTensor()) return on_cpu(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> lowered;
    for (const at::Tensor tensor : value.toTensorList()) lowered.push_back(on_cpu(tensor));
    return lowered;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> lowered;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      lowered.push_back(tensor ? std::optional<at::Tensor>(on_cpu(*tensor)) : std::nullopt);
    return lowered;
  }
  if (value.isDevice()) return c10::Device(c10::kCPU);
  if (value.isGenerator()) return IValue();  // that of the CPU, which the same seed has set
  return value;
}

// A tensor of the device with this content.
at::Tensor on_device(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || !tensor.is_cpu()) return tensor;
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  if (tensor.numel()) on_cpu(made).copy_(tensor);
  return made;
}

IValue on_device(const IValue& value, c10::Device device) {
  if (value.isTensor()) return on_device(value.toTensor(), device);
  if (value.isTensorList()) {
    c10::List<at::Tensor> lifted;
    for (const at::Tensor tensor : value.toTensorList()) lifted.push_back(on_device(tensor, device));
    return lifted;
  }
  return value;
}

// An out= tensor may have been given another size.
void follow_resize(const at::Tensor& original, const at::Tensor& lowered) {
  if (!original.defined() || !original.is_cuda()) return;
  const bool was_empty = original.storage().nbytes() == 0 && lowered.numel();
  if (original.sizes() == lowered.sizes() && !was_empty) return;
  original.resize_(lowered.sizes());
  on_cpu(original).copy_(lowered);
}

void follow_resizes(const IValue& original, const IValue& lowered) {
  if (original.isTensor()) {
    follow_resize(original.toTensor(), lowered.toTensor());
  } else if (original.isTensorList()) {
    const auto before = original.toTensorList(), after = lowered.toTensorList();
    for (size_t i = 0; i < before.size(); i++) follow_resize(before[i], after[i]);
  }
}

c10::Device device_of(const std::vector<IValue>& arguments) {
  for (const auto& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined() && argument.toTensor().is_cuda())
      return argument.toTensor().device();
    if (argument.isTensorList())
      for (const at::Tensor tensor : argument.toTensorList())
        if (tensor.defined() && tensor.is_cuda()) return tensor.device();
  }
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

void run_on_cpu(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = handle.schema();
  static const bool cublas_fails = stub::fault("CUDA_STUB_CUBLAS_OUT_OF_MEMORY") != 0;
  TORCH_CHECK(!cublas_fails || !MATRIX_PRODUCTS.count(schema.name()),
              "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`");
  const std::vector<IValue> arguments = torch::jit::pop(*stack, schema.arguments().size());
  torch::jit::Stack lowered;
  for (const auto& argument : arguments) lowered.push_back(on_cpu(argument));
  const torch::jit::Stack kept = lowered;
  handle.callBoxed(lowered);
  std::vector<IValue> written;
  for (size_t i = 0; i < arguments.size(); i++)
    if (is_written(schema.arguments()[i])) {
      follow_resizes(arguments[i], kept[i]);
      written.push_back(arguments[i]);
    }
  size_t next_written = 0;
  for (size_t i = 0; i < schema.returns().size(); i++)
    if (is_written(schema.returns()[i])) {
      stack->push_back(written.at(next_written++));
    } else {
      stack->push_back(on_device(lowered.at(i), device_of(arguments)));
    }
}

bool returns_a_view(const c10::FunctionSchema& schema) {
  for (const auto& value : schema.returns())
    if (value.alias_info() && !value.alias_info()->isWrite()) return true;
  return false;
}

// Torch warns of every kernel that is replaced.
class Silence : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::unique_ptr<torch::Library> replaced;

}  // namespace

// Replaces torch's kernels of the CUDA key; how many.
EXPORT int cuda_stub_replace_operators() {
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard quiet(&silence);
  auto& dispatcher = c10::Dispatcher::singleton();
  replaced = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto names = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
  names.emplace_back("aten::copy_", "");  // one kernel of all devices otherwise
  int count = 0;
  for (const auto& name : names) {
    const std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (name.getNamespace() != "aten" || LEFT_ALONE.count(full)) continue;
    const auto handle = dispatcher.findSchema(name);
    if (!handle || returns_a_view(handle->schema())) continue;
    replaced->impl(full.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    count++;
  }
  return count;
}
