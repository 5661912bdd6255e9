#include "host.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

namespace trtdet {
namespace {

// Set once while the library is loaded, read by every thread.
std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

nvinfer1::PluginField const kAttributes[] = {
    {"output_type", nullptr, nvinfer1::PluginFieldType::kINT32, 1},
    {"input_scale", nullptr, nvinfer1::PluginFieldType::kFLOAT32, 1},
    {"factor", nullptr, nvinfer1::PluginFieldType::kFLOAT32, 1},
    {"offset", nullptr, nvinfer1::PluginFieldType::kFLOAT32, 1},
};
nvinfer1::PluginFieldCollection const kAttributeNames{4, kAttributes};

bool type_of(nvinfer1::DataType type, Type& out) noexcept {
    switch (type) {
        case nvinfer1::DataType::kFLOAT: out = Type::kFloat; return true;
        case nvinfer1::DataType::kHALF: out = Type::kHalf; return true;
        case nvinfer1::DataType::kINT8: out = Type::kInt8; return true;
        default: return false;
    }
}

std::vector<float> floats(nvinfer1::PluginField const& field) {
    if (field.type != nvinfer1::PluginFieldType::kFLOAT32 || field.data == nullptr || field.length < 1) {
        throw std::invalid_argument(std::string("attribute '") + field.name + "' must be floats, of length 1 or C");
    }
    const float* values = static_cast<const float*>(field.data);
    return std::vector<float>(values, values + field.length);
}

void check_cuda(cudaError_t status, const char* what) {
    if (status != cudaSuccess) {
        throw std::runtime_error(std::string(what) + " failed: " + cudaGetErrorString(status));
    }
}

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept { logger_finder.store(finder); }

void log_error(Activation activation, const char* message) noexcept {
    try {
        const std::string text = std::string("trtdet::") + name_of(activation) + ": " + message;
        nvinfer1::ILoggerFinder* const finder = logger_finder.load();
        nvinfer1::ILogger* const logger = finder == nullptr ? nullptr : finder->findLogger();
        if (logger != nullptr) {
            logger->log(nvinfer1::ILogger::Severity::kERROR, text.c_str());
        } else {
            std::fprintf(stderr, "%s\n", text.c_str());
        }
    } catch (...) {
        // Out of memory while saying why: there is nothing left to say it with.
    }
}

nvinfer1::PluginFieldCollection const* attribute_names() noexcept { return &kAttributeNames; }

Parameters read_attributes(Activation activation, nvinfer1::PluginFieldCollection const& fields) {
    Parameters parameters;
    parameters.activation = activation;
    for (std::int32_t index = 0; index < fields.nbFields; ++index) {
        nvinfer1::PluginField const& field = fields.fields[index];
        if (std::strcmp(field.name, "output_type") == 0) {
            if (field.type != nvinfer1::PluginFieldType::kINT32 || field.data == nullptr || field.length != 1) {
                throw std::invalid_argument("attribute 'output_type' must be one integer of 32 bits");
            }
            std::memcpy(&parameters.output_type, field.data, sizeof parameters.output_type);
        } else if (std::strcmp(field.name, "input_scale") == 0) {
            parameters.input_scale = floats(field);
        } else if (std::strcmp(field.name, "factor") == 0) {
            parameters.factor = floats(field);
        } else if (std::strcmp(field.name, "offset") == 0) {
            parameters.offset = floats(field);
        }
    }
    parameters.check();
    return parameters;
}

bool layout_of(nvinfer1::PluginTensorDesc const& tensor, Layout& layout) noexcept {
    using nvinfer1::DataType;
    using nvinfer1::TensorFormat;
    const bool half = tensor.type == DataType::kHALF;
    const bool int8 = tensor.type == DataType::kINT8;
    if (tensor.format == TensorFormat::kLINEAR) {
        layout = Layout{1, false};
        return true;
    }
    // These formats pack the dimension third to last, which is axis 1 only here.
    if (tensor.dims.nbDims != 4) {
        return false;
    }
    switch (tensor.format) {
        case TensorFormat::kCHW2: layout = Layout{2, false}; return half;
        case TensorFormat::kHWC8: layout = Layout{8, true}; return half;
        case TensorFormat::kCHW4: layout = Layout{4, false}; return int8;
        case TensorFormat::kCHW32: layout = Layout{32, false}; return int8;
        case TensorFormat::kHWC16:
            layout = Layout{16, true};
#if NV_TENSORRT_MAJOR > 10 || (NV_TENSORRT_MAJOR == 10 && NV_TENSORRT_MINOR >= 9)
            return half || int8;
#else
            return half;
#endif
        default: return false;
    }
}

bool combination_served(nvinfer1::PluginTensorDesc const& x, nvinfer1::PluginTensorDesc const& y,
                        Parameters const& parameters, bool free_types) noexcept {
    Type in{};
    Type out{};
    Layout layout{};
    return type_of(x.type, in) && type_of(y.type, out) && x.format == y.format && layout_of(x, layout) &&
           (free_types || out == parameters.output_for(in)) && served(in, out, layout.vector);
}

void ensure_table(std::shared_ptr<const DeviceTable>& table, Parameters const& parameters) {
    int device = -1;
    check_cuda(cudaGetDevice(&device), "finding the current device");
    if (table == nullptr || table->device() != device) {
        cudaError_t status = cudaSuccess;
        table = DeviceTable::upload(parameters.table(), status);
        check_cuda(status, "copying the parameters to the device");
    }
}

void run(Parameters const& parameters, DeviceTable const& table, Steps steps, nvinfer1::PluginTensorDesc const& x_desc,
         nvinfer1::PluginTensorDesc const& y_desc, void const* x, void* y, cudaStream_t stream) {
    Launch what{};
    Layout layout{};
    if (!type_of(x_desc.type, what.in) || !type_of(y_desc.type, what.out) || !layout_of(x_desc, layout)) {
        throw std::invalid_argument("a type or format that supportsFormatCombination did not offer");
    }
    const std::vector<std::int64_t> shape(x_desc.dims.d, x_desc.dims.d + x_desc.dims.nbDims);
    what.activation = parameters.activation;
    what.vector = layout.vector;
    what.extent = extent_of(shape, layout);
    what.table = table.table();
    what.steps = steps;
    parameters.check_channels(what.extent.channels);
    check_cuda(launch(what, x, y, stream), "starting the kernel");
}

}  // namespace trtdet
