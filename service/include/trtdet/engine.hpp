// What runs a network: a TensorRT engine on a GPU, onnxruntime on the CPU, or a recording.
#pragma once

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "trtdet/bundle.hpp"
#include "trtdet/export.hpp"
#include "trtdet/span.hpp"
#include "trtdet/tensor.hpp"

namespace trtdet {

// One execution context with a stream and memory of its own. One thread at a time uses it; several lanes of an engine
// run at the same time. It keeps what it needs of its engine alive.
class TRTDET_API Lane {
public:
    virtual ~Lane() = default;
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    // float32 (max_batch, 3, H, W), to be filled before run(); pinned memory where there is a GPU.
    virtual Span<float> input() = 0;

    // Runs the images 0 to batch - 1 and waits for the outputs. A batch below the engine's smallest is filled up with
    // repetitions of its last image.
    //
    // Throws EngineError: batch is not in 1 to max_batch, or the engine failed; the message holds the library's own
    // words.
    virtual void run(int batch) = 0;

    // Does beforehand what first runs of a size take time for once: memory, kernels for its shape, graphs. Runs every
    // size from 1 to so many images; the runs that follow capture nothing any more. Writes to input().
    //
    // Returns how many CUDA graphs the lane has then, for sizes up to 32 and the largest; 0 where its work is launched
    // otherwise.
    //
    // Throws EngineError: as run().
    virtual int warm_up(int batch) {
        static_cast<void>(batch);
        return 0;
    }

    // The output at that place in Engine::outputs(): (max_batch, ...) of its dtype, of which the images of the last run
    // are defined. The next run writes over it.
    virtual TensorView output(std::size_t index) const = 0;

protected:
    Lane() = default;
};

// A network that is ready to run. Any thread may use it.
class TRTDET_API Engine {
public:
    virtual ~Engine() = default;
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // The outputs in the order of Lane::output(); the first dimension, the batch, is -1.
    virtual const std::vector<OutputSpec>& outputs() const = 0;

    virtual int min_batch() const = 0;
    virtual int opt_batch() const = 0;  // what it was optimised for
    virtual int max_batch() const = 0;

    // How many images should run together where nobody says: on a CPU, where more are no faster, as few as can be.
    virtual int best_batch() const { return max_batch(); }

    // What it runs on, for a log: "TensorRT 8.6.0 (NVIDIA H200)".
    virtual std::string ran_on() const = 0;

    // Makes one more lane. Throws EngineError: there is no memory for it.
    virtual std::unique_ptr<Lane> new_lane() = 0;

protected:
    Engine() = default;
};

// What can run an engine here.
struct Machine {
    struct Device {
        int index = 0;
        std::string name;
        int sm = 0;  // compute capability, 86 for 8.6
    };

    std::string library;  // "tensorrt" or "tensorrt-rtx"
    std::string version;  // of it, such as "8.6.0"
    std::vector<Device> devices;
};

// The index of the first device that can run an engine; with `wanted`, none but the device of this index will do.
//
// Throws UnavailableError: the machine has no such device, or another library or version of it than the engine needs.
// The message says what was built for and what is here.
TRTDET_API int fitting_device(const BackendSpec& backend, const Machine& machine, int wanted = -1);

struct TensorRtOptions {
    // Launch the work as a CUDA graph, captured once for each batch size: of a lane that is warmed up beforehand, and
    // for sizes up to 32 and the largest, else at the first run. Each graph has an execution context of its own.
    bool cuda_graphs = true;

    // Folders in which TensorRT's libraries and the driver's libcuda.so.1 are looked for before the system's own; empty
    // for those alone.
    std::vector<std::filesystem::path> library_folders;

    // The CUDA device to run on, by its index; -1 for the first that fits.
    int device = -1;

    // Told what TensorRT reports: severity 0 internal error, 1 error, 2 warning, 3 information, 4 verbose.
    std::function<void(int severity, std::string_view message)> log;
};

// Opens a bundle's engine on the first device that fits. The library and the driver are loaded now, not when the
// program starts; version, compute capability and the hash of each plugin library are checked before anything is
// deserialised. Of a plugin library the bytes that were checked are loaded, from memory.
//
// Throws UnavailableError: this libtrtdet was built without TensorRT's headers, or with those of another library than
// the engine needs; the bundle has no engine; there is no driver, device or library that fits. EngineError: a plugin
// library cannot be loaded; the engine cannot be deserialised. BundleError: a file was altered.
TRTDET_API std::shared_ptr<Engine> open_tensorrt(const Bundle& bundle, const TensorRtOptions& options = {});

// Which network of a bundle onnxruntime runs.
enum class Precision {
    automatic,  // the faster one where the bundle has both, by a measurement; as_built where it has one
    as_built,   // in INT8 and FP16 as the bundle was built: the detections of its engine
    in_float    // in FP32, whose detections differ a little from those of the engine
};

struct OnnxRuntimeOptions {
    // Folders in which libonnxruntime.so, or the same with a version behind it, is looked for before the system's own.
    std::vector<std::filesystem::path> library_folders;

    // Of a run, the lane's own and those of a pool that all lanes share; 0 for one a core less one, as there are two
    // lanes or more. On two or three cores a run beside which there is no other then has them all, for which the
    // network is loaded twice.
    int threads = 0;

    Precision precision = Precision::automatic;

    // Why it runs in place of the bundle's engine, for Engine::ran_on(); empty where nothing else was wanted.
    std::string in_place_of;

    // Told what onnxruntime reports as wrong, and where a faster network could be had: severity 0 fatal, 1 error, 2
    // warning.
    std::function<void(int severity, std::string_view message)> log;
};

// Opens a bundle's network with onnxruntime on the CPU, which computes the same as Python does with the same network.
// Any version from 1.12 on is loaded now, not when the program starts. EfficientNMS is computed here.
//
// INT8 and FP16 are computed in FP32 and rounded, which takes longer than FP32 alone. With Precision::automatic and a
// bundle that has both networks, both are loaded and each is run a few times; Engine::ran_on() says which is taken,
// and with what times.
//
// Throws UnavailableError: there is no library that fits, or the bundle lacks the network that is wanted.
// EngineError: the network cannot be loaded. BundleError: a file was altered.
TRTDET_API std::shared_ptr<Engine> open_onnxruntime(const Bundle& bundle, const OnnxRuntimeOptions& options = {});

// What runs a bundle: its engine where this machine can run it and else onnxruntime, or one of the two.
enum class Backend { automatic, tensorrt, onnxruntime };

struct EngineOptions {
    Backend backend = Backend::automatic;
    TensorRtOptions tensorrt;
    OnnxRuntimeOptions onnxruntime;
};

// Opens what runs a bundle; Engine::ran_on() says which, and why where it is not the engine that was built. An engine
// that can be run here and then fails is an error: nothing takes its place.
//
// Throws as open_tensorrt() and open_onnxruntime() do.
TRTDET_API std::shared_ptr<Engine> open_engine(const Bundle& bundle, const EngineOptions& options = {});

// What this libtrtdet runs: "networks with onnxruntime", or "engines of TensorRT-RTX 1, and networks with onnxruntime"
// as the headers were that it was built with.
TRTDET_API std::string runnable();

// The version of TensorRT whose headers this libtrtdet was built with, such as "10.9.0"; empty where it was built
// without.
TRTDET_API std::string built_for_tensorrt();

}  // namespace trtdet
