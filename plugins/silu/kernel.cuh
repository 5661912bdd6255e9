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
// goes element by element. `process` is a plain function of the thread's number, so that tests run it on the CPU.
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

#ifdef __CUDACC__
template <Activation kActivation, class In, class Out, unsigned kVector>
__global__ void __launch_bounds__(kThreadsPerBlock)
    kernel(const In* __restrict__ x, Out* __restrict__ y, Table table, Extent extent, Steps steps) {
    process<kActivation, In, Out, kVector>(blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x, x, y, table,
                                           extent, steps);
}
#endif

}  // namespace trtdet

#endif
