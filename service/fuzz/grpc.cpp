// Any bytes are a message of gRPC that becomes a request for what the model takes, or an InferenceError of one line;
// and what is charged for a message before it is read is what it then takes, at least.
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/stubs/logging.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "grpc_message.hpp"
#include "inference_request.hpp"

namespace {

void check(bool good) {
    if (!good) {
        std::abort();
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const google::protobuf::LogSilencer silence;
    inference::ModelInferRequest message;
    const bool parsed = message.ParseFromArray(data, static_cast<int>(size));
    try {
        // In pieces, as it arrives.
        google::protobuf::io::ArrayInputStream stream(data, static_cast<int>(size), 7);
        const auto beside = trtdet::serve::bytes_beside_tensors(stream);
        check(beside <= size);
        if (!parsed || beside > trtdet::serve::max_beside_tensors) {
            return 0;
        }
        check(message.SpaceUsedLong() <= sizeof message + trtdet::serve::message_memory(size, beside));
        const auto request = trtdet::serve::over_http(message, trtdet::serve::infer_head(message));
        check(request.head.target.find_first_of(" \r\n") == std::string::npos);
        trtdet::InputSpec input;
        input.name = "images";
        input.max_batch = 2;
        input.preprocess.height = 1;
        input.preprocess.width = 2;
        const auto taken = trtdet::serve::parse_inference(
            request.body, request.head.inference_header_length, input, {"boxes", "scores"}, {2});
        check(taken.images >= 1 && taken.images <= 2 && taken.values.empty());
        check(taken.files.size() == taken.images || taken.bytes.size() == taken.images * 6 * sizeof(float));
    } catch (const trtdet::serve::InferenceError& error) {
        check(std::strchr(error.what(), '\n') == nullptr && std::strlen(error.what()) <= 4096);
    }
    return 0;
}
