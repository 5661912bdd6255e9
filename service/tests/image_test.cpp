// What needs no file; files are decoded and compared with Python's pixels in tests/service.
#include "trtdet/image.hpp"

#include <array>
#include <catch2/catch.hpp>
#include <numeric>

#include "images.hpp"
#include "trtdet/errors.hpp"

using namespace trtdet;
using namespace trtdet::tests;
using Catch::Matchers::Contains;

namespace {

Preprocess to(int height, int width, Resize resize) {
    Preprocess found;
    found.height = height;
    found.width = width;
    found.resize = resize;
    return found;
}

Image filled(int width, int height, std::uint8_t red, std::uint8_t green, std::uint8_t blue) {
    Image image{width, height, std::vector<std::uint8_t>(static_cast<std::size_t>(3 * width * height))};
    for (std::size_t index = 0; index < image.pixels.size(); index += 3) {
        image.pixels[index] = red;
        image.pixels[index + 1] = green;
        image.pixels[index + 2] = blue;
    }
    return image;
}

std::string png_header(const std::string& size) {
    return std::string("\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR", 16) + size + std::string("\x08\x02\0\0\0", 5);
}

}  // namespace

TEST_CASE("an image is placed where the rule says") {
    std::vector<float> output(3 * 8 * 8);
    const Image image = filled(16, 8, 1, 2, 3);
    SECTION("top left") {
        const Placement placement = preprocess(image, to(8, 8, Resize::letterbox_topleft), output.data());
        CHECK(placement.scale_x == 0.5f);
        CHECK(placement.pad_y == 0);
        CHECK(output[0] == 1);
        CHECK(output[3 * 8] == 1);
        CHECK(output[4 * 8] == 114);
        CHECK(output[64 + 3 * 8] == 2);
        CHECK(output[128 + 3 * 8] == 3);
    }
    SECTION("centre") {
        const Placement placement = preprocess(image, to(8, 8, Resize::letterbox_centre), output.data());
        CHECK(placement.pad_y == 2);
        CHECK(output[8] == 114);
        CHECK(output[2 * 8] == 1);
        CHECK(output[5 * 8] == 1);
        CHECK(output[6 * 8] == 114);
        const Box box = placement.to_image({0, 2, 4, 100});
        CHECK(box.x1 == 0);
        CHECK(box.y1 == 0);
        CHECK(box.x2 == 8);
        CHECK(box.y2 == 8);
    }
    SECTION("stretch") {
        const Placement placement = preprocess(image, to(8, 8, Resize::stretch), output.data());
        CHECK(placement.scale_x == 0.5f);
        CHECK(placement.scale_y == 1);
        CHECK(output[63] == 1);
    }
}

TEST_CASE("channels are reordered and normalised in their own order") {
    Preprocess rule = to(1, 1, Resize::stretch);
    rule.color = Color::bgr;
    rule.scale = 0.5;
    rule.mean = {1, 2, 3};
    rule.std = {1, 2, 4};
    std::vector<float> output(3);
    preprocess(filled(1, 1, 10, 20, 30), rule, output.data());
    CHECK(output == std::vector<float>{14, 4, 0.5f});
}

TEST_CASE("one pixel is an image") {
    std::vector<float> output(3 * 4 * 4);
    const Placement placement = preprocess(filled(1, 1, 9, 9, 9), to(4, 4, Resize::letterbox_centre), output.data());
    CHECK(output == std::vector<float>(48, 9.0f));
    CHECK(placement.to_image({-4, 1, 2, 9}).x2 == 0.5f);
}

TEST_CASE("a side never vanishes") {
    std::vector<float> output(3 * 4 * 4);
    const Placement placement =
        preprocess(filled(1000, 1, 9, 9, 9), to(4, 4, Resize::letterbox_topleft), output.data());
    CHECK(placement.scale_y == 1);
    CHECK(output[3] == 9);
    CHECK(output[4] == 114);
}

TEST_CASE("pixels that do not fit their size are refused") {
    std::vector<float> output(48);
    const Preprocess rule = to(4, 4, Resize::stretch);
    CHECK_THROWS_AS(preprocess(Image{0, 0, {}}, rule, output.data()), ImageError);
    CHECK_THROWS_AS(preprocess(Image{-1, -1, {1, 2, 3}}, rule, output.data()), ImageError);
    CHECK_THROWS_WITH(preprocess(Image{2, 2, {1, 2, 3}}, rule, output.data()), Contains("2 x 2 with 3 bytes"));
}

TEST_CASE("pixels are read where somebody else holds them") {
    // An image of 6 x 4 in which every byte is another one, and the middle 3 x 2 of it.
    std::vector<std::uint8_t> bytes(6 * 4 * 3);
    std::iota(bytes.begin(), bytes.end(), std::uint8_t{0});
    Image middle{3, 2, {}};
    Image turned{3, 2, {}};
    for (std::size_t y = 1; y < 3; ++y) {
        for (std::size_t x = 1; x < 4; ++x) {
            const std::uint8_t* const pixel = bytes.data() + 3 * (6 * y + x);
            middle.pixels.insert(middle.pixels.end(), {pixel[0], pixel[1], pixel[2]});
            turned.pixels.insert(turned.pixels.end(), {pixel[2], pixel[1], pixel[0]});
        }
    }
    const Span<const std::uint8_t> part = Span<const std::uint8_t>(bytes).part(3 * 7, 3 * (6 + 3));
    const auto input = [](const ImageView& image, const Preprocess& rule) {
        std::vector<float> output(rule.values());
        preprocess(image, rule, output.data());
        return output;
    };
    for (const Preprocess& rule : {to(2, 3, Resize::stretch), to(5, 7, Resize::letterbox_centre)}) {
        Preprocess other = rule;
        other.color = Color::bgr;
        CHECK(input({3, 2, PixelFormat::rgb, part, 18}, rule) == input(middle, rule));
        CHECK(input({3, 2, PixelFormat::bgr, part, 18}, rule) == input(turned, rule));
        CHECK(input({3, 2, PixelFormat::bgr, part, 18}, other) == input(middle, rule));
    }
    const auto refused = [&](std::size_t size, std::size_t stride) {
        CHECK_THROWS_AS(
            input({3, 2, PixelFormat::rgb, part.part(0, size), stride}, to(2, 3, Resize::stretch)), ImageError);
    };
    refused(part.size() - 1, 18);
    refused(part.size(), 8);
    refused(0, 0);
}

TEST_CASE("video becomes the colours that it means") {
    struct Sample {
        Yuv yuv;
        std::array<std::uint8_t, 3> from;
        std::array<float, 3> to;
    };
    // Red, green and blue as the standards have them, and black and white.
    const Yuv sd{};
    const Yuv hd{true, false};
    const Yuv jpeg{false, true};
    for (const Sample& sample : std::vector<Sample>{
             {sd, {81, 90, 240}, {255, 0, 0}},
             {sd, {145, 54, 34}, {0, 255, 0}},
             {sd, {41, 240, 110}, {0, 0, 255}},
             {sd, {16, 128, 128}, {0, 0, 0}},
             {sd, {235, 128, 128}, {255, 255, 255}},
             {hd, {63, 102, 240}, {255, 0, 0}},
             {hd, {173, 42, 26}, {0, 255, 0}},
             {hd, {32, 240, 118}, {0, 0, 255}},
             {jpeg, {76, 85, 255}, {255, 0, 0}},
             {jpeg, {150, 44, 21}, {0, 255, 0}},
             {jpeg, {29, 255, 107}, {0, 0, 255}},
             {jpeg, {255, 128, 128}, {255, 255, 255}}}) {
        const std::array<std::uint8_t, 4> luma{sample.from[0], sample.from[0], sample.from[0], sample.from[0]};
        const std::array<std::uint8_t, 2> chroma{sample.from[1], sample.from[2]};
        ImageView image(2, 2, PixelFormat::nv12, luma);
        image.chroma = chroma;
        image.yuv = sample.yuv;
        std::vector<float> output(12);
        preprocess(image, to(2, 2, Resize::stretch), output.data());
        for (std::size_t value = 0; value < output.size(); ++value) {
            CHECK(std::abs(output[value] - sample.to[value / 4]) <= 2);
        }
    }
}

TEST_CASE("each four pixels of video have a colour, with gaps between rows and an odd side") {
    // 3 x 3 in rows of 5 bytes; the colours of the right column are blue.
    const std::vector<std::uint8_t> luma(5 * 2 + 3, 41);
    const std::vector<std::uint8_t> chroma{128, 128, 240, 110, 9, 9, 128, 128, 240, 110};
    ImageView image(3, 3, PixelFormat::nv12, luma, 5);
    image.chroma = chroma;
    image.chroma_stride = 6;
    const Preprocess rule = to(3, 3, Resize::stretch);
    std::vector<float> output(27);
    preprocess(image, rule, output.data());
    const float* const blue = output.data() + 18;
    for (std::size_t row = 0; row < 3; ++row) {
        CHECK(blue[3 * row] == blue[3 * row + 1]);
        CHECK(blue[3 * row] < 40);
        CHECK(blue[3 * row + 2] > 250);
    }
    image.chroma = image.chroma.part(0, 9);
    CHECK_THROWS_WITH(preprocess(image, rule, output.data()), Contains("9 bytes of chroma") && Contains("2 rows of 4"));
}

TEST_CASE("what is no image is refused with a reason") {
    CHECK_THROWS_WITH(decode_image(""), Contains("it is empty"));
    CHECK_THROWS_WITH(decode_image("GIF89a"), Contains("neither JPEG, PNG nor WebP"));
    CHECK_THROWS_WITH(decode_image("\xff\xd8\xff"), Contains("truncated"));
    CHECK_THROWS_WITH(decode_image(std::string_view("\x89PNG\r\n\x1a\n", 8)), Contains("truncated"));
    CHECK_THROWS_AS(decode_image(std::string("\xff\xd8\xff\xd9", 4)), ImageError);
}

TEST_CASE("a file that claims too many pixels is refused before they are made room for") {
    // 40000 x 40000, with the checksum that belongs to it.
    const std::string bomb = png_header(std::string("\0\0\x9c\x40\0\0\x9c\x40", 8)) + "\xde\x6e\x99\x52" +
                             std::string("\0\0\0\0IDAT\x35\xaf\x06\x1e", 12);
    try {
        decode_image(bomb);
        FAIL("it was taken");
    } catch (const ImageTooLargeError& error) {
        CHECK_THAT(error.what(), Contains("40000 x 40000 pixels"));
    } catch (const ImageError& error) {
        FAIL(error.what());
    }
}

TEST_CASE("a JPEG file may go over many pixels less often than over few") {
    const ImageLimits limits{64 * 64, 64};
    CHECK(decode_image(progressive_jpeg(64, 64, 20), limits).pixels == std::vector<std::uint8_t>(3 * 64 * 64, 128));
    CHECK(decode_image(progressive_jpeg(64, 16, 80), limits).height == 16);
    CHECK_THROWS_AS(decode_image(progressive_jpeg(64, 64, 21), limits), ImageTooLargeError);
    CHECK_THROWS_WITH(decode_image(progressive_jpeg(64, 16, 81), limits), Contains("64 x 16 pixels more often"));
    // However few they are.
    CHECK(decode_image(progressive_jpeg(8, 8, 100), limits).width == 8);
    CHECK_THROWS_WITH(decode_image(progressive_jpeg(8, 8, 101), limits), Contains("more than 100 scans"));
}

TEST_CASE("decoding ends when nobody wants the image any more") {
    for (const std::string& file : {progressive_jpeg(80, 400, 10), png(80, 400, 7)}) {
        int asked = 0;
        const Image image = decode_image(file, {}, {{}, [&asked] { return ++asked > 0; }});
        CHECK(image.height == 400);
        // Often enough that it is a matter of milliseconds for the largest file as well.
        CHECK(asked >= 400);
        for (const int patience : {0, 1, asked / 2, asked - 1}) {
            int left = patience;
            CHECK_THROWS_AS(decode_image(file, {}, {{}, [&left] { return left-- > 0; }}), DeadlineError);
            CHECK(left == -1);
        }
    }
}

TEST_CASE("the memory for decoding is known before it is taken") {
    std::size_t told = 0;
    const DecodeHooks hooks{[&told](std::size_t bytes) { told = bytes; }, {}};
    decode_image(png(80, 400, 7), {}, hooks);
    CHECK(told == 3 * 80 * 400);
    // The coefficients of all blocks, 64 of 2 bytes each, stay until the last scan.
    decode_image(progressive_jpeg(80, 400, 2), {}, hooks);
    CHECK(told == (3 + 2) * 80 * 400);
    for (const std::string& file : {progressive_jpeg(8, 8, 2), png(8, 8, 7)}) {
        CHECK_THROWS_AS(
            decode_image(file, {}, {[](std::size_t) { throw OverloadedError("there is no room"); }, {}}),
            OverloadedError);
    }
}
