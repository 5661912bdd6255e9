#include "efficient_nms.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

namespace trtdet {

namespace {

constexpr std::size_t most_candidates = 4096;  // of an image, best first
constexpr float dense = 0.007F;                // under this threshold pairs that do not reach it are sorted to the end
constexpr float empty = -32768;                // the score of these pairs, which are counted all the same

// A (box, class) pair.
struct Pair {
    float score;
    std::size_t flat;  // box * classes + class
    int group = 0;
    std::array<float, 4> corners{};
    std::array<float, 4> turned{};  // the lower corner first
};

// The better first; NaN before all, equal scores in their order.
bool better_pair(const Pair& one, const Pair& other) {
    const float mine = std::isnan(one.score) ? std::numeric_limits<float>::infinity() : one.score;
    const float theirs = std::isnan(other.score) ? std::numeric_limits<float>::infinity() : other.score;
    return mine > theirs || (mine == theirs && one.flat < other.flat);
}

float logit(float probability) {
    return std::log(probability / (1 - probability));
}

float area(float x1, float y1, float x2, float y2) {
    const float width = x2 - x1;
    const float height = y2 - y1;
    return width <= 0 || height <= 0 ? 0 : width * height;
}

// Whether one that is kept suppresses another, with the plugin's own arithmetic.
bool overlap(const Pair& kept, const Pair& other, float threshold) {
    if (kept.group != other.group || !(other.score <= kept.score)) {
        return false;
    }
    const auto& mine = kept.turned;
    const auto& theirs = other.turned;
    const auto higher = [](float one, float another) { return one > another ? one : another; };
    const auto lower = [](float one, float another) { return one < another ? one : another; };
    const float shared = area(
        higher(mine[0], theirs[0]), higher(mine[1], theirs[1]), lower(mine[2], theirs[2]), lower(mine[3], theirs[3]));
    const float united =
        area(mine[0], mine[1], mine[2], mine[3]) + area(theirs[0], theirs[1], theirs[2], theirs[3]) - shared;
    const float iou = shared <= 0 || united <= 0 ? 0 : shared / united;
    return iou >= threshold;
}

// Swapped by sums and differences, as in the plugin.
std::array<float, 4> turned(const std::array<float, 4>& box) {
    std::array<float, 4> found = box;
    for (std::size_t axis = 0; axis < 2; ++axis) {
        if (box[axis] > box[axis + 2]) {
            const float difference = box[axis] - box[axis + 2];
            const float high = difference + box[axis + 2];
            found[axis] = high - difference;
            found[axis + 2] = high;
        }
    }
    return found;
}

std::vector<Pair> pairs_of(const EfficientNms& attributes, const EfficientInput& input) {
    float threshold = attributes.score_threshold;
    float dense_below = dense;
    if (attributes.score_activation) {
        threshold = threshold > 0 ? logit(threshold) : empty;
        dense_below = logit(dense);
    }
    std::vector<Pair> found;
    for (std::size_t flat = 0; flat < input.count * input.classes; ++flat) {
        const bool foreign = static_cast<int>(flat % input.classes) == attributes.background_class;
        const float score = input.scores[flat];
        if (threshold < dense_below) {
            found.push_back({score < threshold || foreign ? empty : score, flat, 0, {}, {}});
        } else if (score >= threshold && !foreign) {
            found.push_back({score, flat, 0, {}, {}});
        }
    }
    const std::size_t count = std::min(found.size(), most_candidates);
    std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(count), found.end(), better_pair);
    found.resize(count);
    for (Pair& pair : found) {
        const std::size_t box = pair.flat / input.classes;
        const std::size_t label = pair.flat % input.classes;
        const float* const at = input.boxes + 4 * (input.per_class ? box * input.classes + label : box);
        pair.corners = {at[0], at[1], at[2], at[3]};
        if (attributes.box_coding) {
            const float half_width = at[2] * 0.5F;
            const float half_height = at[3] * 0.5F;
            pair.corners = {at[0] - half_width, at[1] - half_height, at[0] + half_width, at[1] + half_height};
        }
        pair.turned = turned(pair.corners);
        pair.group = attributes.class_agnostic ? 0 : static_cast<int>(label);
    }
    return found;
}

}  // namespace

void efficient_nms(const EfficientNms& attributes, const EfficientInput& input, const EfficientOutput& output) {
    const auto room = static_cast<std::size_t>(attributes.max_output_boxes);
    std::fill_n(output.boxes, 4 * room, 0.0F);
    std::fill_n(output.scores, room, 0.0F);
    std::fill_n(output.classes, room, 0);
    const std::vector<Pair> pairs = pairs_of(attributes, input);
    std::vector<const Pair*> kept;
    for (const Pair& pair : pairs) {
        if (kept.size() == room) {
            break;
        }
        if (std::none_of(kept.begin(), kept.end(), [&](const Pair* one) {
                return overlap(*one, pair, attributes.iou_threshold);
            })) {
            kept.push_back(&pair);
        }
    }
    for (std::size_t index = 0; index < kept.size(); ++index) {
        std::copy(kept[index]->corners.begin(), kept[index]->corners.end(), output.boxes + 4 * index);
        const float score = kept[index]->score;
        output.scores[index] = attributes.score_activation ? 1 / (1 + std::exp(-score)) : score;
        output.classes[index] = static_cast<std::int32_t>(kept[index]->flat % input.classes);
    }
    *output.count = static_cast<std::int32_t>(kept.size());
}

}  // namespace trtdet
