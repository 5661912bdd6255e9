// TRT_SiLU and TRT_HardSwish for TensorRT 8.6, as IPluginV2DynamicExt. Loading the library registers the creators where
// libnvinfer is already in the process; initTrtdetPlugins does so at any later time.
#include "host.h"

#if NV_TENSORRT_MAJOR >= 10
#error "plugin_v2.cpp is for TensorRT 8.6; plugin_v3.cpp is for TensorRT 10 and later"
#endif

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace trtdet {
namespace {

using nvinfer1::DataType;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginTensorDesc;

// A network that is quantised by dynamic ranges gives each tensor its step only when it runs.
float implicit_step(PluginTensorDesc const& tensor, const char* which) {
    if (tensor.type != DataType::kINT8) {
        return 0.0f;
    }
    if (!std::isfinite(tensor.scale) || tensor.scale <= 0.0f) {
        throw std::invalid_argument(std::string("the INT8 ") + which + " has scale " + std::to_string(tensor.scale) +
                                    "; set a dynamic range, or write output_type and the scales into the node");
    }
    return tensor.scale;
}

class Plugin final : public nvinfer1::IPluginV2DynamicExt {
public:
    explicit Plugin(Parameters parameters) : parameters_(std::move(parameters)), state_(parameters_.serialise()) {}

    // A clone shares the table: TensorRT clones an initialised plugin for each context and initialises it no more.
    Plugin(const Plugin& other)
        : IPluginV2DynamicExt(), parameters_(other.parameters_), state_(other.state_), namespace_(other.namespace_),
          table_(other.table_) {}
    Plugin& operator=(const Plugin&) = delete;

    IPluginV2DynamicExt* clone() const noexcept override {
        return guarded<Plugin*>(parameters_.activation, nullptr, [this] { return new Plugin(*this); });
    }

    char const* getPluginType() const noexcept override { return name_of(parameters_.activation); }
    char const* getPluginVersion() const noexcept override { return kVersion; }
    char const* getPluginNamespace() const noexcept override { return namespace_.c_str(); }
    void setPluginNamespace(char const* name) noexcept override {
        guarded(parameters_.activation, 0, [&] {
            namespace_ = name;
            return 0;
        });
    }

    std::int32_t getNbOutputs() const noexcept override { return 1; }

    DataType getOutputDataType(std::int32_t, DataType const* input_types, std::int32_t) const noexcept override {
        return static_cast<DataType>(parameters_.output_for(static_cast<Type>(input_types[0])));
    }

    nvinfer1::DimsExprs getOutputDimensions(std::int32_t, nvinfer1::DimsExprs const* inputs, std::int32_t,
                                            nvinfer1::IExprBuilder&) noexcept override {
        return inputs[0];
    }

    bool supportsFormatCombination(std::int32_t pos, PluginTensorDesc const* in_out, std::int32_t inputs,
                                   std::int32_t outputs) noexcept override {
        if (inputs != 1 || outputs != 1 || pos < 0 || pos > 1) {
            return false;
        }
        if (pos == 0) {
            Layout layout{};
            PluginTensorDesc const& x = in_out[0];
            return (x.type == DataType::kFLOAT || x.type == DataType::kHALF || x.type == DataType::kINT8) &&
                   layout_of(x, layout);
        }
        // Where ranges quantise the network, the builder chooses the type of each tensor by itself.
        return combination_served(in_out[0], in_out[1], parameters_, parameters_.output_type == kSameAsInput);
    }

    void configurePlugin(DynamicPluginTensorDesc const* in, std::int32_t, DynamicPluginTensorDesc const*,
                         std::int32_t) noexcept override {
        // Cannot refuse: said here, early, and enqueue fails with the same words.
        guarded(parameters_.activation, 0, [&] {
            nvinfer1::Dims const& dims = in[0].desc.dims;
            if (dims.nbDims >= 2 && dims.d[1] >= 0) {
                parameters_.check_channels(dims.d[1]);
            }
            return 0;
        });
    }

    std::size_t getWorkspaceSize(PluginTensorDesc const*, std::int32_t, PluginTensorDesc const*,
                                 std::int32_t) const noexcept override {
        return 0;
    }

    std::int32_t initialize() noexcept override {
        return guarded(parameters_.activation, 1, [this] {
            ensure_table(table_, parameters_);
            return 0;
        });
    }

    void terminate() noexcept override { table_.reset(); }

    std::int32_t enqueue(PluginTensorDesc const* in, PluginTensorDesc const* out, void const* const* inputs,
                         void* const* outputs, void*, cudaStream_t stream) noexcept override {
        return guarded(parameters_.activation, 1, [&] {
            if (table_ == nullptr) {
                throw std::runtime_error("enqueue before initialize: the parameters are not on the device");
            }
            Steps steps{0.0f, 0.0f};
            if (parameters_.output_type == kSameAsInput) {
                steps = Steps{implicit_step(in[0], "input"), implicit_step(out[0], "output")};
            }
            run(parameters_, *table_, steps, in[0], out[0], inputs[0], outputs[0], stream);
            return 0;
        });
    }

    std::size_t getSerializationSize() const noexcept override { return state_.size(); }
    void serialize(void* buffer) const noexcept override { std::memcpy(buffer, state_.data(), state_.size()); }
    void destroy() noexcept override { delete this; }

private:
    Parameters parameters_;
    std::vector<char> state_;
    std::string namespace_{kNamespace};
    std::shared_ptr<const DeviceTable> table_;
};

class Creator final : public nvinfer1::IPluginCreator {
public:
    explicit Creator(Activation activation) : activation_(activation) {}

    char const* getPluginName() const noexcept override { return name_of(activation_); }
    char const* getPluginVersion() const noexcept override { return kVersion; }
    char const* getPluginNamespace() const noexcept override { return kNamespace; }
    // The namespace is the plugin's own: the ONNX node names it.
    void setPluginNamespace(char const*) noexcept override {}
    PluginFieldCollection const* getFieldNames() noexcept override { return attribute_names(); }

    nvinfer1::IPluginV2* createPlugin(char const*, PluginFieldCollection const* fields) noexcept override {
        return guarded<nvinfer1::IPluginV2*>(activation_, nullptr, [&] {
            if (fields == nullptr) {
                throw std::invalid_argument("no attributes were given");
            }
            return new Plugin(read_attributes(activation_, *fields));
        });
    }

    nvinfer1::IPluginV2* deserializePlugin(char const*, void const* data, std::size_t length) noexcept override {
        return guarded<nvinfer1::IPluginV2*>(activation_, nullptr, [&] {
            Parameters parameters = Parameters::deserialise(data, length);
            if (parameters.activation != activation_) {
                throw std::invalid_argument(std::string("the engine holds a ") + name_of(parameters.activation));
            }
            return new Plugin(std::move(parameters));
        });
    }

private:
    Activation activation_;
};

struct Creators {
    Creator silu{Activation::kSiLU};
    Creator hard_swish{Activation::kHardSwish};
    nvinfer1::IPluginCreator* const all[2] = {&silu, &hard_swish};
};

Creators& creators() {
    static Creators made;
    return made;
}

// Null where libnvinfer is not in the process. Looked up and not linked, so that the library loads without it.
nvinfer1::IPluginRegistry* registry() noexcept {
    void* const symbol = dlsym(RTLD_DEFAULT, "getPluginRegistry");
    return symbol == nullptr ? nullptr : reinterpret_cast<nvinfer1::IPluginRegistry* (*)()>(symbol)();
}

bool is_registered(nvinfer1::IPluginRegistry const& registry, nvinfer1::IPluginCreator const* creator) noexcept {
    std::int32_t count = 0;
    nvinfer1::IPluginCreator* const* const all = registry.getPluginCreatorList(&count);
    return std::find(all, all + count, creator) != all + count;
}

bool register_creators() noexcept {
    nvinfer1::IPluginRegistry* const found = registry();
    bool done = found != nullptr;
    for (nvinfer1::IPluginCreator* creator : creators().all) {
        done = done && (is_registered(*found, creator) || found->registerCreator(*creator, kNamespace));
    }
    return done;
}

struct AtLoad {
    AtLoad() noexcept { register_creators(); }
} const at_load;

}  // namespace
}  // namespace trtdet

#define TRTDET_EXPORT extern "C" __attribute__((visibility("default")))

// Registers both creators, once however often it is called; false where libnvinfer is not in the process.
TRTDET_EXPORT bool initTrtdetPlugins() noexcept { return trtdet::register_creators(); }

// What IPluginRegistry::loadLibrary looks for. It registers what it is given and fails on what is there already, so
// the registration made at load is taken back first.
TRTDET_EXPORT nvinfer1::IPluginCreator* const* getPluginCreators(std::int32_t& count) noexcept {
    if (nvinfer1::IPluginRegistry* const found = trtdet::registry()) {
        for (nvinfer1::IPluginCreator* creator : trtdet::creators().all) {
            if (trtdet::is_registered(*found, creator)) {
                found->deregisterCreator(*creator);
            }
        }
    }
    count = 2;
    return trtdet::creators().all;
}

TRTDET_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept { trtdet::set_logger_finder(finder); }
