#include "cuda.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>

#include "library.hpp"
#include "text.hpp"
#include "trtdet/errors.hpp"

namespace trtdet::cuda {

namespace {

// After these the device takes no more work from the process.
bool is_sticky(CUresult code) {
    static constexpr std::array sticky = {214, 700, 702, 710, 714, 715, 716, 717, 718, 719};
    return std::find(sticky.begin(), sticky.end(), static_cast<int>(code)) != sticky.end();
}

bool is_too_old(CUresult code) {
    // 36 is CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER, which the headers of CUDA 11 do not name.
    return static_cast<int>(code) == 36 || code == CUDA_ERROR_SYSTEM_DRIVER_MISMATCH ||
           code == CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE;
}

std::string gib(std::size_t bytes) {
    std::array<char, 32> text{};
    const auto size = static_cast<double>(bytes);
    if (bytes >= std::size_t{1} << 28) {
        std::snprintf(text.data(), text.size(), "%.2f GiB", size / (1 << 30));
    } else {
        std::snprintf(text.data(), text.size(), "%.1f MiB", size / (1 << 20));
    }
    return text.data();
}

[[noreturn]] void cannot(const std::string& why) {
    throw UnavailableError("the engine cannot be run here, as " + why);
}

[[noreturn]] void no_device() {
    const char* shown = std::getenv("CUDA_VISIBLE_DEVICES");
    cannot(
        std::string("this machine's CUDA driver shows no device") +
        (shown != nullptr ? std::string(" (CUDA_VISIBLE_DEVICES is '") + shown + "')" : "") +
        "; run this on a machine with a CUDA device");
}

}  // namespace

Driver::Driver(const std::vector<std::filesystem::path>& folders) {
    const Library library("libcuda.so.1", folders);
    if (!library) {
        cannot(
            "this machine has no CUDA driver (" + library.why() +
            "); run this on a machine with a CUDA device and "
            "NVIDIA's driver");
    }
    const auto take = [&library](auto*& function, const char* name) {
        function = library.function<std::remove_reference_t<decltype(*function)>>(name);
        if (function == nullptr) {
            cannot(std::string("this machine's CUDA driver does not fit: it has no ") + name + "; update the driver");
        }
    };
    take(call.init, "cuInit");
    take(call.error_string, "cuGetErrorString");
    take(call.device_count, "cuDeviceGetCount");
    take(call.device, "cuDeviceGet");
    take(call.device_name, "cuDeviceGetName");
    take(call.device_attribute, "cuDeviceGetAttribute");
    take(call.retain, "cuDevicePrimaryCtxRetain");
    take(call.release, "cuDevicePrimaryCtxRelease_v2");
    take(call.push, "cuCtxPushCurrent_v2");
    take(call.pop, "cuCtxPopCurrent_v2");
    take(call.memory, "cuMemGetInfo_v2");
    take(call.allocate, "cuMemAlloc_v2");
    take(call.free, "cuMemFree_v2");
    take(call.allocate_pinned, "cuMemHostAlloc");
    take(call.free_pinned, "cuMemFreeHost");
    take(call.copy_in, "cuMemcpyHtoDAsync_v2");
    take(call.copy_out, "cuMemcpyDtoHAsync_v2");
    take(call.new_stream, "cuStreamCreate");
    take(call.end_stream, "cuStreamDestroy_v2");
    take(call.wait, "cuStreamSynchronize");
    take(call.begin_capture, "cuStreamBeginCapture_v2");
    take(call.end_capture, "cuStreamEndCapture");
    take(call.instantiate, "cuGraphInstantiateWithFlags");
    take(call.end_graph, "cuGraphDestroy");
    take(call.launch, "cuGraphLaunch");
    take(call.end_executable, "cuGraphExecDestroy");

    const CUresult code = call.init(0);
    if (code == CUDA_ERROR_NO_DEVICE) {
        no_device();
    }
    if (is_too_old(code)) {
        cannot("this machine's CUDA driver does not fit: " + words(code) + "; update the driver");
    }
    if (code != CUDA_SUCCESS) {
        cannot("this machine's CUDA driver does not start: " + words(code));
    }
    if (devices().empty()) {
        no_device();
    }
}

std::vector<Machine::Device> Driver::devices() const {
    std::vector<Machine::Device> found;
    int count = 0;
    check(call.device_count(&count), "cuDeviceGetCount");
    for (int index = 0; index < count; ++index) {
        CUdevice handle = 0;
        std::array<char, 256> name{};
        int major = 0;
        int minor = 0;
        if (call.device(&handle, index) != CUDA_SUCCESS) {
            continue;
        }
        check(call.device_name(name.data(), static_cast<int>(name.size()) - 1, handle), "cuDeviceGetName");
        check(
            call.device_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle),
            "cuDeviceGetAttribute");
        check(
            call.device_attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle),
            "cuDeviceGetAttribute");
        found.push_back({index, name.data(), 10 * major + minor});
    }
    return found;
}

void Driver::check(CUresult code, const char* doing) const {
    if (code == CUDA_SUCCESS) {
        return;
    }
    const std::string said = std::string(doing) + ": " + words(code);
    if (code == CUDA_ERROR_OUT_OF_MEMORY) {
        throw EngineError("the GPU has no memory left (" + said + "); end what else runs on it");
    }
    if (is_too_old(code)) {
        throw UnavailableError("this machine's CUDA driver does not fit (" + said + "); update the driver");
    }
    if (is_sticky(code)) {
        throw EngineError(
            "the GPU failed at what it ran (" + said +
            ") and takes no more work from this process; start the program "
            "again, and if it fails again, build the engine again or test the GPU");
    }
    throw EngineError("the CUDA driver refused " + said);
}

std::string Driver::words(CUresult code) const {
    const char* text = nullptr;
    const bool known = call.error_string(code, &text) == CUDA_SUCCESS && text != nullptr;
    return "error " + std::to_string(static_cast<int>(code)) + (known ? ", " + one_line(text) : "");
}

Gpu::Gpu(std::shared_ptr<const Driver> the_driver, Machine::Device the_device)
    : device(std::move(the_device)), driver(std::move(the_driver)) {
    driver->check(driver->call.device(&handle_, device.index), "cuDeviceGet");
    driver->check(driver->call.retain(&context_, handle_), "cuDevicePrimaryCtxRetain");
}

Gpu::~Gpu() {
    driver->call.release(handle_);
}

Current::Current(const Gpu& gpu) : gpu_(gpu), pushed_(true) {
    gpu.driver->check(gpu.driver->call.push(gpu.context_), "cuCtxPushCurrent");
}

Current::Current(const Gpu& gpu, std::nothrow_t) noexcept
    : gpu_(gpu), pushed_(gpu.driver->call.push(gpu.context_) == CUDA_SUCCESS) {}

Current::~Current() {
    if (pushed_) {
        CUcontext popped = nullptr;
        gpu_.driver->call.pop(&popped);
    }
}

Buffer allocate(const std::shared_ptr<const Gpu>& gpu, std::size_t bytes) {
    const Driver& driver = *gpu->driver;
    const Current current(*gpu);
    CUdeviceptr address = 0;
    const std::size_t size = std::max<std::size_t>(1, bytes);
    const CUresult code = driver.call.allocate(&address, size);
    if (code == CUDA_ERROR_OUT_OF_MEMORY) {
        std::size_t free = 0;
        std::size_t total = 0;
        driver.check(driver.call.memory(&free, &total), "cuMemGetInfo");
        throw EngineError(
            gpu->device.name + " has no " + gib(size) + " of memory left: " + gib(free) + " of " + gib(total) +
            " are free; take fewer lanes, build with a smaller batch, or end what else runs on it");
    }
    driver.check(code, "cuMemAlloc");
    return {gpu, address, driver.call.free};
}

Pinned allocate_pinned(const std::shared_ptr<const Gpu>& gpu, std::size_t bytes) {
    const Driver& driver = *gpu->driver;
    const Current current(*gpu);
    void* address = nullptr;
    const std::size_t size = std::max<std::size_t>(1, bytes);
    const CUresult code = driver.call.allocate_pinned(&address, size, 0);
    if (code == CUDA_ERROR_OUT_OF_MEMORY) {
        throw EngineError(
            "the host cannot lock " + gib(size) + " of memory for copies to " + gpu->device.name +
            "; take fewer lanes, or build with a smaller batch");
    }
    driver.check(code, "cuMemHostAlloc");
    return {gpu, address, driver.call.free_pinned};
}

namespace {

// The default stream does not wait for it, nor it for that one.
Owned<CUstream> new_stream(const std::shared_ptr<const Gpu>& gpu) {
    const Driver& driver = *gpu->driver;
    const Current current(*gpu);
    CUstream stream = nullptr;
    driver.check(driver.call.new_stream(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    return {gpu, stream, driver.call.end_stream};
}

}  // namespace

Stream::Stream(const std::shared_ptr<const Gpu>& gpu) : gpu_(gpu), stream_(new_stream(gpu)) {}

void Stream::copy_in(const Buffer& to, const void* from, std::size_t bytes) const {
    gpu_->driver->check(gpu_->driver->call.copy_in(to.get(), from, bytes, handle()), "cuMemcpyHtoDAsync");
}

void Stream::copy_out(void* to, const Buffer& from, std::size_t bytes) const {
    gpu_->driver->check(gpu_->driver->call.copy_out(to, from.get(), bytes, handle()), "cuMemcpyDtoHAsync");
}

void Stream::wait() const {
    gpu_->driver->check(gpu_->driver->call.wait(handle()), "cuStreamSynchronize");
}

Graph Stream::capture(const std::function<void()>& enqueue) const {
    const Driver& driver = *gpu_->driver;
    // Other threads may allocate meanwhile: in the global mode that would spoil the capture.
    driver.check(driver.call.begin_capture(handle(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
    CUgraph graph = nullptr;
    try {
        enqueue();
    } catch (...) {
        // What cannot be captured ends the capture with an error that is the same one.
        if (driver.call.end_capture(handle(), &graph) == CUDA_SUCCESS) {
            driver.call.end_graph(graph);
        }
        throw;
    }
    driver.check(driver.call.end_capture(handle(), &graph), "cuStreamEndCapture");
    CUgraphExec executable = nullptr;
    const CUresult code = driver.call.instantiate(&executable, graph, 0);
    driver.call.end_graph(graph);
    driver.check(code, "cuGraphInstantiate");
    return {gpu_, executable, driver.call.end_executable};
}

void Stream::launch(const Graph& graph) const {
    gpu_->driver->check(gpu_->driver->call.launch(graph.get(), handle()), "cuGraphLaunch");
}

}  // namespace trtdet::cuda
