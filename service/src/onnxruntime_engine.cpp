#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "efficient_nms.hpp"
#include "library.hpp"
#include "onnxruntime_api.hpp"
#include "text.hpp"
#include "trtdet/cores.hpp"
#include "trtdet/engine.hpp"
#include "trtdet/errors.hpp"

namespace trtdet {

namespace {

namespace fs = std::filesystem;

constexpr const char* stem = "libonnxruntime.so";
constexpr const char* plugin_domain = "trt.plugins";

using Listener = std::function<void(int severity, std::string_view message)>;

// The library under one of its names: wheels have it as libonnxruntime.so.1.20.0 alone, archives and packages with
// links that are shorter.
Library load(const std::vector<fs::path>& folders) {
    for (const fs::path& folder : folders) {
        std::set<std::string> names;
        std::error_code error;
        for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
            const std::string name = entry->path().filename().string();
            if (name == stem || name.rfind(stem + std::string("."), 0) == 0) {
                names.insert(name);
            }
        }
        if (!names.empty()) {
            return Library(*names.begin(), {folder});
        }
    }
    Library versioned(stem + std::string(".1"), {});
    return versioned ? versioned : Library(stem, {});
}

// The loaded library with its environment, of which a process has one. It stays to the end of the process: threads and
// exit handlers of the library do not survive being unloaded.
class OnnxRuntime {
public:
    // Throws UnavailableError: there is none, or an older one than is needed.
    static OnnxRuntime& of(const std::vector<fs::path>& folders) {
        static std::mutex mutex;
        static auto& made = *new std::map<const void*, std::unique_ptr<OnnxRuntime>>;
        // The library reads it when it is loaded, and sends usage data without it. A value of the user's stays.
        static const int telemetry_off = setenv("ORT_DISABLE_TELEMETRY", "1", 0);
        static_cast<void>(telemetry_off);
        const Library library = load(folders);
        if (!library) {
            throw UnavailableError(
                "onnxruntime cannot be loaded (" + library.why() +
                "); install it, or name the folder that has libonnxruntime.so, such as onnxruntime/capi of its Python "
                "package");
        }
        const std::lock_guard lock(mutex);
        std::unique_ptr<OnnxRuntime>& one = made[library.handle()];
        if (one == nullptr) {
            one = std::unique_ptr<OnnxRuntime>(new OnnxRuntime(library));
        }
        return *one;
    }

    // Throws for a status that is an error, with the library's own words.
    void check(ort::Status* status, const char* doing) const {
        if (status == nullptr) {
            return;
        }
        const std::string words = one_line(ort::GetErrorMessage(*api, status));
        ort::ReleaseStatus(*api, status);
        throw EngineError(name() + " failed at " + doing + ": " + words);
    }

    std::string name() const { return "onnxruntime " + version; }

    // Whom the library's messages are told to, for as long as somebody holds it.
    void tell(const std::shared_ptr<const Listener>& listener) {
        const std::lock_guard lock(mutex_);
        listeners_.erase(
            std::remove_if(listeners_.begin(), listeners_.end(), [](const auto& one) { return one.expired(); }),
            listeners_.end());
        listeners_.push_back(listener);
    }

    std::string version;
    const ort::Api* api = nullptr;
    ort::Env* env = nullptr;
    ort::MemoryInfo* memory = nullptr;
    ort::CustomOpDomain* plugins = nullptr;

private:
    explicit OnnxRuntime(const Library& library);

    static void log(void* own, int severity, const char*, const char*, const char*, const char* message) {
        // Nothing may be thrown through the library: a message that cannot be kept is dropped.
        try {
            auto& self = *static_cast<OnnxRuntime*>(own);
            std::vector<std::shared_ptr<const Listener>> listeners;
            {
                const std::lock_guard lock(self.mutex_);
                for (const auto& one : self.listeners_) {
                    listeners.push_back(one.lock());
                }
            }
            for (const auto& listener : listeners) {
                if (listener != nullptr && *listener) {
                    // 4 is fatal, 0 verbose; told as TensorRT tells: 0 fatal, 4 verbose.
                    (*listener)(4 - severity, message);
                }
            }
        } catch (...) {
        }
    }

    std::mutex mutex_;
    std::vector<std::weak_ptr<const Listener>> listeners_;
};

// Releases what the library made.
template <typename Made, typename Release>
std::shared_ptr<Made> held(const OnnxRuntime& library, Made* made, Release release) {
    return std::shared_ptr<Made>(made, [&library, release](Made* one) { release(*library.api, one); });
}

// EfficientNMS_TRT of one node, which finds the functions it needs in the library that made it.
struct EfficientKernel {
    EfficientKernel(const ort::Api& of, const ort::KernelInfo* info) : api(of) {
        attributes.score_threshold = real(info, "score_threshold", 0);
        attributes.iou_threshold = real(info, "iou_threshold", 0);
        attributes.max_output_boxes = static_cast<int>(std::max<std::int64_t>(0, integer(info, "max_output_boxes", 0)));
        attributes.background_class = static_cast<int>(integer(info, "background_class", -1));
        attributes.score_activation = integer(info, "score_activation", 0) != 0;
        attributes.class_agnostic = integer(info, "class_agnostic", 0) != 0;
        attributes.box_coding = integer(info, "box_coding", 0) != 0;
    }

    // Nothing may be thrown through the library: a count that no reader takes says that there was no memory.
    void compute(ort::KernelContext* context) const noexcept {
        try {
            suppress(context);
        } catch (...) {
            if (auto* const counts = output<std::int32_t>(context, 0, {1, 1}); counts != nullptr) {
                *counts = -1;
            }
        }
    }

private:
    void suppress(ort::KernelContext* context) const {
        const auto [boxes, box_shape] = input(context, 0);
        const auto [scores, score_shape] = input(context, 1);
        if (box_shape.size() < 3 || score_shape.size() != 3) {
            return;
        }
        EfficientInput given;
        given.count = static_cast<std::size_t>(score_shape[1]);
        given.classes = static_cast<std::size_t>(score_shape[2]);
        given.per_class = box_shape.size() == 4 && box_shape[2] == score_shape[2] && box_shape[2] != 1;
        const std::int64_t batch = score_shape[0];
        const std::int64_t room = attributes.max_output_boxes;
        auto* const counts = output<std::int32_t>(context, 0, {batch, 1});
        auto* const found = output<float>(context, 1, {batch, room, 4});
        auto* const probabilities = output<float>(context, 2, {batch, room});
        auto* const classes = output<std::int32_t>(context, 3, {batch, room});
        for (std::int64_t image = 0; counts && found && probabilities && classes && image < batch; ++image) {
            given.boxes = boxes + image * box_shape[1] * (given.per_class ? box_shape[2] : 1) * 4;
            given.scores = scores + image * score_shape[1] * score_shape[2];
            efficient_nms(
                attributes, given,
                {counts + image, found + image * room * 4, probabilities + image * room, classes + image * room});
        }
    }

    // What fails here leaves an output out, and the run fails for it.
    bool ok(ort::Status* status) const {
        if (status != nullptr) {
            ort::ReleaseStatus(api, status);
        }
        return status == nullptr;
    }

    float real(const ort::KernelInfo* info, const char* name, float otherwise) const {
        float value = 0;
        return ok(ort::KernelInfoGetAttribute_float(api, info, name, &value)) ? value : otherwise;
    }

    std::int64_t integer(const ort::KernelInfo* info, const char* name, std::int64_t otherwise) const {
        std::int64_t value = 0;
        return ok(ort::KernelInfoGetAttribute_int64(api, info, name, &value)) ? value : otherwise;
    }

    std::pair<const float*, std::vector<std::int64_t>> input(
        const ort::KernelContext* context, std::size_t index) const {
        const ort::Value* value = nullptr;
        void* data = nullptr;
        ort::TensorInfo* info = nullptr;
        std::size_t count = 0;
        ok(ort::KernelContext_GetInput(api, context, index, &value));
        ok(ort::GetTensorMutableData(api, const_cast<ort::Value*>(value), &data));
        ok(ort::GetTensorTypeAndShape(api, value, &info));
        ok(ort::GetDimensionsCount(api, info, &count));
        std::vector<std::int64_t> shape(count);
        ok(ort::GetDimensions(api, info, shape.data(), count));
        ort::ReleaseTensorTypeAndShapeInfo(api, info);
        return {static_cast<const float*>(data), shape};
    }

    template <typename T>
    T* output(ort::KernelContext* context, std::size_t index, const std::vector<std::int64_t>& shape) const {
        ort::Value* value = nullptr;
        void* data = nullptr;
        ok(ort::KernelContext_GetOutput(api, context, index, shape.data(), shape.size(), &value));
        ok(ort::GetTensorMutableData(api, value, &data));
        return static_cast<T*>(data);
    }

    const ort::Api& api;
    EfficientNms attributes;
};

const ort::CustomOp efficient_operator = {
    ort::api_version,
    [](const ort::CustomOp*, const ort::Api* api, const ort::KernelInfo* info) -> void* {
        return new EfficientKernel(*api, info);
    },
    [](const ort::CustomOp*) { return "EfficientNMS_TRT"; },
    [](const ort::CustomOp*) -> const char* { return nullptr; },
    [](const ort::CustomOp*, std::size_t) { return ort::ElementType::float32; },
    [](const ort::CustomOp*) { return std::size_t{2}; },
    [](const ort::CustomOp*, std::size_t index) {
        return index == 0 || index == 3 ? ort::ElementType::int32 : ort::ElementType::float32;
    },
    [](const ort::CustomOp*) { return std::size_t{4}; },
    [](void* kernel, ort::KernelContext* context) { static_cast<EfficientKernel*>(kernel)->compute(context); },
    [](void* kernel) { delete static_cast<EfficientKernel*>(kernel); },
    [](const ort::CustomOp*, std::size_t) { return 0; },
    [](const ort::CustomOp*, std::size_t) { return 0; },
};

OnnxRuntime::OnnxRuntime(const Library& library) {
    const auto base = library.function<const ort::ApiBase*()>("OrtGetApiBase");
    if (base == nullptr) {
        throw UnavailableError(
            std::string(stem) +
            " is no library of onnxruntime: it has no OrtGetApiBase; name the folder of another one");
    }
    version = base()->version();
    api = base()->get_api(ort::api_version);
    if (api == nullptr) {
        throw UnavailableError(
            name() + " is too old: the C API of " + ort::first_library + " is needed; install a later version");
    }
    check(ort::CreateEnvWithCustomLogger(*api, &log, this, ort::severity_error, "trtdet", &env), "starting");
    check(ort::CreateCpuMemoryInfo(*api, ort::arena_allocator, ort::default_memory, &memory), "starting");
    check(ort::CreateCustomOpDomain(*api, plugin_domain, &plugins), "starting");
    check(ort::CustomOpDomain_Add(*api, plugins, &efficient_operator), "starting");
}

ort::ElementType element_of(DType dtype) {
    switch (dtype) {
        case DType::float32:
            return ort::ElementType::float32;
        case DType::float16:
            return ort::ElementType::float16;
        case DType::int32:
            return ort::ElementType::int32;
        case DType::int64:
            return ort::ElementType::int64;
        case DType::int8:
            return ort::ElementType::int8;
        case DType::uint8:
            return ort::ElementType::uint8;
        case DType::boolean:
            return ort::ElementType::boolean;
    }
    return ort::ElementType::float32;
}

// A network that was loaded; all lanes run it, and share its threads. On two or three cores it is loaded twice: a run
// beside which there is no other has them all, of which it would leave one idle, and else one stays free of its
// threads, as two runs with as many threads each take longer than with one.
//
// Threads of the first, which wait while others decode and suppress, sleep. Those of a run alone spin until it ends: to
// wake one at each layer takes as long as the second core saves.
struct Network {
    static constexpr int few_runs = 4;
    static constexpr int most_cores = 3;  // of more, all but one are nearly all

    Network(
        OnnxRuntime& with, const std::vector<char>& model, const Manifest& manifest, const OnnxRuntimeOptions& options)
        : library(with),
          listener(std::make_shared<const Listener>(options.log)),
          input(manifest.input),
          outputs(manifest.outputs),
          remarks(options.in_place_of.empty() ? "" : ", as " + options.in_place_of) {
        library.tell(listener);
        session = load(model, options.threads > 0 ? options.threads : std::max(1, usable_cores() - 1), Waiting::asleep);
        fixed = check_tensors();
    }

    // Loads the model once more where a run alone is to have all cores; once it is chosen, as that takes as long again.
    void share(const std::vector<char>& model, const OnnxRuntimeOptions& options) {
        const int cores = usable_cores();
        if (options.threads == 0 && cores > 1 && cores <= most_cores) {
            alone = load(model, cores, Waiting::spinning);
        }
    }

    enum class Waiting { asleep, spinning };  // how a run's threads wait for its next layer

    std::shared_ptr<ort::Session> load(const std::vector<char>& model, int threads, Waiting waiting) const {
        const ort::Api& api = *library.api;
        ort::SessionOptions* made = nullptr;
        library.check(ort::CreateSessionOptions(api, &made), "starting");
        const auto chosen = held(library, made, ort::ReleaseSessionOptions);
        // As trtdet.backends.onnxruntime sets them: the same numbers come out.
        library.check(ort::SetIntraOpNumThreads(api, made, threads), "setting its threads");
        library.check(ort::SetSessionLogSeverityLevel(api, made, ort::severity_error), "starting");
        library.check(ort::AddCustomOpDomain(api, made, library.plugins), "starting");
        const std::pair<const char*, const char*> entries[] = {
            {"session.intra_op.allow_spinning", waiting == Waiting::spinning ? "1" : "0"},
            {"session.force_spinning_stop", "1"},
            // Q/DQ is computed as it is written: fused into integer kernels it saturates on CPUs without VNNI.
            {"session.disable_quant_qdq", "1"},
            // They take the zero of FP8 for the least that UINT8 holds, and drop the ReLU before it.
            {"optimization.disable_specified_optimizers", "ReluQuantRewrite;ClipQuantRewrite"},
        };
        for (const auto& [key, value] : entries) {
            library.check(ort::AddSessionConfigEntry(api, made, key, value), "starting");
        }
        ort::Session* loaded = nullptr;
        library.check(
            ort::CreateSessionFromArray(api, library.env, model.data(), model.size(), made, &loaded),
            "loading the model");
        return held(library, loaded, ort::ReleaseSession);
    }

    // A run of the network, by `alone` where there is no other beside it, and was none beside the last few.
    class Turn {
    public:
        explicit Turn(const Network& network) : network_(network) {
            const bool beside = network_.running.fetch_add(1) > 0;
            if (beside) {
                network_.undisturbed = 0;
            }
            const bool all = network_.alone != nullptr && !beside && network_.undisturbed >= few_runs;
            session_ = all ? network_.alone.get() : network_.session.get();
        }
        ~Turn() {
            if (network_.undisturbed < few_runs) {
                ++network_.undisturbed;
            }
            --network_.running;
        }
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;

        ort::Session* session() const { return session_; }

    private:
        const Network& network_;
        ort::Session* session_;
    };

    // Compares what the model takes and gives with the manifest. Returns the model's fixed batch, 0 where it is
    // dynamic.
    int check_tensors() const {
        const ort::Api& api = *library.api;
        std::size_t inputs = 0;
        library.check(ort::SessionGetInputCount(api, session.get(), &inputs), "reading the model's inputs");
        ort::TypeInfo* type = nullptr;
        library.check(ort::SessionGetInputTypeInfo(api, session.get(), 0, &type), "reading the model's inputs");
        const auto [element, shape] = tensor(type);
        const std::vector<std::int64_t> wanted = {-1, 3, input.preprocess.height, input.preprocess.width};
        bool same = inputs == 1 && element == ort::ElementType::float32 && shape.size() == wanted.size();
        for (std::size_t axis = 1; same && axis < wanted.size(); ++axis) {
            same = shape[axis] == wanted[axis] || shape[axis] < 0;
        }
        if (!same) {
            throw EngineError(
                "the model takes " + shape_text(shape) + ", and the manifest says float32 " + shape_text(wanted) +
                "; build the bundle again");
        }
        return shape[0] > 0 ? static_cast<int>(shape[0]) : 0;
    }

    std::pair<ort::ElementType, std::vector<std::int64_t>> tensor(ort::TypeInfo* type) const {
        const ort::Api& api = *library.api;
        const auto owned = held(library, type, ort::ReleaseTypeInfo);
        const ort::TensorInfo* info = nullptr;
        auto element = ort::ElementType::float32;
        std::size_t count = 0;
        library.check(ort::CastTypeInfoToTensorInfo(api, type, &info), "reading the model's inputs");
        if (info == nullptr) {
            throw EngineError("the model takes what is no tensor; build the bundle again");
        }
        library.check(ort::GetTensorElementType(api, info, &element), "reading the model's inputs");
        library.check(ort::GetDimensionsCount(api, info, &count), "reading the model's inputs");
        std::vector<std::int64_t> shape(count);
        library.check(ort::GetDimensions(api, info, shape.data(), count), "reading the model's inputs");
        return {element, shape};
    }

    OnnxRuntime& library;
    const std::shared_ptr<const Listener> listener;
    const InputSpec input;
    const std::vector<OutputSpec> outputs;
    std::string remarks;  // what Engine::ran_on() says behind the library
    std::shared_ptr<ort::Session> session;
    std::shared_ptr<ort::Session> alone;  // the same with all cores; empty where a number of threads was given
    int fixed = 0;
    mutable std::atomic<int> running{0};
    mutable std::atomic<int> undisturbed{few_runs};  // runs since the last that started beside another
    mutable std::atomic<int> warm{0};                // a lane was warmed up for so many images
};

class OnnxRuntimeLane final : public Lane {
public:
    explicit OnnxRuntimeLane(std::shared_ptr<const Network> network) : network_(std::move(network)) {
        input_.resize(capacity() * network_->input.preprocess.values());
        for (const OutputSpec& output : network_->outputs) {
            std::size_t size = size_of(output.dtype);
            for (std::size_t axis = 1; axis < output.shape.size(); ++axis) {
                size *= static_cast<std::size_t>(output.shape[axis]);
            }
            sizes_.push_back(size);
            outputs_.emplace_back(capacity() * size);
        }
    }

    Span<float> input() override { return input_; }

    void run(int batch) override {
        const Network::Turn turn(*network_);
        run_on(*turn.session(), batch);
    }

    int warm_up(int batch) override {
        std::fill(input_.begin(), input_.end(), 0.0F);
        // What the library keeps of a size is the session's, which all lanes share: other lanes than the first have
        // memory of their own alone to touch.
        const int from = network_->fixed > 0 || network_->warm.exchange(batch) >= batch ? batch : 1;
        for (ort::Session* const session : {network_->session.get(), network_->alone.get()}) {
            for (int size = from; size <= batch && session != nullptr; ++size) {
                run_on(*session, size);
            }
        }
        return 0;
    }

    TensorView output(std::size_t index) const override {
        const auto& bytes = outputs_.at(index);
        return {network_->outputs[index].dtype, bytes.data(), bytes.size()};
    }

private:
    std::size_t capacity() const { return static_cast<std::size_t>(network_->input.max_batch); }

    void run_on(ort::Session& session, int batch) {
        if (batch < 1 || static_cast<std::size_t>(batch) > capacity()) {
            throw EngineError(
                "the engine takes a batch of 1 to " + std::to_string(capacity()) + ", not of " + std::to_string(batch) +
                "; build it with --batch");
        }
        const Network& network = *network_;
        const int run = network.fixed > 0 ? network.fixed : batch;
        const std::size_t pixels = network.input.preprocess.values();
        for (auto image = static_cast<std::size_t>(batch); image < static_cast<std::size_t>(run); ++image) {
            std::copy_n(
                input_.begin() + static_cast<std::ptrdiff_t>((static_cast<std::size_t>(batch) - 1) * pixels), pixels,
                input_.begin() + static_cast<std::ptrdiff_t>(image * pixels));
        }
        const std::vector<std::int64_t> shape = {
            run, 3, network.input.preprocess.height, network.input.preprocess.width};
        const auto given = tensor(
            input_.data(), static_cast<std::size_t>(run) * pixels * sizeof(float), shape, ort::ElementType::float32);
        std::vector<std::shared_ptr<ort::Value>> made;
        std::vector<ort::Value*> values;
        std::vector<const char*> names;
        for (std::size_t index = 0; index < outputs_.size(); ++index) {
            const OutputSpec& output = network.outputs[index];
            std::vector<std::int64_t> whole = output.shape;
            whole[0] = run;
            made.push_back(tensor(
                outputs_[index].data(), static_cast<std::size_t>(run) * sizes_[index], whole,
                element_of(output.dtype)));
            values.push_back(made.back().get());
            names.push_back(output.name.c_str());
        }
        const char* const name = network.input.name.c_str();
        const ort::Value* const in = given.get();
        network.library.check(
            ort::Run(
                *network.library.api, &session, nullptr, &name, &in, std::size_t{1}, names.data(), names.size(),
                values.data()),
            "running the model");
    }

    // A tensor over memory that stays here.
    std::shared_ptr<ort::Value> tensor(
        void* data, std::size_t bytes, const std::vector<std::int64_t>& shape, ort::ElementType element) const {
        ort::Value* made = nullptr;
        network_->library.check(
            ort::CreateTensorWithDataAsOrtValue(
                *network_->library.api, network_->library.memory, data, bytes, shape.data(), shape.size(), element,
                &made),
            "making a tensor");
        return held(network_->library, made, ort::ReleaseValue);
    }

    const std::shared_ptr<const Network> network_;
    std::vector<float> input_;
    std::vector<std::size_t> sizes_;          // bytes of one image
    std::vector<std::vector<char>> outputs_;  // of all images
};

class OnnxRuntimeEngine final : public Engine {
public:
    explicit OnnxRuntimeEngine(std::shared_ptr<const Network> network) : network_(std::move(network)) {}

    const std::vector<OutputSpec>& outputs() const override { return network_->outputs; }
    int min_batch() const override { return network_->fixed > 0 ? network_->fixed : 1; }
    int opt_batch() const override { return network_->fixed > 0 ? network_->fixed : 1; }
    int max_batch() const override { return network_->input.max_batch; }
    int best_batch() const override { return min_batch(); }

    std::string ran_on() const override { return network_->library.name() + " (CPU)" + network_->remarks; }

    std::unique_ptr<Lane> new_lane() override { return std::make_unique<OnnxRuntimeLane>(network_); }

private:
    const std::shared_ptr<const Network> network_;
};

// Milliseconds of a run of one image by each network, the fastest of a few: the first plans memory, and other programs
// disturb some. They take turns, so that both are disturbed alike.
std::array<double, 2> fastest_runs(const std::array<std::shared_ptr<const Network>, 2>& networks) {
    constexpr int runs = 6;
    std::array<OnnxRuntimeLane, 2> lanes{OnnxRuntimeLane(networks[0]), OnnxRuntimeLane(networks[1])};
    std::array<double, 2> fastest{};
    for (int run = 0; run < runs; ++run) {
        for (std::size_t which = 0; which < lanes.size(); ++which) {
            const auto start = std::chrono::steady_clock::now();
            lanes[which].run(1);
            const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
            fastest[which] = run <= 1 ? took.count() : std::min(fastest[which], took.count());
        }
    }
    return fastest;
}

std::string in_milliseconds(double time) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%.2f ms", time);
    return text.data();
}

// Whether the network that was built is the one in FP32. The first bundles do not name that.
bool is_float(const Manifest& manifest) {
    return manifest.portable == manifest.float_model || manifest.portable == "fp32.onnx";
}

void check_as_built(const Manifest& manifest) {
    if (manifest.portable.empty()) {
        throw UnavailableError(
            "the bundle has no network for onnxruntime: " +
            std::string(
                manifest.implicit ? "it is quantised implicitly, so INT8 is in its engine alone; build it with "
                                    "--quantization explicit, or choose its network in FP32"
                                  : "an older trtdet built it; build it again"));
    }
}

void check_float(const Manifest& manifest) {
    if (manifest.float_model.empty() && !is_float(manifest)) {
        throw UnavailableError(
            "the bundle has no network in FP32; build it with --backend onnxruntime, which puts one into it, or with "
            "--fp32");
    }
}

}  // namespace

std::shared_ptr<Engine> open_onnxruntime(const Bundle& bundle, const OnnxRuntimeOptions& options) {
    const Manifest& manifest = bundle.manifest();
    const bool both = !manifest.portable.empty() && !manifest.float_model.empty() && !is_float(manifest);
    if (options.precision == Precision::in_float) {
        check_float(manifest);
    } else {
        check_as_built(manifest);
    }
    OnnxRuntime& library = OnnxRuntime::of(options.library_folders);
    const auto open = [&](const std::string& file) {
        return std::make_shared<Network>(library, bundle.read(file), manifest, options);
    };
    const auto chosen = [&](const std::shared_ptr<Network>& network, const std::string& file) {
        network->share(bundle.read(file), options);
        return std::make_shared<OnnxRuntimeEngine>(network);
    };
    if (options.precision == Precision::in_float && !is_float(manifest)) {
        const auto network = open(manifest.float_model);
        network->remarks += ", the bundle's network in FP32";
        return chosen(network, manifest.float_model);
    }
    const auto network = open(manifest.portable);
    if (options.precision == Precision::automatic && both) {
        const auto other = open(manifest.float_model);
        const auto [built, in_float] = fastest_runs({network, other});
        const auto& faster = in_float < built ? other : network;
        faster->remarks += (in_float < built ? ", the bundle's network in FP32, as it takes " +
                                                   in_milliseconds(in_float) + " an image and the one that was built "
                                             : ", the network as it was built, as it takes " + in_milliseconds(built) +
                                                   " an image and the one in FP32 ") +
                           in_milliseconds(std::max(built, in_float));
        return chosen(faster, in_float < built ? manifest.float_model : manifest.portable);
    }
    if (options.precision == Precision::automatic && !is_float(manifest) && options.log) {
        options.log(
            2,
            "INT8 and FP16 are computed here in FP32 and rounded, which takes longer than FP32 alone, and the bundle "
            "has no network in FP32; build it with --backend onnxruntime, which puts one into it, or with --fp32");
    }
    return chosen(network, manifest.portable);
}

}  // namespace trtdet
