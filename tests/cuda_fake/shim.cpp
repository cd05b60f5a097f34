// As much of a CUDA backend as fake tensors of device cuda need on a torch without CUDA: a device guard whose streams and
// events do nothing, hooks that say there is one GPU, and the choice of an attention kernel that torch makes on a GPU of
// compute capability 9.0 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Nothing here computes.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct Guard : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Device device() { return c10::Device(c10::DeviceType::CUDA, 0); }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device()); }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};

// flash: no mask, 16 bits. efficient: as many key/value heads as query heads. cuDNN: 16 bits, not deterministic. The
// limits on sizes and strides are left out, which the sizes of the tests keep.
int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor&, const std::optional<at::Tensor>& mask,
               double, bool is_causal, std::optional<double>, bool) {
  auto& context = at::globalContext();
  const bool is_half = query.scalar_type() == at::kBFloat16 || query.scalar_type() == at::kHalf;
  const bool same_heads = query.sym_size(-3) == key.sym_size(-3);
  const bool is_square = query.sym_size(-2) == key.sym_size(-2);
  for (auto backend : context.sDPPriorityOrder()) {
    bool takes = false;
    switch (backend) {
      case at::SDPBackend::cudnn_attention:
        takes = context.userEnabledCuDNNSDP() && is_half && !context.deterministicAlgorithms();
        break;
      case at::SDPBackend::flash_attention:
        takes = context.userEnabledFlashSDP() && is_half && !mask && (!is_causal || is_square);
        break;
      case at::SDPBackend::efficient_attention:
        takes = context.userEnabledMemEfficientSDP() && same_heads;
        break;
      case at::SDPBackend::math:
        takes = context.userEnabledMathSDP();
        break;
      default:
        break;
    }
    if (takes) return static_cast<int64_t>(backend);
  }
  return static_cast<int64_t>(at::SDPBackend::error);
}

}  // namespace

namespace at {
// preferred: a torch with CUDA registers its own hooks under the same name, at a lower priority
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, Hooks)
}  // namespace at

// called when torch is there, whose CUDA part would take its own choice
extern "C" void crius_choose_attention() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose); }
