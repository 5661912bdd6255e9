// Masks of detections: what the network gives for a box, pasted into the image.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "trtdet/detections.hpp"
#include "trtdet/export.hpp"
#include "trtdet/image.hpp"
#include "trtdet/span.hpp"

namespace trtdet {

// What a two-stage detector gives for the detections of an image.
struct Masks {
    int side = 0;            // of a mask, in values; 0 where the bundle has no masks
    float threshold = 0.5F;  // a pixel's probability must exceed it, 0 to 1
    int width = 0;           // of the image that the boxes lie in, in pixels
    int height = 0;
    std::vector<float> probabilities;  // (detections, side, side), 0 to 1, rows from the top of the box

    // Those of a detection, which must exist.
    Span<const float> operator[](std::size_t index) const {
        const auto values = static_cast<std::size_t>(side) * static_cast<std::size_t>(side);
        return {probabilities.data() + index * values, values};
    }
};

// What a one-stage detector gives: a mask's logits are the sum of the prototypes, weighted by its coefficients (YOLACT,
// arXiv:1904.02689).
struct PrototypeMasks {
    int count = 0;   // of prototypes; 0 where the bundle has none
    int height = 0;  // of a prototype, in cells over the whole input
    int width = 0;
    double threshold = 0.5;  // a pixel's probability must exceed it, between 0 and 1
    Placement placement;     // of the image that the boxes lie in, in the input
    int input_height = 0;    // in pixels
    int input_width = 0;
    std::vector<float> prototypes;    // (count, height, width)
    std::vector<float> coefficients;  // (detections, count)

    // Those of a detection, which must exist.
    Span<const float> operator[](std::size_t index) const {
        const auto values = static_cast<std::size_t>(count);
        return {coefficients.data() + index * values, values};
    }
};

// The pixels of an image that a mask covers, in the order of COCO: down each column, the columns from left to right.
struct RunLengths {
    int width = 0;  // of the image, in pixels
    int height = 0;

    // Pixels outside and inside in turn. The first are outside, 0 where the first pixel is inside; all others are above
    // 0. Their sum is width * height.
    std::vector<std::uint32_t> runs;

    // How many pixels are inside.
    TRTDET_API std::uint64_t area() const;

    // 1 for each pixel inside and 0 for all others: width * height bytes, rows from the top.
    TRTDET_API std::vector<std::uint8_t> pixels() const;

    // The runs as text, as pycocotools and COCO's annotations have them in `counts`.
    TRTDET_API std::string counts() const;
};

// Pastes a mask into an image as torchvision's paste_masks_in_image does: the mask with a border of zeros is stretched
// bilinearly over the box, which grows alike and then lies on whole pixels. What lies outside of the image is cut off.
// Equal to torchvision's but for pixels whose probability is within a rounding of the threshold.
//
// Columns are searched for where they cross the threshold, so that time grows with the width of the box and memory with
// its height and the runs; neither grows with the area.
//
// probabilities: (side, side), rows from the top of the box; one that is not a number covers nothing.
// box: in pixels of the image, anywhere; one whose sides are no finite numbers covers nothing.
// width, height: of the image, with fewer than 2^32 pixels.
// threshold: a pixel's probability must exceed it.
//
// Throws ImageError: the image has no pixels, or too many. EngineError: the probabilities are not those of a square.
TRTDET_API RunLengths
paste_mask(Span<const float> probabilities, const Box& box, int width, int height, float threshold = 0.5F);

// Pastes the mask of a detection of a one-stage detector into its image, masks.placement.width x height pixels, as
// prototype_mask() of trtdet.detection.placing in Python: a pixel's logit is bilinear between the cells around its
// place in the input, and must exceed the threshold's; the border of the input has no say. What lies outside of the box
// is cut off: pixel u is within where ceil(x1) <= u < ceil(x2). Equal to Python's but for pixels whose logit is within
// a rounding of the threshold.
//
// Cells are weighed within the box alone, and columns are searched for where they cross the threshold: time grows with
// the cells of the box, their number of prototypes, and the width of the box in pixels.
//
// index: of the detection, below masks.coefficients.size() / masks.count.
// box: in pixels of the image; one whose sides are no finite numbers covers nothing.
//
// Throws ImageError: as paste_mask(). EngineError: the sizes of `masks` do not belong together.
TRTDET_API RunLengths prototype_mask(const PrototypeMasks& masks, std::size_t index, const Box& box);

}  // namespace trtdet
