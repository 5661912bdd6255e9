// The rules one by one; that the results are those of Python is shown with random cases in tests/service.
#include "trtdet/detections.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <utility>
#include <vector>

#include "numbers.hpp"

using namespace trtdet;

namespace {

Nms rules() {
    Nms nms;
    nms.score_threshold = 0.1f;
    nms.iou_threshold = 0.5f;
    nms.max_detections = 10;
    nms.pre_nms_topk = 100;
    return nms;
}

std::vector<Detection> suppress(const std::vector<Box>& boxes, const std::vector<float>& scores, const Nms& nms) {
    return non_max_suppression(
        boxes.empty() ? nullptr : &boxes.front().x1, scores.data(), boxes.size(),
        boxes.empty() ? 0 : scores.size() / boxes.size(), nms);
}

const Box here{0, 0, 10, 10};
const Box nearby{0, 0, 10, 6};  // IoU 0.6
const Box away{20, 20, 30, 30};

}  // namespace

TEST_CASE("the best of overlapping boxes stays, in order of score") {
    const auto found = suppress({here, away, nearby}, {0.5f, 0.9f, 0.6f}, rules());
    REQUIRE(found.size() == 2);
    CHECK(found[0].score == 0.9f);
    CHECK(found[0].box.x1 == 20);
    CHECK(found[1].score == 0.6f);
}

TEST_CASE("an overlap of just the threshold suppresses nothing") {
    CHECK(suppress({here, {0, 0, 10, 5}}, {0.9f, 0.8f}, rules()).size() == 2);
}

TEST_CASE("with an overlap of 1 as the threshold nothing is suppressed") {
    Nms nms = rules();
    nms.iou_threshold = 1;
    const auto found = suppress({here, here, nearby}, {0.5f, 0.9f, 0.7f}, nms);
    REQUIRE(found.size() == 3);
    CHECK(found[1].score == 0.7f);
}

TEST_CASE("rotated boxes are compared by their probabilistic IoU") {
    constexpr float quarter = 1.57079633F;
    const RotatedBox first{10, 10, 20, 4, 0.3F};
    // What trtdet.detection.rotated gives for each with the first.
    const std::vector<std::pair<RotatedBox, float>> others{
        {{11, 10, 20, 4, 0.5F}, 0.66756386F},      {{10, 10, 20, 4, 0.3F - quarter}, 0.2155354F},
        {{10, 10, 20, 4, 0.785398F}, 0.42215931F}, {{10, 10, 20, 4, -0.785398F}, 0.24247932F},
        {{10, 10, 20, 4, 0.3F}, 0.99960047F},
    };
    // The boxes have no say: they are all the same.
    const std::vector<Box> hulls{here, here};
    const std::vector<float> scores{0.9F, 0.8F};
    for (const auto& [other, iou] : others) {
        const std::vector<RotatedBox> rotated{first, other};
        for (const float margin : {-2e-4F, 2e-4F}) {
            Nms nms = rules();
            nms.iou_threshold = iou + margin;
            const auto found = non_max_suppression(&hulls[0].x1, scores.data(), 2, 1, nms, &rotated[0].x);
            CHECK(found.size() == (margin < 0 ? 1 : 2));
        }
    }
    for (const float odd : {not_a_number, infinite}) {
        const std::vector<RotatedBox> rotated{first, {odd, 10, 20, 4, odd}};
        CHECK(non_max_suppression(&hulls[0].x1, scores.data(), 2, 1, rules(), &rotated[0].x).size() == 2);
    }
}

TEST_CASE("a detection names the row of its box") {
    const std::vector<float> scores{0.3F, 0.2F, 0, 0.9F, 0.7F, 0.6F};
    const auto found = suppress({here, away, nearby}, scores, rules());
    REQUIRE(found.size() == 3);
    CHECK((found[0].row == 1 && found[0].class_index == 1));
    CHECK((found[1].row == 2 && found[1].class_index == 0));
    CHECK((found[2].row == 2 && found[2].class_index == 1));
}

TEST_CASE("a score of just the threshold is none, nor is NaN") {
    CHECK(suppress({here, away}, {0.1f, not_a_number}, rules()).empty());
    CHECK(suppress({here}, {std::nextafter(0.1f, 1.0f)}, rules()).size() == 1);
}

TEST_CASE("classes suppress each other only when agnostic") {
    Nms nms = rules();
    const std::vector<float> scores{0.9f, 0, 0, 0.8f};
    CHECK(suppress({here, nearby}, scores, nms).size() == 2);
    nms.class_agnostic = true;
    REQUIRE(suppress({here, nearby}, scores, nms).size() == 1);
    CHECK(suppress({here, nearby}, scores, nms)[0].class_index == 0);
}

TEST_CASE("a box competes with every class or with its best one") {
    Nms nms = rules();
    CHECK(suppress({here}, {0.5f, 0.7f, 0.6f}, nms).size() == 3);
    nms.best_class = true;
    REQUIRE(suppress({here}, {0.5f, 0.7f, 0.7f}, nms).size() == 1);
    CHECK(suppress({here}, {0.5f, 0.7f, 0.7f}, nms)[0].class_index == 1);
    CHECK(suppress({here}, {not_a_number, 0.7f, not_a_number}, nms)[0].class_index == 1);
    CHECK(suppress({here}, {not_a_number, not_a_number, not_a_number}, nms).empty());
}

TEST_CASE("equal scores keep the order of boxes and classes, and the limits cut after it") {
    Nms nms = rules();
    nms.pre_nms_topk = 3;
    nms.max_detections = 2;
    const auto found = suppress({here, away, {50, 50, 60, 60}, {70, 70, 80, 80}}, {0.5f, 0.5f, 0.5f, 0.5f}, nms);
    REQUIRE(found.size() == 2);
    CHECK(found[0].box.x1 == 0);
    CHECK(found[1].box.x1 == 20);
}

TEST_CASE("boxes without area and with NaN suppress nothing") {
    CHECK(suppress({{5, 5, 5, 5}, {5, 5, 5, 5}}, {0.9f, 0.8f}, rules()).size() == 2);
    CHECK(suppress({{10, 10, 0, 0}, {10, 10, 0, 0}}, {0.9f, 0.8f}, rules()).size() == 2);
    CHECK(suppress({{0, not_a_number, 10, 10}, here}, {0.9f, 0.8f}, rules()).size() == 2);
    CHECK(suppress({here, {0, 0, not_a_number, 10}}, {0.9f, 0.8f}, rules()).size() == 2);
}

TEST_CASE("logits are compared as they are and come out as probabilities") {
    Nms nms = rules();
    nms.logits = true;
    nms.score_threshold = 0.5f;
    const auto found = suppress({here, away, {50, 50, 60, 60}}, {0.1f, -0.1f, 2.0f}, nms);
    REQUIRE(found.size() == 2);
    CHECK(found[0].score == Approx(0.880797f));
    CHECK(found[1].score == Approx(0.524979f));
    nms.score_threshold = 1;
    CHECK(suppress({here}, {1000.0f}, nms).empty());
    nms.score_threshold = 0;
    CHECK(suppress({here, away}, {-80.0f, -1000.0f}, nms).size() == 1);
}

TEST_CASE("nothing gives nothing") {
    CHECK(suppress({}, {}, rules()).empty());
}
