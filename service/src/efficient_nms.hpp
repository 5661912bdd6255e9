// TensorRT's plugin EfficientNMS_TRT on the CPU, as trtdet.detection.plugin_nms in Python defines it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trtdet {

// The attributes of a node, by their own names.
struct EfficientNms {
    float score_threshold = 0;  // a score must reach it
    float iou_threshold = 0;    // suppresses from it on
    int max_output_boxes = 0;
    int background_class = -1;      // left out of the result; -1 for none
    bool score_activation = false;  // the scores are logits
    bool class_agnostic = false;    // boxes of all classes suppress each other
    bool box_coding = false;        // centre and size, not two corners
};

// What is suppressed: boxes float32 (count, own, 4), where own is 1 or, a box for each class, `classes`; scores float32
// (count, classes).
struct EfficientInput {
    const float* boxes = nullptr;
    const float* scores = nullptr;
    std::size_t count = 0;
    std::size_t classes = 0;
    bool per_class = false;
};

// Room for the result: max_output_boxes of each, and 4 times as many numbers of boxes. All of it is written.
struct EfficientOutput {
    std::int32_t* count = nullptr;
    float* boxes = nullptr;
    float* scores = nullptr;
    std::int32_t* classes = nullptr;
};

// Suppresses one image.
void efficient_nms(const EfficientNms& attributes, const EfficientInput& input, const EfficientOutput& output);

}  // namespace trtdet
