// TRT_SiLU and TRT_HardSwish for TensorRT 10 and 11, as IPluginV3. IPluginRegistry::loadLibrary finds the creators
// through getCreators; nothing of libnvinfer is needed to link or to load.
#include "host.h"

#if NV_TENSORRT_MAJOR < 10
#error "plugin_v3.cpp is for TensorRT 10 and later; plugin_v2.cpp is for TensorRT 8.6"
#endif

#include <cstring>
#include <stdexcept>

namespace trtdet {
namespace {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginV3;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginTensorDesc;

constexpr const char* kState = "state";

class Plugin final : public IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuild,
                     public nvinfer1::IPluginV3OneRuntime {
public:
    explicit Plugin(Parameters parameters) : parameters_(std::move(parameters)), state_(parameters_.serialise()) {}

    // The fields point into this object's own state, so a copy makes them anew.
    Plugin(const Plugin& other)
        : IPluginV3(), IPluginV3OneCore(), IPluginV3OneBuild(), IPluginV3OneRuntime(),
          parameters_(other.parameters_), state_(other.state_), table_(other.table_) {}
    Plugin& operator=(const Plugin&) = delete;

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override {
        switch (type) {
            case nvinfer1::PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
            case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
            case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }

    IPluginV3* clone() noexcept override {
        return guarded<IPluginV3*>(parameters_.activation, nullptr, [this] { return new Plugin(*this); });
    }

    char const* getPluginName() const noexcept override { return name_of(parameters_.activation); }
    char const* getPluginVersion() const noexcept override { return kVersion; }
    char const* getPluginNamespace() const noexcept override { return kNamespace; }

    std::int32_t getNbOutputs() const noexcept override { return 1; }

    std::int32_t getOutputDataTypes(DataType* output_types, std::int32_t outputs, DataType const* input_types,
                                    std::int32_t inputs) const noexcept override {
        return guarded(parameters_.activation, 1, [&] {
            if (inputs != 1 || outputs != 1) {
                throw std::invalid_argument("takes one input and gives one output");
            }
            output_types[0] = static_cast<DataType>(parameters_.output_for(static_cast<Type>(input_types[0])));
            return 0;
        });
    }

    std::int32_t getOutputShapes(DimsExprs const* inputs, std::int32_t, DimsExprs const*, std::int32_t,
                                 DimsExprs* outputs, std::int32_t, nvinfer1::IExprBuilder&) noexcept override {
        outputs[0] = inputs[0];
        return 0;
    }

    bool supportsFormatCombination(std::int32_t pos, DynamicPluginTensorDesc const* in_out, std::int32_t inputs,
                                   std::int32_t outputs) noexcept override {
        if (inputs != 1 || outputs != 1 || pos < 0 || pos > 1) {
            return false;
        }
        if (pos == 0) {
            Layout layout{};
            PluginTensorDesc const& x = in_out[0].desc;
            return (x.type == DataType::kFLOAT || x.type == DataType::kHALF || x.type == DataType::kINT8) &&
                   layout_of(x, layout);
        }
        return combination_served(in_out[0].desc, in_out[1].desc, parameters_, false);
    }

    std::int32_t configurePlugin(DynamicPluginTensorDesc const* in, std::int32_t, DynamicPluginTensorDesc const*,
                                 std::int32_t) noexcept override {
        return guarded(parameters_.activation, 1, [&] {
            nvinfer1::Dims const& dims = in[0].desc.dims;
            if (dims.nbDims < 2) {
                throw std::invalid_argument("the input has " + std::to_string(dims.nbDims) +
                                            " dimensions; at least (N, C) is needed");
            }
            if (dims.d[1] >= 0) {
                parameters_.check_channels(dims.d[1]);
            }
            return 0;
        });
    }

    // Both the builder, before it times, and every context call this before the first enqueue.
    std::int32_t onShapeChange(PluginTensorDesc const* in, std::int32_t, PluginTensorDesc const*,
                               std::int32_t) noexcept override {
        return guarded(parameters_.activation, 1, [&] {
            parameters_.check_channels(in[0].dims.nbDims < 2 ? 0 : in[0].dims.d[1]);
            ensure_table(table_, parameters_);
            return 0;
        });
    }

    IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override {
        return guarded<IPluginV3*>(parameters_.activation, nullptr, [this] {
            auto attached = std::make_unique<Plugin>(*this);
            ensure_table(attached->table_, parameters_);
            return attached.release();
        });
    }

    std::int32_t enqueue(PluginTensorDesc const* in, PluginTensorDesc const* out, void const* const* inputs,
                         void* const* outputs, void*, cudaStream_t stream) noexcept override {
        return guarded(parameters_.activation, 1, [&] {
            if (table_ == nullptr) {
                throw std::runtime_error("enqueue before onShapeChange: the parameters are not on the device");
            }
            run(parameters_, *table_, Steps{0.0f, 0.0f}, in[0], out[0], inputs[0], outputs[0], stream);
            return 0;
        });
    }

    PluginFieldCollection const* getFieldsToSerialize() noexcept override {
        field_ = PluginField{kState, state_.data(), nvinfer1::PluginFieldType::kINT8,
                             static_cast<std::int32_t>(state_.size())};
        fields_ = PluginFieldCollection{1, &field_};
        return &fields_;
    }

private:
    Parameters parameters_;
    std::vector<char> state_;
    std::shared_ptr<const DeviceTable> table_;
    PluginField field_;
    PluginFieldCollection fields_{};
};

class Creator final : public nvinfer1::IPluginCreatorV3One {
public:
    explicit Creator(Activation activation) : activation_(activation) {}

    char const* getPluginName() const noexcept override { return name_of(activation_); }
    char const* getPluginVersion() const noexcept override { return kVersion; }
    char const* getPluginNamespace() const noexcept override { return kNamespace; }
    PluginFieldCollection const* getFieldNames() noexcept override { return attribute_names(); }

    IPluginV3* createPlugin(char const*, PluginFieldCollection const* fields,
                            nvinfer1::TensorRTPhase phase) noexcept override {
        return guarded<IPluginV3*>(activation_, nullptr, [&] {
            if (fields == nullptr) {
                throw std::invalid_argument("no attributes were given");
            }
            return new Plugin(phase == nvinfer1::TensorRTPhase::kBUILD ? read_attributes(activation_, *fields)
                                                                      : restored(*fields));
        });
    }

private:
    Parameters restored(PluginFieldCollection const& fields) const {
        for (std::int32_t index = 0; index < fields.nbFields; ++index) {
            PluginField const& field = fields.fields[index];
            if (std::strcmp(field.name, kState) == 0) {
                Parameters parameters = Parameters::deserialise(field.data, static_cast<std::size_t>(field.length));
                if (parameters.activation != activation_) {
                    throw std::invalid_argument(std::string("the engine holds a ") + name_of(parameters.activation));
                }
                return parameters;
            }
        }
        throw std::invalid_argument("the engine holds no state for this layer; build it again with this library");
    }

    Activation activation_;
};

struct Creators {
    Creator silu{Activation::kSiLU};
    Creator hard_swish{Activation::kHardSwish};
    nvinfer1::IPluginCreatorInterface* const all[2] = {&silu, &hard_swish};
};

Creators& creators() {
    static Creators made;
    return made;
}

}  // namespace
}  // namespace trtdet

#define TRTDET_EXPORT extern "C" __attribute__((visibility("default")))

// What IPluginRegistry::loadLibrary looks for.
TRTDET_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(std::int32_t& count) noexcept {
    count = 2;
    return trtdet::creators().all;
}

TRTDET_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept { trtdet::set_logger_finder(finder); }
