#include "preprocess.hpp"

#include <algorithm>
#include <cmath>
#include <new>
#include <opencv2/core.hpp>
#include <opencv2/imgproc.hpp>
#include <string>

#include "text.hpp"
#include "trtdet/errors.hpp"

namespace trtdet {

namespace {

cv::InterpolationFlags flag_of(Interpolation interpolation) {
    switch (interpolation) {
        case Interpolation::nearest:
            return cv::INTER_NEAREST;
        case Interpolation::linear:
            return cv::INTER_LINEAR;
        case Interpolation::cubic:
            return cv::INTER_CUBIC;
        case Interpolation::area:
            return cv::INTER_AREA;
    }
    return cv::INTER_LINEAR;
}

// Intel's IPP, which some builds of OpenCV have, interpolates cubically to a grey level more or less than OpenCV
// itself. The setting is the thread's alone.
class WithoutIpp {
public:
    WithoutIpp() : before_(cv::ipp::useIPP()) { cv::ipp::setUseIPP(false); }
    ~WithoutIpp() { cv::ipp::setUseIPP(before_); }

    WithoutIpp(const WithoutIpp&) = delete;
    WithoutIpp& operator=(const WithoutIpp&) = delete;

private:
    const bool before_;
};

// The size after resizing, and the columns and rows of border before the image.
cv::Rect layout(const ImageView& image, const Preprocess& to) {
    if (to.resize == Resize::stretch) {
        return {0, 0, to.width, to.height};
    }
    const double ratio = std::min(double(to.height) / image.height, double(to.width) / image.width);
    // Halves go to the even number, as in Python.
    const int width = std::max(1, static_cast<int>(std::nearbyint(image.width * ratio)));
    const int height = std::max(1, static_cast<int>(std::nearbyint(image.height * ratio)));
    if (to.resize == Resize::letterbox_topleft) {
        return {0, 0, width, height};
    }
    return {(to.width - width) / 2, (to.height - height) / 2, width, height};
}

// The bytes from one row to the next, after making sure that all rows are there.
std::size_t stride_of(
    const ImageView& image, const char* what, Span<const std::uint8_t> bytes, std::size_t stride, std::size_t row,
    std::size_t rows) {
    const std::size_t step = stride == 0 ? row : stride;
    if (row == 0 || rows == 0 || step < row || bytes.size() < row || (bytes.size() - row) / step < rows - 1) {
        throw ImageError(
            "an image of " + std::to_string(image.width) + " x " + std::to_string(image.height) + " with " +
            std::to_string(bytes.size()) + " bytes of " + what + ", " + std::to_string(step) +
            " from one row to the next; expected are " + std::to_string(rows) + " rows of " + std::to_string(row) +
            " bytes each, and at least one pixel");
    }
    return step;
}

// How much of its two samples of colour goes into each channel of a pixel, in 65536ths.
struct Coefficients {
    int luma;
    int black;  // the luma of it
    int red_of_v;
    int green_of_u;
    int green_of_v;
    int blue_of_u;
};

Coefficients coefficients_of(Yuv yuv) {
    const double red = yuv.bt709 ? 0.2126 : 0.299;
    const double blue = yuv.bt709 ? 0.0722 : 0.114;
    const double green = 1 - red - blue;
    const double chroma = yuv.full_range ? 1 : 255.0 / 224;
    const auto fixed = [](double value) { return static_cast<int>(std::lround(value * 65536)); };
    return {
        fixed(yuv.full_range ? 1 : 255.0 / 219),
        yuv.full_range ? 0 : 16,
        fixed(chroma * 2 * (1 - red)),
        fixed(-chroma * 2 * blue * (1 - blue) / green),
        fixed(-chroma * 2 * red * (1 - red) / green),
        fixed(chroma * 2 * (1 - blue)),
    };
}

std::uint8_t clipped(int value) {
    return static_cast<std::uint8_t>(std::clamp((value + 32768) / 65536, 0, 255));
}

// Red, green and blue of luma for each pixel and colour for four; a pixel has the colour of its four.
cv::Mat rgb_of(const ImageView& image, std::size_t stride, std::size_t chroma_stride) {
    const Coefficients by = coefficients_of(image.yuv);
    cv::Mat found(image.height, image.width, CV_8UC3);
    for (int y = 0; y < image.height; ++y) {
        const std::uint8_t* const luma = image.pixels.data() + static_cast<std::size_t>(y) * stride;
        const std::uint8_t* const chroma = image.chroma.data() + static_cast<std::size_t>(y / 2) * chroma_stride;
        std::uint8_t* target = found.ptr(y);
        for (int x = 0; x < image.width; ++x) {
            const int light = (luma[x] - by.black) * by.luma;
            const int u = chroma[x / 2 * 2] - 128;
            const int v = chroma[x / 2 * 2 + 1] - 128;
            *target++ = clipped(light + v * by.red_of_v);
            *target++ = clipped(light + u * by.green_of_u + v * by.green_of_v);
            *target++ = clipped(light + u * by.blue_of_u);
        }
    }
    return found;
}

// The image as OpenCV takes it, without a copy where that is possible.
cv::Mat matrix_of(const ImageView& image) {
    const auto width = static_cast<std::size_t>(std::max(image.width, 0));
    const auto height = static_cast<std::size_t>(std::max(image.height, 0));
    if (image.format != PixelFormat::nv12) {
        const std::size_t stride = stride_of(image, "pixels", image.pixels, image.stride, 3 * width, height);
        return {image.height, image.width, CV_8UC3, const_cast<std::uint8_t*>(image.pixels.data()), stride};
    }
    const std::size_t stride = stride_of(image, "luma", image.pixels, image.stride, width, height);
    const std::size_t chroma_stride =
        stride_of(image, "chroma", image.chroma, image.chroma_stride, (width + 1) / 2 * 2, (height + 1) / 2);
    return rgb_of(image, stride, chroma_stride);
}

}  // namespace

// In float32, as in Python.
Box Placement::to_image(const Box& box) const {
    const Keypoint first = keypoint_to_image(Keypoint{box.x1, box.y1, 0});
    const Keypoint second = keypoint_to_image(Keypoint{box.x2, box.y2, 0});
    return {first.x, first.y, second.x, second.y};
}

Keypoint Placement::keypoint_to_image(const Keypoint& keypoint) const {
    const auto clipped = [](float value, int size) {
        return std::min(std::max(value, 0.0f), static_cast<float>(size));
    };
    return {
        clipped((keypoint.x - pad_x) / static_cast<float>(scale_x), width),
        clipped((keypoint.y - pad_y) / static_cast<float>(scale_y), height),
        keypoint.score,
    };
}

RotatedBox Placement::rotated_to_image(const RotatedBox& box) const {
    const auto across = static_cast<float>(scale_x);
    const auto down = static_cast<float>(scale_y);
    const float cosine = std::cos(box.angle);
    const float sine = std::sin(box.angle);
    return {
        (box.x - pad_x) / across,
        (box.y - pad_y) / down,
        box.width * std::hypot(cosine / across, sine / down),
        box.height * std::hypot(sine / across, cosine / down),
        std::atan2(sine / down, cosine / across),
    };
}

Resized resize(const ImageView& image, const Preprocess& to) {
    cv::Mat pixels;
    Resized made;
    try {
        pixels = matrix_of(image);
        const cv::Rect place = layout(image, to);
        made.x = place.x;
        made.y = place.y;
        made.width = place.width;
        made.height = place.height;
        made.pixels.resize(3 * static_cast<std::size_t>(place.width) * static_cast<std::size_t>(place.height));
        cv::Mat target(place.size(), CV_8UC3, made.pixels.data());
        if (place.size() == pixels.size()) {
            pixels.copyTo(target);
        } else {
            const WithoutIpp exactly;
            cv::resize(pixels, target, place.size(), 0, 0, flag_of(to.interpolation));
        }
    } catch (const cv::Exception& error) {
        if (error.code == cv::Error::StsNoMem) {
            throw std::bad_alloc();
        }
        throw ImageError("the image cannot be resized: " + printable(error.err) + "; send another one");
    }
    made.bgr = image.format == PixelFormat::bgr;
    made.placement = {
        double(made.width) / image.width,
        double(made.height) / image.height,
        static_cast<float>(made.x),
        static_cast<float>(made.y),
        image.width,
        image.height,
    };
    return made;
}

void normalise(const Resized& image, const Preprocess& to, float* output) {
    const auto columns = static_cast<std::size_t>(to.width);
    const std::size_t plane = static_cast<std::size_t>(to.height) * columns;
    const std::size_t before = static_cast<std::size_t>(image.y) * columns + static_cast<std::size_t>(image.x);
    for (std::size_t channel = 0; channel < 3; ++channel, output += plane) {
        // A table of the 256 possible values makes the normalisation exact and cheap.
        float table[256];
        for (int value = 0; value < 256; ++value) {
            table[value] = static_cast<float>((value * to.scale - to.mean[channel]) / to.std[channel]);
        }
        const std::size_t source = (to.color == Color::bgr) == image.bgr ? channel : 2 - channel;
        const std::uint8_t* from = image.pixels.data() + source;
        float* target = std::fill_n(output, before, table[to.pad_value]);
        for (int y = 0; y < image.height; ++y) {
            int x = 0;
            // Four at a time: their tables are read before any is written.
            for (; x + 4 <= image.width; x += 4, from += 12, target += 4) {
                const float first = table[from[0]], second = table[from[3]], third = table[from[6]];
                const float fourth = table[from[9]];
                target[0] = first;
                target[1] = second;
                target[2] = third;
                target[3] = fourth;
            }
            for (; x < image.width; ++x, from += 3) {
                *target++ = table[*from];
            }
            // The border to the right, and that of the next row to the left.
            if (y + 1 < image.height) {
                target = std::fill_n(target, to.width - image.width, table[to.pad_value]);
            }
        }
        std::fill(target, output + plane, table[to.pad_value]);
    }
}

Placement preprocess(const ImageView& image, const Preprocess& to, float* output) {
    const Resized resized = resize(image, to);
    normalise(resized, to, output);
    return resized.placement;
}

}  // namespace trtdet
