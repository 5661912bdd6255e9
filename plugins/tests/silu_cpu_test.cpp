// Runs the arithmetic and the whole kernel body on the CPU.
//
//     silu_cpu_test                                   every check; exit code 0 where all hold
//     silu_cpu_test kernel ACT IN OUT SCALE FACTOR OFFSET INPUT_STEP OUTPUT_STEP FORM SHIFT
//                                                     stdin to stdout, raw: the kernel body over one channel
//     silu_cpu_test activation ACT                    likewise, the activation alone, float32 to float32
//
// ACT is silu or hard_swish; IN and OUT are float, half or int8. FORM is what the kernel has to choose for this many
// values: tables or elements. SHIFT elements lie between an aligned address and the first value.
#include "parameters.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using namespace trtdet;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();

long checks = 0;
long failures = 0;

void check(bool holds, const std::string& what) {
    ++checks;
    if (!holds && ++failures <= 20) {
        std::fprintf(stderr, "FAILED: %s\n", what.c_str());
    }
}

void check_refused(const char* words, const std::function<void()>& body) {
    try {
        body();
    } catch (const std::invalid_argument& error) {
        check(std::strstr(error.what(), words) != nullptr, std::string("'") + words + "' in '" + error.what() + "'");
        return;
    }
    check(false, std::string("nothing was refused with ") + words);
}

void rounding() {
    for (int whole = -140; whole <= 140; ++whole) {
        const int even = whole % 2 == 0 ? whole : whole + 1;  // whole + 0.5 lies between whole and whole + 1
        const int tie = even < -128 ? -128 : even > 127 ? 127 : even;
        const int exact = whole < -128 ? -128 : whole > 127 ? 127 : whole;
        const float value = static_cast<float>(whole);
        check(int8_of(value + 0.5f) == tie, "tie above " + std::to_string(whole));
        check(int8_of(value) == exact, "whole " + std::to_string(whole));
        check(int8_of(std::nextafterf(value + 0.5f, -kInfinity)) == exact, "below tie " + std::to_string(whole));
    }
    check(int8_of(kInfinity) == 127 && int8_of(-kInfinity) == -128, "int8 of infinity");
    check(int8_of(kLargest) == 127 && int8_of(-kLargest) == -128, "int8 of the largest");
    check(int8_of(kNaN) == 0 && int8_of(-kNaN) == 0, "int8 of NaN");
    check(int8_of(0.49999997f) == 0 && int8_of(-0.49999997f) == 0, "int8 just below a half");
}

void halves() {
    for (unsigned bits = 0; bits < 65536; ++bits) {
        const Half half{static_cast<unsigned short>(bits)};
        const float value = float_of_half(half);
        if (std::isnan(value)) {
            check((bits & 0x7c00u) == 0x7c00u && (bits & 1023u) != 0, "NaN of half");
            check(std::isnan(float_of_half(half_of(value))), "NaN stays NaN through half");
        } else {
            check(half_of(value).bits == bits, "half " + std::to_string(bits));
        }
    }
    check(half_of(65519.996f).bits == 0x7bffu && half_of(65520.0f).bits == 0x7c00u, "where half becomes infinite");
    check(half_of(0x1p-25f).bits == 0 && half_of(0x1.8p-24f).bits == 2, "ties of subnormal halves");
    check(half_of(2049.0f).bits == half_of(2048.0f).bits && half_of(2051.0f).bits == half_of(2052.0f).bits, "ties of half");
}

void activations() {
    for (float (*act)(float) : {silu, hard_swish}) {
        check(act(-kInfinity) == 0.0f && act(kInfinity) == kInfinity, "at infinity");
        check(std::isnan(act(kNaN)), "at NaN");
        check(act(kLargest) == kLargest && act(-kLargest) == 0.0f, "at the largest");
        check(act(0.0f) == 0.0f && !std::signbit(act(0.0f)) && std::signbit(act(-0.0f)), "at zero");
    }
    check(silu(100.0f) == 100.0f && hard_swish(3.0f) == 3.0f && hard_swish(-3.0f) == 0.0f, "beyond the bend");
    check(silu(-90.0f) < 0.0f && silu(-90.0f) > -1e-36f, "exp does not overflow below -88.7");
    const Steps none{0.0f, 0.0f};
    const Channel plain{1.0f, 1.0f, 0.0f, 0.0f};
    check(element<Activation::kSiLU, float, Int8>(kNaN, plain, none) == 0, "NaN to int8");
    check(element<Activation::kSiLU, float, Int8>(1e30f, plain, none) == 127, "large to int8");
    check(element<Activation::kSiLU, float, Half>(1e30f, plain, none).bits == 0x7c00u, "large to half");
    const Channel down{1.0f, -1.0f, 0.0f, 0.0f};
    check(element<Activation::kHardSwish, float, Int8>(1e30f, down, none) == -128, "large negative to int8");
    check(element<Activation::kHardSwish, Int8, Int8>(100, plain, Steps{0.5f, 0.25f}) == 127, "implicit steps saturate");
    check(element<Activation::kHardSwish, Int8, Int8>(100, plain, Steps{0.5f, 2.0f}) == 25, "implicit steps");
}

// One way to lay out (n, c, s) in memory, as the headers of TensorRT write it.
struct Format {
    const char* name;
    Layout layout;
    std::size_t (*place)(std::size_t n, std::size_t c, std::size_t s, std::size_t channels, std::size_t span, std::size_t v);
};

std::size_t place_linear(std::size_t n, std::size_t c, std::size_t s, std::size_t channels, std::size_t span, std::size_t) {
    return (n * channels + c) * span + s;
}
std::size_t place_chw(std::size_t n, std::size_t c, std::size_t s, std::size_t channels, std::size_t span, std::size_t v) {
    return ((n * ((channels + v - 1) / v) + c / v) * span + s) * v + c % v;
}
std::size_t place_hwc(std::size_t n, std::size_t c, std::size_t s, std::size_t channels, std::size_t span, std::size_t v) {
    return (n * span + s) * ((channels + v - 1) / v * v) + c;
}

const Format kLinear{"linear", {1, false}, place_linear};
const Format kChw2{"chw2", {2, false}, place_chw};
const Format kChw4{"chw4", {4, false}, place_chw};
const Format kChw32{"chw32", {32, false}, place_chw};
const Format kHwc8{"hwc8", {8, true}, place_hwc};
const Format kHwc16{"hwc16", {16, true}, place_hwc};

struct Shape {
    std::size_t n, c, h, w;
};
const Shape kShapes[] = {{1, 1, 1, 1},  {1, 3, 5, 7},   {2, 8, 4, 4},  {1, 31, 3, 3}, {2, 33, 1, 5},
                         {1, 32, 2, 8}, {3, 5, 16, 16}, {1, 64, 1, 1}, {2, 17, 3, 1}, {0, 4, 2, 2},
                         {2, 3, 23, 29}, {1, 35, 32, 33}, {5, 33, 16, 8}, {1, 48, 40, 40}, {2, 2, 64, 65}};

void check_case(bool holds, const Format& format, const Extent& extent, std::size_t shift, std::size_t place) {
    check(holds, std::string(format.name) + " of " + std::to_string(extent.channels) + " channels, span " +
                     std::to_string(extent.span) + ", shift " + std::to_string(shift) + ": wrong at " +
                     std::to_string(place));
}

template <class T>
T random_value(std::mt19937& source) {
    T value;
    store(std::uniform_real_distribution<float>(-9.0f, 9.0f)(source), value);
    return value;
}
template <>
Int8 random_value<Int8>(std::mt19937& source) {
    return static_cast<Int8>(std::uniform_int_distribution<int>(-128, 127)(source));
}

// NaN where the type has one: it must not come out of the padding.
template <class T>
T poison() {
    T value;
    store(kNaN, value);
    return value;
}
template <>
Int8 poison<Int8>() {
    return 99;
}

template <class T>
bool same(T a, T b) {
    return std::memcmp(&a, &b, sizeof a) == 0;
}

// 64-byte aligned memory that begins `shift` elements later. Not zeroed.
template <class T>
class Memory {
public:
    Memory(std::size_t count, std::size_t shift)
        : base_(std::aligned_alloc(64, ((count + shift) * sizeof(T) + 64) / 64 * 64)), shift_(shift) {}
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { std::free(base_); }
    T* get() const { return static_cast<T*>(base_) + shift_; }

private:
    void* base_;
    std::size_t shift_;
};

std::set<unsigned> tabled;  // vectors of layouts that ran by tables

// What a grid of `blocks` does with Tables; false where these are not used.
template <Activation kActivation, class In, class Out, unsigned kVector>
bool by_tables(unsigned blocks, const In* x, Out* y, const Table& table, const Extent& extent, const Steps& steps) {
    if constexpr (std::is_same_v<In, Int8> && std::is_same_v<Out, Int8>) {
        using Kind = Tables<kActivation, kVector>;
        const Kind kind(table, extent, steps);
        std::vector<Int8> tables(Kind::kBytes);
        for (unsigned block = 0; block < blocks; ++block) {
            for (unsigned task = block; task < kind.tasks(); task += blocks) {
                for (unsigned thread = 0; thread < kThreadsPerBlock; ++thread) {
                    kind.fill(task, thread, tables.data());
                }
                for (unsigned thread = 0; thread < kThreadsPerBlock; ++thread) {
                    kind.apply(task, thread, tables.data(), x, y);
                }
            }
        }
        if (kind.tasks() != 0) {
            tabled.insert(kVector);
        }
        return kind.tasks() != 0;
    } else {
        static_cast<void>(blocks), static_cast<void>(x), static_cast<void>(y), static_cast<void>(table);
        static_cast<void>(extent), static_cast<void>(steps);
        return false;
    }
}

// Every entry of a band's tables is what `element` gives, for scales from where every input rounds to 0 to where every
// one saturates; a channel of the padding has zeros.
template <Activation kActivation>
void tables() {
    const unsigned channels = 30;  // of a band of 32
    std::vector<Channel> entries;
    for (unsigned channel = 0; channel < channels; ++channel) {
        const float sign = channel % 3 == 0 ? -1.0f : 1.0f;
        entries.push_back(Channel{std::ldexp(1.3f, static_cast<int>(channel) - 20),
                                  sign * std::ldexp(1.1f, static_cast<int>(channel * 7 % 31) - 12),
                                  static_cast<float>(channel % 5) * 17.5f - 35.0f, 0.0f});
    }
    for (const Steps& steps : {Steps{0.0f, 0.0f}, Steps{0.043f, 0.019f}}) {
        for (const unsigned count : {1u, channels}) {
            using Kind = Tables<kActivation, 32>;
            const Kind kind(Table{entries.data(), count}, Extent{32 * 4096, channels, 4096}, steps);
            std::vector<Int8> filled(Kind::kBytes, Int8(99));
            for (unsigned thread = 0; thread < kThreadsPerBlock; ++thread) {
                kind.fill(0, thread, filled.data());
            }
            for (unsigned place = 0; place < Kind::kBytes; ++place) {
                const unsigned lane = place / kInputs;
                const Int8 q = static_cast<Int8>(static_cast<unsigned char>(place % kInputs));
                const Int8 expected =
                    lane < channels
                        ? element<kActivation, Int8, Int8>(q, entries[count == 1 ? 0 : lane], steps)
                        : Int8(0);
                check(filled[place] == expected, "entry " + std::to_string(place) + " of the tables");
            }
        }
    }
    const auto tasks = [](unsigned channels, unsigned span) {
        const Extent extent{channels * span, channels, span};
        return Tables<kActivation, 1>(Table{nullptr, 1}, extent, Steps{}).tasks();
    };
    check(tasks(64, 20 * 20) == 0, "a map whose tables cost more than they save is computed directly");
    check(tasks(64, 32 * 16) == 64, "a task a channel from where tables pay");
    check(tasks(64, 80 * 80) == 64 && tasks(64, 80 * 160) == 64 * 3, "a window for every thread of a task");
    check(tasks(64, 320 * 320) == 64 * 16, "tasks for every processor where the map allows it");
}

template <Activation kActivation, class In, class Out, unsigned kVector>
void kernel_case(const Format& format, const Shape& shape, bool per_channel, std::size_t shift, unsigned threads) {
    std::mt19937 source(static_cast<unsigned>(shape.c * 1000 + shape.w + kVector));
    const std::size_t span = shape.h * shape.w;
    const std::int64_t dims[] = {static_cast<std::int64_t>(shape.n), static_cast<std::int64_t>(shape.c),
                                 static_cast<std::int64_t>(shape.h), static_cast<std::int64_t>(shape.w)};
    const Extent extent = extent_of({dims, dims + 4}, format.layout);
    Parameters parameters;
    parameters.activation = kActivation;
    if (per_channel) {
        parameters.input_scale.clear();
        parameters.factor.clear();
        parameters.offset.clear();
        for (std::size_t c = 0; c < shape.c; ++c) {
            parameters.input_scale.push_back(0.01f + 0.003f * static_cast<float>(c));
            parameters.factor.push_back(1.5f + 0.7f * static_cast<float>(c % 7));
            parameters.offset.push_back(static_cast<float>(c % 5) - 2.0f);
        }
    } else {
        parameters.input_scale = {0.05f};
        parameters.factor = {11.0f};
        parameters.offset = {-3.25f};
    }
    parameters.check();
    const std::vector<Channel> entries = parameters.table();

    const std::size_t guard = 64;
    Memory<In> x(extent.total + 1, shift);
    Memory<Out> y(extent.total + guard, shift);
    std::vector<Out> expected(extent.total + guard);
    for (std::size_t place = 0; place < extent.total; ++place) {
        x.get()[place] = poison<In>();
        store(0.0f, expected[place]);
    }
    for (std::size_t place = 0; place < extent.total + guard; ++place) {
        y.get()[place] = poison<Out>();
    }
    for (std::size_t place = extent.total; place < extent.total + guard; ++place) {
        expected[place] = poison<Out>();
    }
    for (std::size_t n = 0; n < shape.n; ++n) {
        for (std::size_t c = 0; c < shape.c; ++c) {
            for (std::size_t s = 0; s < span; ++s) {
                const std::size_t place = format.place(n, c, s, shape.c, span, kVector);
                const In value = random_value<In>(source);
                x.get()[place] = value;
                expected[place] = element<kActivation, In, Out>(value, entries[per_channel ? c : 0], Steps{0.0f, 0.0f});
            }
        }
    }
    const Table table{entries.data(), static_cast<unsigned>(entries.size())};
    const Steps none{0.0f, 0.0f};
    if (!by_tables<kActivation, In, Out, kVector>(threads, x.get(), y.get(), table, extent, none)) {
        for (unsigned thread = 0; thread < threads; ++thread) {
            process<kActivation, In, Out, kVector>(thread, threads, x.get(), y.get(), table, extent, none);
        }
    }
    std::size_t wrong = 0;
    while (wrong < expected.size() && same(y.get()[wrong], expected[wrong])) {
        ++wrong;
    }
    check_case(wrong == expected.size(), format, extent, shift, wrong);
}

template <Activation kActivation, class In, class Out, unsigned kVector>
void kernel_cases(const Format& format) {
    for (const Shape& shape : kShapes) {
        for (const bool per_channel : {false, true}) {
            for (const std::size_t shift : {0u, 1u}) {
                for (const unsigned threads : {1u, 7u, 4096u}) {
                    kernel_case<kActivation, In, Out, kVector>(format, shape, per_channel, shift, threads);
                }
            }
        }
    }
}

template <Activation kActivation, class In>
void linear_cases() {
    kernel_cases<kActivation, In, float, 1>(kLinear);
    kernel_cases<kActivation, In, Half, 1>(kLinear);
    kernel_cases<kActivation, In, Int8, 1>(kLinear);
}

template <Activation kActivation>
void kernels() {
    linear_cases<kActivation, float>();
    linear_cases<kActivation, Half>();
    linear_cases<kActivation, Int8>();
    kernel_cases<kActivation, Half, Half, 2>(kChw2);
    kernel_cases<kActivation, Half, Half, 8>(kHwc8);
    kernel_cases<kActivation, Half, Half, 16>(kHwc16);
    kernel_cases<kActivation, Int8, Int8, 4>(kChw4);
    kernel_cases<kActivation, Int8, Int8, 16>(kHwc16);
    kernel_cases<kActivation, Int8, Int8, 32>(kChw32);
}

void parameters() {
    Parameters given;
    given.activation = Activation::kHardSwish;
    given.output_type = 2;
    given.factor = {1.0f, 2.0f, 3.0f};
    given.offset = {0.5f};
    const std::vector<char> bytes = given.serialise();
    const Parameters read = Parameters::deserialise(bytes.data(), bytes.size());
    check(read.activation == given.activation && read.output_type == 2 && read.factor == given.factor &&
              read.offset == given.offset && read.input_scale == given.input_scale,
          "what is serialised comes back");
    check(given.table().size() == 3 && given.table()[2].factor == 3.0f && given.table()[2].offset == 0.5f, "the table");
    for (std::size_t length = 0; length < bytes.size(); ++length) {
        check_refused("bytes", [&] { Parameters::deserialise(bytes.data(), length); });
    }
    std::vector<char> longer = bytes;
    longer.push_back(0);
    check_refused("cut or altered", [&] { Parameters::deserialise(longer.data(), longer.size()); });
    std::vector<char> other = bytes;
    other[4] = 9;
    check_refused("format 9", [&] { Parameters::deserialise(other.data(), other.size()); });
    std::vector<char> huge = bytes;
    std::memset(huge.data() + 16, 0xff, 12);
    check_refused("cut or altered", [&] { Parameters::deserialise(huge.data(), huge.size()); });

    given.check_channels(3);
    check_refused("the input has 4 channels and the attributes 3", [&] { given.check_channels(4); });
    Parameters one;
    one.check_channels(17);
    const auto refused = [](const char* words, std::vector<float> Parameters::*member, std::vector<float> values) {
        Parameters wrong;
        wrong.factor = {1.0f, 1.0f};
        wrong.*member = std::move(values);
        check_refused(words, [&] { wrong.check(); });
    };
    refused("input_scale holds 0", &Parameters::input_scale, {0.0f});
    refused("offset holds nan", &Parameters::offset, {kNaN});
    refused("factor holds inf", &Parameters::factor, {kInfinity});
    refused("factor has 2 values; give 1, or one for each of the 3 channels", &Parameters::offset, {1.0f, 2.0f, 3.0f});
    refused("factor has 0 values", &Parameters::factor, {});
    Parameters wrong_type;
    wrong_type.output_type = 3;
    check_refused("output_type is 3", [&] { wrong_type.check(); });
    check_refused("dimensions", [] { extent_of({4}, Layout{}); });
    check_refused("2^31", [] { extent_of({1 << 16, 1 << 15}, Layout{}); });
    check_refused("dynamic", [] { extent_of({-1, 3, 4, 4}, Layout{}); });
    check(extent_of({2, 3}, Layout{}).span == 1 && extent_of({2, 3}, Layout{}).total == 6, "two dimensions");
    check(extent_of({2, 3, 4, 5, 6}, Layout{}).span == 120, "five dimensions");
}

// The kernel body over all values of the standard input; false where it chooses another form.
template <Activation kActivation, class In, class Out>
bool stream(const Channel& channel, const Steps& steps, bool by_table, std::size_t shift) {
    std::string bytes;
    char part[4096];
    for (std::size_t count; (count = std::fread(part, 1, sizeof part, stdin)) != 0;) {
        bytes.append(part, count);
    }
    const unsigned total = static_cast<unsigned>(bytes.size() / sizeof(In));
    Memory<In> x(total, shift);
    Memory<Out> y(total, shift);
    std::memcpy(x.get(), bytes.data(), total * sizeof(In));
    const Table table{&channel, 1};
    const Extent extent{total, 1, total};
    if (by_tables<kActivation, In, Out, 1>(7, x.get(), y.get(), table, extent, steps) != by_table) {
        return false;
    }
    for (unsigned thread = 0; !by_table && thread < 7; ++thread) {
        process<kActivation, In, Out, 1>(thread, 7, x.get(), y.get(), table, extent, steps);
    }
    return std::fwrite(y.get(), sizeof(Out), total, stdout) == total;
}

template <Activation kActivation, class In, class... Given>
bool stream_to(const std::string& out, const Given&... given) {
    return out == "float"  ? stream<kActivation, In, float>(given...)
           : out == "half" ? stream<kActivation, In, Half>(given...)
           : out == "int8" ? stream<kActivation, In, Int8>(given...)
                           : false;
}

template <Activation kActivation, class... Given>
bool stream_from(const std::string& in, const Given&... given) {
    return in == "float"  ? stream_to<kActivation, float>(given...)
           : in == "half" ? stream_to<kActivation, Half>(given...)
           : in == "int8" ? stream_to<kActivation, Int8>(given...)
                          : false;
}

bool stream_activation(const std::string& act) {
    float x;
    while (std::fread(&x, sizeof x, 1, stdin) == 1) {
        const float y = act == "silu" ? silu(x) : hard_swish(x);
        std::fwrite(&y, sizeof y, 1, stdout);
    }
    return true;
}

}  // namespace

int main(int count, char** words) {
    const std::vector<std::string> given(words + 1, words + count);
    const auto number = [&](std::size_t index) { return std::strtof(given[index].c_str(), nullptr); };
    if (given.size() == 2 && given[0] == "activation") {
        return stream_activation(given[1]) ? 0 : 2;
    }
    if (given.size() == 11 && given[0] == "kernel" && (given[9] == "tables" || given[9] == "elements")) {
        const Channel channel{number(4), number(5), number(6), 0.0f};
        const Steps steps{number(7), number(8)};
        const bool tables = given[9] == "tables";
        const std::size_t shift = std::strtoul(given[10].c_str(), nullptr, 10);
        return (given[1] == "silu" ? stream_from<Activation::kSiLU>(given[2], given[3], channel, steps, tables, shift)
                                   : stream_from<Activation::kHardSwish>(given[2], given[3], channel, steps, tables, shift))
                   ? 0
                   : 2;
    }
    if (!given.empty()) {
        std::fprintf(stderr, "unknown arguments; the head of silu_cpu_test.cpp lists what is taken\n");
        return 2;
    }
    rounding();
    halves();
    activations();
    parameters();
    kernels<Activation::kSiLU>();
    kernels<Activation::kHardSwish>();
    check(tabled == std::set<unsigned>{1, 4, 16, 32}, "every layout of INT8 runs by tables");
    tables<Activation::kSiLU>();
    tables<Activation::kHardSwish>();
    std::printf("%ld checks, %ld failures\n", checks, failures);
    return failures == 0 ? 0 : 1;
}
