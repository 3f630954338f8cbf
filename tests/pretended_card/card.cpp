// Two CUDA devices for a torch that was built without CUDA. Their memory is the host's; __init__.py runs their
// operators on the CPU. Here is what Python cannot give: devices, memory, and tensors over that memory.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr DeviceIndex NUM_CARDS = 2;
thread_local DeviceIndex chosen = 0;

DeviceIndex choose(DeviceIndex card) {
  DeviceIndex before = chosen;
  if (card >= 0) chosen = card;
  return before;
}

struct WithCard {
  explicit WithCard(std::optional<Device> device) : before(choose(device ? device->index() : -1)) {}
  ~WithCard() { chosen = before; }
  DeviceIndex before;
};

// ---------------------------------------------------------------- memory

std::mutex guard_of_blocks;
std::map<void*, int64_t> births;  // of each block in use: a number that no other block ever had
int64_t last_birth = 0;

void release(void* block) {
  std::lock_guard<std::mutex> held(guard_of_blocks);
  births.erase(block);
  std::free(block);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* block = num_bytes ? std::malloc(num_bytes) : nullptr;
    std::lock_guard<std::mutex> held(guard_of_blocks);
    if (block) births[block] = ++last_birth;
    return {block, block, &release, Device(c10::kCUDA, chosen)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }
} memory;

int64_t birth(const at::Tensor& tensor) {
  std::lock_guard<std::mutex> held(guard_of_blocks);
  auto found = births.find(const_cast<void*>(tensor.storage().data()));
  return found == births.end() ? 0 : found->second;
}

// ---------------------------------------------------------------- devices

struct Cards final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kCUDA;
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device to) const override { return {c10::kCUDA, choose(to.index())}; }
  Device getDevice() const override { return {c10::kCUDA, chosen}; }
  void setDevice(Device to) const override { choose(to.index()); }
  void uncheckedSetDevice(Device to) const noexcept override { choose(to.index()); }
  Stream getStream(Device of) const override { return Stream(Stream::DEFAULT, of); }
  Stream getNewStream(Device of, int = 0) const override { return getStream(of); }
  Stream exchangeStream(Stream given) const override { return given; }
  DeviceIndex deviceCount() const noexcept override { return NUM_CARDS; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Cards);

}  // namespace

namespace at {
struct CardHooks final : CUDAHooksInterface {
  explicit CardHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return NUM_CARDS; }
  DeviceIndex deviceCount() const override { return NUM_CARDS; }
  DeviceIndex current_device() const override { return chosen; }
  DeviceIndex getCurrentDevice() const override { return chosen; }
  void setCurrentDevice(DeviceIndex card) const override { choose(card); }
  DeviceIndex exchangeDevice(DeviceIndex card) const override { return choose(card); }
  DeviceIndex maybeExchangeDevice(DeviceIndex card) const override { return choose(card); }
  Device getDeviceFromPtr(void*) const override { return {kCUDA, chosen}; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", CardHooks)
}  // namespace at

namespace {

// ---------------------------------------------------------------- tensors

using Sizes = c10::SymIntArrayRef;
using Type = std::optional<at::ScalarType>;
const c10::DispatchKeySet ON_A_CARD(c10::DispatchKey::CUDA);

at::Tensor empty(Sizes size, Type type, std::optional<at::Layout>, std::optional<Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  WithCard card(device);
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  return at::detail::empty_generic(sizes, &memory, ON_A_CARD, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(Sizes size, Sizes stride, Type type, std::optional<at::Layout>,
                         std::optional<Device> device, std::optional<bool>) {
  WithCard card(device);
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  return at::detail::empty_strided_generic(sizes, strides, &memory, ON_A_CARD, c10::dtype_or_default(type));
}

at::Tensor as_strided(const at::Tensor& self, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->expect_int();
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  return at::native::as_strided_tensorimpl(self, sizes, strides, start);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, Sizes size, Sizes stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  return at::native::set_storage_cpu_(self, std::move(source), offset.expect_int(), sizes, strides);
}

// A tensor of the host over the memory of a card's. It keeps that memory alive only where it owns it.
at::Tensor on_host(const at::Tensor& tensor, bool owns) {
  if (tensor.is_cpu()) return tensor;
  at::AutoDispatchBelowADInplaceOrView below;
  void* data = tensor.storage().mutable_data();
  auto drop = [](void* storage) { delete static_cast<c10::Storage*>(storage); };
  c10::DataPtr pointer =
      owns ? c10::DataPtr(data, new c10::Storage(tensor.storage()), drop, c10::kCPU) : c10::DataPtr(data, c10::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(pointer), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

TORCH_LIBRARY(pretended_card, library) {
  library.def("on_host(Tensor tensor, bool owns) -> Tensor");
  library.def("birth(Tensor tensor) -> int");
  library.def("choose(int card) -> int", [](int64_t card) -> int64_t { return choose(static_cast<DeviceIndex>(card)); });
}

TORCH_LIBRARY_IMPL(pretended_card, CUDA, library) {
  library.impl("on_host", on_host);
  library.impl("birth", birth);
}
TORCH_LIBRARY_IMPL(pretended_card, CPU, library) {
  library.impl("on_host", on_host);
  library.impl("birth", birth);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", [](const at::Tensor& self, Sizes size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
  });
  library.impl("_reshape_alias", [](const at::Tensor& self, Sizes size, Sizes stride) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  library.impl("unfold", at::native::unfold);
  library.impl("resize_", [](const at::Tensor& self, Sizes size, std::optional<at::MemoryFormat> format) -> const at::Tensor& {
    WithCard card(self.device());
    return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
  });
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    int64_t size = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
    return at::native::set_storage_cpu_(self, std::move(source), 0, {size}, {});
  });
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("record_stream", [](at::Tensor&, Stream) {});
}

}  // namespace
