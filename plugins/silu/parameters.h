// What a node of TRT_SiLU or TRT_HardSwish says, checked, and the bytes an engine keeps of it. Plain C++: needs
// neither TensorRT nor CUDA.
#ifndef TRTDET_SILU_PARAMETERS_H
#define TRTDET_SILU_PARAMETERS_H

#include "kernel.cuh"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace trtdet {

// The values of nvinfer1::DataType.
enum class Type : std::int32_t { kFloat = 0, kHalf = 1, kInt8 = 2 };

constexpr std::int32_t kSameAsInput = -1;

struct Parameters {
    Activation activation = Activation::kSiLU;
    std::int32_t output_type = kSameAsInput;
    std::vector<float> input_scale{1.0f};  // each of length 1 or C
    std::vector<float> factor{1.0f};
    std::vector<float> offset{0.0f};

    // Throws std::invalid_argument: a length other than 1 and C, a value that is not finite, an input_scale not above
    // 0, an output_type other than -1 to 2.
    void check() const;

    // 1 where every attribute is given once, else C.
    std::uint32_t channels() const;

    // Throws std::invalid_argument: the tensor has other channels than the attributes.
    void check_channels(std::int64_t channels) const;

    // channels() entries.
    std::vector<Channel> table() const;

    Type output_for(Type input) const;

    // In the machine's own byte order, as everything in an engine is.
    std::vector<char> serialise() const;

    // Throws std::invalid_argument: not written by serialise(), of another format, cut short or too long.
    static Parameters deserialise(const void* data, std::size_t length);
};

// "TRT_SiLU" or "TRT_HardSwish".
const char* name_of(Activation activation);

// How memory is divided; see kernel.cuh.
struct Layout {
    std::uint32_t vector = 1;
    bool channels_last = false;
};

// The extent of a tensor (N, C, ...) in a layout. Throws std::invalid_argument: fewer than two dimensions, a negative
// one, or 2^31 elements and more.
Extent extent_of(const std::vector<std::int64_t>& shape, Layout layout);

}  // namespace trtdet

#endif
