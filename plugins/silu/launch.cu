#include "launch.h"

namespace trtdet {
namespace {

template <Activation kActivation, class In, class Out, unsigned kVector>
cudaError_t start(const Launch& what, const void* x, void* y, cudaStream_t stream) {
    const unsigned per_block = kThreadsPerBlock * kChunk<In, Out>;
    const unsigned blocks = (what.extent.total + per_block - 1) / per_block;
    kernel<kActivation, In, Out, kVector><<<blocks, kThreadsPerBlock, 0, stream>>>(
        static_cast<const In*>(x), static_cast<Out*>(y), what.table, what.extent, what.steps);
    return cudaGetLastError();
}

using Start = cudaError_t (*)(const Launch&, const void*, void*, cudaStream_t);

template <Activation kActivation, class In>
Start linear(Type out) {
    switch (out) {
        case Type::kFloat: return start<kActivation, In, float, 1>;
        case Type::kHalf: return start<kActivation, In, Half, 1>;
        case Type::kInt8: return start<kActivation, In, Int8, 1>;
    }
    return nullptr;
}

// Null where no kernel is served.
template <Activation kActivation>
Start chosen(Type in, Type out, std::uint32_t vector) {
    if (vector == 1) {
        switch (in) {
            case Type::kFloat: return linear<kActivation, float>(out);
            case Type::kHalf: return linear<kActivation, Half>(out);
            case Type::kInt8: return linear<kActivation, Int8>(out);
        }
    }
    if (in == Type::kHalf && out == Type::kHalf) {
        switch (vector) {
            case 2: return start<kActivation, Half, Half, 2>;
            case 8: return start<kActivation, Half, Half, 8>;
            case 16: return start<kActivation, Half, Half, 16>;
            default: return nullptr;
        }
    }
    if (in == Type::kInt8 && out == Type::kInt8) {
        switch (vector) {
            case 4: return start<kActivation, Int8, Int8, 4>;
            case 16: return start<kActivation, Int8, Int8, 16>;
            case 32: return start<kActivation, Int8, Int8, 32>;
            default: return nullptr;
        }
    }
    return nullptr;
}

}  // namespace

bool served(Type in, Type out, std::uint32_t vector) {
    return chosen<Activation::kSiLU>(in, out, vector) != nullptr;
}

cudaError_t launch(const Launch& what, const void* x, void* y, cudaStream_t stream) {
    if (what.extent.total == 0) {
        return cudaSuccess;
    }
    const Start start = what.activation == Activation::kSiLU
                            ? chosen<Activation::kSiLU>(what.in, what.out, what.vector)
                            : chosen<Activation::kHardSwish>(what.in, what.out, what.vector);
    return start == nullptr ? cudaErrorInvalidValue : start(what, x, y, stream);
}

std::shared_ptr<const DeviceTable> DeviceTable::upload(const std::vector<Channel>& entries, cudaError_t& status) {
    std::shared_ptr<DeviceTable> made(new DeviceTable);
    status = cudaGetDevice(&made->device_);
    if (status != cudaSuccess) {
        return nullptr;
    }
    void* memory = nullptr;
    status = cudaMalloc(&memory, entries.size() * sizeof(Channel));
    if (status != cudaSuccess) {
        return nullptr;
    }
    made->table_ = Table{static_cast<const Channel*>(memory), static_cast<unsigned>(entries.size())};
    status = cudaMemcpy(memory, entries.data(), entries.size() * sizeof(Channel), cudaMemcpyHostToDevice);
    if (status == cudaSuccess) {
        // A copy from pageable memory may return before it is done, and the kernel runs on a stream that need not wait.
        status = cudaStreamSynchronize(cudaStreamLegacy);
    }
    return status == cudaSuccess ? made : nullptr;
}

DeviceTable::~DeviceTable() {
    // Nothing is left to do about a failure: at the end of a process the driver may be gone before the last plugin.
    static_cast<void>(cudaFree(const_cast<Channel*>(table_.entries)));
}

}  // namespace trtdet
