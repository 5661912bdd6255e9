// Non-maximum suppression, as trtdet.detection.suppression in Python defines it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "trtdet/bundle.hpp"
#include "trtdet/export.hpp"

namespace trtdet {

// Two corners; what the pixels are of is said where it is used.
struct Box {
    float x1 = 0;
    float y1 = 0;
    float x2 = 0;
    float y2 = 0;
};

struct Keypoint {
    float x = 0;
    float y = 0;
    float score = 0;  // 0 to 1
};

// A box that is turned about its centre. The angle is that from the x axis to the side of the width, in radians,
// positive towards the y axis, which points down.
struct RotatedBox {
    float x = 0;  // the centre
    float y = 0;
    float width = 0;
    float height = 0;
    float angle = 0;
};

struct Detection {
    Box box;
    float score = 0;  // 0 to 1
    int class_index = 0;
    std::size_t row = 0;  // of the network's outputs, in which the box is and what belongs to it
};

// Greedy non-maximum suppression of one image, exact and deterministic.
//
// - Candidates are (box, class) pairs with a score strictly above the threshold; NaN never is. With best_class a box is
//   one for its highest class only, the lowest index where classes tie.
// - The best pre_nms_topk go on, in order of falling score; equal scores keep (box, class) order.
// - In that order each is kept unless a kept one of its class (of any class when class_agnostic) overlaps it with an
//   IoU strictly above the threshold. That is computed in float32; NaN, as of boxes without area, suppresses nothing.
//   Where there are rotated boxes, their probabilistic IoU is compared: 1 minus the Hellinger distance of two Gaussians
//   with the boxes' covariances (Llerena et al. 2021, arXiv:2106.06072), as Ultralytics' batch_probiou computes it.
// - The first max_detections kept are the result, in that order.
//
// boxes: float32 (count, 4), x1 y1 x2 y2 in any unit.
// scores: float32 (count, classes), 0 to 1, or any real number with nms.logits; results are probabilities all the same.
// rotated: float32 (count, 5), the fields of RotatedBox in the unit of the boxes, or null for upright boxes.
TRTDET_API std::vector<Detection> non_max_suppression(
    const float* boxes, const float* scores, std::size_t count, std::size_t classes, const Nms& nms,
    const float* rotated = nullptr);

}  // namespace trtdet
