// What is used of onnxruntime's C API, declared here: it is a table of functions at fixed places, to which versions
// only append, so a library of any version from 1.12 on is loaded without its headers. onnxruntime_api_test.cpp
// compares the places with onnxruntime_c_api.h where that header is given, and the tests of the engine run real
// libraries.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trtdet::ort {

// The version that is asked for; later libraries give it as well. It is that of onnxruntime 1.12, the first in which
// all that the session is told is known.
constexpr std::uint32_t api_version = 12;
constexpr const char* first_library = "1.12";

struct Status;
struct Env;
struct Session;
struct SessionOptions;
struct MemoryInfo;
struct Value;
struct TypeInfo;
struct TensorInfo;
struct RunOptions;
struct CustomOpDomain;
struct KernelInfo;
struct KernelContext;
struct Api;

// ONNXTensorElementDataType.
enum class ElementType : int { float32 = 1, uint8 = 2, int8 = 3, int32 = 6, int64 = 7, boolean = 9, float16 = 10 };

constexpr int severity_error = 3;  // OrtLoggingLevel
constexpr int arena_allocator = 1;
constexpr int default_memory = 0;

using LogFunction =
    void(void* own, int severity, const char* category, const char* id, const char* place, const char* message);

struct ApiBase {
    const Api* (*get_api)(std::uint32_t version);
    const char* (*version)();
};

// The functions of OrtApi. A Status that is not null is an error and is to be released.
struct Api {
    void (*functions[131])();
};

// One of them by its place, which is called with the table first.
template <std::size_t place, typename Function>
struct Slot {
    static constexpr std::size_t index = place;

    template <typename... Arguments>
    auto operator()(const Api& api, Arguments... arguments) const {
        return reinterpret_cast<Function*>(api.functions[place])(arguments...);
    }
};

constexpr Slot<2, const char*(const Status*)> GetErrorMessage;
constexpr Slot<4, Status*(LogFunction*, void* own, int severity, const char* id, Env**)> CreateEnvWithCustomLogger;
constexpr Slot<8, Status*(const Env*, const void* model, std::size_t, const SessionOptions*, Session**)>
    CreateSessionFromArray;
constexpr Slot<
    9, Status*(
           Session*, const RunOptions*, const char* const* input_names, const Value* const* inputs, std::size_t,
           const char* const* output_names, std::size_t, Value** outputs)>
    Run;
constexpr Slot<10, Status*(SessionOptions**)> CreateSessionOptions;
constexpr Slot<22, Status*(SessionOptions*, int severity)> SetSessionLogSeverityLevel;
constexpr Slot<24, Status*(SessionOptions*, int threads)> SetIntraOpNumThreads;
constexpr Slot<26, Status*(const char* name, CustomOpDomain**)> CreateCustomOpDomain;
constexpr Slot<27, Status*(CustomOpDomain*, const struct CustomOp*)> CustomOpDomain_Add;
constexpr Slot<28, Status*(SessionOptions*, CustomOpDomain*)> AddCustomOpDomain;
constexpr Slot<30, Status*(const Session*, std::size_t*)> SessionGetInputCount;
constexpr Slot<33, Status*(const Session*, std::size_t index, TypeInfo**)> SessionGetInputTypeInfo;
constexpr Slot<
    49, Status*(
            const MemoryInfo*, void* data, std::size_t bytes, const std::int64_t* shape, std::size_t dimensions,
            ElementType, Value**)>
    CreateTensorWithDataAsOrtValue;
constexpr Slot<51, Status*(Value*, void** data)> GetTensorMutableData;
constexpr Slot<55, Status*(const TypeInfo*, const TensorInfo**)> CastTypeInfoToTensorInfo;
constexpr Slot<60, Status*(const TensorInfo*, ElementType*)> GetTensorElementType;
constexpr Slot<61, Status*(const TensorInfo*, std::size_t*)> GetDimensionsCount;
constexpr Slot<62, Status*(const TensorInfo*, std::int64_t*, std::size_t)> GetDimensions;
constexpr Slot<65, Status*(const Value*, TensorInfo**)> GetTensorTypeAndShape;
constexpr Slot<69, Status*(int allocator, int memory, MemoryInfo**)> CreateCpuMemoryInfo;
constexpr Slot<85, Status*(const KernelInfo*, const char* name, float*)> KernelInfoGetAttribute_float;
constexpr Slot<86, Status*(const KernelInfo*, const char* name, std::int64_t*)> KernelInfoGetAttribute_int64;
constexpr Slot<90, Status*(const KernelContext*, std::size_t index, const Value**)> KernelContext_GetInput;
constexpr Slot<91, Status*(KernelContext*, std::size_t index, const std::int64_t* shape, std::size_t, Value**)>
    KernelContext_GetOutput;
constexpr Slot<93, void(Status*)> ReleaseStatus;
constexpr Slot<95, void(Session*)> ReleaseSession;
constexpr Slot<96, void(Value*)> ReleaseValue;
constexpr Slot<98, void(TypeInfo*)> ReleaseTypeInfo;
constexpr Slot<99, void(TensorInfo*)> ReleaseTensorTypeAndShapeInfo;
constexpr Slot<100, void(SessionOptions*)> ReleaseSessionOptions;
constexpr Slot<130, Status*(SessionOptions*, const char* key, const char* value)> AddSessionConfigEntry;

// OrtCustomOp as version 12 has it: an operator of one's own.
struct CustomOp {
    std::uint32_t version;
    void* (*create_kernel)(const CustomOp*, const Api*, const KernelInfo*);
    const char* (*name)(const CustomOp*);
    const char* (*execution_provider)(const CustomOp*);  // null for the CPU
    ElementType (*input_type)(const CustomOp*, std::size_t index);
    std::size_t (*input_count)(const CustomOp*);
    ElementType (*output_type)(const CustomOp*, std::size_t index);
    std::size_t (*output_count)(const CustomOp*);
    void (*compute)(void* kernel, KernelContext*);
    void (*destroy_kernel)(void* kernel);
    int (*input_characteristic)(const CustomOp*, std::size_t index);  // 0 for required
    int (*output_characteristic)(const CustomOp*, std::size_t index);
};

}  // namespace trtdet::ort
