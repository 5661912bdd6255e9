// Asks the library what TensorRT 10 and 11 ask before anything runs. plugin_test LIBRARY; needs no GPU.
#include "plugin_test.h"

#include <memory>

using namespace nvinfer1;

namespace {

template <class Capability>
Capability* as(IPluginV3& plugin, PluginCapabilityType type) {
    return static_cast<Capability*>(plugin.getCapabilityInterface(type));
}

DynamicPluginTensorDesc dynamic(DataType type, TensorFormat format, std::int32_t rank = 4) {
    DynamicPluginTensorDesc desc{};
    desc.desc = tensor(type, format, rank);
    return desc;
}

bool serves(IPluginV3OneBuild& build, DataType in, DataType out, TensorFormat in_format, TensorFormat out_format,
            std::int32_t rank = 4) {
    const DynamicPluginTensorDesc both[] = {dynamic(in, in_format, rank), dynamic(out, out_format, rank)};
    return build.supportsFormatCombination(0, both, 1, 1) && build.supportsFormatCombination(1, both, 1, 1);
}

void formats(IPluginV3OneBuild& same, IPluginV3OneBuild& to_int8) {
    constexpr TensorFormat kLinear = TensorFormat::kLINEAR;
    for (const DataType type : {DataType::kFLOAT, DataType::kHALF, DataType::kINT8}) {
        check(serves(same, type, type, kLinear, kLinear), "linear");
        check(serves(to_int8, type, DataType::kINT8, kLinear, kLinear), "linear to int8");
        check(serves(same, type, type, kLinear, kLinear, 2), "two dimensions");
    }
    check(!serves(same, DataType::kHALF, DataType::kINT8, kLinear, kLinear), "a type the node does not say");
    check(!serves(same, DataType::kINT32, DataType::kINT32, kLinear, kLinear), "int32");
    constexpr bool kInt8Hwc16 = NV_TENSORRT_MAJOR > 10 || (NV_TENSORRT_MAJOR == 10 && NV_TENSORRT_MINOR >= 9);
    const struct {
        TensorFormat format;
        bool half, int8;
    } rows[] = {{TensorFormat::kCHW2, true, false},   {TensorFormat::kHWC8, true, false},
                {TensorFormat::kCHW4, false, true},   {TensorFormat::kCHW32, false, true},
                {TensorFormat::kHWC16, true, kInt8Hwc16}, {TensorFormat::kCHW16, false, false},
                {TensorFormat::kHWC, false, false}};
    for (const auto& row : rows) {
        const std::string name = "format " + std::to_string(static_cast<int>(row.format));
        check(serves(same, DataType::kHALF, DataType::kHALF, row.format, row.format) == row.half, name + " of half");
        check(serves(same, DataType::kINT8, DataType::kINT8, row.format, row.format) == row.int8, name + " of int8");
        check(!serves(same, DataType::kINT8, DataType::kINT8, row.format, kLinear), name + " to linear");
        check(!serves(same, DataType::kINT8, DataType::kINT8, row.format, row.format, 3), name + " of three dimensions");
        check(!serves(to_int8, DataType::kHALF, DataType::kINT8, row.format, row.format), name + " of two types");
    }
}

}  // namespace

int main(int, char** words) {
    void* const library = open_library(words[1]);
    entry<void (*)(ILoggerFinder*)>(library, "setLoggerFinder")(&finder);
    std::int32_t count = 0;
    IPluginCreatorInterface* const* const all =
        entry<IPluginCreatorInterface* const* (*)(std::int32_t&)>(library, "getCreators")(count);
    check(count == 2, "two creators");
    auto& silu = static_cast<IPluginCreatorV3One&>(*all[0]);
    auto& hard_swish = static_cast<IPluginCreatorV3One&>(*all[1]);
    check(std::string(all[0]->getInterfaceInfo().kind) == "PLUGIN CREATOR_V3ONE", "the kind of creator");
    check(std::string(silu.getPluginName()) == "TRT_SiLU", "TRT_SiLU");
    check(std::string(hard_swish.getPluginName()) == "TRT_HardSwish", "TRT_HardSwish");
    check(std::string(silu.getPluginNamespace()) == "trtdet" && std::string(silu.getPluginVersion()) == "1", "identity");
    check(silu.getFieldNames()->nbFields == 4, "four attributes");

    Node plain(-1, {1.0f});
    Node three(2, {1.0f, 2.0f, 3.0f});
    std::unique_ptr<IPluginV3> same(silu.createPlugin("a", &plain.collection, TensorRTPhase::kBUILD));
    std::unique_ptr<IPluginV3> to_int8(silu.createPlugin("b", &three.collection, TensorRTPhase::kBUILD));
    check(same != nullptr && to_int8 != nullptr, "plugins are created");
    auto& build = *as<IPluginV3OneBuild>(*to_int8, PluginCapabilityType::kBUILD);
    formats(*as<IPluginV3OneBuild>(*same, PluginCapabilityType::kBUILD), build);
    check(std::string(as<IPluginV3OneCore>(*same, PluginCapabilityType::kCORE)->getPluginName()) == "TRT_SiLU", "core");

    const DataType half = DataType::kHALF;
    DataType given{};
    check(build.getOutputDataTypes(&given, 1, &half, 1) == 0 && given == DataType::kINT8, "the type the node says");
    check(as<IPluginV3OneBuild>(*same, PluginCapabilityType::kBUILD)->getOutputDataTypes(&given, 1, &half, 1) == 0 &&
              given == half, "the type of the input");
    DynamicPluginTensorDesc x = dynamic(half, TensorFormat::kLINEAR);
    DynamicPluginTensorDesc y = dynamic(DataType::kINT8, TensorFormat::kLINEAR);
    check(build.configurePlugin(&x, 1, &y, 1) == 0, "three channels");
    x.desc.dims.d[1] = 5;
    check(build.configurePlugin(&x, 1, &y, 1) != 0, "five channels");
    check_said("trtdet::TRT_SiLU: the input has 5 channels and the attributes 3");
    x.desc.dims.d[1] = -1;
    check(build.configurePlugin(&x, 1, &y, 1) == 0, "dynamic channels");
    x.desc.dims.nbDims = 1;
    check(build.configurePlugin(&x, 1, &y, 1) != 0, "one dimension");
    check_said("at least (N, C) is needed");

    auto& runtime = *as<IPluginV3OneRuntime>(*to_int8, PluginCapabilityType::kRUNTIME);
    PluginFieldCollection const* state = runtime.getFieldsToSerialize();
    std::unique_ptr<IPluginV3> read(silu.createPlugin("b", state, TensorRTPhase::kRUNTIME));
    check(read != nullptr, "the state is read");
    std::unique_ptr<IPluginV3> clone(read == nullptr ? nullptr : read->clone());
    read.reset();
    if (clone != nullptr) {
        PluginFieldCollection const* again =
            as<IPluginV3OneRuntime>(*clone, PluginCapabilityType::kRUNTIME)->getFieldsToSerialize();
        check(again->fields[0].length == state->fields[0].length &&
                  std::memcmp(again->fields[0].data, state->fields[0].data, state->fields[0].length) == 0,
              "a clone of what was read holds the same state");
    }
    check(hard_swish.createPlugin("b", state, TensorRTPhase::kRUNTIME) == nullptr, "another op's state");
    check_said("trtdet::TRT_HardSwish: the engine holds a TRT_SiLU");
    PluginField cut = state->fields[0];
    --cut.length;
    const PluginFieldCollection damaged{1, &cut};
    check(silu.createPlugin("b", &damaged, TensorRTPhase::kRUNTIME) == nullptr, "a state cut short");
    check_said("cut or altered");
    check(silu.createPlugin("b", &plain.collection, TensorRTPhase::kRUNTIME) == nullptr, "no state");
    check_said("the engine holds no state");
    Node wrong(7, {1.0f});
    check(silu.createPlugin("b", &wrong.collection, TensorRTPhase::kBUILD) == nullptr, "a wrong attribute");
    check_said("output_type is 7");
    check(silu.createPlugin("b", nullptr, TensorRTPhase::kBUILD) == nullptr, "no attributes at all");

    const PluginTensorDesc in = tensor(half, TensorFormat::kLINEAR);
    const PluginTensorDesc out = tensor(DataType::kINT8, TensorFormat::kLINEAR);
    const void* inputs[] = {nullptr};
    void* outputs[] = {nullptr};
    check(runtime.enqueue(&in, &out, inputs, outputs, nullptr, nullptr) != 0, "enqueue too early");
    check_said("enqueue before onShapeChange");
    std::printf("%d failures\n", failures);
    return failures == 0 ? 0 : 1;
}
