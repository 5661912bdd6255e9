#include "trtdet/detections.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace trtdet {

namespace {

// A (box, class) pair that may become a detection.
struct Candidate {
    float score;
    std::size_t flat;  // box * classes + class
};

// The better first; of equal scores the one that comes first.
bool better(const Candidate& one, const Candidate& other) {
    return one.score > other.score || (one.score == other.score && one.flat < other.flat);
}

// NumPy's minimum and maximum: NaN where either is.
float least(float one, float other) {
    return one <= other || std::isnan(one) ? one : other;
}
float most(float one, float other) {
    return one >= other || std::isnan(one) ? one : other;
}

float area(const Box& box) {
    return most(box.x2 - box.x1, 0) * most(box.y2 - box.y1, 0);
}

bool overlap(const Box& one, float one_area, const Box& other, float other_area, float threshold) {
    const float width = most(least(one.x2, other.x2) - most(one.x1, other.x1), 0);
    const float height = most(least(one.y2, other.y2) - most(one.y1, other.y1), 0);
    const float shared = width * height;
    return shared / (one_area + other_area - shared) > threshold;
}

// The Gaussian of a rotated box: its centre, and the covariances of x with x, y with y and x with y.
struct Gaussian {
    float x = 0;
    float y = 0;
    float a = 0;
    float b = 0;
    float c = 0;

    float determinant() const { return a * b - c * c; }
};

Gaussian gaussian_of(const float* rotated) {
    const float along = rotated[2] * rotated[2] / 12.0F;
    const float across = rotated[3] * rotated[3] / 12.0F;
    const float cosine = std::cos(rotated[4]);
    const float sine = std::sin(rotated[4]);
    const float cosine2 = cosine * cosine;
    const float sine2 = sine * sine;
    return {
        rotated[0], rotated[1], along * cosine2 + across * sine2, along * sine2 + across * cosine2,
        (along - across) * cosine * sine};
}

// The arithmetic, with its epsilons, is that of trtdet.detection.rotated.
float probabilistic_iou(const Gaussian& one, const Gaussian& other) {
    constexpr float epsilon = 1e-7F;
    const float a = one.a + other.a;
    const float b = one.b + other.b;
    const float c = one.c + other.c;
    const float x = other.x - one.x;
    const float y = one.y - other.y;
    const float determinant = a * b - c * c;
    const float spread = (a * y * y + b * x * x) / (determinant + epsilon) * 0.25F;
    const float skew = c * x * y / (determinant + epsilon) * 0.5F;
    const float own = most(one.determinant(), 0) * most(other.determinant(), 0);
    const float size = std::log(determinant / (4 * std::sqrt(own) + epsilon) + epsilon) * 0.5F;
    const float distance = least(most(spread + skew + size, epsilon), 100);
    return 1 - std::sqrt(1 - std::exp(-distance) + epsilon);
}

// What a score must exceed: the threshold itself, or the logit of it.
float score_bound(float threshold, bool logits) {
    if (!logits) {
        return threshold;
    }
    if (threshold >= 1) {
        return std::numeric_limits<float>::infinity();
    }
    // Below the smallest normal number a probability counts as 0, which exceeds no threshold.
    const double probability = std::max(double{threshold}, double{std::numeric_limits<float>::min()});
    return static_cast<float>(std::log(probability / (1 - probability)));
}

// Whether one of the scores exceeds the bound; most rows have none, and blocks of a fixed size are compared at once.
bool exceeds(const float* scores, std::size_t count, float bound) {
    constexpr std::size_t block = 16;
    std::size_t index = 0;
    for (; index + block <= count; index += block) {
        int over = 0;
        for (std::size_t at = 0; at < block; ++at) {
            over |= static_cast<int>(scores[index + at] > bound);
        }
        if (over != 0) {
            return true;
        }
    }
    return std::any_of(scores + index, scores + count, [bound](float score) { return score > bound; });
}

std::vector<Candidate> candidates_of(const float* scores, std::size_t count, std::size_t classes, const Nms& nms) {
    const float bound = score_bound(nms.score_threshold, nms.logits);
    std::vector<Candidate> found;
    for (std::size_t box = 0; box < count; ++box) {
        const float* const row = scores + box * classes;
        if (!exceeds(row, classes, bound)) {
            continue;
        }
        if (nms.best_class) {
            std::size_t best = 0;
            float value = -std::numeric_limits<float>::infinity();
            for (std::size_t index = 0; index < classes; ++index) {
                if (row[index] > value) {
                    best = index;
                    value = row[index];
                }
            }
            found.push_back({value, box * classes + best});
        } else {
            for (std::size_t index = 0; index < classes; ++index) {
                if (row[index] > bound) {
                    found.push_back({row[index], box * classes + index});
                }
            }
        }
    }
    const auto limit = static_cast<std::size_t>(nms.pre_nms_topk);
    if (found.size() > limit) {
        std::nth_element(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(limit), found.end(), better);
        found.resize(limit);
    }
    std::sort(found.begin(), found.end(), better);
    return found;
}

}  // namespace

std::vector<Detection> non_max_suppression(
    const float* boxes, const float* scores, std::size_t count, std::size_t classes, const Nms& nms,
    const float* rotated) {
    std::vector<Detection> kept;
    std::vector<float> areas;
    std::vector<Gaussian> gaussians;  // in place of areas, where boxes are rotated
    const auto limit = static_cast<std::size_t>(nms.max_detections);
    const bool suppresses = nms.iou_threshold < 1;  // no boxes overlap by more
    for (const Candidate& candidate : candidates_of(scores, count, classes, nms)) {
        if (kept.size() == limit) {
            break;
        }
        const std::size_t row = candidate.flat / classes;
        const float* const corners = boxes + row * 4;
        const Box box{corners[0], corners[1], corners[2], corners[3]};
        const float size = area(box);
        const Gaussian gaussian = rotated != nullptr ? gaussian_of(rotated + row * 5) : Gaussian{};
        const int class_index = static_cast<int>(candidate.flat % classes);
        bool suppressed = false;
        for (std::size_t index = 0; suppresses && index < kept.size() && !suppressed; ++index) {
            if (nms.class_agnostic || kept[index].class_index == class_index) {
                suppressed = rotated != nullptr ? probabilistic_iou(gaussians[index], gaussian) > nms.iou_threshold
                                                : overlap(kept[index].box, areas[index], box, size, nms.iou_threshold);
            }
        }
        if (!suppressed) {
            kept.push_back({box, candidate.score, class_index, row});
            areas.push_back(size);
            gaussians.push_back(gaussian);
        }
    }
    if (nms.logits) {
        for (Detection& detection : kept) {
            detection.score = 1 / (1 + std::exp(-detection.score));
        }
    }
    return kept;
}

}  // namespace trtdet
