#include "trtdet/image.hpp"

#include <csetjmp>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

#include <jpeglib.h>

#include <jerror.h>
#include <png.h>
#include <webp/decode.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "text.hpp"
#include "trtdet/errors.hpp"

namespace trtdet {

namespace {

// A JPEG file with more is not made by anyone but to cost time: each scan goes over the whole image.
constexpr int most_scans = 100;

// As many scans as an image of the most pixels may have, twice what encoders write; a smaller image may have more, as
// the time for a scan is that for its pixels, however few bytes it has.
constexpr std::int64_t most_full_scans = 20;

[[noreturn]] void refuse(const std::string& what) {
    throw ImageError("the image cannot be decoded: " + what + "; send another file");
}

void check_size(std::int64_t width, std::int64_t height, const ImageLimits& limits) {
    if (width < 1 || height < 1) {
        refuse("it has no pixels");
    }
    if (width > limits.max_side || height > limits.max_side || width * height > limits.max_pixels) {
        throw ImageTooLargeError(
            "the image has " + std::to_string(width) + " x " + std::to_string(height) +
            " pixels, allowed are sides of " + std::to_string(limits.max_side) + " and " +
            std::to_string(limits.max_pixels) + " in all; make it smaller before it is sent");
    }
}

// Why a decoder ended early.
enum class Failure { damaged, too_many_scans, unwanted, no_memory };

// What both decoders' jobs have.
struct Job {
    std::string_view bytes;
    const ImageLimits* limits;
    const DecodeHooks* hooks;
    Image image;
    std::jmp_buf back;
    Failure failure = Failure::damaged;

    bool unwanted() const { return hooks->wanted && !hooks->wanted(); }

    void reserve(std::size_t more) const {
        if (hooks->reserve) {
            hooks->reserve(
                std::size_t{3} * static_cast<std::size_t>(image.width) * static_cast<std::size_t>(image.height) + more);
        }
    }
};

[[noreturn]] void report(const Job& job, const char* message) {
    switch (job.failure) {
        case Failure::too_many_scans:
            throw ImageTooLargeError(
                "the image is a JPEG file that goes over its " + std::to_string(job.image.width) + " x " +
                std::to_string(job.image.height) +
                " pixels more often than is allowed for so many; save it without "
                "scans of its own (not progressive), or make it smaller");
        case Failure::unwanted:
            throw DeadlineError("the time for the answer was over while the image was decoded; send a smaller one");
        case Failure::no_memory:
            throw std::bad_alloc();
        case Failure::damaged:
            break;
    }
    refuse(printable(message));
}

// Both decoders report errors by longjmp. What has a destructor therefore lives in a job, outside of the function that
// is jumped back to; nothing that has one is made between the library's frames and that function.

struct JpegJob : Job {
    jpeg_decompress_struct info;
    jpeg_error_mgr errors;
    jpeg_source_mgr source;
    jpeg_progress_mgr progress;
    char message[JMSG_LENGTH_MAX];
    std::vector<std::uint8_t> row;

    JpegJob() = default;
    JpegJob(const JpegJob&) = delete;
    JpegJob& operator=(const JpegJob&) = delete;
    ~JpegJob() { jpeg_destroy_decompress(&info); }
};

void jpeg_fail(JpegJob& job, const char* message) {
    std::snprintf(job.message, sizeof job.message, "%s", message);
    std::longjmp(job.back, 1);
}

// As Pillow has it: 255 - k scales what is left of the light.
std::uint8_t from_cmyk(int ink, int light) {
    const int product = ink * light + 128;
    return static_cast<std::uint8_t>(std::max(0, light - (((product >> 8) + product) >> 8)));
}

void jpeg_rows(JpegJob& job) {
    jpeg_decompress_struct& info = job.info;
    while (info.output_scanline < info.output_height) {
        std::uint8_t* const target =
            job.image.pixels.data() + std::size_t{info.output_scanline} * info.output_width * 3;
        JSAMPROW rows[] = {info.out_color_space == JCS_RGB ? target : job.row.data()};
        if (jpeg_read_scanlines(&info, rows, 1) != 1) {
            jpeg_fail(job, "the JPEG file is truncated");
        }
        const std::uint8_t* const row = job.row.data();
        for (std::size_t x = 0; x < info.output_width && rows[0] == row; ++x) {
            if (info.out_color_space == JCS_GRAYSCALE) {
                std::memset(target + 3 * x, row[x], 3);
            } else {  // Adobe's convention, which is everyone's: inks are stored inverted
                for (std::size_t channel = 0; channel < 3; ++channel) {
                    target[3 * x + channel] = from_cmyk(255 - row[4 * x + channel], row[4 * x + 3]);
                }
            }
        }
    }
}

// Called for each row of blocks that is read, and each row of pixels that is made.
void watch_jpeg(JpegJob& job) {
    const int scans = job.info.input_scan_number;
    if (scans > most_scans) {
        jpeg_fail(job, "the JPEG file has more than 100 scans");
    }
    if (scans > most_full_scans &&
        std::int64_t{job.image.width} * job.image.height > most_full_scans * job.limits->max_pixels / scans) {
        job.failure = Failure::too_many_scans;
        std::longjmp(job.back, 1);
    }
    if (job.unwanted()) {
        job.failure = Failure::unwanted;
        std::longjmp(job.back, 1);
    }
}

// What libjpeg holds until the last scan: the coefficients of all blocks.
std::size_t jpeg_coefficients(jpeg_decompress_struct& info) {
    std::size_t bytes = 0;
    for (int index = 0; index < info.num_components && jpeg_has_multiple_scans(&info) != FALSE; ++index) {
        const jpeg_component_info& component = info.comp_info[index];
        bytes += std::size_t{component.width_in_blocks} * component.height_in_blocks * sizeof(JBLOCK);
    }
    return bytes;
}

void start_jpeg(JpegJob& job) {
    jpeg_decompress_struct& info = job.info;
    info.err = jpeg_std_error(&job.errors);
    job.errors.error_exit = [](j_common_ptr common) {
        auto& failed = *static_cast<JpegJob*>(common->client_data);
        failed.failure = common->err->msg_code == JERR_OUT_OF_MEMORY ? Failure::no_memory : Failure::damaged;
        common->err->format_message(common, failed.message);
        std::longjmp(failed.back, 1);
    };
    job.errors.emit_message = [](j_common_ptr, int) {};
    info.client_data = &job;
    jpeg_create_decompress(&info);
    job.source.init_source = [](j_decompress_ptr) {};
    job.source.term_source = [](j_decompress_ptr) {};
    // False: there is no more, and whoever asked returns as far as it came.
    job.source.fill_input_buffer = [](j_decompress_ptr) -> boolean { return FALSE; };
    job.source.skip_input_data = [](j_decompress_ptr reader, long count) {
        if (count > 0 && static_cast<std::size_t>(count) > reader->src->bytes_in_buffer) {
            jpeg_fail(*static_cast<JpegJob*>(reader->client_data), "the JPEG file is truncated");
        } else if (count > 0) {
            reader->src->next_input_byte += count;
            reader->src->bytes_in_buffer -= static_cast<std::size_t>(count);
        }
    };
    job.source.resync_to_restart = jpeg_resync_to_restart;
    job.source.next_input_byte = reinterpret_cast<const JOCTET*>(job.bytes.data());
    job.source.bytes_in_buffer = job.bytes.size();
    info.src = &job.source;
    job.progress.progress_monitor = [](j_common_ptr common) {
        watch_jpeg(*static_cast<JpegJob*>(common->client_data));
    };
    info.progress = &job.progress;
}

bool run_jpeg(JpegJob& job) {
    jpeg_decompress_struct& info = job.info;
    std::memset(&info, 0, sizeof info);
    if (setjmp(job.back) != 0) {
        return false;
    }
    start_jpeg(job);
    if (jpeg_read_header(&info, TRUE) != JPEG_HEADER_OK) {
        jpeg_fail(job, "the JPEG file is truncated");
    }
    check_size(info.image_width, info.image_height, *job.limits);
    switch (info.num_components) {
        case 1:
            info.out_color_space = JCS_GRAYSCALE;
            break;
        case 3:
            info.out_color_space = JCS_RGB;
            break;
        case 4:
            info.out_color_space = JCS_CMYK;
            break;
        default:
            jpeg_fail(job, "the JPEG file has a number of channels other than 1, 3 or 4");
    }
    job.image.width = static_cast<int>(info.image_width);
    job.image.height = static_cast<int>(info.image_height);
    job.reserve(jpeg_coefficients(info));
    if (jpeg_start_decompress(&info) == FALSE) {
        jpeg_fail(job, "the JPEG file is truncated");
    }
    job.image.pixels.resize(std::size_t{info.output_width} * info.output_height * 3);
    job.row.resize(std::size_t{info.output_width} * 4);
    jpeg_rows(job);
    return true;
}

Image decode_jpeg(std::string_view bytes, const ImageLimits& limits, const DecodeHooks& hooks) {
    JpegJob job;
    job.bytes = bytes;
    job.limits = &limits;
    job.hooks = &hooks;
    if (!run_jpeg(job)) {
        report(job, job.message);
    }
    return std::move(job.image);
}

struct PngJob : Job {
    png_structp png = nullptr;
    png_infop info = nullptr;
    char message[256];
    std::vector<std::uint8_t> samples;  // of 16-bit grey, two bytes each

    PngJob() = default;
    PngJob(const PngJob&) = delete;
    PngJob& operator=(const PngJob&) = delete;
    ~PngJob() { png_destroy_read_struct(&png, &info, nullptr); }
};

// passes: how often an interlaced file goes over the rows; 1 for another.
void png_rows(PngJob& job, int passes, std::uint8_t* first, std::size_t stride) {
    const auto height = static_cast<std::size_t>(job.image.height);
    for (int pass = 0; pass < passes; ++pass) {
        for (std::size_t y = 0; y < height; ++y) {
            if (job.unwanted()) {
                job.failure = Failure::unwanted;
                std::longjmp(job.back, 1);
            }
            png_read_row(job.png, first + y * stride, nullptr);
        }
    }
}

bool run_png(PngJob& job) {
    // With an allocation of its own: where that fails, libpng says so in the words of any other error.
    job.png = png_create_read_struct_2(
        PNG_LIBPNG_VER_STRING, &job,
        [](png_structp png, png_const_charp message) {
            auto& failed = *static_cast<PngJob*>(png_get_error_ptr(png));
            std::snprintf(failed.message, sizeof failed.message, "%s", message);
            std::longjmp(failed.back, 1);
        },
        [](png_structp, png_const_charp) {}, &job,
        [](png_structp png, png_alloc_size_t size) {
            void* const memory = std::malloc(size);
            if (memory == nullptr) {
                static_cast<PngJob*>(png_get_mem_ptr(png))->failure = Failure::no_memory;
            }
            return memory;
        },
        [](png_structp, png_voidp memory) { std::free(memory); });
    if (job.png == nullptr) {
        throw std::bad_alloc();
    }
    if (setjmp(job.back) != 0) {
        return false;
    }
    job.info = png_create_info_struct(job.png);
    if (job.info == nullptr) {
        throw std::bad_alloc();
    }
    png_set_read_fn(job.png, &job, [](png_structp png, png_bytep target, std::size_t count) {
        auto& reading = *static_cast<PngJob*>(png_get_io_ptr(png));
        if (count > reading.bytes.size()) {
            png_error(png, "the PNG file is truncated");
        }
        std::memcpy(target, reading.bytes.data(), count);
        reading.bytes.remove_prefix(count);
    });
    // What is beside the pixels is not wanted: a profile or a text can be packed as densely as pixels are.
    png_set_keep_unknown_chunks(job.png, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
    png_read_info(job.png, job.info);
    const png_uint_32 width = png_get_image_width(job.png, job.info);
    const png_uint_32 height = png_get_image_height(job.png, job.info);
    check_size(width, height, *job.limits);
    const bool wide_grey =
        png_get_bit_depth(job.png, job.info) == 16 && png_get_color_type(job.png, job.info) == PNG_COLOR_TYPE_GRAY;
    if (!wide_grey) {
        png_set_strip_16(job.png);
        png_set_palette_to_rgb(job.png);
        png_set_expand_gray_1_2_4_to_8(job.png);
        png_set_strip_alpha(job.png);
        png_set_gray_to_rgb(job.png);
    }
    const int passes = png_set_interlace_handling(job.png);
    png_read_update_info(job.png, job.info);
    if (png_get_rowbytes(job.png, job.info) != std::size_t{width} * (wide_grey ? 2 : 3)) {
        png_error(job.png, "the PNG file has rows of a length of its own");
    }
    job.image.width = static_cast<int>(width);
    job.image.height = static_cast<int>(height);
    job.reserve(wide_grey ? std::size_t{width} * height * 2 : 0);
    job.image.pixels.resize(std::size_t{width} * height * 3);
    if (!wide_grey) {
        png_rows(job, passes, job.image.pixels.data(), std::size_t{width} * 3);
        return true;
    }
    job.samples.resize(std::size_t{width} * height * 2);
    png_rows(job, passes, job.samples.data(), std::size_t{width} * 2);
    for (std::size_t index = 0; index < std::size_t{width} * height; ++index) {
        const int level = job.samples[2 * index] * 256 + job.samples[2 * index + 1];
        std::memset(job.image.pixels.data() + 3 * index, (level + 128) / 257, 3);
    }
    return true;
}

Image decode_png(std::string_view bytes, const ImageLimits& limits, const DecodeHooks& hooks) {
    PngJob job;
    job.bytes = bytes;
    job.limits = &limits;
    job.hooks = &hooks;
    if (!run_png(job)) {
        report(job, job.message);
    }
    return std::move(job.image);
}

// Lossless files need four bytes a pixel beside the image; others less.
constexpr std::size_t webp_pixel_bytes = 4;

// So much is read between two looks at whether the image is still wanted. Until the decoder has come to the pixels it
// begins anew with each step, so that each is twice as long as the one before.
constexpr std::size_t webp_step = 64 * 1024;

Image decode_webp(std::string_view bytes, const ImageLimits& limits, const DecodeHooks& hooks) {
    Job job;
    job.bytes = bytes;
    job.limits = &limits;
    job.hooks = &hooks;
    const auto* data = reinterpret_cast<const std::uint8_t*>(bytes.data());
    WebPBitstreamFeatures features;
    if (WebPGetFeatures(data, bytes.size(), &features) != VP8_STATUS_OK) {
        refuse("the WebP file is truncated or damaged");
    }
    if (features.has_animation != 0) {
        refuse("the WebP file is an animation");
    }
    check_size(features.width, features.height, limits);
    job.image.width = features.width;
    job.image.height = features.height;
    const auto row = std::size_t{3} * static_cast<std::size_t>(features.width);
    const auto pixels = static_cast<std::size_t>(features.width) * static_cast<std::size_t>(features.height);
    job.reserve(pixels * webp_pixel_bytes);
    job.image.pixels.resize(3 * pixels);
    // Alpha is dropped, not blended.
    const std::unique_ptr<WebPIDecoder, decltype(&WebPIDelete)> decoder(
        WebPINewRGB(MODE_RGB, job.image.pixels.data(), job.image.pixels.size(), static_cast<int>(row)), &WebPIDelete);
    if (!decoder) {
        throw std::bad_alloc();
    }
    auto status = VP8_STATUS_SUSPENDED;
    std::size_t step = webp_step;
    for (std::size_t end = 0; status == VP8_STATUS_SUSPENDED && end < bytes.size();) {
        if (job.unwanted()) {
            job.failure = Failure::unwanted;
            report(job, "");
        }
        end = std::min(end + step, bytes.size());
        status = WebPIUpdate(decoder.get(), data, end);
        int rows = 0;
        const bool pixels_come = WebPIDecGetRGB(decoder.get(), &rows, nullptr, nullptr, nullptr) != nullptr && rows > 0;
        step = pixels_come ? webp_step : end;
    }
    if (status == VP8_STATUS_OUT_OF_MEMORY) {
        throw std::bad_alloc();
    }
    if (status != VP8_STATUS_OK) {
        refuse("the WebP file is truncated or damaged");
    }
    return std::move(job.image);
}

}  // namespace

Image decode_image(std::string_view bytes, const ImageLimits& limits, const DecodeHooks& hooks) {
    if (bytes.substr(0, 3) == "\xff\xd8\xff") {
        return decode_jpeg(bytes, limits, hooks);
    }
    if (bytes.substr(0, 8) == "\x89PNG\r\n\x1a\n") {
        return decode_png(bytes, limits, hooks);
    }
    if (bytes.substr(0, 4) == "RIFF" && bytes.substr(std::min<std::size_t>(8, bytes.size()), 4) == "WEBP") {
        return decode_webp(bytes, limits, hooks);
    }
    refuse(bytes.empty() ? "it is empty" : "it is neither JPEG, PNG nor WebP");
}

}  // namespace trtdet
