// A network that nothing is built from: it keeps what TensorRT's ONNX parser adds to it and works out the shapes that
// the parser asks for, so that the real parser reads a model with no builder, which would want a GPU.
//
// It is written against the public headers of TensorRT 8.6 alone, whose interfaces forward to the abstract classes of
// namespace apiv; recorded.h, written by recorded.py, holds what of these needs no thought.
#pragma once

#include <NvInfer.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

namespace standin {

using namespace nvinfer1;

// Ends the program: what was called is not written here, and any answer would be made up.
[[noreturn]] void lacks(char const* function);

// Shapes that were worked out before hold no more: the parser sets a layer's attributes once it has the layer.
void changed();

template <class Abstract>
class Recorded;

#include "recorded.h"

class Layer;
class Network;

// The whole numbers of a small tensor, as shapes are computed from; each may be open.
using Numbers = std::vector<std::optional<int32_t>>;

// A tensor, whose shape, type and numbers its layer works out when they are asked for.
class Tensor final : public Recorded<apiv::VTensor> {
public:
    // Without a layer that makes it, it is an input of the network.
    explicit Tensor(Layer* maker) : maker_(maker), face_(*this) {}

    // What the parser holds in its hands.
    ITensor& face() noexcept { return face_; }
    static Tensor& of(ITensor& face) { return static_cast<Face&>(face).tensor; }

    Dims getDimensions() const noexcept override;
    DataType getType() const noexcept override;
    bool isNetworkInput() const noexcept override { return maker_ == nullptr; }
    bool isNetworkOutput() const noexcept override { return is_output; }
    // Which of the two a tensor is decides the builder, from the whole network.
    bool isShapeTensor() const noexcept override { return false; }
    bool isExecutionTensor() const noexcept override { return true; }
    void setDimensionName(int32_t axis, char const* given) noexcept override { axis_names_[axis] = given; }
    char const* getDimensionName(int32_t axis) const noexcept override {
        auto const found = axis_names_.find(axis);
        return found == axis_names_.end() ? nullptr : found->second.c_str();
    }

    // Its numbers, where they can be worked out.
    std::optional<Numbers> const& held() const;

    bool is_output{};
    std::optional<Numbers> numbers;

private:
    struct Face final : ITensor {
        explicit Face(Tensor& of) : tensor(of) { mImpl = &of; }
        Tensor& tensor;
    };

    Layer* maker_;
    std::map<int32_t, std::string> axis_names_;
    Face face_;
};

class Layer final : public Recorded<apiv::VLayer> {
public:
    Layer(Network& network, LayerType kind, std::vector<Tensor*> inputs, int32_t outputs);

    // Gives the outputs their shapes and types, if anything changed since it last did.
    void update();

    // The shape and the type of an input; whether there is such an input.
    Dims shape(std::size_t input) const { return inputs[input]->getDimensions(); }
    DataType type(std::size_t input) const { return inputs[input]->getType(); }
    bool has(std::size_t input) const { return input < inputs.size() && inputs[input] != nullptr; }

    // The numbers of an input, where there is one and they can be worked out.
    std::optional<Numbers> held(std::size_t input) const { return has(input) ? inputs[input]->held() : std::nullopt; }

    // Says what an output is.
    void gives(Dims shape, DataType type, std::size_t output = 0);

    // Says which numbers the first output holds.
    void holds(Numbers numbers);

    // Notes what a builder would not take, in the stand-in's own words.
    void wrong(std::string const& what) const;

    LayerType getType() const noexcept override { return kind_; }
    int32_t getNbInputs() const noexcept override { return static_cast<int32_t>(inputs.size()); }
    int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(outputs.size()); }
    ITensor* getInput(int32_t index) const noexcept override;
    ITensor* getOutput(int32_t index) const noexcept override;
    void setInput(int32_t index, ITensor& tensor) noexcept override;
    void setOutputType(int32_t index, DataType type) noexcept override;

    std::vector<Tensor*> inputs;  // null where an optional one was left out
    mutable std::deque<Tensor> outputs;
    ILayer* face{};
    std::function<void()> infer;

private:
    Network& network_;
    LayerType kind_;
    std::map<int32_t, DataType> asked_types_;
    std::int64_t seen_ = -1;
};

// What a layer's face shares with every other: the layer, and the attributes of its kind.
template <class Interface, class Attributes>
class Face final : public Interface {
public:
    Face(Layer& layer, Attributes& attributes) {
        this->mLayer = &layer;
        this->mImpl = &attributes;
        if constexpr (std::is_base_of_v<ILoopBoundaryLayer, Interface>) {
            this->mBoundary = &boundary_;
        }
    }

private:
    Recorded<apiv::VLoopBoundaryLayer> boundary_;
};

class Network final : public Recorded<apiv::VNetworkDefinition> {
public:
    Network() : face_(*this) {}

    INetworkDefinition& face() { return face_; }
    std::deque<Layer> const& layers() const { return layers_; }
    std::deque<Tensor>& inputs() { return inputs_; }
    std::vector<Tensor*> const& outputs() const { return outputs_; }

    // What a builder would not take, found after every layer has its shapes.
    std::set<std::string> const& findings();
    void wrong(std::string what) { findings_.insert(std::move(what)); }

    ITensor* addInput(char const* name, DataType type, Dims dimensions) noexcept override;
    void markOutput(ITensor& tensor) noexcept override;
    int32_t getNbLayers() const noexcept override { return static_cast<int32_t>(layers_.size()); }
    ILayer* getLayer(int32_t index) const noexcept override { return layers_[index].face; }
    int32_t getNbInputs() const noexcept override { return static_cast<int32_t>(inputs_.size()); }
    int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(outputs_.size()); }
    ITensor* getInput(int32_t index) const noexcept override { return &inputs_[index].face(); }
    ITensor* getOutput(int32_t index) const noexcept override { return &outputs_[index]->face(); }
    bool hasImplicitBatchDimension() const noexcept override { return false; }
    bool setWeightsName(Weights, char const*) noexcept override { return true; }  // for refitting engines
    void setErrorRecorder(IErrorRecorder* recorder) noexcept override { recorder_ = recorder; }
    IErrorRecorder* getErrorRecorder() const noexcept override { return recorder_; }
    IBuilder& getBuilder() const noexcept override { return builder_.face; }

    IActivationLayer* addActivation(ITensor& input, ActivationType type) noexcept override;
    ICastLayer* addCast(ITensor& input, DataType type) noexcept override;
    IConcatenationLayer* addConcatenation(ITensor* const* inputs, int32_t count) noexcept override;
    IConstantLayer* addConstant(Dims dimensions, Weights weights) noexcept override;
    IConvolutionLayer* addConvolutionNd(ITensor& input, int32_t maps, Dims kernel, Weights weights,
                                        Weights bias) noexcept override;
    IDeconvolutionLayer* addDeconvolutionNd(ITensor& input, int32_t maps, Dims kernel, Weights weights,
                                            Weights bias) noexcept override;
    IDequantizeLayer* addDequantize(ITensor& input, ITensor& scale) noexcept override;
    IElementWiseLayer* addElementWise(ITensor& first, ITensor& second,
                                      ElementWiseOperation operation) noexcept override;
    IFillLayer* addFill(Dims dimensions, FillOperation operation) noexcept override;
    IGatherLayer* addGather(ITensor& data, ITensor& indices, int32_t axis) noexcept override;
    IGatherLayer* addGatherV2(ITensor& data, ITensor& indices, GatherMode mode) noexcept override;
    IGridSampleLayer* addGridSample(ITensor& input, ITensor& grid) noexcept override;
    IIdentityLayer* addIdentity(ITensor& input) noexcept override;
    ILoop* addLoop() noexcept override;
    IMatrixMultiplyLayer* addMatrixMultiply(ITensor& first, MatrixOperation first_operation, ITensor& second,
                                            MatrixOperation second_operation) noexcept override;
    INMSLayer* addNMS(ITensor& boxes, ITensor& scores, ITensor& most) noexcept override;
    INonZeroLayer* addNonZero(ITensor& input) noexcept override;
    IPluginV2Layer* addPluginV2(ITensor* const* inputs, int32_t count, IPluginV2& plugin) noexcept override;
    IPoolingLayer* addPoolingNd(ITensor& input, PoolingType type, Dims window) noexcept override;
    IQuantizeLayer* addQuantize(ITensor& input, ITensor& scale) noexcept override;
    IReduceLayer* addReduce(ITensor& input, ReduceOperation operation, uint32_t axes, bool keep) noexcept override;
    IResizeLayer* addResize(ITensor& input) noexcept override;
    IScaleLayer* addScaleNd(ITensor& input, ScaleMode mode, Weights shift, Weights scale, Weights power,
                            int32_t axis) noexcept override;
    IScatterLayer* addScatter(ITensor& data, ITensor& indices, ITensor& updates, ScatterMode mode) noexcept override;
    ISelectLayer* addSelect(ITensor& condition, ITensor& first, ITensor& second) noexcept override;
    IShapeLayer* addShape(ITensor& input) noexcept override;
    IShuffleLayer* addShuffle(ITensor& input) noexcept override;
    ISliceLayer* addSlice(ITensor& input, Dims start, Dims size, Dims stride) noexcept override;
    ISoftMaxLayer* addSoftMax(ITensor& input) noexcept override;
    ITopKLayer* addTopK(ITensor& input, TopKOperation operation, int32_t k, uint32_t axes) noexcept override;
    IUnaryLayer* addUnary(ITensor& input, UnaryOperation operation) noexcept override;

    // The plugin of a layer that is one.
    IPluginV2& plugin(Layer const& layer) const { return static_cast<IPluginV2Layer&>(*layer.face).getPlugin(); }

private:
    friend class Loop;

    struct Face final : INetworkDefinition {
        explicit Face(Network& network) { mImpl = &network; }
    };

    // The parser asks the builder for the plugins, and for nothing else.
    struct Builder final : Recorded<apiv::VBuilder> {
        Builder() : face(*this) {}
        IPluginRegistry& getPluginRegistry() noexcept override { return *::getPluginRegistry(); }

        struct Face final : IBuilder {
            explicit Face(Builder& builder) { mImpl = &builder; }
        };
        mutable Face face;
    };

    // Adds a layer: infer(layer, attributes) gives its outputs their shapes and types.
    template <class Interface, class Attributes, class Infer>
    Interface* add(LayerType kind, std::vector<ITensor*> const& inputs, int32_t outputs,
                   std::shared_ptr<Attributes> attributes, Infer infer);

    IGatherLayer* gather(ITensor& data, ITensor& indices, int32_t axis, GatherMode mode);

    mutable std::deque<Tensor> inputs_;
    std::vector<Tensor*> outputs_;
    std::deque<Layer> layers_;
    std::vector<std::shared_ptr<void>> kept_;  // faces, attributes and loops
    std::set<std::string> findings_;
    IErrorRecorder* recorder_{};
    Face face_;
    Builder builder_;
};

// "[1,3,-1]"
std::string written(Dims const& shape);

}  // namespace standin
