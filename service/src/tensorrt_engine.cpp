#include <string>

#include "trtdet/engine.hpp"
#include "trtdet/errors.hpp"

#ifndef TRTDET_WITH_TENSORRT

namespace trtdet {

std::string built_for_tensorrt() {
    return "";
}

std::string runnable() {
    return "networks with onnxruntime";
}

std::shared_ptr<Engine> open_tensorrt(const Bundle& bundle, const TensorRtOptions&) {
    const std::string title = bundle.manifest().backend.name == "tensorrt-rtx" ? "TensorRT-RTX" : "TensorRT";
    throw UnavailableError(
        "this libtrtdet was built without the headers of " + title + " and runs " + runnable() +
        "; for engines build it with -DTENSORRT_INCLUDE_DIR=the folder of its NvInfer.h");
}

}  // namespace trtdet

#else

#include <NvInferRuntime.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <type_traits>

#include "cuda.hpp"
#include "library.hpp"
#include "text.hpp"

namespace trtdet {

namespace {

namespace trt = nvinfer1;

// What differs between the libraries that have this interface. TensorRT-RTX's headers define TRT_MAJOR_RTX; it numbers
// its versions from 1 and has the functions of TensorRT 11.
#ifdef TRT_MAJOR_RTX
#define TRTDET_INTERFACE 11
constexpr int header_major = TRT_MAJOR_RTX;
constexpr int header_minor = TRT_MINOR_RTX;
constexpr int header_patch = TRT_PATCH_RTX;
constexpr const char* backend_name = "tensorrt-rtx";
constexpr const char* title = "TensorRT-RTX";
constexpr const char* library_stem = "libtensorrt_rtx.so.";
constexpr bool has_plugins = false;  // it must have no creators at all
#else
#define TRTDET_INTERFACE NV_TENSORRT_MAJOR
constexpr int header_major = NV_TENSORRT_MAJOR;
constexpr int header_minor = NV_TENSORRT_MINOR;
constexpr int header_patch = NV_TENSORRT_PATCH;
constexpr const char* backend_name = "tensorrt";
constexpr const char* title = "TensorRT";
constexpr const char* library_stem = "libnvinfer.so.";
constexpr bool has_plugins = true;
#endif

std::string title_of(const std::string& backend) {
    return backend == "tensorrt-rtx" ? "TensorRT-RTX" : "TensorRT";
}

using Listener = std::shared_ptr<const std::function<void(int severity, std::string_view message)>>;

// The logger of a loaded library. TensorRT keeps the first logger of a process for good and sends it what it says in
// every thread, so there is one for each library, which belongs to no engine and ends with the process. Whoever calls
// TensorRT listens for as long as the call lasts.
class Log final : public trt::ILogger {
public:
    // What TensorRT reports while this lives: what the thread's own calls cause, and what threads of TensorRT's own say
    // meanwhile.
    class Scope {
    public:
        Scope(Log& log, Listener listener) : log_(log), listener_(std::move(listener)) {
            const std::lock_guard lock(log_.mutex_);
            log_.scopes_.push_back(this);
        }
        ~Scope() {
            const std::lock_guard lock(log_.mutex_);
            log_.scopes_.erase(std::find(log_.scopes_.begin(), log_.scopes_.end(), this));
        }
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;

        // What was reported as wrong, in one line; empty where nothing was.
        std::string words() const {
            const std::lock_guard lock(log_.mutex_);
            const std::string all = std::accumulate(
                wrong_.begin(), wrong_.end(), std::string(), [](std::string said, const std::string& one) {
                    return std::move(said) + (said.empty() ? "" : "; ") + one;
                });
            return one_line(all);
        }

    private:
        friend class Log;

        Log& log_;
        const Listener listener_;
        const std::thread::id thread_ = std::this_thread::get_id();
        std::vector<std::string> wrong_;
    };

    void log(Severity severity, const char* message) noexcept override {
        // Nothing may be thrown through TensorRT: a message that cannot be kept is dropped.
        try {
            for (const Listener& listener : note(severity, message)) {
                try {
                    (*listener)(static_cast<int>(severity), message);
                } catch (...) {
                }
            }
        } catch (...) {
        }
    }

    // Held while what the whole process has of the library is changed.
    std::mutex registering;

private:
    // Keeps a message for those whom it concerns, and gives back whom to tell; that is done without the lock.
    std::vector<Listener> note(Severity severity, const char* message) {
        const std::lock_guard lock(mutex_);
        std::vector<Scope*> concerned;
        const auto own = std::find_if(scopes_.rbegin(), scopes_.rend(), [](const Scope* scope) {
            return scope->thread_ == std::this_thread::get_id();
        });
        if (own != scopes_.rend()) {
            concerned.push_back(*own);
        } else {
            concerned = scopes_;
        }
        std::vector<Listener> listeners;
        for (Scope* scope : concerned) {
            constexpr std::size_t most = 20;
            if (severity <= Severity::kERROR && scope->wrong_.size() < most) {
                scope->wrong_.emplace_back(message);
            }
            const Listener& listener = scope->listener_;
            if (listener != nullptr && std::find(listeners.begin(), listeners.end(), listener) == listeners.end()) {
                listeners.push_back(listener);
            }
        }
        return listeners;
    }

    std::mutex mutex_;
    std::vector<Scope*> scopes_;
};

// The log of a library, made with the first engine that is opened with it. It must outlive whatever the library does,
// to the end of the process, so it is never destroyed; it holds nothing of an engine but while one is called.
Log& log_of(const Library& library) {
    static std::mutex mutex;
    static auto& logs = *new std::map<const void*, std::unique_ptr<Log>>;
    const std::lock_guard lock(mutex);
    std::unique_ptr<Log>& log = logs[library.handle()];
    if (log == nullptr) {
        log = std::make_unique<Log>();
    }
    return *log;
}

std::string dotted(int major, int minor, int patch) {
    return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

// TensorRT's library, and the one with its own plugins where that is to be had. Its version is told without a device.
struct TensorRt {
    explicit TensorRt(const BackendSpec& backend, const std::vector<std::filesystem::path>& folders)
        : library(library_stem + std::to_string(header_major), folders) {
        if (!library) {
            throw UnavailableError(
                std::string("the engine cannot be run here, as ") + title + " " + std::to_string(header_major) +
                " cannot be loaded (" + library.why() + "); install " + title + " " + backend.version +
                ", or name the folder that has its libraries");
        }
        const auto version_number = library.function<int()>("getInferLibVersion");
        create_runtime = library.function<void*(void*, int)>("createInferRuntime_INTERNAL");
        if (version_number == nullptr || create_runtime == nullptr) {
            throw UnavailableError(
                std::string(library_stem) + std::to_string(header_major) + " is no library of " + title +
                ": it has no createInferRuntime_INTERNAL; install " + title + " " + backend.version);
        }
        // 8600 is 8.6.0; since version 10 there are two digits more, as there are for TensorRT-RTX.
        const int number = version_number();
        const int unit = number < 10000 ? 1000 : 10000;
        major = number / unit;
        version = dotted(major, number % unit / 100, number % 100);
        if (major != header_major) {
            throw UnavailableError(
                std::string("the library that was found is ") + title + " " + version +
                ", and this libtrtdet was built with the headers of " + built_for_tensorrt() + "; install " + title +
                " " + std::to_string(header_major) + ", or build libtrtdet with the headers of " +
                std::to_string(major));
        }
        log = &log_of(library);
        if (has_plugins) {
            const Library plugins("libnvinfer_plugin.so." + std::to_string(header_major), folders);
            const auto init = plugins ? plugins.function<bool(void*, const char*)>("initLibNvInferPlugins") : nullptr;
            no_plugins = plugins ? "it has no initLibNvInferPlugins" : plugins.why();
            if (init != nullptr) {
                init_plugins = init;
                no_plugins.clear();
            }
        }
    }

    Library library;
    int major = 0;
    std::string version;
    Log* log = nullptr;
    void* (*create_runtime)(void*, int) = nullptr;
    bool (*init_plugins)(void*, const char*) = nullptr;
    std::string no_plugins;  // why TensorRT's own plugins are not to be had; empty where they are
};

// What to do about what TensorRT says, by patterns in its words, the more special first.
std::string advised(const std::string& words) {
    struct Advice {
        std::vector<const char*> patterns;
        const char* advice;
    };
    static const std::vector<Advice> known = {
        {{"not compatible with this version", "version tag", "library version"},
         "build it again with the TensorRT installed here"},
        {{"plugin"}, "give the library that has the plugin with --set engine.plugins=LIBRARY when building"},
        {{"out of memory", "outofmemory", "failed to allocate", "memory allocation"},
         "take a smaller batch, or end what else runs"},
        {{"incompatible device", "expecting compute"}, "build it again on this machine"},
        {{"magic tag", "serialization", "deserializ", "checksum", "corrupt"},
         "it was altered or cut short; build it again"},
        {{"initialization", "driver"}, "update the driver to one for this TensorRT's CUDA"},
    };
    std::string lower = words;
    std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char one) {
        return one < 0x80 ? static_cast<char>(std::tolower(one)) : static_cast<char>(one);
    });
    for (const Advice& one : known) {
        for (const char* pattern : one.patterns) {
            if (lower.find(pattern) != std::string::npos) {
                return words + "; " + one.advice;
            }
        }
    }
    return words;
}

// Deletes what the library made, with its device current.
template <typename Made>
struct Ended {
    std::shared_ptr<const cuda::Gpu> gpu;

    void operator()(Made* made) const {
        const cuda::Current current(*gpu, std::nothrow);
        delete made;
    }
};

template <typename Made>
using Held = std::unique_ptr<Made, Ended<Made>>;

std::vector<std::int64_t> shape_of(const trt::Dims& dims) {
    return dims.nbDims < 0 ? std::vector<std::int64_t>{-1} : std::vector<std::int64_t>(dims.d, dims.d + dims.nbDims);
}

DType dtype_of(const std::string& name, trt::DataType type) {
    switch (type) {
        case trt::DataType::kFLOAT:
            return DType::float32;
        case trt::DataType::kHALF:
            return DType::float16;
        case trt::DataType::kINT8:
            return DType::int8;
        case trt::DataType::kUINT8:
            return DType::uint8;
        case trt::DataType::kINT32:
            return DType::int32;
        case trt::DataType::kBOOL:
            return DType::boolean;
#if TRTDET_INTERFACE >= 10
        case trt::DataType::kINT64:
            return DType::int64;
#endif
        default:
            throw EngineError(
                "tensor " + in_quotes(name) + " of the engine is of type " + std::to_string(static_cast<int>(type)) +
                " (nvinfer1::DataType); allowed: float32, float16, int8, uint8, int32, int64, bool");
    }
}

// A deserialised engine, what it takes and gives, and the device it is on.
struct Loaded {
    Loaded(
        const Bundle& bundle, const std::vector<char>& bytes, TensorRt library,
        std::shared_ptr<const cuda::Gpu> the_gpu, const TensorRtOptions& options)
        : tensorrt(std::move(library)),
          gpu(std::move(the_gpu)),
          listener(
              options.log ? std::make_shared<const std::function<void(int, std::string_view)>>(options.log) : nullptr),
          runtime(nullptr, {gpu}),
          engine(nullptr, {gpu}) {
        const Calling calling(*this, "loading the engine");
        start(bundle, calling);
        engine.reset(runtime->deserializeCudaEngine(bytes.data(), bytes.size()));
        if (engine == nullptr) {
            throw calling.refused(tensorrt.no_plugins.empty() ? "" : plugins_missing());
        }
        read_tensors(bundle.manifest().input);
        without(options.cuda_graphs ? "" : "they were not asked for");
    }

    // With the device current, and listening to TensorRT.
    class Calling {
    public:
        Calling(const Loaded& loaded, std::string what)
            : loaded_(loaded),
              what_(std::move(what)),
              current_(*loaded.gpu),
              scope_(*loaded.tensorrt.log, loaded.listener) {}

        // The error for what TensorRT did not do, with what it said and what to do about it.
        EngineError refused(const std::string& beside = "") const {
            std::string words = scope_.words();
            if (words.empty()) {
                words = "it gave no reason";
            }
            return EngineError(
                loaded_.name() + " failed at " + what_ + ": " + advised(words) + (beside.empty() ? "" : "; " + beside));
        }

    private:
        const Loaded& loaded_;
        const std::string what_;
        const cuda::Current current_;
        const Log::Scope scope_;
    };

    std::string name() const { return std::string(title) + " " + tensorrt.version; }

    // Says why the work is not launched as a CUDA graph; what is said first stays.
    void without(const std::string& why) const {
        const std::lock_guard lock(mutex_);
        if (without_graphs_.empty()) {
            without_graphs_ = why;
        }
    }

    std::string without_graphs() const {
        const std::lock_guard lock(mutex_);
        return without_graphs_;
    }

    const TensorRt tensorrt;
    const std::shared_ptr<const cuda::Gpu> gpu;
    const Listener listener;
    Held<trt::IRuntime> runtime;
    Held<trt::ICudaEngine> engine;  // goes before its runtime
#ifdef TRT_MAJOR_RTX
    Held<trt::IRuntimeCache> kernels{nullptr, {gpu}};  // made with the first context, and held while there is one
#endif

    std::string input;
    std::vector<std::int64_t> image;  // C, H, W
    bool dynamic = false;
    int min_batch = 0;
    int opt_batch = 0;
    int max_batch = 0;
    std::vector<std::string> output_names;

    // Held while contexts are made, run for the first time and captured: that is when TensorRT still changes things
    // that they share.
    std::mutex setup;

private:
    std::string plugins_missing() const {
        return "TensorRT's own plugins were not loaded (" + tensorrt.no_plugins + ")";
    }

    void start(const Bundle& bundle, const Calling& calling) {
        const Manifest& manifest = bundle.manifest();
        const auto& plugins = manifest.backend.plugins;
        if (!has_plugins && !plugins.empty()) {
            throw EngineError(name() + " takes no plugin libraries; build the engine again");
        }
        if (has_plugins && !tensorrt.no_plugins.empty() && manifest.nms.where == Suppression::efficient) {
            throw EngineError(
                "the engine needs TensorRT's own plugins (EfficientNMS), and they cannot be loaded (" +
                tensorrt.no_plugins + "); install all of " + name());
        }
        if (has_plugins && !tensorrt.no_plugins.empty()) {
            tensorrt.log->log(trt::ILogger::Severity::kWARNING, plugins_missing().c_str());
        }
        // Plugins are registered for the whole process.
        const std::lock_guard lock(tensorrt.log->registering);
        if (tensorrt.init_plugins != nullptr && !tensorrt.init_plugins(tensorrt.log, "")) {
            throw calling.refused("TensorRT's own plugins were not registered");
        }
        runtime.reset(static_cast<trt::IRuntime*>(tensorrt.create_runtime(tensorrt.log, NV_TENSORRT_VERSION)));
        if (runtime == nullptr) {
            throw calling.refused();
        }
        const auto embedded = [](const Plugin& one) { return one.embedded; };
        if (manifest.backend.version_compatible || std::any_of(plugins.begin(), plugins.end(), embedded)) {
            // Both carry code of the host, a plugin or a runtime of their version, which is run only when asked for.
            runtime->setEngineHostCodeAllowed(true);
        }
#ifndef TRT_MAJOR_RTX  // which has no DLA
        if (manifest.backend.dla >= 0) {
            runtime->setDLACore(manifest.backend.dla);
        }
#endif
        for (const Plugin& plugin : plugins) {
            if (plugin.embedded) {
                continue;
            }
            const Calling loading(*this, "loading the plugin library " + in_quotes(bundle.file(plugin.file).string()));
            // What is loaded is what was compared, whatever becomes of the file meanwhile.
            const LibraryCopy verified(plugin.file, bundle.read(plugin.file), plugin.sha256);
            if (runtime->getPluginRegistry().loadLibrary(verified.path().c_str()) == nullptr) {
                throw loading.refused();
            }
        }
    }

    void read_tensors(const InputSpec& wanted) {
        std::string inputs;
        int input_count = 0;
        for (int index = 0; index < engine->getNbIOTensors(); ++index) {
            const std::string tensor = engine->getIOTensorName(index);
            const DType dtype = dtype_of(tensor, engine->getTensorDataType(tensor.c_str()));
            if (engine->getTensorLocation(tensor.c_str()) != trt::TensorLocation::kDEVICE) {
                throw EngineError(
                    "tensor " + in_quotes(tensor) +
                    " of the engine is a shape on the host; build it from another model");
            }
            if (engine->getTensorIOMode(tensor.c_str()) != trt::TensorIOMode::kINPUT) {
                output_names.push_back(tensor);
                continue;
            }
            const auto shape = shape_of(engine->getTensorShape(tensor.c_str()));
            inputs += (inputs.empty() ? "" : ", ") + in_quotes(tensor) + " " + shape_text(shape);
            ++input_count;
            input = tensor;
            image.assign(shape.begin() + (shape.empty() ? 0 : 1), shape.end());
            dynamic = !shape.empty() && shape[0] < 0;
            min_batch = opt_batch = max_batch = shape.empty() ? 0 : static_cast<int>(shape[0]);
            if (dtype != DType::float32) {
                throw EngineError(
                    "the engine takes " + in_quotes(tensor) + " in another type than float32; build it again");
            }
        }
        const std::vector<std::int64_t> expected = {3, wanted.preprocess.height, wanted.preprocess.width};
        if (input_count != 1 || image != expected) {
            throw EngineError(
                "the engine takes " + (inputs.empty() ? "nothing" : inputs) + ", and the manifest says " +
                in_quotes(wanted.name) + " Nx" + shape_text(expected) + "; build it again");
        }
        if (dynamic) {
            const auto batch = [this](trt::OptProfileSelector which) {
                return static_cast<int>(engine->getProfileShape(input.c_str(), 0, which).d[0]);
            };
            min_batch = batch(trt::OptProfileSelector::kMIN);
            opt_batch = batch(trt::OptProfileSelector::kOPT);
            max_batch = batch(trt::OptProfileSelector::kMAX);
        }
        if (min_batch < 1 || max_batch < min_batch) {
            throw EngineError(
                "the engine takes batches of " + std::to_string(min_batch) + " to " + std::to_string(max_batch) +
                "; build it again");
        }
    }

    mutable std::mutex mutex_;
    mutable std::string without_graphs_;
};

using Calling = Loaded::Calling;

// The memory in which an execution context works is the caller's, so that those of a lane can share it. TensorRT 10.1
// has new names for it, which a library of 10.0 does not know yet: every 10 is asked by the old ones.
#if TRTDET_INTERFACE < 11
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#endif

std::size_t scratch_size(const trt::ICudaEngine& engine) {
#if TRTDET_INTERFACE < 11
    return engine.getDeviceMemorySize();
#else
    return static_cast<std::size_t>(std::max<std::int64_t>(0, engine.getDeviceMemorySizeV2()));
#endif
}

// Null where the library refuses.
trt::IExecutionContext* new_context(Loaded& loaded) {
    trt::ICudaEngine& engine = *loaded.engine;
#if defined(TRT_MAJOR_RTX)
    const std::unique_ptr<trt::IRuntimeConfig> config(engine.createRuntimeConfig());
    if (config == nullptr) {
        return nullptr;
    }
    config->setExecutionContextAllocationStrategy(trt::ExecutionContextAllocationStrategy::kUSER_MANAGED);
    // Else it compiles for a shape in the background, and until then runs what is slower; and that is what a graph
    // would keep. Its own strategy of graphs stays off: a lane's graph holds the copies as well.
    config->setDynamicShapesKernelSpecializationStrategy(trt::DynamicShapesKernelSpecializationStrategy::kEAGER);
    // What is compiled for one context need not be compiled for the others; without it all works, later.
    if (loaded.kernels == nullptr) {
        loaded.kernels.reset(config->createRuntimeCache());
    }
    if (loaded.kernels != nullptr) {
        static_cast<void>(config->setRuntimeCache(*loaded.kernels));
    }
    return engine.createExecutionContext(config.get());
#elif TRTDET_INTERFACE >= 10
    return engine.createExecutionContext(trt::ExecutionContextAllocationStrategy::kUSER_MANAGED);
#else
    return engine.createExecutionContextWithoutDeviceMemory();
#endif
}

void give_scratch(trt::IExecutionContext& context, const cuda::Buffer& scratch, std::size_t size) {
    void* address = reinterpret_cast<void*>(scratch.get());
#if TRTDET_INTERFACE < 11
    static_cast<void>(size);
    context.setDeviceMemory(address);
#else
    context.setDeviceMemoryV2(address, static_cast<std::int64_t>(size));
#endif
}

#if TRTDET_INTERFACE < 11
#pragma GCC diagnostic pop
#endif

class TensorRtLane final : public Lane {
public:
    explicit TensorRtLane(std::shared_ptr<Loaded> loaded)
        : loaded_(std::move(loaded)),
          stream_(loaded_->gpu),
          image_bytes_(bytes_of(DType::float32, loaded_->image)),
          input_(take(image_bytes_)),
          scratch_bytes_(scratch_size(*loaded_->engine)),
          scratch_(cuda::allocate(loaded_->gpu, scratch_bytes_)),
          any_(loaded_->gpu) {
        const std::lock_guard lock(loaded_->setup);
        make_context(any_);
        set_batch(any_, loaded_->max_batch);
        for (const std::string& name : loaded_->output_names) {
            OutputSpec spec{
                name, dtype_of(name, loaded_->engine->getTensorDataType(name.c_str())), output_shape(any_, name)};
            const std::size_t bytes = bytes_of(spec.dtype, {spec.shape.begin() + 1, spec.shape.end()});
            spec.shape[0] = -1;
            outputs_.push_back({std::move(spec), bytes, take(bytes)});
        }
        give_addresses(any_);
    }

    ~TensorRtLane() override {
        // After an error there may be work under way, on memory that is about to go.
        const cuda::Current current(*loaded_->gpu, std::nothrow);
        try {
            stream_.wait();
        } catch (...) {
        }
    }

    std::vector<OutputSpec> outputs() const {
        std::vector<OutputSpec> specs;
        for (const Output& output : outputs_) {
            specs.push_back(output.spec);
        }
        return specs;
    }

    Span<float> input() override {
        return {static_cast<float*>(input_.host.get()), image_bytes_ * batches() / sizeof(float)};
    }

    TensorView output(std::size_t index) const override {
        const Output& output = outputs_.at(index);
        return {output.spec.dtype, output.memory.host.get(), output.image_bytes * batches()};
    }

    int warm_up(int batch) override {
        std::memset(input_.host.get(), 0, image_bytes_ * batches());
        // Where memory does not last for all, one image and the largest batch matter most.
        run(1);
        run(batch);
        for (int size = 2; size < batch && size <= most_captured; ++size) {
            run(size);
        }
        captures_ = false;
        for (int size = most_captured + 1; size < batch; ++size) {
            run(size);  // on the context that these share; kernels may be compiled for each shape
        }
        return static_cast<int>(own_.size()) + (any_.graph ? 1 : 0);
    }

    void run(int batch) override {
        if (batch < 1 || batch > loaded_->max_batch) {
            throw EngineError(
                "the engine takes 1 to " + std::to_string(loaded_->max_batch) + " images at once, not " +
                std::to_string(batch) + "; build it with another --batch");
        }
        const int filled = std::max(batch, loaded_->min_batch);
        for (int index = batch; index < filled; ++index) {
            std::memcpy(image_at(index), image_at(batch - 1), image_bytes_);
        }
        const cuda::Current current(*loaded_->gpu);
        if (const cuda::Graph* graph = captured(filled)) {
            stream_.launch(*graph);
            stream_.wait();
        } else if (captures_ && loaded_->without_graphs().empty()) {
            run_and_capture(filled);
        } else {
            set_batch(any_, filled);
            enqueue(any_);
            stream_.wait();
        }
    }

private:
    // Batches of more images run for so long that launching their kernels one by one is hidden behind the first ones,
    // while each graph takes the memory of a context.
    static constexpr int most_captured = 32;

    // Memory of the device and what it is copied from or to, for the largest batch.
    struct Memory {
        cuda::Pinned host;
        cuda::Buffer device;
    };

    struct Output {
        OutputSpec spec;
        std::size_t image_bytes;
        Memory memory;
    };

    // An execution context, the batch that it is set to, and its work as a graph.
    struct Work {
        explicit Work(const std::shared_ptr<const cuda::Gpu>& gpu) : context(nullptr, {gpu}) {}

        Held<trt::IExecutionContext> context;
        int batch = 0;
        std::optional<cuda::Graph> graph;
    };

    static std::size_t bytes_of(DType dtype, const std::vector<std::int64_t>& shape) {
        std::size_t bytes = size_of(dtype);
        for (const std::int64_t one : shape) {
            bytes *= static_cast<std::size_t>(one);
        }
        return bytes;
    }

    std::size_t batches() const { return static_cast<std::size_t>(loaded_->max_batch); }

    Memory take(std::size_t image_bytes) const {
        const std::size_t bytes = image_bytes * batches();
        return {cuda::allocate_pinned(loaded_->gpu, bytes), cuda::allocate(loaded_->gpu, bytes)};
    }

    char* image_at(int index) {
        return static_cast<char*>(input_.host.get()) + image_bytes_ * static_cast<std::size_t>(index);
    }

    void make_context(Work& work) {
        const Calling calling(*loaded_, "making an execution context");
        work.context.reset(new_context(*loaded_));
        if (work.context == nullptr) {
            throw calling.refused();
        }
        give_scratch(*work.context, scratch_, scratch_bytes_);
    }

    void give_addresses(Work& work) {
        give_address(work, loaded_->input, input_.device);
        for (const Output& output : outputs_) {
            give_address(work, output.spec.name, output.memory.device);
        }
    }

    void give_address(Work& work, const std::string& name, const cuda::Buffer& memory) {
        const Calling calling(*loaded_, "taking memory for " + in_quotes(name));
        if (!work.context->setTensorAddress(name.c_str(), reinterpret_cast<void*>(memory.get()))) {
            throw calling.refused();
        }
    }

    // Sets the batch and looks whether the outputs have the shapes with it that they have with the largest.
    void set_batch(Work& work, int batch) {
        if (work.batch == batch) {
            return;
        }
        work.batch = 0;
        const Calling calling(*loaded_, "setting a batch of " + std::to_string(batch));
        if (loaded_->dynamic) {
            // Of TensorRT 8.6, only the first context has a profile from the start.
            if (work.context->getOptimizationProfile() != 0) {
                if (!work.context->setOptimizationProfileAsync(0, stream_.handle())) {
                    throw EngineError(
                        loaded_->name() +
                        " lets only one context use this engine: it was built for one "
                        "(PreviewFeature.PROFILE_SHARING_0806 was off); build it again");
                }
                stream_.wait();
            }
            trt::Dims dims{};
            dims.nbDims = 4;
            dims.d[0] = batch;
            for (std::size_t axis = 0; axis < 3; ++axis) {
                dims.d[axis + 1] = static_cast<std::remove_reference_t<decltype(dims.d[0])>>(loaded_->image[axis]);
            }
            if (!work.context->setInputShape(loaded_->input.c_str(), dims)) {
                throw calling.refused();
            }
        }
        work.batch = batch;
        for (const Output& output : outputs_) {
            std::vector<std::int64_t> expected = output.spec.shape;
            expected[0] = batch;
            const auto shape = output_shape(work, output.spec.name);
            if (shape != expected) {
                work.batch = 0;
                throw EngineError(
                    "output " + in_quotes(output.spec.name) + " of the engine is " + shape_text(shape) +
                    " with a batch of " + std::to_string(batch) + ", not " + shape_text(expected) + "; build it again");
            }
        }
    }

    // The shape of an output with the batch that is set.
    std::vector<std::int64_t> output_shape(const Work& work, const std::string& name) const {
        const auto shape = shape_of(work.context->getTensorShape(name.c_str()));
        if (std::any_of(shape.begin(), shape.end(), [](std::int64_t one) { return one < 0; })) {
            throw EngineError(
                "output " + in_quotes(name) + " of the engine has a shape, " + shape_text(shape) +
                ", that is known only when it ran; build it with --nms native or --nms host");
        }
        if (shape.empty() || shape[0] != work.batch) {
            throw EngineError(
                "output " + in_quotes(name) + " of the engine is " + shape_text(shape) + " with a batch of " +
                std::to_string(work.batch) + ": its first axis must be the batch; build it again");
        }
        return shape;
    }

    const cuda::Graph* captured(int batch) const {
        if (!loaded_->dynamic) {
            return any_.graph ? &*any_.graph : nullptr;
        }
        const auto known = own_.find(batch);
        return known != own_.end() ? &*known->second.graph : nullptr;
    }

    void run_and_capture(int batch) {
        const std::lock_guard lock(loaded_->setup);
        std::optional<Work> own = loaded_->dynamic ? new_work(batch) : std::nullopt;
        Work& work = own ? *own : any_;
        set_batch(work, batch);
        // The first run also does what is done once; it must not be captured.
        enqueue(work);
        stream_.wait();
        if (loaded_->dynamic && !own) {
            return;
        }
        try {
            work.graph.emplace(stream_.capture([this, &work] { enqueue(work); }));
            if (own) {
                own_.emplace(batch, std::move(*own));
            }
        } catch (const EngineError& error) {
            loaded_->without(std::string("capturing it failed (") + error.what() + ")");
        }
    }

    // A context for one batch alone: TensorRT keeps with a context, not with what was captured of it, what a shape
    // changes. Where there is no memory for one there is none, and no graph.
    std::optional<Work> new_work(int batch) {
        try {
            Work work(loaded_->gpu);
            make_context(work);
            set_batch(work, batch);
            give_addresses(work);
            return work;
        } catch (const EngineError& error) {
            loaded_->without(
                "a batch of " + std::to_string(batch) + " has no context of its own (" + error.what() + ")");
            return std::nullopt;
        }
    }

    // Puts everything into the stream: images in, the work, outputs back.
    void enqueue(const Work& work) {
        const auto batch = static_cast<std::size_t>(work.batch);
        stream_.copy_in(input_.device, input_.host.get(), batch * image_bytes_);
        {
            const Calling calling(*loaded_, "running the engine");
            if (!work.context->enqueueV3(stream_.handle())) {
                throw calling.refused();
            }
        }
        for (const Output& output : outputs_) {
            stream_.copy_out(output.memory.host.get(), output.memory.device, batch * output.image_bytes);
        }
    }

    // In the order in which they are made; they go in the opposite one.
    const std::shared_ptr<Loaded> loaded_;
    const cuda::Stream stream_;
    const std::size_t image_bytes_;
    const Memory input_;
    const std::size_t scratch_bytes_;
    const cuda::Buffer scratch_;
    std::vector<Output> outputs_;
    Work any_;                 // for any batch; of a static engine, with a graph
    std::map<int, Work> own_;  // of a dynamic engine, each for one batch with a graph
    bool captures_ = true;     // whether a batch that has no graph yet gets one
};

class TensorRtEngine final : public Engine {
public:
    // Makes the first lane as well: only a context knows the shapes of the outputs, and that there is memory for one is
    // better known now.
    TensorRtEngine(std::shared_ptr<Loaded> loaded, const Manifest& manifest) : loaded_(std::move(loaded)) {
        // As the manifest names them, whatever order the builder left them in.
        const auto place = [&manifest](const std::string& name) {
            return std::find_if(
                       manifest.outputs.begin(), manifest.outputs.end(),
                       [&name](const OutputSpec& one) { return one.name == name; }) -
                   manifest.outputs.begin();
        };
        std::stable_sort(
            loaded_->output_names.begin(), loaded_->output_names.end(),
            [&place](const std::string& one, const std::string& other) { return place(one) < place(other); });
        auto lane = std::make_unique<TensorRtLane>(loaded_);
        outputs_ = lane->outputs();
        first_ = std::move(lane);
    }

    const std::vector<OutputSpec>& outputs() const override { return outputs_; }
    int min_batch() const override { return loaded_->min_batch; }
    int opt_batch() const override { return loaded_->opt_batch; }
    int max_batch() const override { return loaded_->max_batch; }

    std::string ran_on() const override {
        const std::string without = loaded_->without_graphs();
        return loaded_->name() + " (" + loaded_->gpu->device.name + ")" +
               (without.empty() ? "" : ", without CUDA graphs, as " + without);
    }

    std::unique_ptr<Lane> new_lane() override {
        {
            const std::lock_guard lock(mutex_);
            if (first_ != nullptr) {
                return std::move(first_);
            }
        }
        return std::make_unique<TensorRtLane>(loaded_);
    }

private:
    const std::shared_ptr<Loaded> loaded_;
    std::vector<OutputSpec> outputs_;
    std::mutex mutex_;
    std::unique_ptr<Lane> first_;
};

// Refuses what no library here can run, before any is loaded.
void check_backend(const Manifest& manifest) {
    const BackendSpec& backend = manifest.backend;
    if (backend.name == "onnxruntime" || manifest.files.count("model.engine") == 0) {
        throw UnavailableError(
            "the bundle has no engine: it was built with --backend " + backend.name +
            "; build it again with --backend " + backend_name);
    }
    if (backend.name != backend_name) {
        throw UnavailableError(
            "the engine is of " + title_of(backend.name) + " " + backend.version +
            ", and this libtrtdet was built with the "
            "headers of " +
            title + " " + built_for_tensorrt() + "; build libtrtdet with those of " + title_of(backend.name) +
            ", or the bundle with --backend " + backend_name);
    }
    const std::string major = backend.version.substr(0, backend.version.find('.'));
    if (major != std::to_string(header_major) && !backend.version_compatible) {
        throw UnavailableError(
            "the engine was built with " + std::string(title) + " " + backend.version +
            ", and this libtrtdet with the headers "
            "of " +
            built_for_tensorrt() + "; build libtrtdet with those of " + title + " " + major +
            ", or the engine again with " + title + " " + std::to_string(header_major));
    }
}

// An engine of TensorRT-RTX starts with "vtrt". The header of TensorRT's own is not published; its library refuses what
// is not whole.
void check_plan(const std::vector<char>& bytes) {
    constexpr std::string_view magic = "vtrt";
    if (bytes.empty()) {
        throw EngineError("the engine is empty; build it again");
    }
    const std::string_view start(bytes.data(), std::min(magic.size(), bytes.size()));
    if ((start == magic) != (backend_name == std::string_view("tensorrt-rtx"))) {
        throw EngineError("the engine is none of " + std::string(title) + ": it does not start as one; build it again");
    }
}

}  // namespace

std::string runnable() {
    return std::string("engines of ") + title + " " + std::to_string(header_major) + ", and networks with onnxruntime";
}

std::string built_for_tensorrt() {
    return dotted(header_major, header_minor, header_patch);
}

std::shared_ptr<Engine> open_tensorrt(const Bundle& bundle, const TensorRtOptions& options) {
    const Manifest& manifest = bundle.manifest();
    check_backend(manifest);
    auto driver = std::make_shared<const cuda::Driver>(options.library_folders);
    TensorRt tensorrt(manifest.backend, options.library_folders);
    const auto devices = driver->devices();
    const int index = fitting_device(manifest.backend, {backend_name, tensorrt.version, devices}, options.device);
    const std::vector<char> bytes = bundle.read("model.engine");
    check_plan(bytes);
    const auto device = std::find_if(
        devices.begin(), devices.end(), [index](const Machine::Device& one) { return one.index == index; });
    auto gpu = std::make_shared<const cuda::Gpu>(std::move(driver), *device);
    auto loaded = std::make_shared<Loaded>(bundle, bytes, std::move(tensorrt), std::move(gpu), options);
    return std::make_shared<TensorRtEngine>(std::move(loaded), manifest);
}

}  // namespace trtdet

#endif
