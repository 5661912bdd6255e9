// The kernel of TRT_SiLU and TRT_HardSwish: one family over the types of input and output and over the layout.
//
// All layouts of TensorRT that are served here are one: memory is [..][groups][span][vector], and an element of
// `group` and `lane` belongs to channel group * vector + lane. The last group is padded where the vector does not
// divide the channels.
//
//     kLINEAR           [N][C][H*W]                   vector 1    span H*W
//     kCHW2, 4, 32      [N][C/v][H*W][v]              vector v    span H*W
//     kHWC8, 16         [N*H*W][C/v][v]               vector v    span 1
//
// A thread moves 16 bytes of the wider type at a time; what remains, and everything where a pointer is not aligned,
// goes element by element.
//
// INT8 to INT8 has 256 inputs a channel: where a map is large enough, a block computes what each becomes once, keeps that
// in shared memory and looks it up (`Tables`); otherwise each element is computed by itself (`process`). Both use
// `element`, so the bits are the same. Both are plain functions of the numbers of block and thread, so that tests run
// them on the CPU.
#ifndef TRTDET_SILU_KERNEL_CUH
#define TRTDET_SILU_KERNEL_CUH

#include "activation.h"

namespace trtdet {

constexpr unsigned kThreadsPerBlock = 256;

// Elements that a thread moves at once.
template <class In, class Out>
constexpr unsigned kChunk = 16 / (sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out));

// All in elements. `total` counts the padding too and is below 2^31.
struct Extent {
    unsigned total;
    unsigned channels;
    unsigned span;
};

// `count` entries: one for each channel, or one for all.
struct Table {
    const Channel* entries;
    unsigned count;
};

// The channel of the element at a place in memory and, step by step, of those behind it: two divisions a walk.
template <unsigned kVector>
class Walk {
public:
    TRTDET_BOTH Walk(unsigned place, const Extent& extent)
        : groups_((extent.channels + kVector - 1) / kVector), span_(extent.span), lane_(place % kVector) {
        const unsigned vector = place / kVector;
        const unsigned row = vector / span_;
        at_ = vector - row * span_;
        group_ = row % groups_;
    }

    // Not below `channels` in the padding.
    TRTDET_BOTH unsigned channel() const { return group_ * kVector + lane_; }

    // Goes on to the next element; false where that is known to be of the same channel.
    TRTDET_BOTH bool next() {
        if (++lane_ != kVector) {
            return true;
        }
        lane_ = 0;
        if (++at_ != span_) {
            return kVector != 1;
        }
        at_ = 0;
        group_ = group_ + 1 == groups_ ? 0 : group_ + 1;
        return true;
    }

private:
    unsigned groups_;
    unsigned span_;
    unsigned lane_;
    unsigned at_ = 0;
    unsigned group_ = 0;
};

TRTDET_BOTH unsigned word_of(float x) { return bits_of(x); }
TRTDET_BOTH unsigned word_of(Half x) { return x.bits; }
TRTDET_BOTH unsigned word_of(Int8 x) { return static_cast<unsigned char>(x); }

TRTDET_BOTH void from_word(unsigned word, float& x) { x = float_of(word); }
TRTDET_BOTH void from_word(unsigned word, Half& x) { x.bits = static_cast<unsigned short>(word); }
TRTDET_BOTH void from_word(unsigned word, Int8& x) { x = static_cast<Int8>(static_cast<unsigned char>(word)); }

// kCount elements as they are moved: whole words, so that each move is one instruction. Little-endian.
template <class T, unsigned kCount>
struct alignas(sizeof(T) * kCount) Chunk {
    static constexpr unsigned kPerWord = 4 / sizeof(T);
    unsigned words[kCount / kPerWord] = {};

    TRTDET_BOTH static bool fits(const T* place) {
        return reinterpret_cast<unsigned long long>(place) % sizeof(Chunk) == 0;
    }

    TRTDET_BOTH void load(const T* place) {
#ifdef __CUDA_ARCH__
        *this = *reinterpret_cast<const Chunk*>(place);
#else
        check(place);
        memcpy(words, place, sizeof words);
#endif
    }

    TRTDET_BOTH void save(T* place) const {
#ifdef __CUDA_ARCH__
        *reinterpret_cast<Chunk*>(place) = *this;
#else
        check(place);
        memcpy(place, words, sizeof words);
#endif
    }

#ifndef __CUDA_ARCH__
    // A GPU ends the kernel here; a CPU would not mind.
    static void check(const T* place) {
        if (!fits(place)) {
            __builtin_trap();
        }
    }
#endif

    TRTDET_BOTH T get(unsigned index) const {
        T value;
        from_word(words[index / kPerWord] >> (index % kPerWord * 8 * sizeof(T)), value);
        return value;
    }

    // Each place of a new chunk is set once.
    TRTDET_BOTH void set(unsigned index, T value) {
        words[index / kPerWord] |= word_of(value) << (index % kPerWord * 8 * sizeof(T));
    }
};

// Computes with the parameters of a walk's channel. The padding becomes 0: a NaN there would pass through a
// convolution's zero weights.
template <Activation kActivation, class In, class Out, unsigned kVector>
class Cell {
public:
    TRTDET_BOTH Cell(unsigned place, const Table& table, const Extent& extent, const Steps& steps)
        : walk_(place, extent), table_(table), channels_(extent.channels), steps_(steps) {
        fetch();
    }

    TRTDET_BOTH Out operator()(In q) const {
        if (kVector != 1 && !inside_) {
            Out zero;
            store(0.0f, zero);
            return zero;
        }
        return element<kActivation, In, Out>(q, channel_, steps_);
    }

    TRTDET_BOTH void next() {
        if (walk_.next()) {
            fetch();
        }
    }

private:
    TRTDET_BOTH void fetch() {
        const unsigned channel = walk_.channel();
        inside_ = channel < channels_;
        if (inside_) {
            channel_ = table_.entries[table_.count == 1 ? 0 : channel];
        }
    }

    Walk<kVector> walk_;
    Table table_;
    unsigned channels_;
    Steps steps_;
    Channel channel_ = {};
    bool inside_ = false;
};

// What thread `thread` of `threads` does. x and y hold extent.total elements and do not overlap.
template <Activation kActivation, class In, class Out, unsigned kVector>
TRTDET_BOTH void process(unsigned thread, unsigned threads, const In* __restrict__ x, Out* __restrict__ y,
                         const Table& table, const Extent& extent, const Steps& steps) {
    constexpr unsigned kCount = kChunk<In, Out>;
    using Reader = Chunk<In, kCount>;
    using Writer = Chunk<Out, kCount>;
    const bool wide = Reader::fits(x) && Writer::fits(y);
    const unsigned chunks = wide ? extent.total / kCount : 0;
    for (unsigned index = thread; index < chunks; index += threads) {
        const unsigned place = index * kCount;
        Cell<kActivation, In, Out, kVector> cell(place, table, extent, steps);
        Reader in;
        Writer out;
        in.load(x + place);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
        for (unsigned k = 0; k < kCount; ++k) {
            out.set(k, cell(in.get(k)));
            if (k + 1 < kCount) {
                cell.next();
            }
        }
        out.save(y + place);
    }
    for (unsigned place = chunks * kCount + thread; place < extent.total; place += threads) {
        y[place] = Cell<kActivation, In, Out, kVector>(place, table, extent, steps)(x[place]);
    }
}

constexpr unsigned kInputs = 256;  // values of an INT8

// INT8 to INT8 by tables. A task is a part of a band: the elements of kTables channels that are next to each other. In
// every of the `segments` between which other channels lie, a band is contiguous. It is cut into windows of 16 bytes at
// addresses that are multiples of 16; where a window reaches over the band's end, only the elements inside are touched.
template <Activation kActivation, unsigned kVector>
class Tables {
public:
    // Channels of a band. Two vectors of kHWC16, so that a sector of 32 bytes is used as a whole.
    static constexpr unsigned kTables = kVector == 16 ? 32 : kVector;

    // What a block has of them in shared memory, by channel of the band and input as unsigned.
    static constexpr unsigned kBytes = kTables * kInputs;

    TRTDET_BOTH Tables(const Table& table, const Extent& extent, const Steps& steps)
        : table_(table), steps_(steps), channels_(extent.channels) {
        row_ = (extent.channels + kVector - 1) / kVector * kVector * extent.span;
        segments_ = row_ == 0 ? 0 : extent.total / row_;
        band_ = kTables * extent.span;
        bands_ = band_ == 0 ? 0 : (row_ + band_ - 1) / band_;
        const bool whole = row_ % kWindow == 0 && band_ % kWindow == 0;
        const unsigned longest = band_ < row_ ? band_ : row_;
        windows_ = whole ? longest / kWindow : (longest + 2 * kWindow - 2) / kWindow;
        const unsigned values = segments_ * extent.span;
        unsigned part = extent.total / (kTables * kEnoughTasks);
        part = part < kUsual ? kUsual : part > kMost ? kMost : part;
        slices_ = values < kLeast ? 0 : values < part ? 1 : values / part;
        slice_ = slices_ == 0 ? 0 : (segments_ * windows_ + slices_ - 1) / slices_;
    }

    // 0 where filling the tables would take longer than computing each element.
    TRTDET_BOTH unsigned tasks() const { return bands_ * slices_; }

    // The part of thread `thread` of a block in filling the tables of a task.
    TRTDET_BOTH void fill(unsigned task, unsigned thread, Int8* tables) const {
        const unsigned first = task / slices_ * kTables;
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
        for (unsigned lane = 0; lane < kTables; ++lane) {
            const unsigned channel = first + lane;
            // The padding becomes 0, whatever it holds: its factor and offset are.
            Channel entry = {};
            if (channel < channels_) {
                entry = table_.entries[table_.count == 1 ? 0 : channel];
            }
            for (unsigned input = thread; input < kInputs; input += kThreadsPerBlock) {
                const Int8 q = static_cast<Int8>(static_cast<unsigned char>(input));
                tables[lane * kInputs + input] = element<kActivation, Int8, Int8>(q, entry, steps_);
            }
        }
    }

    // The part of the same thread in the task, when the tables are filled.
    TRTDET_BOTH void apply(unsigned task, unsigned thread, const Int8* __restrict__ tables, const Int8* __restrict__ x,
                           Int8* __restrict__ y) const {
        const unsigned offset = task / slices_ * band_;
        const unsigned length = row_ - offset < band_ ? row_ - offset : band_;
        const bool wide = Window::fits(x) && Window::fits(y);
        const unsigned from = task % slices_ * slice_;
        const unsigned all = segments_ * windows_;
        const unsigned end = from + slice_ < all ? from + slice_ : all;
        for (unsigned window = from + thread; window < end; window += kThreadsPerBlock) {
            const unsigned segment = window / windows_;
            const unsigned start = segment * row_ + offset;
            const unsigned place = start / kWindow * kWindow + (window - segment * windows_) * kWindow;
            if (wide && place >= start && place + kWindow <= start + length) {
                // A multiple of 16 where the vector is, of 4 where that is 4: the lanes that follow do not wrap.
                const Int8* const lanes = tables + (place - start) % kTables * kInputs;
                Window in;
                Window out;
                in.load(x + place);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
                for (unsigned k = 0; k < kWindow; ++k) {
                    out.set(k, lanes[k % kTables * kInputs + word_of(in.get(k))]);
                }
                out.save(y + place);
                continue;
            }
            // Rolled: few windows come here, and the registers of sixteen would be taken from all.
            const unsigned last = place + kWindow < start + length ? place + kWindow : start + length;
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
            for (unsigned at = place < start ? start : place; at < last; ++at) {
                y[at] = tables[(at - start) % kTables * kInputs + word_of(x[at])];
            }
        }
    }

private:
    static constexpr unsigned kWindow = 16;
    using Window = Chunk<Int8, kWindow>;

    // Of values of one channel that a task has. With fewer than the least, filling 256 entries costs more than it saves.
    // The usual number gives every thread of a block a window. More are put together only where there are tasks enough
    // for every processor of a GPU.
    static constexpr unsigned kLeast = 512;
    static constexpr unsigned kUsual =
        kThreadsPerBlock * kWindow / kTables > kLeast ? kThreadsPerBlock * kWindow / kTables : kLeast;
    static constexpr unsigned kMost = 16384;
    static constexpr unsigned kEnoughTasks = 1024;

    Table table_;
    Steps steps_;
    unsigned channels_;
    unsigned row_;       // elements of all channels in a segment
    unsigned segments_;  // images; pixels where the channels are last
    unsigned band_;      // elements of a band in a segment; the last band may have fewer
    unsigned bands_;
    unsigned windows_;  // the most that a band's part of a segment touches
    unsigned slices_;   // tasks of a band
    unsigned slice_;    // windows of a task
};

#ifdef __CUDACC__
// What a block of kThreadsPerBlock threads does of a grid of any size.
template <Activation kActivation, class In, class Out, unsigned kVector>
__device__ __forceinline__ void compute(const In* __restrict__ x, Out* __restrict__ y, const Table& table,
                                        const Extent& extent, const Steps& steps) {
    if constexpr (sizeof(In) == sizeof(Int8) && sizeof(Out) == sizeof(Int8)) {
        using Kind = Tables<kActivation, kVector>;
        const Kind kind(table, extent, steps);
        const unsigned tasks = kind.tasks();
        if (tasks != 0) {
            __shared__ Int8 tables[Kind::kBytes];
            for (unsigned task = blockIdx.x; task < tasks; task += gridDim.x) {
                kind.fill(task, threadIdx.x, tables);
                __syncthreads();
                kind.apply(task, threadIdx.x, tables, x, y);
                __syncthreads();
            }
            return;
        }
    }
    process<kActivation, In, Out, kVector>(blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x, x, y, table,
                                           extent, steps);
}

template <Activation kActivation, class In, class Out, unsigned kVector>
__global__ void __launch_bounds__(kThreadsPerBlock)
    kernel(const In* __restrict__ x, Out* __restrict__ y, Table table, Extent extent, Steps steps) {
    compute<kActivation, In, Out, kVector>(x, y, table, extent, steps);
}
#endif

}  // namespace trtdet

#endif
