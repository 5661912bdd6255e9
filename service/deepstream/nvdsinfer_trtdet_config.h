// What the bounding-box parser suppresses with, where the network leaves that to its reader. A package brings its own
// with the thresholds of its bundle; these are the values a configuration starts from.

#pragma once

#include "trtdet/bundle.hpp"

namespace trtdet::deepstream {

inline Nms rules() {
    Nms nms;
    nms.score_threshold = 0.001F;
    nms.iou_threshold = 0.65F;
    nms.max_detections = 300;
    nms.pre_nms_topk = 3000;
    return nms;
}

}  // namespace trtdet::deepstream
