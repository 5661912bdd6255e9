// Messages of the Open Inference Protocol over gRPC as the requests and answers of HTTP, which all else is made for.
// Nothing here knows of gRPC itself.
#pragma once

#include <google/protobuf/io/zero_copy_stream.h>

#include <cstdint>
#include <string>

#include "open_inference.pb.h"
#include "request.hpp"

namespace trtdet::serve {

// "/v2/models/NAME", and "/versions/VERSION" behind it where there is one; with %XX for every byte that has a meaning
// in a path.
std::string model_path(const std::string& name, const std::string& version);

// "/v2/repository/models/NAME/CHANGE".
std::string change_path(const std::string& name, const std::string& change);

// Bytes that a message may have beside tensors. Those of clients have some hundred.
constexpr std::uint64_t max_beside_tensors = 16 * 1024;

// Bytes of an encoded ModelInferRequest that are not its tensors' numbers and files. Each may become hundreds in
// memory, as where an input of two bytes has all the fields of one, and those of tensors hardly more than one.
//
// Throws InferenceError: it is no such message.
std::uint64_t bytes_beside_tensors(google::protobuf::io::ZeroCopyInputStream& encoded);

// What the message and the request that is made of it take at most. encoded: its bytes. beside: those beside tensors.
std::uint64_t message_memory(std::uint64_t encoded, std::uint64_t beside);

// Method and target of the request over HTTP.
Head infer_head(const inference::ModelInferRequest& given);

// The request as it would have come over HTTP: JSON, and the tensors behind it. head: what is known of it.
//
// Throws InferenceError: raw_input_contents are neither left out nor one for each input, or an input has contents
// beside them.
Request over_http(const inference::ModelInferRequest& given, Head head);

// An answer of HTTP with all outputs behind its JSON, as a message.
inference::ModelInferResponse from_http(const Response& response);

}  // namespace trtdet::serve
