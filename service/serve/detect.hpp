// /v1/detect: images in, detections out as JSON.
#pragma once

#include <memory>

#include "context.hpp"
#include "router.hpp"

namespace trtdet::serve {

Endpoint detect_endpoint(const std::shared_ptr<Context>& context);

}  // namespace trtdet::serve
