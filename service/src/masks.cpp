#include "trtdet/masks.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "trtdet/errors.hpp"

namespace trtdet {

namespace {

// Far outside of every image, and within what a float can tell apart from its neighbours to a few hundred pixels.
constexpr float farthest = 1 << 30;

// Where a pixel lies among values: between two of them, nearer to one.
struct Between {
    std::size_t before = 0;
    std::size_t after = 0;
    float weight_before = 1;
    float weight_after = 0;

    float of(const float* values) const { return values[before] * weight_before + values[after] * weight_after; }
};

// One axis of a mask that is stretched over pixels of an image.
class Axis {
public:
    // count: values. from, to: the box on this axis, in pixels. size: of the image.
    Axis(std::size_t count, float from, float to, int size) : count_(count) {
        const float grown = static_cast<float>(static_cast<double>(count) / static_cast<double>(count - 2));
        const float centre = (to + from) * 0.5F;
        const float half = (to - from) * 0.5F * grown;
        first_ = whole(centre - half);
        const std::int64_t last = whole(centre + half);
        length_ = std::max<std::int64_t>(last - first_ + 1, 1);
        begin = static_cast<int>(std::clamp<std::int64_t>(first_, 0, size));
        end = static_cast<int>(std::clamp<std::int64_t>(last + 1, begin, size));
    }

    // Where a pixel of the image lies, as torch's bilinear interpolation without aligned corners has it.
    Between at(int pixel) const {
        const float scale = static_cast<float>(count_) / static_cast<float>(length_);
        const float place = std::max(scale * (static_cast<float>(pixel - first_) + 0.5F) - 0.5F, 0.0F);
        Between found;
        found.before = std::min(static_cast<std::size_t>(place), count_ - 1);
        found.after = std::min(found.before + 1, count_ - 1);
        found.weight_after = std::min(place - static_cast<float>(found.before), 1.0F);
        found.weight_before = 1 - found.weight_after;
        return found;
    }

    // Pixels of the image that the axis covers, from begin to end - 1.
    int begin = 0;
    int end = 0;

private:
    // Towards zero, as a conversion to an integer is.
    static std::int64_t whole(float value) { return static_cast<std::int64_t>(std::clamp(value, -farthest, farthest)); }

    std::size_t count_;
    std::int64_t first_ = 0;
    std::int64_t length_ = 1;
};

// Writes runs, of which neighbours of the same kind are one.
class Runs {
public:
    void add(bool inside, std::uint64_t count) {
        if (count == 0) {
            return;
        }
        if (inside != inside_) {
            end();
            inside_ = inside;
        }
        length_ += count;
    }

    std::vector<std::uint32_t> take() {
        end();
        return std::move(runs_);
    }

private:
    void end() {
        runs_.push_back(static_cast<std::uint32_t>(length_));
        length_ = 0;
    }

    std::vector<std::uint32_t> runs_;
    std::uint64_t length_ = 0;
    bool inside_ = false;
};

// A mask with its border of zeros, columns one after the other.
std::vector<float> bordered(Span<const float> values, std::size_t side) {
    const std::size_t count = side + 2;
    std::vector<float> made(count * count);
    for (std::size_t row = 0; row < side; ++row) {
        for (std::size_t column = 0; column < side; ++column) {
            made[(column + 1) * count + row + 1] = values[row * side + column];
        }
    }
    return made;
}

// The rows of an image that a mask covers, in stretches between the same two values of a column.
class Rows {
public:
    explicit Rows(const Axis& axis) {
        for (int row = axis.begin; row < axis.end; ++row) {
            places_.push_back(axis.at(row));
            if (starts_.empty() || places_.back().before != places_[starts_.back()].before) {
                starts_.push_back(places_.size() - 1);
            }
        }
        starts_.push_back(places_.size());
    }

    // Adds a column. Within a stretch values rise or fall throughout, so that they cross the threshold once at most.
    void add(Runs& runs, const float* values, float threshold) const {
        for (std::size_t stretch = 0; stretch + 1 < starts_.size(); ++stretch) {
            const std::size_t begin = starts_[stretch];
            const std::size_t end = starts_[stretch + 1];
            const bool first = places_[begin].of(values) > threshold;
            const bool last = places_[end - 1].of(values) > threshold;
            if (first == last) {
                runs.add(first, end - begin);
                continue;
            }
            const auto crossing = std::partition_point(
                places_.begin() + static_cast<std::ptrdiff_t>(begin),
                places_.begin() + static_cast<std::ptrdiff_t>(end),
                [&](const Between& place) { return (place.of(values) > threshold) == first; });
            const auto at = static_cast<std::size_t>(crossing - places_.begin());
            runs.add(first, at - begin);
            runs.add(last, end - at);
        }
    }

private:
    std::vector<Between> places_;
    std::vector<std::size_t> starts_;  // the first row of each stretch, and the end of the last
};

std::size_t side_of(std::size_t values) {
    const auto side = static_cast<std::size_t>(std::lround(std::sqrt(static_cast<double>(values))));
    if (values == 0 || side * side != values) {
        throw EngineError(
            "a mask of " + std::to_string(values) +
            " values was given, expected those of a square; build the bundle "
            "again");
    }
    return side;
}

}  // namespace

std::uint64_t RunLengths::area() const {
    std::uint64_t sum = 0;
    for (std::size_t index = 1; index < runs.size(); index += 2) {
        sum += runs[index];
    }
    return sum;
}

std::vector<std::uint8_t> RunLengths::pixels() const {
    const auto columns = static_cast<std::size_t>(width);
    const auto rows = static_cast<std::size_t>(height);
    std::vector<std::uint8_t> made(columns * rows);
    std::size_t place = 0;
    for (std::size_t index = 0; index < runs.size(); ++index) {
        const std::size_t end = std::min(place + runs[index], made.size());
        for (; index % 2 == 1 && place < end; ++place) {
            made[place % rows * columns + place / rows] = 1;
        }
        place = end;
    }
    return made;
}

// Each run but the first three is written as its difference to the run before the last, in digits of five bits, the
// lowest first, of which all but the last have a sixth bit; as characters from '0' on. See rleToString() of
// https://github.com/cocodataset/cocoapi/blob/master/common/maskApi.c
std::string RunLengths::counts() const {
    std::string text;
    for (std::size_t index = 0; index < runs.size(); ++index) {
        std::int64_t left = runs[index];
        if (index > 2) {
            left -= runs[index - 2];
        }
        for (bool more = true; more;) {
            const auto digit = static_cast<int>(left & 0x1f);
            left >>= 5;
            more = (digit & 0x10) != 0 ? left != -1 : left != 0;
            text += static_cast<char>('0' + digit + (more ? 0x20 : 0));
        }
    }
    return text;
}

RunLengths paste_mask(Span<const float> probabilities, const Box& box, int width, int height, float threshold) {
    const std::size_t side = side_of(probabilities.size());
    if (width < 1 || height < 1 || std::int64_t{width} * height > std::int64_t{0xffffffff}) {
        throw ImageError(
            "a mask cannot be pasted into an image of " + std::to_string(width) + " x " + std::to_string(height) +
            " pixels; it must have 1 to 2^32 - 1");
    }
    RunLengths found{width, height, {}};
    Runs runs;
    const auto rows_of_image = static_cast<std::uint64_t>(height);
    const bool finite =
        std::isfinite(box.x1) && std::isfinite(box.y1) && std::isfinite(box.x2) && std::isfinite(box.y2);
    const Axis across(side + 2, finite ? box.x1 : 0, finite ? box.x2 : 0, finite ? width : 0);
    const Axis down(side + 2, finite ? box.y1 : 0, finite ? box.y2 : 0, finite ? height : 0);
    if (across.begin == across.end || down.begin == down.end) {
        runs.add(false, static_cast<std::uint64_t>(width) * rows_of_image);
        found.runs = runs.take();
        return found;
    }
    const std::vector<float> values = bordered(probabilities, side);
    const Rows rows(down);
    std::vector<float> column(side + 2);
    runs.add(false, static_cast<std::uint64_t>(across.begin) * rows_of_image);
    for (int x = across.begin; x < across.end; ++x) {
        const Between place = across.at(x);
        for (std::size_t row = 0; row < column.size(); ++row) {
            column[row] = values[place.before * column.size() + row] * place.weight_before +
                          values[place.after * column.size() + row] * place.weight_after;
        }
        runs.add(false, static_cast<std::uint64_t>(down.begin));
        rows.add(runs, column.data(), threshold);
        runs.add(false, rows_of_image - static_cast<std::uint64_t>(down.end));
    }
    runs.add(false, static_cast<std::uint64_t>(width - across.end) * rows_of_image);
    found.runs = runs.take();
    return found;
}

}  // namespace trtdet
