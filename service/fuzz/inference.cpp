// Any header and body of an inference is a request for what the model takes, or an InferenceError of one line. The
// first line is the length of the JSON, as the header has it; it is empty where there is no more than JSON.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "inference_request.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    constexpr std::size_t max_images = 2;
    const std::string_view all(reinterpret_cast<const char*>(data), size);
    const std::size_t line = all.find('\n');
    if (line == std::string_view::npos) {
        return 0;
    }
    const std::string_view body = all.substr(line + 1);
    trtdet::InputSpec input;
    input.name = "images";
    input.max_batch = max_images;
    input.preprocess.height = 1;
    input.preprocess.width = 2;
    try {
        const auto request =
            trtdet::serve::parse_inference(body, all.substr(0, line), input, {"boxes", "scores"}, {max_images});
        const std::size_t count = input.preprocess.values();
        const std::size_t given = request.values.size() + request.bytes.size() / sizeof(float);
        const bool inside =
            request.bytes.empty() ||
            (std::less_equal<>()(body.data(), request.bytes.data()) &&
             std::less_equal<>()(request.bytes.data() + request.bytes.size(), body.data() + body.size()));
        if (!inside || request.images < 1 || request.images > max_images || request.outputs.empty() ||
            request.values.empty() == request.bytes.empty() || given != count * request.images) {
            std::abort();
        }
        for (const auto& output : request.outputs) {
            if (output.index > 1) {
                std::abort();
            }
        }
        for (std::size_t index = 0; index < request.images; ++index) {
            if (request.image(index).size() != count) {
                std::abort();
            }
        }
    } catch (const trtdet::serve::InferenceError& error) {
        if (std::strchr(error.what(), '\n') != nullptr || std::strlen(error.what()) > 4096) {
            std::abort();
        }
    }
    return 0;
}
