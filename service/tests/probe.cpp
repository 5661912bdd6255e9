// Asks one part of the library at a time, for tests that compare it with Python.
//
//     trtdet-probe manifest MANIFEST               nothing, or the reason why it is refused
//     trtdet-probe decode IMAGE                    "width height\n", then the pixels
//     trtdet-probe upright IMAGE                   the same, turned as its EXIF data say
//     trtdet-probe preprocess MANIFEST IMAGE       "scale_x scale_y pad_x pad_y\n", then the network's input
//     trtdet-probe nms                             cases on stdin, detections on stdout, see nms()
//     trtdet-probe scans WIDTH HEIGHT COUNT        a JPEG file that goes over its pixels so often
//
// Ends with 1 and one line on stderr where the library throws an Error, and with 3 where there is no memory.
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <new>

#include "images.hpp"
#include "trtdet/detections.hpp"
#include "trtdet/errors.hpp"
#include "trtdet/image.hpp"

namespace {

using namespace trtdet;

std::string contents(const char* file) {
    std::ifstream stream(file, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(stream), {});
}

template <typename T>
void write(const std::vector<T>& values) {
    std::fwrite(values.data(), sizeof(T), values.size(), stdout);
}

void decode(const char* file) {
    const Image image = decode_image(contents(file));
    std::printf("%d %d\n", image.width, image.height);
    write(image.pixels);
}

void turn(const char* file) {
    const auto bytes = contents(file);
    const Image image = upright(decode_image(bytes), exif_orientation(bytes));
    std::printf("%d %d\n", image.width, image.height);
    write(image.pixels);
}

void preprocess(const char* manifest, const char* file) {
    const Preprocess rule = parse_manifest(contents(manifest)).input.preprocess;
    std::vector<float> input(rule.values());
    const Placement placement = trtdet::preprocess(decode_image(contents(file)), rule, input.data());
    std::printf("%.17g %.17g %.9g %.9g\n", placement.scale_x, placement.scale_y, placement.pad_x, placement.pad_y);
    write(input);
}

// Each case: a line "count classes score_threshold iou_threshold max_detections pre_nms_topk agnostic best logits
// rotated", then float32 boxes, scores and, with rotated, rotated boxes. Each answer: a line with the number of
// detections, and one "x1 y1 x2 y2 score class row" for each.
void nms() {
    std::size_t count = 0;
    std::size_t classes = 0;
    bool is_rotated = false;
    Nms rule;
    while (std::cin >> count >> classes >> rule.score_threshold >> rule.iou_threshold >> rule.max_detections >>
           rule.pre_nms_topk >> rule.class_agnostic >> rule.best_class >> rule.logits >> is_rotated) {
        std::cin.ignore(1);
        std::vector<float> boxes(count * 4);
        std::vector<float> scores(count * classes);
        std::vector<float> rotated(is_rotated ? count * 5 : 0);
        for (auto* const values : {&boxes, &scores, &rotated}) {
            std::cin.read(
                reinterpret_cast<char*>(values->data()), static_cast<std::streamsize>(values->size() * sizeof(float)));
        }
        const auto found = non_max_suppression(
            boxes.data(), scores.data(), count, classes, rule, is_rotated ? rotated.data() : nullptr);
        std::printf("%zu\n", found.size());
        for (const Detection& one : found) {
            std::printf(
                "%.9g %.9g %.9g %.9g %.9g %d %zu\n", one.box.x1, one.box.y1, one.box.x2, one.box.y2, one.score,
                one.class_index, one.row);
        }
    }
}

}  // namespace

int main(int count, char** arguments) {
    const std::string what = count > 1 ? arguments[1] : "";
    try {
        if (what == "manifest" && count == 3) {
            parse_manifest(contents(arguments[2]));
        } else if (what == "decode" && count == 3) {
            decode(arguments[2]);
        } else if (what == "upright" && count == 3) {
            turn(arguments[2]);
        } else if (what == "preprocess" && count == 4) {
            preprocess(arguments[2], arguments[3]);
        } else if (what == "nms" && count == 2) {
            nms();
        } else if (what == "scans" && count == 5) {
            const auto side = [&](int index) { return static_cast<std::uint32_t>(std::stoul(arguments[index])); };
            std::cout << tests::progressive_jpeg(side(2), side(3), std::stoi(arguments[4]));
        } else {
            std::fprintf(stderr, "usage: trtdet-probe manifest|decode|upright|preprocess|nms|scans ...\n");
            return 2;
        }
    } catch (const Error& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    } catch (const std::bad_alloc&) {
        return 3;
    }
    return 0;
}
