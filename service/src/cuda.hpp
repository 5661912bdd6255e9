// The CUDA driver: devices, memory, streams and graphs. It is loaded when it is asked for; nothing of it is linked.
//
// Every failure is an EngineError with the driver's own words. What is owned here is given back quietly: whoever waited
// for the work has been told that the device failed.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "trtdet/engine.hpp"

namespace trtdet::cuda {

// The driver's functions, by the names under which every driver since CUDA 11.4 has them.
struct Functions {
    decltype(::cuInit)* init;
    decltype(::cuGetErrorString)* error_string;
    decltype(::cuDeviceGetCount)* device_count;
    decltype(::cuDeviceGet)* device;
    decltype(::cuDeviceGetName)* device_name;
    decltype(::cuDeviceGetAttribute)* device_attribute;
    decltype(::cuDevicePrimaryCtxRetain)* retain;
    decltype(::cuDevicePrimaryCtxRelease_v2)* release;
    decltype(::cuCtxPushCurrent_v2)* push;
    decltype(::cuCtxPopCurrent_v2)* pop;
    decltype(::cuMemGetInfo_v2)* memory;
    decltype(::cuMemAlloc_v2)* allocate;
    decltype(::cuMemFree_v2)* free;
    decltype(::cuMemHostAlloc)* allocate_pinned;
    decltype(::cuMemFreeHost)* free_pinned;
    decltype(::cuMemcpyHtoDAsync_v2)* copy_in;
    decltype(::cuMemcpyDtoHAsync_v2)* copy_out;
    decltype(::cuStreamCreate)* new_stream;
    decltype(::cuStreamDestroy_v2)* end_stream;
    decltype(::cuStreamSynchronize)* wait;
    decltype(::cuStreamBeginCapture_v2)* begin_capture;
    decltype(::cuStreamEndCapture)* end_capture;
    decltype(::cuGraphInstantiateWithFlags)* instantiate;
    decltype(::cuGraphDestroy)* end_graph;
    decltype(::cuGraphLaunch)* launch;
    decltype(::cuGraphExecDestroy)* end_executable;
};

// The driver, loaded and initialised. Any thread may use it.
class Driver {
public:
    // folders: where libcuda.so.1 is looked for before the system's own places.
    //
    // Throws EngineError: there is no driver, no device, or the driver does not start; the words are why an engine
    // cannot be run here.
    explicit Driver(const std::vector<std::filesystem::path>& folders);

    // The devices it shows; at least one.
    std::vector<Machine::Device> devices() const;

    // Throws EngineError where the code is no success. doing: the name of the function that gave it.
    void check(CUresult code, const char* doing) const;

    Functions call{};

private:
    std::string words(CUresult code) const;
};

// A device by its primary context, which it shares with the libraries of this process. Any thread may use it.
class Gpu {
public:
    // Throws EngineError: the driver has no such device.
    Gpu(std::shared_ptr<const Driver> driver, Machine::Device device);
    ~Gpu();
    Gpu(const Gpu&) = delete;
    Gpu& operator=(const Gpu&) = delete;

    const Machine::Device device;
    const std::shared_ptr<const Driver> driver;

private:
    friend class Current;

    CUdevice handle_ = 0;
    CUcontext context_ = nullptr;
};

// Makes a device the current one of this thread, for as long as it lives. They nest.
class Current {
public:
    // Throws EngineError: the driver refuses.
    explicit Current(const Gpu& gpu);

    // For destructors: where the driver refuses, nothing becomes current, and there is nothing to give back either.
    Current(const Gpu& gpu, std::nothrow_t) noexcept;

    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

    explicit operator bool() const { return pushed_; }

private:
    const Gpu& gpu_;
    bool pushed_;
};

// A handle of the driver's that is given back at the end.
template <typename Handle>
class Owned {
public:
    using Release = CUresult (*)(Handle);

    Owned(std::shared_ptr<const Gpu> gpu, Handle handle, Release release)
        : gpu_(std::move(gpu)), handle_(handle), release_(release) {}
    ~Owned() {
        if (gpu_ != nullptr) {
            const Current current(*gpu_, std::nothrow);
            if (current) {
                release_(handle_);
            }
        }
    }
    Owned(Owned&& other) noexcept
        : gpu_(std::exchange(other.gpu_, nullptr)), handle_(other.handle_), release_(other.release_) {}
    Owned& operator=(Owned&&) = delete;

    Handle get() const { return handle_; }

private:
    std::shared_ptr<const Gpu> gpu_;
    Handle handle_;
    Release release_;
};

using Buffer = Owned<CUdeviceptr>;
using Pinned = Owned<void*>;
using Graph = Owned<CUgraphExec>;

// Memory of the device, uninitialised; without bytes it has an address all the same.
//
// Throws EngineError: it has not so much left; the message says how much is.
Buffer allocate(const std::shared_ptr<const Gpu>& gpu, std::size_t bytes);

// Memory of the host that the device copies from and to by itself, uninitialised.
//
// Throws EngineError: the host has not so much memory to lock.
Pinned allocate_pinned(const std::shared_ptr<const Gpu>& gpu, std::size_t bytes);

// Work that the device does in order. One thread at a time uses it, with the device current; nothing waits but wait()
// and the end.
class Stream {
public:
    // Throws EngineError: the driver refuses.
    explicit Stream(const std::shared_ptr<const Gpu>& gpu);

    CUstream handle() const { return stream_.get(); }

    void copy_in(const Buffer& to, const void* from, std::size_t bytes) const;
    void copy_out(void* to, const Buffer& from, std::size_t bytes) const;

    // Blocks until all work is done. Throws EngineError: the device failed at it.
    void wait() const;

    // What enqueue() puts into this stream, not run but kept. Only this thread is held to what may be captured.
    //
    // Throws EngineError: something in it cannot be captured, or enqueue() does; the stream is usable as before.
    Graph capture(const std::function<void()>& enqueue) const;

    // Runs what was captured.
    void launch(const Graph& graph) const;

private:
    std::shared_ptr<const Gpu> gpu_;
    Owned<CUstream> stream_;
};

}  // namespace trtdet::cuda
