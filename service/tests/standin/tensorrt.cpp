// A stand-in for libnvinfer: what libtrtdet calls of TensorRT, with the real headers' interfaces, on memory and streams
// of the stand-in driver of tests/standin/cuda.c. What it cannot show: kernels, precision and speed of a GPU.
//
// It is strict. Whatever else is called ends the process, and so does what the real library does not survive: a call
// with no context current, an engine that goes before its contexts, a runtime that goes before its engines.
//
// An engine of it is a text of these lines:
//
//     standin                    the first one
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
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "stubs.hpp"

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

void say(Severity severity, const std::string& words) { the_logger->log(severity, words.c_str()); }

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
            if (key == "standin") {
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
#if NV_TENSORRT_MAJOR >= 10
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

// What the contexts of an engine share.
struct Shared {
    std::mutex mutex;
    int contexts = 0;
    int profiled = 0;  // those with the profile
    int made = 0;
};

class Context final : public IExecutionContext {
public:
    Context(const Network& network, Shared& shared) : work_(network, shared) { mImpl = &work_; }

private:
    class Work final : public apiv_stubs::VExecutionContextStubs {};
};

}  // namespace

}  // namespace nvinfer1
