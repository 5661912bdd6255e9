#include "parameters.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace trtdet {
namespace {

constexpr std::uint32_t kMagic = 0x554c5354;  // "TSLU"
constexpr std::uint32_t kFormat = 1;

// What serialise() writes before the values.
struct Header {
    std::uint32_t magic;
    std::uint32_t format;
    std::int32_t activation;
    std::int32_t output_type;
    std::uint32_t lengths[3];
};

void check_values(const char* name, const std::vector<float>& values, std::size_t channels, bool positive) {
    if (values.size() != 1 && values.size() != channels) {
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(values.size()) +
                                    " values; give 1, or one for each of the " + std::to_string(channels) + " channels");
    }
    for (const float value : values) {
        if (!std::isfinite(value) || (positive && value <= 0.0f)) {
            throw std::invalid_argument(std::string(name) + " holds " + std::to_string(value) + "; every value must be " +
                                        (positive ? "finite and above 0" : "finite"));
        }
    }
}

}  // namespace

const char* name_of(Activation activation) {
    return activation == Activation::kSiLU ? "TRT_SiLU" : "TRT_HardSwish";
}

std::uint32_t Parameters::channels() const {
    std::size_t most = input_scale.size();
    most = factor.size() > most ? factor.size() : most;
    most = offset.size() > most ? offset.size() : most;
    return static_cast<std::uint32_t>(most);
}

void Parameters::check() const {
    if (activation != Activation::kSiLU && activation != Activation::kHardSwish) {
        throw std::invalid_argument("unknown activation " + std::to_string(static_cast<int>(activation)));
    }
    if (output_type < kSameAsInput || output_type > static_cast<std::int32_t>(Type::kInt8)) {
        throw std::invalid_argument("output_type is " + std::to_string(output_type) +
                                    "; allowed: -1 (as the input), 0 (float32), 1 (float16), 2 (int8)");
    }
    check_values("input_scale", input_scale, channels(), true);
    check_values("factor", factor, channels(), false);
    check_values("offset", offset, channels(), false);
}

void Parameters::check_channels(std::int64_t count) const {
    if (channels() != 1 && count != static_cast<std::int64_t>(channels())) {
        throw std::invalid_argument("the input has " + std::to_string(count) + " channels and the attributes " +
                                    std::to_string(channels()) + "; give 1 value or one a channel");
    }
}

std::vector<Channel> Parameters::table() const {
    std::vector<Channel> entries(channels());
    const auto at = [](const std::vector<float>& values, std::size_t index) {
        return values[values.size() == 1 ? 0 : index];
    };
    for (std::size_t index = 0; index < entries.size(); ++index) {
        entries[index] = Channel{at(input_scale, index), at(factor, index), at(offset, index), 0.0f};
    }
    return entries;
}

Type Parameters::output_for(Type input) const {
    return output_type == kSameAsInput ? input : static_cast<Type>(output_type);
}

std::vector<char> Parameters::serialise() const {
    const std::vector<float>* const all[] = {&input_scale, &factor, &offset};
    Header header{kMagic, kFormat, static_cast<std::int32_t>(activation), output_type, {}};
    std::size_t length = sizeof header;
    for (std::size_t index = 0; index < 3; ++index) {
        header.lengths[index] = static_cast<std::uint32_t>(all[index]->size());
        length += all[index]->size() * sizeof(float);
    }
    std::vector<char> bytes(length);
    char* place = bytes.data();
    std::memcpy(place, &header, sizeof header);
    place += sizeof header;
    for (const std::vector<float>* values : all) {
        std::memcpy(place, values->data(), values->size() * sizeof(float));
        place += values->size() * sizeof(float);
    }
    return bytes;
}

Parameters Parameters::deserialise(const void* data, std::size_t length) {
    Header header{};
    if (data == nullptr || length < sizeof header) {
        throw std::invalid_argument("the engine holds " + std::to_string(length) + " bytes for this layer, fewer than the " +
                                    std::to_string(sizeof header) + " of a header; build the engine again");
    }
    std::memcpy(&header, data, sizeof header);
    if (header.magic != kMagic || header.format != kFormat) {
        throw std::invalid_argument("the engine holds this layer in format " + std::to_string(header.format) +
                                    ", and this library reads format " + std::to_string(kFormat) +
                                    "; build the engine again with this library");
    }
    std::uint64_t expected = sizeof header;
    for (const std::uint32_t count : header.lengths) {
        expected += static_cast<std::uint64_t>(count) * sizeof(float);
    }
    if (expected != length) {
        throw std::invalid_argument("the engine holds " + std::to_string(length) + " bytes for this layer instead of " +
                                    std::to_string(expected) + "; it was cut or altered: build it again");
    }
    Parameters parameters;
    parameters.activation = static_cast<Activation>(header.activation);
    parameters.output_type = header.output_type;
    const char* place = static_cast<const char*>(data) + sizeof header;
    std::vector<float>* const all[] = {&parameters.input_scale, &parameters.factor, &parameters.offset};
    for (std::size_t index = 0; index < 3; ++index) {
        all[index]->resize(header.lengths[index]);
        std::memcpy(all[index]->data(), place, header.lengths[index] * sizeof(float));
        place += header.lengths[index] * sizeof(float);
    }
    parameters.check();
    return parameters;
}

Extent extent_of(const std::vector<std::int64_t>& shape, Layout layout) {
    if (shape.size() < 2) {
        throw std::invalid_argument("the input has " + std::to_string(shape.size()) +
                                    " dimensions; at least (N, C) is needed");
    }
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
    const std::int64_t vector = layout.vector;
    std::int64_t span = 1;
    std::int64_t total = 1;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
        const std::int64_t size = axis == 1 ? (shape[axis] + vector - 1) / vector * vector : shape[axis];
        if (size < 0 || size > kMost || total * size > kMost) {
            throw std::invalid_argument("the input is dynamic or has 2^31 elements and more; use a smaller batch");
        }
        total *= size;
        span *= axis < 2 ? 1 : size;
    }
    return Extent{static_cast<unsigned>(total), static_cast<unsigned>(shape[1]),
                  static_cast<unsigned>(layout.channels_last ? 1 : span)};
}

}  // namespace trtdet
