#include "grpc_message.hpp"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <boost/url/encode.hpp>
#include <boost/url/rfc/unreserved_chars.hpp>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "inference_request.hpp"

namespace trtdet::serve {
namespace {

using Json = nlohmann::ordered_json;

// A part of a path, with %XX for every byte that has a meaning in one.
std::string in_path(const std::string& text) {
    return boost::urls::encode(text, boost::urls::unreserved_chars);
}

Json parameter(const inference::InferParameter& given) {
    switch (given.parameter_choice_case()) {
        case inference::InferParameter::kBoolParam:
            return given.bool_param();
        case inference::InferParameter::kInt64Param:
            return given.int64_param();
        case inference::InferParameter::kUint64Param:
            return given.uint64_param();
        case inference::InferParameter::kDoubleParam:
            return given.double_param();
        case inference::InferParameter::kStringParam:
            return given.string_param();
        case inference::InferParameter::PARAMETER_CHOICE_NOT_SET:
            break;
    }
    return nullptr;
}

template <typename Parameters>
Json parameters(const Parameters& given) {
    Json all = Json::object();
    for (const auto& [name, value] : given) {
        all[name] = parameter(value);
    }
    return all;
}

// Bytes of an input as it stands behind the JSON over HTTP.
std::size_t tensor_bytes(const inference::ModelInferRequest& request, int index) {
    if (request.raw_input_contents_size() > index) {
        return request.raw_input_contents(index).size();
    }
    const auto& contents = request.inputs(index).contents();
    auto bytes = static_cast<std::size_t>(contents.fp32_contents_size()) * sizeof(float);
    for (const auto& element : contents.bytes_contents()) {
        bytes += sizeof(std::uint32_t) + element.size();
    }
    return bytes;
}

// Appends these bytes.
void append_tensor(std::string& bytes, const inference::ModelInferRequest& request, int index) {
    if (request.raw_input_contents_size() > index) {
        bytes += request.raw_input_contents(index);
        return;
    }
    const auto& contents = request.inputs(index).contents();
    bytes.append(
        reinterpret_cast<const char*>(contents.fp32_contents().data()),
        static_cast<std::size_t>(contents.fp32_contents_size()) * sizeof(float));
    for (const auto& element : contents.bytes_contents()) {
        const auto length = static_cast<std::uint32_t>(element.size());
        bytes.append(reinterpret_cast<const char*>(&length), sizeof length).append(element);
    }
}

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// Reads one field after the other, up to the end of the message. tensor: given a field's number and wire type, reads
// the field and returns its bytes if it belongs to a tensor; without a value the field is skipped.
template <typename Tensor>
std::uint64_t tensor_bytes_in(CodedInputStream& encoded, const Tensor& tensor) {
    std::uint64_t bytes = 0;
    while (const auto tag = encoded.ReadTag()) {
        const auto taken = tensor(WireFormatLite::GetTagFieldNumber(tag), WireFormatLite::GetTagWireType(tag));
        if (taken) {
            bytes += *taken;
        } else if (!WireFormatLite::SkipField(&encoded, tag)) {
            throw InferenceError("the message is damaged");
        }
    }
    if (!encoded.ConsumedEntireMessage()) {
        throw InferenceError("the message is damaged");
    }
    return bytes;
}

int length_of(CodedInputStream& encoded) {
    int length = 0;
    if (!encoded.ReadVarintSizeAsInt(&length)) {
        throw InferenceError("the message is damaged");
    }
    return length;
}

std::uint64_t skipped(CodedInputStream& encoded, int bytes) {
    if (!encoded.Skip(bytes)) {
        throw InferenceError("the message is cut");
    }
    return static_cast<std::uint64_t>(bytes);
}

// Bytes of tensors in a message within the one that is read.
template <typename Tensor>
std::uint64_t tensor_bytes_within(CodedInputStream& encoded, const Tensor& tensor) {
    const int length = length_of(encoded);
    const auto limit = encoded.PushLimit(length);
    const auto bytes = tensor_bytes_in(encoded, tensor);
    if (encoded.BytesUntilLimit() != 0) {
        throw InferenceError("the message is cut");
    }
    encoded.PopLimit(limit);
    return bytes;
}

// Where some tensors stood in one place and some in the other, one of another input would be taken.
void check_places(const inference::ModelInferRequest& request) {
    const int raw = request.raw_input_contents_size();
    if (raw == 0) {
        return;
    }
    if (raw != request.inputs_size()) {
        throw InferenceError(
            "the request has " + std::to_string(raw) + " raw_input_contents for " +
            std::to_string(request.inputs_size()) + " inputs; give one for each input, or none");
    }
    for (const auto& input : request.inputs()) {
        if (input.has_contents()) {
            throw InferenceError("an input has contents beside raw_input_contents; give one of them");
        }
    }
}

}  // namespace

std::string model_path(const std::string& name, const std::string& version) {
    return "/v2/models/" + in_path(name) + (version.empty() ? "" : "/versions/" + in_path(version));
}

std::string change_path(const std::string& name, const std::string& change) {
    return "/v2/repository/models/" + in_path(name) + "/" + change;
}

std::uint64_t bytes_beside_tensors(google::protobuf::io::ZeroCopyInputStream& stream) {
    using Bytes = std::optional<std::uint64_t>;
    using Given = inference::ModelInferRequest;
    using Contents = inference::InferTensorContents;
    constexpr auto delimited = WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
    CodedInputStream encoded(&stream);
    const auto in_contents = [&](int field, int kind) -> Bytes {
        if (kind == delimited &&
            (field == Contents::kFp32ContentsFieldNumber || field == Contents::kBytesContentsFieldNumber)) {
            return skipped(encoded, length_of(encoded));
        }
        if (kind == WireFormatLite::WIRETYPE_FIXED32 && field == Contents::kFp32ContentsFieldNumber) {
            return skipped(encoded, sizeof(float)) + 1;  // with its tag
        }
        return std::nullopt;
    };
    const auto in_input = [&](int field, int kind) -> Bytes {
        if (kind == delimited && field == Given::InferInputTensor::kContentsFieldNumber) {
            return tensor_bytes_within(encoded, in_contents);
        }
        return std::nullopt;
    };
    const auto in_request = [&](int field, int kind) -> Bytes {
        if (kind == delimited && field == Given::kInputsFieldNumber) {
            return tensor_bytes_within(encoded, in_input);
        }
        if (kind == delimited && field == Given::kRawInputContentsFieldNumber) {
            return skipped(encoded, length_of(encoded));
        }
        return std::nullopt;
    };
    const auto of_tensors = tensor_bytes_in(encoded, in_request);
    return static_cast<std::uint64_t>(encoded.CurrentPosition()) - of_tensors;
}

std::uint64_t message_memory(std::uint64_t encoded, std::uint64_t beside) {
    // An input of two bytes is an object of 150, and then one of JSON with four members.
    constexpr std::uint64_t of_field = 512;
    return 2 * encoded + of_field * beside;
}

Head infer_head(const inference::ModelInferRequest& given) {
    Head head;
    head.method = "POST";
    head.target = model_path(given.model_name(), given.model_version()) + "/infer";
    return head;
}

Request over_http(const inference::ModelInferRequest& given, Head head) {
    check_places(given);
    Json json{{"id", given.id()}, {"parameters", parameters(given.parameters())}};
    json["parameters"]["binary_data_output"] = true;
    json["inputs"] = Json::array();
    std::size_t tensors = 0;
    for (int index = 0; index < given.inputs_size(); ++index) {
        const auto& input = given.inputs(index);
        Json own = parameters(input.parameters());
        own["binary_data_size"] = tensor_bytes(given, index);
        tensors += tensor_bytes(given, index);
        json["inputs"].push_back(
            {{"name", input.name()},
             {"datatype", input.datatype()},
             {"shape", std::vector<std::int64_t>(input.shape().begin(), input.shape().end())},
             {"parameters", std::move(own)}});
    }
    for (const auto& output : given.outputs()) {
        Json own = parameters(output.parameters());
        own["binary_data"] = true;
        json["outputs"].push_back({{"name", output.name()}, {"parameters", std::move(own)}});
    }
    Request request;
    request.head = std::move(head);
    request.body = json.dump(-1, ' ', false, Json::error_handler_t::replace);
    request.head.inference_header_length = std::to_string(request.body.size());
    // Once, as a batch of tensors is megabytes.
    request.body.reserve(request.body.size() + tensors);
    for (int index = 0; index < given.inputs_size(); ++index) {
        append_tensor(request.body, given, index);
    }
    request.head.length = request.body.size();
    return request;
}

inference::ModelInferResponse from_http(const Response& response) {
    inference::ModelInferResponse answer;
    std::size_t length = response.body.size();
    for (const auto& [name, value] : response.headers) {
        if (name == "Inference-Header-Content-Length") {
            length = std::stoul(value);
        }
    }
    const auto json = Json::parse(response.body.substr(0, length));
    answer.set_model_name(json["model_name"].get<std::string>());
    answer.set_model_version(json["model_version"].get<std::string>());
    answer.set_id(json.value("id", ""));
    for (const auto& [name, value] : json["parameters"].items()) {
        (*answer.mutable_parameters())[name].set_string_param(value.get<std::string>());
    }
    for (const auto& output : json["outputs"]) {
        auto& one = *answer.add_outputs();
        one.set_name(output["name"].get<std::string>());
        one.set_datatype(output["datatype"].get<std::string>());
        for (const auto& size : output["shape"]) {
            one.add_shape(size.get<std::int64_t>());
        }
        const auto bytes = output["parameters"]["binary_data_size"].get<std::size_t>();
        answer.add_raw_output_contents(response.body.substr(length, bytes));
        length += bytes;
    }
    return answer;
}

}  // namespace trtdet::serve
