// A recording is laid out as a safetensors file (https://huggingface.co/docs/safetensors): the length of the header as
// a little-endian 64-bit integer, the header in JSON, and the tensors one after the other. Its tensors are
//
//     fingerprints       F32 (images, 3, rows, columns): means of the network's input over cells, channel by channel
//     outputs.<name>     of the output's dtype (images, ...): what the network gave
//
// and its __metadata__ has "format": "trtdet-recording-1" and "content_hash", the bundle's.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>

#include "text.hpp"
#include "trtdet/errors.hpp"
#include "trtdet/recording.hpp"

namespace trtdet {

namespace {

using Json = nlohmann::json;

constexpr const char* format = "trtdet-recording-1";
constexpr int most_cells = 16;   // on each axis; an input with fewer rows or columns has as many cells
constexpr double tolerance = 1;  // grey levels
constexpr std::uint64_t longest_header = 1 << 24;

// A file in memory. What is mapped stays readable when the file is replaced.
class Mapping {
public:
    explicit Mapping(const std::filesystem::path& file) {
        const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
        struct stat facts {};
        if (descriptor >= 0 && ::fstat(descriptor, &facts) == 0 && S_ISREG(facts.st_mode) && facts.st_size > 0) {
            void* const at =
                ::mmap(nullptr, static_cast<std::size_t>(facts.st_size), PROT_READ, MAP_PRIVATE, descriptor, 0);
            if (at != MAP_FAILED) {
                bytes_ = {static_cast<const char*>(at), static_cast<std::size_t>(facts.st_size)};
            }
        }
        if (descriptor >= 0) {
            ::close(descriptor);
        }
    }

    ~Mapping() {
        if (!bytes_.empty()) {
            ::munmap(const_cast<char*>(bytes_.data()), bytes_.size());
        }
    }

    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    std::string_view bytes() const { return bytes_; }

private:
    std::string_view bytes_;
};

const char* type_name(DType dtype) {
    switch (dtype) {
        case DType::float32:
            return "F32";
        case DType::float16:
            return "F16";
        case DType::int32:
            return "I32";
        case DType::int64:
            return "I64";
        case DType::int8:
            return "I8";
        case DType::uint8:
            return "U8";
        case DType::boolean:
            return "BOOL";
    }
    return "";
}

struct Recording {
    std::unique_ptr<Mapping> mapping;
    InputSpec input;
    std::vector<OutputSpec> outputs;
    std::size_t images = 0;
    std::vector<float> fingerprints;
    std::vector<std::string_view> values;  // of each output, all images
    std::vector<std::size_t> sizes;        // bytes of one image
    std::string name;
    RecordingOptions options;

    int rows() const { return std::min(most_cells, input.preprocess.height); }
    int columns() const { return std::min(most_cells, input.preprocess.width); }
    std::size_t cells() const { return static_cast<std::size_t>(3 * rows() * columns()); }
    std::size_t pixels() const { return input.preprocess.values(); }

    [[noreturn]] void refuse(const std::string& what) const {
        throw EngineError(
            "the recording '" + printable(name) + "' " + what + "; make it again with service/tests/record.py");
    }
};

// The bytes of a tensor, whose type and shape are as expected.
std::string_view tensor(
    const Recording& of, const Json& header, std::string_view data, const std::string& name, DType dtype,
    const std::vector<std::int64_t>& shape) {
    const auto found = header.find(name);
    if (found == header.end() || !found->is_object()) {
        of.refuse("lacks the tensor " + in_quotes(name));
    }
    const Json type = found->value("dtype", Json());
    if (type != type_name(dtype)) {
        of.refuse("has " + in_quotes(name) + " as another type than " + type_name(dtype));
    }
    if (found->value("shape", Json()) != Json(shape)) {
        of.refuse("has " + in_quotes(name) + " in another shape than " + Json(shape).dump());
    }
    const Json offsets = found->value("data_offsets", Json());
    std::uint64_t expected = size_of(dtype);
    for (const std::int64_t size : shape) {
        expected *= static_cast<std::uint64_t>(size);
    }
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
        !offsets[1].is_number_unsigned()) {
        of.refuse("does not say where " + in_quotes(name) + " is");
    }
    const auto begin = offsets[0].get<std::uint64_t>();
    const auto end = offsets[1].get<std::uint64_t>();
    if (begin > end || end > data.size() || end - begin != expected) {
        of.refuse("is cut short or damaged: " + in_quotes(name) + " is not within it");
    }
    return data.substr(begin, expected);
}

std::shared_ptr<const Recording> read_recording(
    const std::filesystem::path& file, const Manifest& manifest, const RecordingOptions& options) {
    auto recording = std::make_shared<Recording>();
    recording->name = file.string();
    recording->mapping = std::make_unique<Mapping>(file);
    recording->input = manifest.input;
    recording->outputs = manifest.outputs;
    recording->options = options;
    std::string_view bytes = recording->mapping->bytes();
    std::uint64_t length = 0;
    if (bytes.size() < sizeof length) {
        recording->refuse("cannot be read");
    }
    for (std::size_t index = sizeof length; index-- > 0;) {
        length = length << 8 | static_cast<unsigned char>(bytes[index]);
    }
    bytes.remove_prefix(sizeof length);
    if (length > longest_header || length > bytes.size()) {
        recording->refuse("is cut short or none");
    }
    const Json header = Json::parse(bytes.substr(0, length), nullptr, false);
    bytes.remove_prefix(length);
    const Json about = header.is_object() ? header.value("__metadata__", Json()) : Json();
    if (!about.is_object() || about.value("format", Json()) != format) {
        recording->refuse(std::string("is none of format ") + format);
    }
    if (about.value("content_hash", Json()) != manifest.content_hash) {
        recording->refuse("was made from another bundle");
    }
    const Json fingerprints = header.value("fingerprints", Json());
    const Json shape = fingerprints.is_object() ? fingerprints.value("shape", Json()) : Json();
    if (!shape.is_array() || shape.empty() || !shape[0].is_number_unsigned() || shape[0] < 1 || shape[0] > 1 << 20) {
        recording->refuse("holds no image");
    }
    recording->images = shape[0].get<std::size_t>();
    const auto images = static_cast<std::int64_t>(recording->images);
    const auto prints = tensor(
        *recording, header, bytes, "fingerprints", DType::float32,
        {images, 3, recording->rows(), recording->columns()});
    recording->fingerprints.resize(prints.size() / sizeof(float));
    std::memcpy(recording->fingerprints.data(), prints.data(), prints.size());
    for (const OutputSpec& output : manifest.outputs) {
        std::vector<std::int64_t> all = output.shape;
        all[0] = images;
        recording->values.push_back(tensor(*recording, header, bytes, "outputs." + output.name, output.dtype, all));
        recording->sizes.push_back(recording->values.back().size() / recording->images);
    }
    return recording;
}

// Means over cells, in grey levels: what the network's scale and deviation did is undone, so that a difference can be
// measured. The mean is left in; it is the same for every image.
std::vector<float> fingerprint(const Recording& recording, const float* image) {
    const Preprocess& to = recording.input.preprocess;
    std::vector<float> found;
    found.reserve(recording.cells());
    for (int channel = 0; channel < 3; ++channel) {
        for (int row = 0; row < recording.rows(); ++row) {
            const int top = row * to.height / recording.rows();
            const int bottom = (row + 1) * to.height / recording.rows();
            for (int column = 0; column < recording.columns(); ++column) {
                const int left = column * to.width / recording.columns();
                const int right = (column + 1) * to.width / recording.columns();
                double sum = 0;
                for (int y = top; y < bottom; ++y) {
                    const float* const line = image + static_cast<std::size_t>(y) * static_cast<std::size_t>(to.width);
                    sum = std::accumulate(line + left, line + right, sum);
                }
                found.push_back(static_cast<float>(sum / ((bottom - top) * (right - left))));
            }
        }
        image += static_cast<std::size_t>(to.height) * static_cast<std::size_t>(to.width);
    }
    return found;
}

// The first row or column of a cell, of so many pixels in so many cells.
std::size_t edge(int cell, int pixels, int cells) {
    return static_cast<std::size_t>(cell * pixels / cells);
}

// The grey level that becomes a number of the network's input.
std::uint8_t grey_of(float value, std::size_t channel, const Preprocess& to) {
    const double level = (double{value} * to.std[channel] + to.mean[channel]) / to.scale;
    // Written so that NaN is black.
    return level > 0 ? static_cast<std::uint8_t>(std::lround(std::min(level, 255.0))) : std::uint8_t{0};
}

// An image of the network's size that has a fingerprint.
Image image_of(const Recording& recording, const float* print) {
    const Preprocess& to = recording.input.preprocess;
    const auto width = static_cast<std::size_t>(to.width);
    Image image{to.width, to.height, std::vector<std::uint8_t>(recording.pixels())};
    for (std::size_t channel = 0; channel < 3; ++channel) {
        const std::size_t place = to.color == Color::rgb ? channel : 2 - channel;
        for (int row = 0; row < recording.rows(); ++row) {
            for (int column = 0; column < recording.columns(); ++column) {
                const std::uint8_t level = grey_of(*print++, channel, to);
                const std::size_t right = edge(column + 1, to.width, recording.columns());
                for (std::size_t y = edge(row, to.height, recording.rows());
                     y < edge(row + 1, to.height, recording.rows()); ++y) {
                    for (std::size_t x = edge(column, to.width, recording.columns()); x < right; ++x) {
                        image.pixels[3 * (y * width + x) + place] = level;
                    }
                }
            }
        }
    }
    return image;
}

// The recorded image that is nearest, by the cell that differs most.
std::size_t nearest(const Recording& recording, const float* image) {
    const std::vector<float> wanted = fingerprint(recording, image);
    const Preprocess& to = recording.input.preprocess;
    const std::size_t plane = recording.cells() / 3;
    double least = std::numeric_limits<double>::infinity();
    std::size_t found = 0;
    for (std::size_t index = 0; index < recording.images; ++index) {
        const float* const known = recording.fingerprints.data() + index * recording.cells();
        double most = 0;
        for (std::size_t cell = 0; cell < recording.cells() && most < least; ++cell) {
            const double step = to.scale / to.std[cell / plane];
            // Written so that NaN is far from everything.
            const double distance = std::abs(double{wanted[cell]} - double{known[cell]}) / step;
            most = distance <= most ? most : distance;
        }
        if (most < least) {
            least = most;
            found = index;
        }
    }
    if (!(least <= tolerance)) {
        throw EngineError(
            "the recording has no image within " + format_number(tolerance) +
            " grey level of this one; record it with service/tests/record.py");
    }
    return found;
}

class RecordedLane final : public Lane {
public:
    explicit RecordedLane(std::shared_ptr<const Recording> recording)
        : recording_(std::move(recording)), input_(capacity() * recording_->pixels()) {
        for (const std::size_t size : recording_->sizes) {
            outputs_.emplace_back(capacity() * size);
        }
    }

    Span<float> input() override { return input_; }

    void run(int batch) override {
        if (batch < 1 || batch > recording_->input.max_batch) {
            throw EngineError(
                "the engine takes a batch of 1 to " + std::to_string(recording_->input.max_batch) + ", not of " +
                std::to_string(batch) + "; build it with --batch");
        }
        std::this_thread::sleep_for(recording_->options.run_time);
        for (std::size_t image = 0; image < static_cast<std::size_t>(batch); ++image) {
            const std::size_t found = nearest(*recording_, input_.data() + image * recording_->pixels());
            for (std::size_t output = 0; output < outputs_.size(); ++output) {
                const std::size_t size = recording_->sizes[output];
                std::memcpy(
                    outputs_[output].data() + image * size, recording_->values[output].data() + found * size, size);
            }
        }
    }

    TensorView output(std::size_t index) const override {
        const std::vector<char>& bytes = outputs_.at(index);
        return {recording_->outputs[index].dtype, bytes.data(), bytes.size()};
    }

private:
    std::size_t capacity() const { return static_cast<std::size_t>(recording_->input.max_batch); }

    std::shared_ptr<const Recording> recording_;
    std::vector<float> input_;
    std::vector<std::vector<char>> outputs_;
};

class RecordedEngine final : public Engine {
public:
    explicit RecordedEngine(std::shared_ptr<const Recording> recording) : recording_(std::move(recording)) {}

    const std::vector<OutputSpec>& outputs() const override { return recording_->outputs; }
    int min_batch() const override { return recording_->input.min_batch; }
    int opt_batch() const override { return recording_->input.opt_batch; }
    int max_batch() const override { return recording_->input.max_batch; }
    std::string ran_on() const override { return "a recording of " + std::to_string(recording_->images) + " images"; }
    std::unique_ptr<Lane> new_lane() override { return std::make_unique<RecordedLane>(recording_); }

private:
    std::shared_ptr<const Recording> recording_;
};

}  // namespace

std::vector<Image> recorded_images(const std::filesystem::path& file, const Manifest& manifest, std::size_t most) {
    const auto recording = read_recording(file, manifest, {});
    std::vector<Image> images;
    for (std::size_t index = 0; index < std::min(most, recording->images); ++index) {
        images.push_back(image_of(*recording, recording->fingerprints.data() + index * recording->cells()));
    }
    return images;
}

std::shared_ptr<Engine> open_recording(
    const std::filesystem::path& file, const Manifest& manifest, const RecordingOptions& options) {
    return std::make_shared<RecordedEngine>(read_recording(file, manifest, options));
}

}  // namespace trtdet
