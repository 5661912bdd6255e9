// What the plugins of all TensorRT versions share: reading attributes, formats, and how an error is said.
#ifndef TRTDET_SILU_HOST_H
#define TRTDET_SILU_HOST_H

#include "launch.h"

#include <NvInfer.h>

#include <exception>
#include <memory>

namespace trtdet {

constexpr const char* kNamespace = "trtdet";
constexpr const char* kVersion = "1";

// Through the logger that TensorRT gave to setLoggerFinder, else to stderr.
void log_error(Activation activation, const char* message) noexcept;

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

// Runs `body`; an exception becomes a message and `failed`. Every virtual function that can throw goes through here:
// TensorRT calls them across a boundary that exceptions must not cross.
template <class Result, class Body>
Result guarded(Activation activation, Result failed, Body&& body) noexcept {
    try {
        return body();
    } catch (const std::exception& error) {
        log_error(activation, error.what());
    } catch (...) {
        log_error(activation, "an exception that is not std::exception");
    }
    return failed;
}

// The attributes that an ONNX node may carry, in the order of ATTRIBUTES in trtdet/backends/tensorrt/silu_aot.py.
nvinfer1::PluginFieldCollection const* attribute_names() noexcept;

// Throws std::invalid_argument: an attribute is of another type, or Parameters::check refuses its value. Attributes
// that are not this plugin's are left alone: TensorRT's parser hands over its own as well.
Parameters read_attributes(Activation activation, nvinfer1::PluginFieldCollection const& fields);

// True where the format is served for tensors of this type and rank.
bool layout_of(nvinfer1::PluginTensorDesc const& tensor, Layout& layout) noexcept;

// True where the plugin runs from x to y. `free_types`: the types need not be what output_type says.
bool combination_served(nvinfer1::PluginTensorDesc const& x, nvinfer1::PluginTensorDesc const& y,
                        Parameters const& parameters, bool free_types) noexcept;

// The table on the current device: `table` as it is, or a new one. Throws std::runtime_error where CUDA refuses.
void ensure_table(std::shared_ptr<const DeviceTable>& table, Parameters const& parameters);

// Throws std::runtime_error: CUDA refused; std::invalid_argument: shapes that do not fit.
void run(Parameters const& parameters, DeviceTable const& table, Steps steps, nvinfer1::PluginTensorDesc const& x_desc,
         nvinfer1::PluginTensorDesc const& y_desc, void const* x, void* y, cudaStream_t stream);

}  // namespace trtdet

#endif
