// What the bounding-box parser suppresses with, where the network leaves that to its reader. 'trtdet package' writes
// this file anew with the values of a bundle's manifest; these are trtdet's defaults.

#pragma once

#include <cstddef>

namespace trtdet::deepstream {

// A score must exceed this; the logit of the threshold where the network gives logits.
inline constexpr float score_bound = 0.001F;
// A box is suppressed by a better one that it overlaps by more than this.
inline constexpr float iou_threshold = 0.65F;
// At most so many pairs of box and class enter the suppression, and at most so many leave it.
inline constexpr std::size_t pre_nms_topk = 3000;
inline constexpr std::size_t max_detections = 300;
// Boxes of different classes suppress each other.
inline constexpr bool class_agnostic = false;
// A box competes with its best class only, not with every class over the bound.
inline constexpr bool best_class = false;
// Scores lack their sigmoid.
inline constexpr bool logits = false;

}  // namespace trtdet::deepstream
