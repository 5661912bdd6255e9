// Asks the library what TensorRT 8.6 asks before anything runs. plugin_test LIBRARY; needs no GPU.
#include "plugin_test.h"

#include <algorithm>

using namespace nvinfer1;

namespace {

// Refuses what is there already, as TensorRT's does.
class Registry final : public IPluginRegistry {
public:
    bool registerCreator(IPluginCreator& creator, AsciiChar const* const) noexcept override {
        if (std::find(creators.begin(), creators.end(), &creator) != creators.end()) {
            return false;
        }
        creators.push_back(&creator);
        return true;
    }
    IPluginCreator* const* getPluginCreatorList(std::int32_t* const count) const noexcept override {
        *count = static_cast<std::int32_t>(creators.size());
        return creators.data();
    }
    IPluginCreator* getPluginCreator(AsciiChar const* const, AsciiChar const* const,
                                     AsciiChar const* const) noexcept override {
        return nullptr;
    }
    void setErrorRecorder(IErrorRecorder* const) noexcept override {}
    IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
    bool deregisterCreator(IPluginCreator const& creator) noexcept override {
        const auto found = std::find(creators.begin(), creators.end(), &creator);
        if (found == creators.end()) {
            return false;
        }
        creators.erase(found);
        return true;
    }
    bool isParentSearchEnabled() const override { return false; }
    void setParentSearchEnabled(bool const) override {}
    PluginLibraryHandle loadLibrary(AsciiChar const*) noexcept override { return nullptr; }
    void deregisterLibrary(PluginLibraryHandle) noexcept override {}

    std::vector<IPluginCreator*> creators;
};

Registry registry;

bool serves(IPluginV2DynamicExt& plugin, DataType in, DataType out, TensorFormat format) {
    const PluginTensorDesc both[] = {tensor(in, format), tensor(out, format)};
    return plugin.supportsFormatCombination(0, both, 1, 1) && plugin.supportsFormatCombination(1, both, 1, 1);
}

}  // namespace

extern "C" IPluginRegistry* getPluginRegistry() noexcept { return &registry; }

int main(int, char** words) {
    void* const library = open_library(words[1]);
    check(registry.creators.size() == 2, "loading registers both creators");
    const auto init = entry<bool (*)()>(library, "initTrtdetPlugins");
    check(init() && init() && registry.creators.size() == 2, "registering again changes nothing");
    std::int32_t count = 0;
    IPluginCreator* const* const all =
        entry<IPluginCreator* const* (*)(std::int32_t&)>(library, "getPluginCreators")(count);
    check(count == 2 && registry.creators.empty(), "what is handed over for registering is registered no more");
    check(init() && registry.creators.size() == 2, "and can be registered again");
    entry<void (*)(ILoggerFinder*)>(library, "setLoggerFinder")(&finder);

    IPluginCreator& silu = *all[0];
    IPluginCreator& hard_swish = *all[1];
    check(std::string(silu.getPluginName()) == "TRT_SiLU", "TRT_SiLU");
    check(std::string(hard_swish.getPluginName()) == "TRT_HardSwish", "TRT_HardSwish");
    check(std::string(silu.getPluginNamespace()) == "trtdet" && std::string(silu.getPluginVersion()) == "1", "identity");

    Node plain(-1, {1.0f});
    Node three(2, {1.0f, 2.0f, 3.0f});
    auto* const same = static_cast<IPluginV2DynamicExt*>(silu.createPlugin("a", &plain.collection));
    auto* const to_int8 = static_cast<IPluginV2DynamicExt*>(hard_swish.createPlugin("b", &three.collection));
    check(same != nullptr && to_int8 != nullptr, "plugins are created");
    constexpr TensorFormat kLinear = TensorFormat::kLINEAR;
    for (const DataType in : {DataType::kFLOAT, DataType::kHALF, DataType::kINT8}) {
        for (const DataType out : {DataType::kFLOAT, DataType::kHALF, DataType::kINT8}) {
            check(serves(*same, in, out, kLinear), "the builder chooses types where ranges quantise");
            check(serves(*to_int8, in, out, kLinear) == (out == DataType::kINT8), "the node chooses the type");
        }
        check(to_int8->getOutputDataType(0, &in, 1) == DataType::kINT8, "the type the node says");
        check(same->getOutputDataType(0, &in, 1) == in, "the type of the input");
    }
    check(serves(*same, DataType::kINT8, DataType::kINT8, TensorFormat::kCHW32), "kCHW32");
    check(serves(*same, DataType::kHALF, DataType::kHALF, TensorFormat::kHWC16), "kHWC16 of half");
    check(!serves(*same, DataType::kINT8, DataType::kINT8, TensorFormat::kHWC16), "kHWC16 of int8");
    check(!serves(*same, DataType::kHALF, DataType::kINT8, TensorFormat::kCHW32), "kCHW32 of two types");

    DynamicPluginTensorDesc x{};
    x.desc = tensor(DataType::kHALF, kLinear);
    x.desc.dims.d[1] = 5;
    to_int8->configurePlugin(&x, 1, &x, 1);
    check_said("trtdet::TRT_HardSwish: the input has 5 channels and the attributes 3");

    std::vector<char> state(to_int8->getSerializationSize());
    to_int8->serialize(state.data());
    IPluginV2* const read = hard_swish.deserializePlugin("b", state.data(), state.size());
    check(read != nullptr, "the state is read");
    if (read != nullptr) {
        IPluginV2* const clone = read->clone();
        read->destroy();
        std::vector<char> again(clone->getSerializationSize());
        clone->serialize(again.data());
        check(again == state, "a clone of what was read holds the same state");
        check(std::string(clone->getPluginNamespace()) == "trtdet", "and the same namespace");
        clone->destroy();
    }
    check(silu.deserializePlugin("b", state.data(), state.size()) == nullptr, "another op's state");
    check_said("trtdet::TRT_SiLU: the engine holds a TRT_HardSwish");
    check(silu.deserializePlugin("b", state.data(), state.size() - 1) == nullptr, "a state cut short");
    check_said("cut or altered");
    Node wrong(7, {1.0f});
    check(silu.createPlugin("b", &wrong.collection) == nullptr, "a wrong attribute");
    check_said("output_type is 7");

    const PluginTensorDesc in = tensor(DataType::kINT8, kLinear);
    const void* inputs[] = {nullptr};
    void* outputs[] = {nullptr};
    check(same->enqueue(&in, &in, inputs, outputs, nullptr, nullptr) != 0, "enqueue too early");
    check_said("enqueue before initialize");
    same->terminate();
    same->destroy();
    to_int8->destroy();
    std::printf("%d failures\n", failures);
    return failures == 0 ? 0 : 1;
}
