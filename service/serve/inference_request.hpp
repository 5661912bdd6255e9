// The body of an inference of the Open Inference Protocol: JSON, and tensors in it or behind it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "trtdet/bundle.hpp"

namespace trtdet::serve {

// A body that is not what the protocol or the model wants; the message is one line.
class InferenceError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

struct InferenceRequest {
    // An output that is wanted, at its place among those that there are.
    struct Output {
        std::size_t index = 0;
        bool binary = false;
    };

    std::string id;  // empty where there is none
    std::size_t images = 0;
    std::vector<Output> outputs;

    // The tensor of one image, float32 (3, H, W); not of files.
    std::vector<float> image(std::size_t index) const;

    // Of these all but one are empty: images are files where the input's datatype is BYTES, within the body.
    std::vector<std::string_view> files;
    std::vector<float> values;  // of all images, as they stood in the JSON
    std::string_view bytes;     // within the body that was parsed, little-endian

    std::size_t values_of_image = 0;
};

struct InferenceLimits {
    std::size_t max_images = 32;
    std::function<bool()> wanted{};  // asked now and then; where nobody wants the answer any more, reading ends
};

// What reading a body takes at most, in bytes: its numbers, and what else stands in its JSON. body: its size.
//
// Throws InferenceError: header_length is not a number of its bytes.
std::uint64_t inference_memory(
    std::size_t body, std::string_view header_length, const InputSpec& input, const InferenceLimits& limits);

// Numbers of tensors never become JSON values, and there is an end to what else a body may hold: memory is bounded by
// what the model takes.
//
// header_length: of the header Inference-Header-Content-Length, the bytes of JSON that stand before the tensors; empty
// where the body is JSON as a whole.
// outputs: the names that may be asked for; all are wanted where the request names none.
//
// Where the input's datatype is BYTES, its elements are the images' files, behind the JSON as the protocol has them:
// each after its length, 4 bytes, little-endian.
//
// Throws InferenceError: it is not JSON, not of the protocol, asks for shared memory, or has another input than the
// model: name, datatype, shape, size. DeadlineError: limits.wanted said no.
InferenceRequest parse_inference(
    std::string_view body, std::string_view header_length, const InputSpec& input,
    const std::vector<std::string_view>& outputs, const InferenceLimits& limits);

}  // namespace trtdet::serve
