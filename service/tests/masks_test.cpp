#include "trtdet/masks.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <tuple>

#include "numbers.hpp"
#include "trtdet/errors.hpp"

using namespace trtdet;
using Catch::Matchers::Contains;

namespace {

std::uint64_t sum(const RunLengths& mask) {
    std::uint64_t all = 0;
    for (const std::uint32_t run : mask.runs) {
        all += run;
    }
    return all;
}

// What every mask is, whatever was pasted.
void check_form(const RunLengths& mask, int width, int height) {
    CHECK(mask.width == width);
    CHECK(mask.height == height);
    CHECK(sum(mask) == static_cast<std::uint64_t>(width) * static_cast<std::uint64_t>(height));
    for (std::size_t index = 1; index < mask.runs.size(); ++index) {
        CHECK(mask.runs[index] > 0);
    }
}

// The value of a pixel of a box that lies on whole pixels, by the definition.
float value_at(const std::vector<float>& mask, int side, int length_x, int length_y, int x, int y) {
    const auto place = [side](int pixel, int length) {
        const float scale = static_cast<float>(side + 2) / static_cast<float>(length);
        return std::max(scale * (static_cast<float>(pixel) + 0.5F) - 0.5F, 0.0F);
    };
    const auto level = [&](int row, int column) {
        const bool within = row >= 1 && row <= side && column >= 1 && column <= side;
        return within ? mask[static_cast<std::size_t>((row - 1) * side + column - 1)] : 0.0F;
    };
    const float at_x = place(x, length_x);
    const float at_y = place(y, length_y);
    const int left = static_cast<int>(at_x);
    const int top = static_cast<int>(at_y);
    const float right_weight = at_x - static_cast<float>(left);
    const float bottom_weight = at_y - static_cast<float>(top);
    const auto across = [&](int row) {
        return level(row, left) * (1 - right_weight) + level(row, left + 1) * right_weight;
    };
    return across(top) * (1 - bottom_weight) + across(top + 1) * bottom_weight;
}

}  // namespace

TEST_CASE("masks are pasted as torchvision pastes them", "[masks]") {
    std::ifstream stream(TORCHVISION_MASKS);
    const auto stored = nlohmann::json::parse(stream);
    std::vector<std::vector<float>> masks;
    for (const auto& levels : stored["masks"]) {
        auto& mask = masks.emplace_back();
        for (const auto& level : levels) {
            mask.push_back(level.get<float>() / 255);
        }
    }
    REQUIRE(stored["cases"].size() > 60);
    for (const auto& one : stored["cases"]) {
        const int height = one["size"][0];
        const int width = one["size"][1];
        const auto& sides = one["box"];
        const Box box{sides[0], sides[1], sides[2], sides[3]};
        const auto found = paste_mask(masks.at(one["mask"]), box, width, height);
        INFO(one);
        check_form(found, width, height);
        CHECK(found.counts() == one["counts"].get<std::string>());
    }
}

TEST_CASE("masks are what each of their pixels is by itself", "[masks]") {
    std::mt19937 random(7);
    const auto between = [&](float least, float most) {
        return std::uniform_real_distribution<float>(least, most)(random);
    };
    for (int round = 0; round < 300; ++round) {
        const int side = 1 + round % 9;
        std::vector<float> mask(static_cast<std::size_t>(side * side));
        for (float& value : mask) {
            value = round % 11 == 0 && between(0, 1) < 0.2F ? not_a_number : between(0, 1);
        }
        const int width = 1 + static_cast<int>(between(0, 90));
        const int height = 1 + static_cast<int>(between(0, 90));
        const float left = between(-40, 80);
        const float top = between(-40, 80);
        const Box box{left, top, left + between(0, 120), top + between(0, 120)};
        const float threshold = between(0.1F, 0.9F);
        const auto grown = static_cast<float>(double(side + 2) / side);
        const auto edges = [&](float from, float to) {
            const float centre = (to + from) * 0.5F;
            const float half = (to - from) * 0.5F * grown;
            return std::pair(static_cast<int>(centre - half), static_cast<int>(centre + half));
        };
        const auto [x1, x2] = edges(box.x1, box.x2);
        const auto [y1, y2] = edges(box.y1, box.y2);
        const auto found = paste_mask(mask, box, width, height, threshold);
        check_form(found, width, height);
        const auto pixels = found.pixels();
        REQUIRE(pixels.size() == static_cast<std::size_t>(width * height));
        std::uint64_t inside = 0;
        int different = 0;
        for (int y = 0; y < height; ++y) {
            for (int x = 0; x < width; ++x) {
                const bool within = x >= x1 && x <= x2 && y >= y1 && y <= y2;
                const bool expected =
                    within && value_at(mask, side, x2 - x1 + 1, y2 - y1 + 1, x - x1, y - y1) > threshold;
                const auto got = pixels[static_cast<std::size_t>(y * width + x)];
                inside += got;
                different += got != (expected ? 1 : 0) ? 1 : 0;
            }
        }
        CHECK(different == 0);
        CHECK(inside == found.area());
    }
}

TEST_CASE("masks of prototypes are what each of their pixels is by itself", "[masks]") {
    std::mt19937 random(3);
    const auto between = [&](float least, float most) {
        return std::uniform_real_distribution<float>(least, most)(random);
    };
    for (int round = 0; round < 200; ++round) {
        PrototypeMasks masks;
        masks.count = 1 + round % 3;
        masks.height = 1 + static_cast<int>(between(0, 9));
        masks.width = 1 + static_cast<int>(between(0, 9));
        masks.threshold = between(0.1F, 0.9F);
        masks.input_height = 4 * masks.height;
        masks.input_width = 4 * masks.width;
        const int width = 1 + static_cast<int>(between(0, 90));
        const int height = 1 + static_cast<int>(between(0, 90));
        // A letterbox in the centre.
        const double ratio = std::min(double(masks.input_height) / height, double(masks.input_width) / width);
        const int placed_width = std::max(1, static_cast<int>(std::nearbyint(width * ratio)));
        const int placed_height = std::max(1, static_cast<int>(std::nearbyint(height * ratio)));
        masks.placement = {
            double(placed_width) / width,
            double(placed_height) / height,
            static_cast<float>((masks.input_width - placed_width) / 2),
            static_cast<float>((masks.input_height - placed_height) / 2),
            width,
            height};
        masks.prototypes.resize(static_cast<std::size_t>(masks.count * masks.height * masks.width));
        for (float& value : masks.prototypes) {
            value = between(-1, 1);
        }
        masks.coefficients.resize(static_cast<std::size_t>(2 * masks.count));
        for (float& value : masks.coefficients) {
            value = between(-1, 1);
        }
        const float left = between(0, float(width));
        const float top = between(0, float(height));
        const Box box{left, top, between(left, float(width)), between(top, float(height))};
        const auto cell = [&](std::size_t row, std::size_t column) {
            float sum = 0;
            for (std::size_t one = 0; one < masks[1].size(); ++one) {
                const std::size_t line = one * static_cast<std::size_t>(masks.height) + row;
                sum += masks[1][one] * masks.prototypes[line * static_cast<std::size_t>(masks.width) + column];
            }
            return sum;
        };
        // The cells before and after a pixel on an axis, and the share of the second.
        const auto place = [](int pixel, double scale, double pad, double length, double input, int count) {
            const double cells = count / input;
            double at = ((pixel + 0.5) * scale + pad) * cells - 0.5;
            at = std::max(std::min(at, (pad + scale * length) * cells - 1), pad * cells);
            const auto first = static_cast<std::size_t>(at);
            const auto second = std::min(first + 1, static_cast<std::size_t>(count - 1));
            return std::tuple(first, second, static_cast<float>(at - static_cast<double>(first)));
        };
        const auto logit = static_cast<float>(std::log(masks.threshold / (1 - masks.threshold)));
        const Placement& where = masks.placement;
        const auto found = prototype_mask(masks, 1, box);
        check_form(found, width, height);
        const auto pixels = found.pixels();
        int different = 0;
        for (int y = 0; y < height; ++y) {
            for (int x = 0; x < width; ++x) {
                const auto [x0, x1, across] =
                    place(x, where.scale_x, where.pad_x, width, masks.input_width, masks.width);
                const auto [y0, y1, down] =
                    place(y, where.scale_y, where.pad_y, height, masks.input_height, masks.height);
                const float before = cell(y0, x0) * (1 - down) + cell(y1, x0) * down;
                const float after = cell(y0, x1) * (1 - down) + cell(y1, x1) * down;
                const bool within =
                    static_cast<float>(x) >= std::ceil(box.x1) && static_cast<float>(x) < std::ceil(box.x2) &&
                    static_cast<float>(y) >= std::ceil(box.y1) && static_cast<float>(y) < std::ceil(box.y2);
                const bool expected = within && before * (1 - across) + after * across > logit;
                different += (pixels[static_cast<std::size_t>(y * width + x)] != 0) != expected ? 1 : 0;
            }
        }
        CHECK(different == 0);
    }
}

TEST_CASE("a mask of prototypes that are none covers nothing, or is refused", "[masks]") {
    PrototypeMasks masks;
    CHECK_THROWS_WITH(prototype_mask(masks, 0, {}), Contains("image of 0 x 0 pixels"));
    masks.placement.width = 30;
    masks.placement.height = 20;
    CHECK_THROWS_WITH(
        prototype_mask(masks, 0, {}), Contains("mask 0 of 0 coefficients and 0 values of prototypes was wanted"));
    masks.count = 2;
    masks.height = 5;
    masks.width = 8;
    masks.input_height = 20;
    masks.input_width = 32;
    masks.prototypes.assign(80, 1.0F);
    masks.coefficients = {1, 1, not_a_number, 1, infinite, 1};
    CHECK(prototype_mask(masks, 0, {2, 3, 12, 9}).area() == 60);
    CHECK(prototype_mask(masks, 2, {2, 3, 12, 9}).area() <= 60);
    CHECK(prototype_mask(masks, 0, {-1e30F, -1e30F, 1e30F, 1e30F}).area() == 600);
    // Not a number exceeds nothing.
    CHECK(prototype_mask(masks, 1, {2, 3, 12, 9}).area() == 0);
    CHECK(prototype_mask(masks, 0, {12, 9, 2, 3}).area() == 0);
    CHECK(prototype_mask(masks, 0, {40, 3, 50, 9}).area() == 0);
    for (const float bad : {not_a_number, infinite, -infinite}) {
        for (int side = 0; side < 4; ++side) {
            float sides[] = {1, 1, 5, 5};
            sides[side] = bad;
            const auto found = prototype_mask(masks, 0, {sides[0], sides[1], sides[2], sides[3]});
            check_form(found, 30, 20);
            CHECK(found.area() == 0);
        }
    }
    // A placement that is none.
    PrototypeMasks odd = masks;
    for (const float pad : {-100.0F, 1e9F, not_a_number}) {
        odd.placement.pad_x = odd.placement.pad_y = pad;
        CHECK(prototype_mask(odd, 0, {2, 3, 12, 9}).area() == 60);
    }
    CHECK_THROWS_AS(prototype_mask(masks, 3, {2, 3, 12, 9}), EngineError);
    masks.prototypes.pop_back();
    CHECK_THROWS_WITH(prototype_mask(masks, 0, {2, 3, 12, 9}), Contains("79 values") && Contains("2 x 5 x 8 values"));
}

TEST_CASE("runs are written as COCO writes them", "[masks]") {
    // 4 x 3: columns of 0 0 1, 1 1 0, 0 0 0, 1 1 1.
    const RunLengths mask{4, 3, {2, 3, 4, 3}};
    CHECK(mask.pixels() == std::vector<std::uint8_t>{0, 1, 0, 1, 0, 1, 0, 1, 1, 0, 0, 1});
    CHECK(mask.area() == 6);
    CHECK(mask.counts() == "2340");
    CHECK(RunLengths{1000, 1000, {1000000}}.counts() == "Pb`n0");
    CHECK(RunLengths{2, 2, {0, 4}}.counts() == "04");
    CHECK(RunLengths{10, 10, {3, 40, 30, 5, 20, 2}}.counts() == "3X1n0mNFM");
}

TEST_CASE("a mask of values that are no masks covers nothing, or what is in the image", "[masks]") {
    const std::vector<float> full(784, 1.0F);
    for (const float bad : {not_a_number, infinite, -infinite}) {
        for (int side = 0; side < 4; ++side) {
            float sides[] = {1, 1, 5, 5};
            sides[side] = bad;
            const auto found = paste_mask(full, {sides[0], sides[1], sides[2], sides[3]}, 30, 20);
            check_form(found, 30, 20);
            CHECK(found.area() == 0);
        }
    }
    // Larger than any image, and inside out.
    CHECK(paste_mask(full, {-1e30F, -1e30F, 1e30F, 1e30F}, 30, 20).area() == 600);
    CHECK(paste_mask(full, {-3e38F, -3e38F, 3e38F, 3e38F}, 30, 20).runs.size() < 3);
    CHECK(paste_mask(full, {20, 15, 5, 5}, 30, 20).area() == 0);
    CHECK(paste_mask(full, {1e9F, 1e9F, 1e10F, 1e10F}, 30, 20).area() == 0);
    CHECK(paste_mask(full, {-5, -5, 35, 25}, 30, 20).runs == std::vector<std::uint32_t>{0, 600});
    CHECK(paste_mask(std::vector<float>(784, not_a_number), {0, 0, 30, 20}, 30, 20).area() == 0);
    CHECK(paste_mask(std::vector<float>(784, infinite), {0, 0, 30, 20}, 30, 20).area() > 400);
    CHECK(paste_mask(full, {0, 0, 9, 9}, 30, 20, not_a_number).area() == 0);
    CHECK_THROWS_WITH(paste_mask(full, {}, 0, 5), Contains("0 x 5 pixels"));
    CHECK_THROWS_AS(paste_mask(full, {}, 65536, 65536), ImageError);
    CHECK_THROWS_WITH(paste_mask(std::vector<float>(783), {}, 5, 5), Contains("a mask of 783 values"));
    CHECK_THROWS_AS(paste_mask(Span<const float>(), {}, 5, 5), EngineError);
}

TEST_CASE("a mask of the largest image takes the memory of its runs", "[masks]") {
    std::vector<float> mask(784, 1.0F);
    mask[400] = 0;
    const auto found = paste_mask(mask, {0, 0, 65535, 65535}, 65535, 65535);
    check_form(found, 65535, 65535);
    CHECK(found.area() > 4'000'000'000U);
    CHECK(found.runs.size() < 4 * 65535);
}
