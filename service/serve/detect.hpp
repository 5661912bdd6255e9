// Images in, detections out as JSON.
#pragma once

#include <memory>
#include <vector>

#include "context.hpp"
#include "router.hpp"

namespace trtdet::serve {

// /v1/detect, by the first model, and the same for each model by its name.
std::vector<Endpoint> detect_endpoints(const std::shared_ptr<Context>& context);

}  // namespace trtdet::serve
