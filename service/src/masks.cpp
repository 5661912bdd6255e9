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
    template <typename At>
    Rows(int begin, int end, const At& at) {
        for (int row = begin; row < end; ++row) {
            places_.push_back(at(row));
            if (starts_.empty() || places_.back().before != places_[starts_.back()].before) {
                starts_.push_back(places_.size() - 1);
            }
        }
        starts_.push_back(places_.size());
    }

    // Adds a column, of which value(Between) is a row's. Within a stretch values rise or fall throughout, so that they
    // cross the threshold once at most.
    template <typename Value>
    void add(Runs& runs, const Value& value, float threshold) const {
        for (std::size_t stretch = 0; stretch + 1 < starts_.size(); ++stretch) {
            const std::size_t begin = starts_[stretch];
            const std::size_t end = starts_[stretch + 1];
            const bool first = value(places_[begin]) > threshold;
            const bool last = value(places_[end - 1]) > threshold;
            if (first == last) {
                runs.add(first, end - begin);
                continue;
            }
            const auto crossing = std::partition_point(
                places_.begin() + static_cast<std::ptrdiff_t>(begin),
                places_.begin() + static_cast<std::ptrdiff_t>(end),
                [&](const Between& place) { return (value(place) > threshold) == first; });
            const auto at = static_cast<std::size_t>(crossing - places_.begin());
            runs.add(first, at - begin);
            runs.add(last, end - at);
        }
    }

private:
    std::vector<Between> places_;
    std::vector<std::size_t> starts_;  // the first row of each stretch, and the end of the last
};

// One axis of prototypes over the input of a network, in which an image lies.
struct CellAxis {
    double scale;       // of the image in the input
    double pad;         // before the image
    double length;      // of the image, in pixels
    double input;       // of the input
    std::size_t count;  // of cells

    // Where a pixel of the image lies. Cells beyond the image, which see the border alone, have no say.
    Between at(int pixel) const {
        const double ratio = static_cast<double>(count) / input;
        double place = ((pixel + 0.5) * scale + pad) * ratio - 0.5;
        place = std::max(std::min(place, (pad + scale * length) * ratio - 1), pad * ratio);
        // Whatever the placement is, within the cells.
        place = place > 0 ? std::min(place, static_cast<double>(count - 1)) : 0;
        Between found;
        found.before = static_cast<std::size_t>(place);
        found.after = std::min(found.before + 1, count - 1);
        found.weight_after = static_cast<float>(place - static_cast<double>(found.before));
        found.weight_before = 1 - found.weight_after;
        return found;
    }
};

// The cells of the prototypes that a box needs, weighted and summed: columns one after the other.
class Cells {
public:
    Cells(const PrototypeMasks& masks, Span<const float> coefficients, Between rows, Between columns)
        : top_(rows.before), left_(columns.before), height_(rows.after + 1 - rows.before) {
        const auto stride = static_cast<std::size_t>(masks.width);
        const std::size_t plane = static_cast<std::size_t>(masks.height) * stride;
        const std::size_t width = columns.after + 1 - columns.before;
        std::vector<float> sums(height_ * width);
        for (std::size_t one = 0; one < coefficients.size(); ++one) {
            const float* const cells = masks.prototypes.data() + one * plane + top_ * stride + left_;
            for (std::size_t row = 0; row < height_; ++row) {
                add(coefficients[one], cells + row * stride, sums.data() + row * width, width);
            }
        }
        values_.resize(sums.size());
        for (std::size_t row = 0; row < height_; ++row) {
            for (std::size_t column = 0; column < width; ++column) {
                values_[column * height_ + row] = sums[row * width + column];
            }
        }
    }

    const float* column(std::size_t index) const { return values_.data() + (index - left_) * height_; }

    // A place on the axis of rows, among those that there are.
    Between within(Between place) const {
        place.before -= top_;
        place.after -= top_;
        return place;
    }

private:
    static void add(float weight, const float* cells, float* sums, std::size_t count) {
        for (std::size_t index = 0; index < count; ++index) {
            sums[index] += weight * cells[index];
        }
    }

    std::size_t top_;
    std::size_t left_;
    std::size_t height_;
    std::vector<float> values_;
};

void check_pixels(int width, int height) {
    if (width < 1 || height < 1 || std::int64_t{width} * height > std::int64_t{0xffffffff}) {
        throw ImageError(
            "a mask cannot be pasted into an image of " + std::to_string(width) + " x " + std::to_string(height) +
            " pixels; it must have 1 to 2^32 - 1");
    }
}

// A mask that covers no pixel.
RunLengths none_of(int width, int height) {
    return {width, height, {static_cast<std::uint32_t>(std::int64_t{width} * height)}};
}

bool is_finite(const Box& box) {
    return std::isfinite(box.x1) && std::isfinite(box.y1) && std::isfinite(box.x2) && std::isfinite(box.y2);
}

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
    check_pixels(width, height);
    RunLengths found{width, height, {}};
    Runs runs;
    const auto rows_of_image = static_cast<std::uint64_t>(height);
    const bool finite = is_finite(box);
    const Axis across(side + 2, finite ? box.x1 : 0, finite ? box.x2 : 0, finite ? width : 0);
    const Axis down(side + 2, finite ? box.y1 : 0, finite ? box.y2 : 0, finite ? height : 0);
    if (across.begin == across.end || down.begin == down.end) {
        return none_of(width, height);
    }
    const std::vector<float> values = bordered(probabilities, side);
    const Rows rows(down.begin, down.end, [&down](int row) { return down.at(row); });
    std::vector<float> column(side + 2);
    runs.add(false, static_cast<std::uint64_t>(across.begin) * rows_of_image);
    for (int x = across.begin; x < across.end; ++x) {
        const Between place = across.at(x);
        for (std::size_t row = 0; row < column.size(); ++row) {
            column[row] = values[place.before * column.size() + row] * place.weight_before +
                          values[place.after * column.size() + row] * place.weight_after;
        }
        runs.add(false, static_cast<std::uint64_t>(down.begin));
        rows.add(runs, [&column](const Between& row) { return row.of(column.data()); }, threshold);
        runs.add(false, rows_of_image - static_cast<std::uint64_t>(down.end));
    }
    runs.add(false, static_cast<std::uint64_t>(width - across.end) * rows_of_image);
    found.runs = runs.take();
    return found;
}

RunLengths prototype_mask(const PrototypeMasks& masks, std::size_t index, const Box& box) {
    const int width = masks.placement.width;
    const int height = masks.placement.height;
    check_pixels(width, height);
    const auto count = static_cast<std::size_t>(std::max(masks.count, 0));
    const auto rows_of_cells = static_cast<std::size_t>(std::max(masks.height, 0));
    const auto columns_of_cells = static_cast<std::size_t>(std::max(masks.width, 0));
    if (masks.prototypes.empty() || masks.prototypes.size() != count * rows_of_cells * columns_of_cells ||
        index >= masks.coefficients.size() / count || masks.input_width < 1 || masks.input_height < 1) {
        throw EngineError(
            "mask " + std::to_string(index) + " of " + std::to_string(masks.coefficients.size()) +
            " coefficients and " + std::to_string(masks.prototypes.size()) +
            " values of prototypes was wanted, expected " + std::to_string(count) + " coefficients for each mask and " +
            std::to_string(count) + " x " + std::to_string(rows_of_cells) + " x " + std::to_string(columns_of_cells) +
            " values; build the bundle again");
    }
    if (!is_finite(box)) {
        return none_of(width, height);
    }
    const auto pixel = [](float side, int size) {
        return static_cast<int>(std::clamp(std::ceil(side), 0.0F, static_cast<float>(size)));
    };
    const int left = pixel(box.x1, width);
    const int right = pixel(box.x2, width);
    const int top = pixel(box.y1, height);
    const int bottom = pixel(box.y2, height);
    if (left >= right || top >= bottom) {
        return none_of(width, height);
    }
    const Placement& placed = masks.placement;
    const CellAxis across{
        placed.scale_x, double{placed.pad_x}, double(width), double(masks.input_width), columns_of_cells};
    const CellAxis down{
        placed.scale_y, double{placed.pad_y}, double(height), double(masks.input_height), rows_of_cells};
    const auto range = [](const CellAxis& axis, int begin, int end) {
        Between cells;
        cells.before = axis.at(begin).before;
        cells.after = axis.at(end - 1).after;
        return cells;
    };
    const Cells cells(masks, masks[index], range(down, top, bottom), range(across, left, right));
    const Rows rows(top, bottom, [&](int row) { return cells.within(down.at(row)); });
    const auto threshold = static_cast<float>(std::log(masks.threshold / (1 - masks.threshold)));
    Runs runs;
    const auto rows_of_image = static_cast<std::uint64_t>(height);
    runs.add(false, static_cast<std::uint64_t>(left) * rows_of_image);
    for (int x = left; x < right; ++x) {
        const Between place = across.at(x);
        const float* const before = cells.column(place.before);
        const float* const after = cells.column(place.after);
        runs.add(false, static_cast<std::uint64_t>(top));
        rows.add(
            runs,
            [&](const Between& row) {
                return row.of(before) * place.weight_before + row.of(after) * place.weight_after;
            },
            threshold);
        runs.add(false, rows_of_image - static_cast<std::uint64_t>(bottom));
    }
    runs.add(false, static_cast<std::uint64_t>(width - right) * rows_of_image);
    return {width, height, runs.take()};
}

}  // namespace trtdet
