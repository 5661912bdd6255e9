// Pixels in and boxes out: decode an image, place it in the network's input, and map boxes back.
//
// Equal to trtdet.data.images in Python, which calibration and evaluation use: decoding bit by bit, resizing to one
// grey level.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "trtdet/bundle.hpp"
#include "trtdet/detections.hpp"
#include "trtdet/export.hpp"
#include "trtdet/span.hpp"

namespace trtdet {

// 8-bit RGB, rows from the top, no padding between rows: 3 * width * height bytes.
struct Image {
    int width = 0;
    int height = 0;
    std::vector<std::uint8_t> pixels;
};

// How the samples of a pixel lie: three bytes in this order, or as video decoders and cameras give them, a plane of
// luma and one of colours, U and V in turn, for two by two pixels each.
enum class PixelFormat { rgb, bgr, nv12 };

// What the samples of NV12 mean: video of high definition is BT.709, that before and JPEG BT.601; JPEG alone uses the
// full range of a byte.
struct Yuv {
    bool bt709 = false;
    bool full_range = false;
};

// Pixels that somebody else holds, such as a decoder, a camera or a cv::Mat: rows from the top.
struct ImageView {
    int width = 0;
    int height = 0;
    PixelFormat format = PixelFormat::rgb;
    Span<const std::uint8_t> pixels;  // with nv12 the luma
    std::size_t stride = 0;           // bytes from one row to the next; 0 where none are between
    Span<const std::uint8_t> chroma;  // with nv12: half as many rows, each as long as those of the luma
    std::size_t chroma_stride = 0;
    Yuv yuv;  // with nv12

    ImageView() = default;
    ImageView(const Image& image) : width(image.width), height(image.height), pixels(image.pixels) {}
    ImageView(int columns, int rows, PixelFormat order, Span<const std::uint8_t> bytes, std::size_t step = 0)
        : width(columns), height(rows), format(order), pixels(bytes), stride(step) {}
};

// What is refused before it is decoded. The number of pixels is what a small file can claim many of. A JPEG file may go
// over max_pixels pixels 20 times, over fewer more often, and over none more than 100 times.
struct ImageLimits {
    std::int64_t max_pixels = 50'000'000;
    int max_side = 32'768;
};

// How the caller takes part in decoding. Each may be empty.
struct DecodeHooks {
    // Told how many bytes decoding takes at most, the image among them, after the header was read and before they are
    // taken. May wait; what it throws ends the decoding.
    std::function<void(std::size_t bytes)> reserve{};

    // Asked with every row or two; where nobody wants the image any more, decoding ends. Must not throw.
    std::function<bool()> wanted{};
};

// Decodes a JPEG, PNG or WebP file.
//
// Grey, palette, CMYK and images with alpha are converted; alpha is dropped, not blended. 16-bit grey is divided by
// 257, so that 65535 becomes 255; of other 16-bit channels the high byte is taken. EXIF orientation is not applied:
// COCO's annotations, and most tools' labels, count pixels as they are stored.
//
// bytes: the whole file.
//
// Throws ImageError: neither JPEG, PNG nor WebP, an animation, truncated or damaged. ImageTooLargeError: the header
// names more than the limits allow, and nothing was decoded; or the file goes over its pixels too often. DeadlineError:
// hooks.wanted said no.
TRTDET_API Image decode_image(std::string_view bytes, const ImageLimits& limits = {}, const DecodeHooks& hooks = {});

// The EXIF orientation in a JPEG, PNG or WebP file, 1 to 8; 1, as the pixels are stored, where there is none.
TRTDET_API int exif_orientation(std::string_view bytes);

// The image as it is to be looked at: turned and mirrored as its EXIF orientation says. Boxes are in pixels of that
// then.
TRTDET_API Image upright(Image image, int orientation);

// Where an image lies in the network's input: network = image * scale + pad on each axis, in pixels. The scale is the
// one the pixels really underwent, resized size / original size.
struct Placement {
    double scale_x = 1;
    double scale_y = 1;
    float pad_x = 0;
    float pad_y = 0;
    int width = 0;  // of the original image, in pixels
    int height = 0;

    // Maps a box from pixels of the network's input to pixels of the original image, clipped to it.
    TRTDET_API Box to_image(const Box& box) const;

    // The same of a keypoint, whose score stays.
    TRTDET_API Keypoint keypoint_to_image(const Keypoint& keypoint) const;

    // The same of a rotated box, which is not clipped. Its sides are divided by the scale of each axis; where scales
    // differ, as with Resize::stretch, the sides of the result are as long as those, and the width has its direction.
    TRTDET_API RotatedBox rotated_to_image(const RotatedBox& box) const;
};

// Makes the network's input of an image.
//
// output: float32 (3, preprocess.height, preprocess.width), channels in preprocess.color order; written in full.
//
// Throws ImageError: the image is empty, or has fewer bytes than its rows need.
TRTDET_API Placement preprocess(const ImageView& image, const Preprocess& preprocess, float* output);

}  // namespace trtdet
