// The Open Inference Protocol (KServe's version 2) over HTTP, with its extension for binary tensors: the network's
// input in, detections out, as tensors.
#pragma once

#include <memory>
#include <vector>

#include "context.hpp"
#include "router.hpp"

namespace trtdet::serve {

std::vector<Endpoint> open_inference_endpoints(const std::shared_ptr<Context>& context);

// Gives an error the protocol's form, {"error": "message"}, where the request was for one of its paths.
void use_error_form(const Head& head, Response& response);

}  // namespace trtdet::serve
