// Starting the kernel and keeping its table on the device; the one part that needs CUDA and not TensorRT.
#ifndef TRTDET_SILU_LAUNCH_H
#define TRTDET_SILU_LAUNCH_H

#include "parameters.h"

#include <cuda_runtime_api.h>

#include <memory>

namespace trtdet {

// A table of channels in device memory, never changed once made, so that clones on many threads share it.
class DeviceTable {
public:
    // Copies the table to the current device; an empty pointer and `status` where CUDA refuses.
    static std::shared_ptr<const DeviceTable> upload(const std::vector<Channel>& entries, cudaError_t& status);

    DeviceTable(const DeviceTable&) = delete;
    DeviceTable& operator=(const DeviceTable&) = delete;
    ~DeviceTable();

    Table table() const { return table_; }
    int device() const { return device_; }

private:
    DeviceTable() = default;

    Table table_{nullptr, 0};
    int device_ = -1;
};

// True where a kernel exists: any two types where the vector is 1, else two equal ones that TensorRT has the format for.
bool served(Type in, Type out, std::uint32_t vector);

struct Launch {
    Activation activation;
    Type in;
    Type out;
    std::uint32_t vector;
    Extent extent;
    Table table;
    Steps steps;
};

// Puts the kernel on the stream and waits for nothing. cudaErrorInvalidValue where no kernel is served.
cudaError_t launch(const Launch& what, const void* x, void* y, cudaStream_t stream);

}  // namespace trtdet

#endif
