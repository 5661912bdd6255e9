// The arithmetic of TRT_SiLU and TRT_HardSwish on one element, in float32.
//
//     x = q * input_scale                       an INT8 input; float inputs are taken as they are
//     y = factor * act(x) + offset              saturated and rounded half to even for an INT8 output
//
// Every step rounds once: no multiply and add are joined, so that a reference which computes step by step gets the
// same bits. The same text is compiled by g++ (tests), by nvcc (the library) and by NVRTC (the engine carries the
// kernel), which is why the device part includes nothing.
#ifndef TRTDET_SILU_ACTIVATION_H
#define TRTDET_SILU_ACTIVATION_H

#ifdef __CUDACC__
#define TRTDET_BOTH __host__ __device__ __forceinline__
#else
#define TRTDET_BOTH inline
#endif
#ifndef __CUDACC_RTC__
#include <cmath>
#include <cstring>
#endif

namespace trtdet {

enum class Activation : int { kSiLU = 0, kHardSwish = 1 };

// binary16, by its bits: NVRTC comes without cuda_fp16.h.
struct Half {
    unsigned short bits;
};
using Int8 = signed char;

// What one channel is computed with. 16 bytes, so that a thread fetches it in one load.
struct alignas(16) Channel {
    float input_scale;
    float factor;
    float offset;
    float unused;
};

// The steps of an implicitly quantised network (TensorRT 8.6), which are known only when it runs; 0 where not in use.
struct Steps {
    float input;   // replaces Channel::input_scale
    float output;  // y is divided by it
};

TRTDET_BOTH unsigned bits_of(float x) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(x);
#else
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

TRTDET_BOTH float float_of(unsigned bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

TRTDET_BOTH float multiply(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

TRTDET_BOTH float add(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

TRTDET_BOTH float divide(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

// x is within the range of int. Half to even: the host is in its default rounding mode.
TRTDET_BOTH int round_half_to_even(float x) {
#ifdef __CUDA_ARCH__
    return __float2int_rn(x);
#else
    return static_cast<int>(lrintf(x));
#endif
}

TRTDET_BOTH bool is_minus_infinity(float x) { return x < -3.402823466e+38f; }

// x * sigmoid(x). exp is taken of -|x| only: it cannot overflow, so that no negative x is lost early. -inf gives its
// limit, -0; +inf gives +inf; NaN stays NaN.
TRTDET_BOTH float silu(float x) {
    if (is_minus_infinity(x)) {
        return -0.0f;
    }
    const float e = expf(x < 0.0f ? x : -x);
    const float numerator = x < 0.0f ? multiply(x, e) : x;
    return divide(numerator, add(1.0f, e));
}

// x * clip(x / 6 + 1 / 2, 0, 1). -inf gives its limit, -0; +inf gives +inf; NaN stays NaN.
TRTDET_BOTH float hard_swish(float x) {
    if (is_minus_infinity(x)) {
        return -0.0f;
    }
    float gate = add(divide(x, 6.0f), 0.5f);
    gate = gate < 0.0f ? 0.0f : gate;
    gate = gate > 1.0f ? 1.0f : gate;
    return multiply(x, gate);
}

template <Activation kActivation>
TRTDET_BOTH float activate(float x) {
    return kActivation == Activation::kSiLU ? silu(x) : hard_swish(x);
}

TRTDET_BOTH float float_of_half(Half half) {
#ifdef __CUDA_ARCH__
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half.bits));
    return x;
#else
    const unsigned sign = (half.bits & 0x8000u) << 16;
    const unsigned exponent = (half.bits >> 10) & 31u;
    const unsigned fraction = half.bits & 1023u;
    if (exponent == 31) {
        return float_of(sign | 0x7f800000u | (fraction << 13));
    }
    if (exponent == 0) {
        return float_of(sign | bits_of(static_cast<float>(fraction) * 0x1p-24f));
    }
    return float_of(sign | ((exponent + 112) << 23) | (fraction << 13));
#endif
}

// IEEE 754: half to even, above 65504 by more than half a step to infinity.
TRTDET_BOTH Half half_of(float x) {
#ifdef __CUDA_ARCH__
    Half half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(x));
    return half;
#else
    const unsigned sign = (bits_of(x) >> 16) & 0x8000u;
    unsigned bits = bits_of(x) & 0x7fffffffu;
    if (bits > 0x7f800000u) {
        bits = 0x7fffu;
    } else if (bits >= 0x477ff000u) {  // 65520
        bits = 0x7c00u;
    } else if (bits < 0x38800000u) {  // 2^-14: subnormal, a multiple of 2^-24
        bits = static_cast<unsigned>(round_half_to_even(float_of(bits) * 0x1p24f));
    } else {
        bits = (bits + 0xfffu + ((bits >> 13) & 1u) - 0x38000000u) >> 13;
    }
    return Half{static_cast<unsigned short>(sign | bits)};
#endif
}

// -128 to 127; NaN gives 0.
TRTDET_BOTH Int8 int8_of(float x) {
    if (x != x) {
        return 0;
    }
    x = x < -128.0f ? -128.0f : x;
    x = x > 127.0f ? 127.0f : x;
    return static_cast<Int8>(round_half_to_even(x));
}

TRTDET_BOTH float real(float x, float) { return x; }
TRTDET_BOTH float real(Half x, float) { return float_of_half(x); }
TRTDET_BOTH float real(Int8 q, float scale) { return multiply(static_cast<float>(q), scale); }

TRTDET_BOTH void store(float y, float& out) { out = y; }
TRTDET_BOTH void store(float y, Half& out) { out = half_of(y); }
TRTDET_BOTH void store(float y, Int8& out) { out = int8_of(y); }

template <Activation kActivation, class In, class Out>
TRTDET_BOTH Out element(In q, const Channel& channel, const Steps& steps) {
    const float x = real(q, steps.input != 0.0f ? steps.input : channel.input_scale);
    float y = add(multiply(channel.factor, activate<kActivation>(x)), channel.offset);
    if (steps.output != 0.0f) {
        y = divide(y, steps.output);
    }
    Out out;
    store(y, out);
    return out;
}

}  // namespace trtdet

#endif
