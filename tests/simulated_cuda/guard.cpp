// What torch asks of a CUDA build in C++: the current device and stream of a thread, events between streams, and pinned
// memory. Autograd's engine calls the first two from a thread of its own for each device, as it does on a real one.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_set>

namespace {

constexpr c10::DeviceType CUDA = c10::DeviceType::CUDA;
constexpr int MOST_DEVICES = 2;  // as many threads does autograd's engine start, whatever torch.cuda.device_count() says

thread_local c10::DeviceIndex device_now = 0;
thread_local int64_t streams_now[MOST_DEVICES] = {0, 0};
thread_local std::string refusal;  // why Python does not allow the call that has just been reported to it

using OnEvent = void (*)(int64_t event, int device, int64_t stream);
OnEvent on_record = nullptr;
OnEvent on_wait = nullptr;
void (*on_pinned_allocation)() = nullptr;

void raise_refusal() {
  if (refusal.empty()) return;
  std::string message;
  message.swap(refusal);
  TORCH_CHECK(false, message);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::Device getDevice() const override { return {CUDA, device_now}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) device_now = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return MOST_DEVICES; }

  c10::Stream stream(c10::DeviceIndex index, int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, {CUDA, index}, id);
  }
  c10::DeviceIndex index_of(c10::Device device) const { return device.index() < 0 ? device_now : device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return stream(index_of(device), streams_now[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index_of(device), 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(next.device());
    streams_now[next.device_index()] = next.id();
    return before;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    static std::atomic<intptr_t> events{0};
    *event = reinterpret_cast<void*>(--events);  // below zero: Python's own are above
    if (on_record) on_record(reinterpret_cast<intptr_t>(*event), stream.device_index(), stream.id());
    raise_refusal();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event && on_wait) on_wait(reinterpret_cast<intptr_t>(event), stream.device_index(), stream.id());
    raise_refusal();
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

// Host memory that a device reads and writes by itself.
struct PinnedAllocator final : c10::Allocator {
  static std::mutex& mutex() { static std::mutex one; return one; }
  static std::unordered_set<const void*>& live() { static std::unordered_set<const void*> one; return one; }
  static void release(void* memory) {
    { std::lock_guard<std::mutex> lock(mutex()); live().erase(memory); }
    c10::GetCPUAllocator()->raw_deallocate(memory);
  }
  c10::DataPtr allocate(size_t num_bytes) override {
    if (on_pinned_allocation) on_pinned_allocation();
    raise_refusal();
    if (num_bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
    void* memory = c10::GetCPUAllocator()->raw_allocate(num_bytes);
    std::lock_guard<std::mutex> lock(mutex());
    live().insert(memory);
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCuDNN() const override { return false; }
  bool compiledWithCuDNN() const override { return false; }
  long versionCuDNN() const override { return 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return MOST_DEVICES; }
  c10::DeviceIndex deviceCount() const override { return MOST_DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  void setCurrentDevice(c10::DeviceIndex device) const override { device_now = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({CUDA, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  at::Device getDeviceFromPtr(void*) const override { return {CUDA, device_now}; }
  // The processor draws a device's random numbers, too.
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void* memory) const override {
    std::lock_guard<std::mutex> lock(PinnedAllocator::mutex());
    return PinnedAllocator::live().count(memory) != 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator one;
    return &one;
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ::Hooks)
}

// What Python calls, by ctypes.
extern "C" {
int get_device() { return device_now; }
void set_device(int device) { device_now = static_cast<c10::DeviceIndex>(device); }
int64_t get_stream(int device) { return streams_now[device]; }
void set_stream(int device, int64_t stream) { streams_now[device] = stream; }
void refuse(const char* why) { refusal = why; }
void report_to(OnEvent record, OnEvent wait, void (*pinned)()) {
  on_record = record;
  on_wait = wait;
  on_pinned_allocation = pinned;
}
}
