// A stand-in for libnvinfer: what libtrtdet calls of TensorRT, with the real headers' interfaces, on memory and streams
// of the stand-in driver of tests/standin/cuda.c. What it cannot show: kernels, precision and speed of a GPU.
//
// It is strict. Whatever else is called ends the process, and so does what the real library does not survive: a call
// with no context current, an engine that goes before its contexts, a runtime that goes before its engines.
//
// An engine of it is a text of these lines:
//
//     standin                    the first one; for TensorRT-RTX vtrt
//     input NAME C H W           float32
//     batch N                    static; or, dynamic: batch MIN OPT MAX
//     output NAME TYPE D...      of an image; TYPE is float32, int32, uint8, int8, bool, int64 or fp8. Element j of it
//                                is (j + 1) * pixel[j modulo number of pixels], as that type
//     scratch BYTES              memory that an execution context works in
//     needs PLUGIN               a creator that must be registered
//     host-code                  it carries code of the host, which must be allowed
//     unshared                   it was built for one context (of TensorRT 8.6)
//     contexts N                 the library has memory for so many contexts at the same time
//     says SEVERITY WORDS...     reported while it is loaded; 'says-elsewhere' is reported by another thread
//     fails WHAT                 WHAT is loading, shape, address or running; what was logged says why
//     unknown NAME               an output whose shape is known only when it ran
//     grows NAME                 an output whose last axis is as long as the batch
//     on-host NAME               a tensor that is a shape on the host
//
// Environment variables:
//     TENSORRT_STANDIN_VERSION   what getInferLibVersion() tells, such as 8.6.0; the headers' unless set
//     TENSORRT_STANDIN_NULL      set: there is no runtime to be had
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "stubs.hpp"

// TensorRT-RTX has the functions of TensorRT 11 and numbers its own versions.
#ifdef TRT_MAJOR_RTX
#define INTERFACE 11
#else
#define INTERFACE NV_TENSORRT_MAJOR
#endif

namespace nvinfer1 {

namespace {

[[noreturn]] void end(const char* why) {
    std::fprintf(stderr, "the stand-in for TensorRT: %s\n", why);
    std::abort();
}

template <typename Function>
Function* driver(const char* name) {
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) {
        end("the driver was not loaded before it");
    }
    return reinterpret_cast<Function*>(dlsym(library, name));
}

void must_be_current() {
    std::size_t free = 0;
    std::size_t total = 0;
    if (driver<int(std::size_t*, std::size_t*)>("cuMemGetInfo_v2")(&free, &total) == 201) {
        end("called with no context current");
    }
}

// The first logger of a process is the one that every message goes to.
ILogger* the_logger = nullptr;
using Severity = ILogger::Severity;

void say(Severity severity, const std::string& words) {
    the_logger->log(severity, words.c_str());
}

void take_logger(void* logger) {
    auto* given = static_cast<ILogger*>(logger);
    if (the_logger == nullptr) {
        the_logger = given;
    } else if (the_logger != given) {
        say(Severity::kWARNING, "The logger passed into createInferRuntime differs from one already registered");
    }
}

std::set<std::string>& global_creators() {
    static std::set<std::string> creators;
    return creators;
}

class Registry final : public IPluginRegistryStubs {
public:
    PluginLibraryHandle loadLibrary(AsciiChar const* path) noexcept override {
        void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) {
            say(Severity::kERROR, std::string("Could not load plugin library: ") + dlerror());
            return nullptr;
        }
        const auto creators = reinterpret_cast<const char* (*)()>(dlsym(library, "standin_creators"));
        std::istringstream names(creators != nullptr ? creators() : "");
        std::string name;
        bool any = false;
        while (names >> name) {
            any = own_.insert(name).second || any;
        }
        if (!any) {
            say(Severity::kERROR, std::string("Plugin library ") + path + " has no creators that are new");
            return nullptr;
        }
        return library;
    }

    bool knows(const std::string& name) const { return own_.count(name) + global_creators().count(name) > 0; }

private:
    std::set<std::string> own_;
};

struct Output {
    std::string name;
    DataType type;
    std::vector<int> shape;  // of an image
};

struct Network {
    explicit Network(const std::string& text) {
        std::istringstream lines(text);
        std::string line;
        while (std::getline(lines, line)) {
            std::istringstream words(line);
            std::string key;
            words >> key;
            if (key == "standin" || key == "vtrt") {
                whole = true;
            } else if (key == "input") {
                int extent = 0;
                words >> input;
                while (words >> extent) {
                    image.push_back(extent);
                }
            } else if (key == "batch") {
                int one = 0;
                while (words >> one) {
                    batch.push_back(one);
                }
            } else if (key == "output") {
                Output output;
                std::string type;
                int extent = 0;
                words >> output.name >> type;
                output.type = type_of(type);
                while (words >> extent) {
                    output.shape.push_back(extent);
                }
                outputs.push_back(output);
            } else if (key == "scratch") {
                words >> scratch;
            } else if (key == "contexts") {
                words >> contexts;
            } else if (key == "needs") {
                words >> plugin;
            } else if (key == "says" || key == "says-elsewhere") {
                int severity = 0;
                words >> severity >> std::ws;
                std::string said;
                std::getline(words, said);
                (key == "says" ? messages : elsewhere).emplace_back(static_cast<Severity>(severity), said);
            } else if (!key.empty()) {
                std::string value;
                words >> value;
                faults[key] = value;
            }
        }
    }

    static DataType type_of(const std::string& name) {
        static const std::map<std::string, DataType> known = {
            {"float32", DataType::kFLOAT}, {"int32", DataType::kINT32}, {"uint8", DataType::kUINT8},
            {"int8", DataType::kINT8},     {"bool", DataType::kBOOL},   {"fp8", DataType::kFP8},
#if INTERFACE >= 10
            {"int64", DataType::kINT64},
#endif
        };
        return known.at(name);
    }

    bool fails(const std::string& what) const { return has("fails", what); }
    bool has(const std::string& key, const std::string& value = "") const {
        const auto found = faults.find(key);
        return found != faults.end() && found->second == value;
    }

    const Output* output(const std::string& name) const {
        const auto found =
            std::find_if(outputs.begin(), outputs.end(), [&name](const Output& one) { return one.name == name; });
        return found != outputs.end() ? &*found : nullptr;
    }

    Dims shape(const std::string& name, int images) const {
        const std::vector<int>& one = name == input ? image : output(name)->shape;
        Dims dims{};
        dims.nbDims = static_cast<std::int32_t>(one.size() + 1);
        dims.d[0] = images;
        std::copy(one.begin(), one.end(), dims.d + 1);
        if (has("unknown", name) || (has("grows", name) && images < 0)) {
            dims.d[one.size()] = -1;
        } else if (has("grows", name)) {
            dims.d[one.size()] = images;
        }
        return dims;
    }

    bool dynamic() const { return batch.size() == 3; }
    int largest() const { return batch.back(); }

    bool whole = false;
    std::string input;
    std::vector<int> image;
    std::vector<int> batch;
    std::vector<Output> outputs;
    std::size_t scratch = 0;
    int contexts = 1 << 20;
    std::string plugin;
    std::map<std::string, std::string> faults;
    std::vector<std::pair<Severity, std::string>> messages;
    std::vector<std::pair<Severity, std::string>> elsewhere;
};

std::atomic<long>& runs_of(int images) {
    static std::array<std::atomic<long>, 64> counts{};
    return counts.at(static_cast<std::size_t>(images));
}

// What the contexts of an engine share.
struct Shared {
    std::mutex mutex;
    int contexts = 0;
    bool profile_taken = false;
};

class Context final : public IExecutionContext {
public:
    Context(const Network& network, Shared& shared, bool has_profile)
        : shared_(shared), work_(network, shared, has_profile) {
        mImpl = &work_;
        shared_.contexts++;
    }
    ~Context() noexcept override {
        must_be_current();
        const std::lock_guard lock(shared_.mutex);
        shared_.contexts--;
        if (work_.has_profile()) {
            shared_.profile_taken = false;
        }
    }

private:
    class Work final : public VExecutionContextStubs {
    public:
        Work(const Network& network, Shared& shared, bool has_profile)
            : network_(network),
              shared_(shared),
              has_profile_(has_profile),
              images_(network.dynamic() ? -1 : network.largest()) {}

        bool has_profile() const { return has_profile_; }

        std::int32_t getOptimizationProfile() const noexcept override { return has_profile_ ? 0 : -1; }

        bool setOptimizationProfileAsync(std::int32_t index, cudaStream_t) noexcept override {
            must_be_current();
            const std::lock_guard lock(shared_.mutex);
            if (index != 0 || (network_.has("unshared") && shared_.profile_taken)) {
                say(Severity::kERROR, "Profile " + std::to_string(index) + " has been chosen for another context");
                return false;
            }
            has_profile_ = shared_.profile_taken = true;
            return true;
        }

#if INTERFACE >= 11
        void setDeviceMemoryV2(void* memory, std::int64_t size) noexcept override {
            if (size != static_cast<std::int64_t>(network_.scratch)) {
                end("the memory of a context has another size than was asked for");
            }
            scratch_ = static_cast<char*>(memory);
        }
#else
        void setDeviceMemory(void* memory) noexcept override { scratch_ = static_cast<char*>(memory); }
#endif

        bool setInputShape(char const* name, Dims const& dims) noexcept override {
            must_be_current();
            bool right = name == network_.input && has_profile_ && !network_.fails("shape") && dims.nbDims == 4;
            for (int axis = 1; right && axis < 4; ++axis) {
                right = dims.d[axis] == network_.image[static_cast<std::size_t>(axis - 1)];
            }
            if (!right || dims.d[0] < network_.batch.front() || dims.d[0] > network_.largest()) {
                say(Severity::kERROR,
                    "IExecutionContext::setInputShape: Error Code 3: API Usage Error (Static dimension "
                    "mismatch while setting input shape.)");
                return false;
            }
            images_ = static_cast<int>(dims.d[0]);
            return true;
        }

        Dims getTensorShape(char const* name) const noexcept override { return network_.shape(name, images_); }

        bool setTensorAddress(char const* name, void* memory) noexcept override {
            if (network_.fails("address")) {
                say(Severity::kERROR, "IExecutionContext::setTensorAddress: the address is not aligned");
                return false;
            }
            addresses_[name] = memory;
            return memory != nullptr;
        }

        bool enqueueV3(cudaStream_t stream) noexcept override {
            must_be_current();
            if (network_.fails("running")) {
                say(Severity::kERROR,
                    "[runner.cpp::execute::416] Error Code 1: Cuda Runtime (invalid\nresource handle)");
                return false;
            }
            if (images_ < 0 || addresses_.size() != network_.outputs.size() + 1 ||
                (network_.scratch > 0 && scratch_ == nullptr)) {
                say(Severity::kERROR, "IExecutionContext::enqueueV3: Error Code 3: API Usage Error (not all is set)");
                return false;
            }
            // A stream that captures gives an error, which the caller meets again when it ends the capture.
            return driver<int(cudaStream_t, void (*)(void*), void*)>("cuLaunchHostFunc")(
                       stream, [](void* self) { static_cast<Work*>(self)->perform(); }, this) == 0;
        }

    private:
        // Reads what the context is set to now: a graph that outlives a change of the batch gives what it must not.
        void perform() {
            const bool marked = network_.scratch >= sizeof(this);
            const Work* const self = this;
            if (marked) {
                std::memcpy(scratch_, &self, sizeof(self));
            }
            usleep(100);
            runs_of(images_)++;
            const auto* pixels = static_cast<const float*>(addresses_.at(network_.input));
            std::size_t count = 1;
            for (const int one : network_.image) {
                count *= static_cast<std::size_t>(one);
            }
            for (const Output& output : network_.outputs) {
                std::size_t elements = 1;
                for (const int one : output.shape) {
                    elements *= static_cast<std::size_t>(one);
                }
                for (std::size_t image = 0; image < static_cast<std::size_t>(images_); ++image) {
                    for (std::size_t element = 0; element < elements; ++element) {
                        const float value = static_cast<float>(element + 1) * pixels[image * count + element % count];
                        write(output.type, addresses_.at(output.name), image * elements + element, value);
                    }
                }
            }
            if (marked && std::memcmp(scratch_, &self, sizeof(self)) != 0) {
                end("two contexts worked in the same memory at once");
            }
        }

        static void write(DataType type, void* memory, std::size_t at, float value) {
            switch (type) {
                case DataType::kINT32:
                    static_cast<std::int32_t*>(memory)[at] = static_cast<std::int32_t>(value);
                    break;
#if INTERFACE >= 10
                case DataType::kINT64:
                    static_cast<std::int64_t*>(memory)[at] = static_cast<std::int64_t>(value);
                    break;
#endif
                case DataType::kFLOAT:
                    static_cast<float*>(memory)[at] = value;
                    break;
                case DataType::kBOOL:
                    static_cast<bool*>(memory)[at] = value != 0;
                    break;
                default:
                    static_cast<std::uint8_t*>(memory)[at] = static_cast<std::uint8_t>(static_cast<int>(value));
            }
        }

        const Network& network_;
        Shared& shared_;
        bool has_profile_;
        int images_;
        char* scratch_ = nullptr;
        std::map<std::string, void*> addresses_;
    };

    Shared& shared_;
    Work work_;
};

#ifdef TRT_MAJOR_RTX
class RuntimeCache final : public IRuntimeCache {
public:
    bool deserialize(void const*, std::size_t) noexcept override { absent("a cache that is read"); }
    IHostMemory* serialize() const noexcept override { absent("a cache that is written"); }
};

class RuntimeConfig final : public IRuntimeConfig {
public:
    RuntimeConfig() { mImpl = &work_; }
    ~RuntimeConfig() noexcept override = default;

    // What it was set to, TensorRT-RTX's defaults unless set.
    struct Set {
        ExecutionContextAllocationStrategy memory = ExecutionContextAllocationStrategy::kSTATIC;
        DynamicShapesKernelSpecializationStrategy kernels = DynamicShapesKernelSpecializationStrategy::kLAZY;
        const IRuntimeCache* cache = nullptr;
    };
    const Set& set() const { return work_.set; }

private:
    class Work final : public VRuntimeConfigStubs {
    public:
        void setExecutionContextAllocationStrategy(ExecutionContextAllocationStrategy strategy) noexcept override {
            set.memory = strategy;
        }
        void setDynamicShapesKernelSpecializationStrategy(
            DynamicShapesKernelSpecializationStrategy strategy) noexcept override {
            set.kernels = strategy;
        }
        IRuntimeCache* createRuntimeCache() noexcept override {
            must_be_current();
            return new RuntimeCache;
        }
        bool setRuntimeCache(IRuntimeCache const& cache) noexcept override {
            set.cache = &cache;
            return true;
        }

        Set set;
    };

    Work work_;
};
#endif

class Engine final : public ICudaEngine {
public:
    Engine(Network network, int& engines) : engines_(engines), work_(std::move(network)) {
        mImpl = &work_;
        ++engines_;
    }
    ~Engine() noexcept override {
        must_be_current();
        if (work_.contexts() != 0) {
            end("an engine went before its contexts");
        }
        --engines_;
    }

private:
    class Work final : public VCudaEngineStubs {
    public:
        explicit Work(Network network) : network_(std::move(network)) {}

        int contexts() const { return shared_.contexts; }

        std::int32_t getNbIOTensors() const noexcept override {
            return static_cast<std::int32_t>(network_.outputs.size() + 1);
        }
        // The input comes last: nothing says that it is the first.
        char const* getIOTensorName(std::int32_t index) const noexcept override {
            const auto place = static_cast<std::size_t>(index);
            return place < network_.outputs.size() ? network_.outputs[place].name.c_str() : network_.input.c_str();
        }
        TensorIOMode getTensorIOMode(char const* name) const noexcept override {
            return name == network_.input ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
        }
        DataType getTensorDataType(char const* name) const noexcept override {
            return name == network_.input ? DataType::kFLOAT : network_.output(name)->type;
        }
        TensorLocation getTensorLocation(char const* name) const noexcept override {
            return network_.has("on-host", name) ? TensorLocation::kHOST : TensorLocation::kDEVICE;
        }
        Dims getTensorShape(char const* name) const noexcept override {
            return network_.shape(name, network_.dynamic() ? -1 : network_.largest());
        }
        Dims getProfileShape(char const* name, std::int32_t, OptProfileSelector which) const noexcept override {
            return network_.shape(name, network_.batch.at(static_cast<std::size_t>(which)));
        }

#if INTERFACE >= 11
        std::int64_t getDeviceMemorySizeV2() const noexcept override {
            return static_cast<std::int64_t>(network_.scratch);
        }
#else
        std::size_t getDeviceMemorySize() const noexcept override { return network_.scratch; }
#endif

#ifdef TRT_MAJOR_RTX
        IRuntimeConfig* createRuntimeConfig() noexcept override { return new RuntimeConfig; }

        IExecutionContext* createExecutionContextWithRuntimeConfig(IRuntimeConfig* config) noexcept override {
            const auto& how = static_cast<RuntimeConfig*>(config)->set();
            if (how.memory != ExecutionContextAllocationStrategy::kUSER_MANAGED) {
                absent("memory of its own for a context");
            }
            if (how.kernels != DynamicShapesKernelSpecializationStrategy::kEAGER) {
                end("what is captured is not what is compiled for the shape");
            }
            if (how.cache == nullptr || (cache_ != nullptr && how.cache != cache_)) {
                end("a context does not share what was compiled for the others");
            }
            cache_ = how.cache;
            return create();
        }
#elif INTERFACE >= 10
        IExecutionContext* createExecutionContext(ExecutionContextAllocationStrategy strategy) noexcept override {
            if (strategy != ExecutionContextAllocationStrategy::kUSER_MANAGED) {
                absent("memory of its own for a context");
            }
            return create();
        }
#else
        IExecutionContext* createExecutionContextWithoutDeviceMemory() noexcept override { return create(); }
#endif

    private:
        IExecutionContext* create() {
            must_be_current();
            const std::lock_guard lock(shared_.mutex);
            if (shared_.contexts >= network_.contexts) {
                say(Severity::kERROR,
                    "[virtualMemoryBuffer.cpp::resizePhysical::140] Error Code 2: OutOfMemory (Requested "
                    "size was 1024 bytes.)");
                return nullptr;
            }
            // Of TensorRT 8.6 the first context alone has the profile from the start; later versions share it.
            const bool has_profile = INTERFACE >= 10 || !shared_.profile_taken;
            shared_.profile_taken = true;
            return new Context(network_, shared_, has_profile);
        }

        const Network network_;
        Shared shared_;
#ifdef TRT_MAJOR_RTX
        const IRuntimeCache* cache_ = nullptr;
#endif
    };

    int& engines_;
    Work work_;
};

class Runtime final : public IRuntime {
public:
    Runtime() { mImpl = &work_; }
    ~Runtime() noexcept override {
        if (work_.engines != 0) {
            end("a runtime went before its engines");
        }
    }

private:
    class Work final : public VRuntimeStubs {
    public:
        IPluginRegistry& getPluginRegistry() noexcept override { return registry_; }
        void setEngineHostCodeAllowed(bool allowed) noexcept override { host_code_ = allowed; }

#if INTERFACE >= 10
        ICudaEngine* deserializeCudaEngine(void const* data, std::size_t size) noexcept override {
            return load(data, size);
        }
#else
        ICudaEngine* deserializeCudaEngine(void const* data, std::size_t size, IPluginFactory*) noexcept override {
            return load(data, size);
        }
#endif

        int engines = 0;

    private:
        ICudaEngine* load(void const* data, std::size_t size) {
            must_be_current();
            Network network(std::string(static_cast<char const*>(data), size));
            for (const auto& [severity, words] : network.messages) {
                say(severity, words);
            }
            if (!network.elsewhere.empty()) {
                std::thread([&network] {
                    for (const auto& [severity, words] : network.elsewhere) {
                        say(severity, words);
                    }
                }).join();
            }
            std::string refused;
            if (!network.whole) {
                refused =
                    "1: [stdArchiveReader.cpp::StdArchiveReader::32] Error Code 1: Serialization (Serialization "
                    "assertion magicTagRead == kMAGIC_TAG failed.Magic tag does not match)";
            } else if (!network.plugin.empty() && !registry_.knows(network.plugin)) {
                refused =
                    "1: [pluginV2Runner.cpp::load::303] Error Code 1: Serialization (Serialization assertion creator "
                    "failed.Cannot deserialize plugin since corresponding IPluginCreator not found in Plugin Registry)";
            } else if (network.has("host-code") && !host_code_) {
                refused = "Engine has host code, which is not allowed";
            }
            if (!refused.empty()) {
                say(Severity::kERROR, refused);
                return nullptr;
            }
            if (network.fails("loading")) {
                return nullptr;
            }
            return new Engine(std::move(network), engines);
        }

        Registry registry_;
        bool host_code_ = false;
    };

    Work work_;
};

}  // namespace

}  // namespace nvinfer1

extern "C" {

std::int32_t getInferLibVersion() noexcept {
#ifdef TRT_MAJOR_RTX
    int major = TRT_MAJOR_RTX;
    int minor = TRT_MINOR_RTX;
    int patch = TRT_PATCH_RTX;
#else
    int major = NV_TENSORRT_MAJOR;
    int minor = NV_TENSORRT_MINOR;
    int patch = NV_TENSORRT_PATCH;
#endif
    if (const char* given = std::getenv("TENSORRT_STANDIN_VERSION")) {
        std::sscanf(given, "%d.%d.%d", &major, &minor, &patch);
    }
    return major * (INTERFACE < 10 && major < 10 ? 1000 : 10000) + minor * 100 + patch;
}

void* createInferRuntime_INTERNAL(void* logger, std::int32_t) noexcept {
    nvinfer1::must_be_current();
    nvinfer1::take_logger(logger);
    if (std::getenv("TENSORRT_STANDIN_NULL") != nullptr) {
        nvinfer1::say(nvinfer1::Severity::kERROR, "CUDA initialization failure with error: 222");
        return nullptr;
    }
    return new nvinfer1::Runtime;
}

// How often so many images were run together.
extern "C" long standin_runs(int images) {
    return nvinfer1::runs_of(images);
}

// For libnvinfer_plugin: what it has.
void standin_register(const char* name, void* logger) {
    nvinfer1::take_logger(logger);
    nvinfer1::global_creators().insert(name);
}
}
