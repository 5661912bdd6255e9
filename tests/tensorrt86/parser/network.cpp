#include "network.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <numeric>
#include <utility>

namespace standin {
namespace {

std::int64_t revision = 0;

// Of a constant: shapes are computed from few.
constexpr std::int64_t most_numbers = 64;

// How many elements a shape has; -1 where that is not known.
std::int64_t volume(Dims const& shape) {
    std::int64_t product = 1;
    for (int32_t axis = 0; axis < shape.nbDims; ++axis) {
        if (shape.d[axis] < 0) {
            return -1;
        }
        product *= shape.d[axis];
    }
    return product;
}

Dims unknown(int32_t rank) {
    Dims shape{};
    shape.nbDims = rank;
    std::fill_n(shape.d, rank, -1);
    return shape;
}

void append(Dims& shape, int32_t size) { shape.d[shape.nbDims++] = size; }

// The sizes of two inputs that are computed element by element. TensorRT wants the same rank.
Dims broadcast(Layer const& layer, Dims first, Dims const& second) {
    if (first.nbDims != second.nbDims) {
        layer.wrong("ranks differ: " + written(first) + " " + written(second));
        return first.nbDims > second.nbDims ? first : second;
    }
    for (int32_t axis = 0; axis < first.nbDims; ++axis) {
        int32_t& size = first.d[axis];
        int32_t const other = second.d[axis];
        if (size >= 0 && other >= 0 && size != other && size != 1 && other != 1) {
            layer.wrong("cannot be broadcast: " + written(first) + " " + written(second));
        }
        size = size == 1 || (size < 0 && other != 1) ? other : size;
    }
    return first;
}

void same_types(Layer const& layer, std::size_t first, std::size_t second) {
    if (layer.type(first) != layer.type(second)) {
        layer.wrong("types differ: " + std::to_string(static_cast<int>(layer.type(first))) + " " +
                    std::to_string(static_cast<int>(layer.type(second))));
    }
}

bool is_float(DataType type) { return type == DataType::kFLOAT || type == DataType::kHALF; }

// A shape that an input holds, itself a tensor (rank).
Dims held_shape(Layer const& layer, std::size_t input) {
    Dims const holder = layer.shape(input);
    Dims shape = unknown(holder.nbDims > 0 ? std::max(holder.d[0], 0) : 0);
    if (auto const numbers = layer.held(input)) {
        std::transform(numbers->begin(), numbers->end(), shape.d, [](auto one) { return one.value_or(-1); });
    }
    return shape;
}

Numbers as_numbers(Dims const& dims) { return {dims.d, dims.d + dims.nbDims}; }

// What an operation on pairs gives for two whole numbers.
std::optional<int32_t> paired(ElementWiseOperation operation, std::optional<int32_t> a, std::optional<int32_t> b) {
    if (!a || !b) {
        return std::nullopt;
    }
    switch (operation) {
        case ElementWiseOperation::kSUM: return *a + *b;
        case ElementWiseOperation::kPROD: return *a * *b;
        case ElementWiseOperation::kMAX: return std::max(*a, *b);
        case ElementWiseOperation::kMIN: return std::min(*a, *b);
        case ElementWiseOperation::kSUB: return *a - *b;
        case ElementWiseOperation::kDIV: return *b == 0 ? std::nullopt : std::optional(*a / *b);
        case ElementWiseOperation::kFLOOR_DIV:
            return *b == 0 ? std::nullopt : std::optional(*a / *b - (*a % *b != 0 && (*a < 0) != (*b < 0)));
        case ElementWiseOperation::kEQUAL: return *a == *b;
        case ElementWiseOperation::kLESS: return *a < *b;
        case ElementWiseOperation::kGREATER: return *a > *b;
        default: return std::nullopt;
    }
}

// Of numbers of the same count, or of one that stands for all.
std::optional<int32_t> at(Numbers const& numbers, std::size_t index) {
    if (numbers.size() == 1) {
        return numbers.front();
    }
    return index < numbers.size() ? numbers[index] : std::nullopt;
}

// The same numbers in the same order.
void hold_inputs(Layer& layer) {
    if (auto numbers = layer.held(0)) {
        layer.holds(std::move(*numbers));
    }
}

void as_input(Layer& layer) { layer.gives(layer.shape(0), layer.type(0)); }

// How a window moves over feature maps (N, C, ...).
struct Window {
    Dims size, stride, before, after, dilation;
    PaddingMode padding;
};

Dims slid(Dims const& input, int32_t channels, Window const& window) {
    Dims shape = input;
    shape.d[1] = channels;
    // Attributes that the parser left alone have no axes.
    auto const or_else = [](Dims const& given, int32_t axis, int32_t usual) {
        return given.nbDims > axis ? given.d[axis] : usual;
    };
    for (int32_t axis = 0; axis < window.size.nbDims; ++axis) {
        int32_t& size = shape.d[axis + 2];
        if (size < 0) {
            continue;
        }
        int32_t const stride = or_else(window.stride, axis, 1);
        int32_t const reach = or_else(window.dilation, axis, 1) * (window.size.d[axis] - 1) + 1;
        int32_t const room = size + or_else(window.before, axis, 0) + or_else(window.after, axis, 0) - reach;
        switch (window.padding) {
            case PaddingMode::kEXPLICIT_ROUND_DOWN: size = room / stride + 1; break;
            case PaddingMode::kEXPLICIT_ROUND_UP: size = (room + stride - 1) / stride + 1; break;
            case PaddingMode::kSAME_UPPER:
            case PaddingMode::kSAME_LOWER: size = (size + stride - 1) / stride; break;
            default: lacks("the padding of Caffe");
        }
    }
    return shape;
}

// A size that a plugin computes its output's from.
class Size final : public IDimensionExpr, public apiv::VDimensionExpr {
public:
    explicit Size(int32_t value) : value_(value) { IDimensionExpr::mImpl = this; }
    bool isConstant() const override { return value_ >= 0; }
    int32_t getConstantValue() const override { return value_; }

private:
    int32_t value_;
};

class Sizes final : public IExprBuilder, public apiv::VExprBuilder {
public:
    Sizes() { IExprBuilder::mImpl = this; }

    IDimensionExpr const* constant(int32_t value) override { return &made_.emplace_back(value); }

    IDimensionExpr const* operation(DimensionOperation operation, IDimensionExpr const& first,
                                    IDimensionExpr const& second) override {
        if (!first.isConstant() || !second.isConstant()) {
            return constant(-1);
        }
        int32_t const a = first.getConstantValue(), b = second.getConstantValue();
        switch (operation) {
            case DimensionOperation::kSUM: return constant(a + b);
            case DimensionOperation::kPROD: return constant(a * b);
            case DimensionOperation::kMAX: return constant(std::max(a, b));
            case DimensionOperation::kMIN: return constant(std::min(a, b));
            case DimensionOperation::kSUB: return constant(a - b);
            case DimensionOperation::kEQUAL: return constant(a == b);
            case DimensionOperation::kLESS: return constant(a < b);
            case DimensionOperation::kFLOOR_DIV: return constant(a / b);
            case DimensionOperation::kCEIL_DIV: return constant((a + b - 1) / b);
        }
        lacks("an operation on sizes");
    }

private:
    std::deque<Size> made_;
};

void as_plugin_says(Layer& layer, IPluginV2& plugin) {
    auto* const dynamic = dynamic_cast<IPluginV2DynamicExt*>(&plugin);
    if (dynamic == nullptr) {
        layer.wrong("its plugin takes no dynamic shapes");
        return;
    }
    Sizes sizes;
    std::vector<DimsExprs> shapes;
    std::vector<DataType> types;
    for (std::size_t input = 0; input < layer.inputs.size(); ++input) {
        Dims const shape = layer.shape(input);
        DimsExprs& said = shapes.emplace_back();
        said.nbDims = shape.nbDims;
        std::transform(shape.d, shape.d + shape.nbDims, said.d, [&](int32_t size) { return sizes.constant(size); });
        types.push_back(layer.type(input));
    }
    auto const count = static_cast<int32_t>(types.size());
    for (std::size_t output = 0; output < layer.outputs.size(); ++output) {
        auto const index = static_cast<int32_t>(output);
        DimsExprs const said = dynamic->getOutputDimensions(index, shapes.data(), count, sizes);
        Dims shape = unknown(said.nbDims);
        for (int32_t axis = 0; axis < said.nbDims; ++axis) {
            shape.d[axis] = said.d[axis]->isConstant() ? said.d[axis]->getConstantValue() : -1;
        }
        layer.gives(shape, dynamic->getOutputDataType(index, types.data(), count), output);
    }
}

}  // namespace

void changed() { ++revision; }

void lacks(char const* function) {
    std::cout << "{\"lacks\": \"" << function << "\"}" << std::endl;
    std::_Exit(3);
}

std::string written(Dims const& shape) {
    std::string text = "[";
    for (int32_t axis = 0; axis < shape.nbDims; ++axis) {
        text += (axis > 0 ? "," : "") + std::to_string(shape.d[axis]);
    }
    return text + "]";
}

// Tensors

Dims Tensor::getDimensions() const noexcept {
    if (maker_ != nullptr) {
        maker_->update();
    }
    return dimensions;
}

DataType Tensor::getType() const noexcept {
    if (maker_ != nullptr) {
        maker_->update();
    }
    return type;
}

std::optional<Numbers> const& Tensor::held() const {
    if (maker_ != nullptr) {
        maker_->update();
    }
    return numbers;
}

// Layers

Layer::Layer(Network& network, LayerType kind, std::vector<Tensor*> given, int32_t count)
    : inputs(std::move(given)), network_(network), kind_(kind) {
    for (int32_t index = 0; index < count; ++index) {
        outputs.emplace_back(this);
    }
}

void Layer::update() {
    if (seen_ == revision) {
        return;
    }
    seen_ = revision;
    for (Tensor& output : outputs) {
        output.numbers.reset();
    }
    infer();
    for (auto const& [index, type] : asked_types_) {
        outputs[index].type = type;
    }
}

void Layer::gives(Dims shape, DataType type, std::size_t output) {
    outputs[output].dimensions = shape;
    outputs[output].type = type;
}

void Layer::holds(Numbers numbers) { outputs.front().numbers = std::move(numbers); }

void Layer::wrong(std::string const& what) const { network_.wrong(name + ": " + what); }

ITensor* Layer::getInput(int32_t index) const noexcept {
    return index < getNbInputs() && inputs[index] != nullptr ? &inputs[index]->face() : nullptr;
}

ITensor* Layer::getOutput(int32_t index) const noexcept {
    return index < getNbOutputs() ? &outputs[index].face() : nullptr;
}

void Layer::setInput(int32_t index, ITensor& tensor) noexcept {
    if (index >= getNbInputs()) {
        inputs.resize(index + 1);
    }
    inputs[index] = &Tensor::of(tensor);
    changed();
}

void Layer::setOutputType(int32_t index, DataType type) noexcept {
    asked_types_[index] = type;
    changed();
}

// The network

std::set<std::string> const& Network::findings() {
    for (Layer& layer : layers_) {
        layer.update();
    }
    return findings_;
}

ITensor* Network::addInput(char const* name, DataType type, Dims dimensions) noexcept {
    Tensor& tensor = inputs_.emplace_back(nullptr);
    tensor.name = name;
    tensor.type = type;
    tensor.dimensions = dimensions;
    return &tensor.face();
}

void Network::markOutput(ITensor& tensor) noexcept {
    outputs_.push_back(&Tensor::of(tensor));
    outputs_.back()->is_output = true;
}

template <class Interface, class Attributes, class Infer>
Interface* Network::add(LayerType kind, std::vector<ITensor*> const& inputs, int32_t outputs,
                        std::shared_ptr<Attributes> attributes, Infer infer) {
    std::vector<Tensor*> tensors;
    for (ITensor* input : inputs) {
        tensors.push_back(&Tensor::of(*input));
    }
    Layer& layer = layers_.emplace_back(*this, kind, std::move(tensors), outputs);
    // As TensorRT calls what nobody named.
    layer.name = "(Unnamed Layer* " + std::to_string(layers_.size() - 1) + ")";
    for (std::size_t index = 0; index < layer.outputs.size(); ++index) {
        layer.outputs[index].name = layer.name + "_output_" + std::to_string(index);
    }
    layer.infer = [&layer, attributes, infer] { infer(layer, *attributes); };
    auto const face = std::make_shared<standin::Face<Interface, Attributes>>(layer, *attributes);
    layer.face = face.get();
    kept_.push_back(face);
    changed();
    return face.get();
}

IActivationLayer* Network::addActivation(ITensor& input, ActivationType type) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VActivationLayer>>();
    made->activationType = type;
    return add<IActivationLayer>(LayerType::kACTIVATION, {&input}, 1, made, [](Layer& layer, auto&) {
        if (!is_float(layer.type(0))) {
            layer.wrong("an activation of whole numbers");
        }
        as_input(layer);
    });
}

ICastLayer* Network::addCast(ITensor& input, DataType type) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VCastLayer>>();
    made->toType = type;
    return add<ICastLayer>(LayerType::kCAST, {&input}, 1, made,
                           [](Layer& layer, auto& cast) {
                               layer.gives(layer.shape(0), cast.toType);
                               hold_inputs(layer);
                           });
}

IConcatenationLayer* Network::addConcatenation(ITensor* const* inputs, int32_t count) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VConcatenationLayer>>();
    auto const infer = [](Layer& layer, auto& join) {
        Dims shape = layer.shape(0);
        for (std::size_t input = 1; input < layer.inputs.size(); ++input) {
            Dims const next = layer.shape(input);
            same_types(layer, 0, input);
            bool fits = next.nbDims == shape.nbDims;
            for (int32_t axis = 0; fits && axis < shape.nbDims; ++axis) {
                int32_t const first = shape.d[axis], second = next.d[axis];
                fits = axis == join.axis || first < 0 || second < 0 || first == second;
            }
            if (!fits) {
                layer.wrong("cannot be joined: " + written(shape) + " " + written(next));
                continue;
            }
            int32_t& size = shape.d[join.axis];
            size = size < 0 || next.d[join.axis] < 0 ? -1 : size + next.d[join.axis];
        }
        layer.gives(shape, layer.type(0));
        Numbers joined;
        for (Tensor const* input : layer.inputs) {
            if (shape.nbDims != 1 || !input->held()) {
                return;
            }
            joined.insert(joined.end(), input->held()->begin(), input->held()->end());
        }
        layer.holds(std::move(joined));
    };
    return add<IConcatenationLayer>(LayerType::kCONCATENATION, {inputs, inputs + count}, 1, made, infer);
}

IConstantLayer* Network::addConstant(Dims dimensions, Weights weights) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VConstantLayer>>();
    made->dimensions = dimensions;
    made->weights = weights;
    return add<IConstantLayer>(LayerType::kCONSTANT, {}, 1, made, [](Layer& layer, auto& constant) {
        if (volume(constant.dimensions) != constant.weights.count) {
            layer.wrong(std::to_string(constant.weights.count) + " values in a constant of " +
                        written(constant.dimensions));
        }
        layer.gives(constant.dimensions, constant.weights.type);
        if (constant.weights.type == DataType::kINT32 && constant.weights.count <= most_numbers) {
            auto const* const first = static_cast<int32_t const*>(constant.weights.values);
            layer.holds({first, first + constant.weights.count});
        }
    });
}

/// A convolution, or one that is transposed, as it was asked for.
template <typename Kind>
static std::shared_ptr<Recorded<Kind>> with_kernel(int32_t maps, Dims kernel, Weights weights, Weights bias) {
    auto made = std::make_shared<Recorded<Kind>>();
    made->nbOutputMaps = maps;
    made->kernelSizeNd = kernel;
    made->kernelWeights = weights;
    made->biasWeights = bias;
    made->nbGroups = 1;
    return made;
}

IConvolutionLayer* Network::addConvolutionNd(ITensor& input, int32_t maps, Dims kernel, Weights weights,
                                             Weights bias) noexcept {
    auto const made = with_kernel<apiv::VConvolutionLayer>(maps, kernel, weights, bias);
    return add<IConvolutionLayer>(LayerType::kCONVOLUTION, {&input}, 1, made, [](Layer& layer, auto& conv) {
        Window const window{conv.kernelSizeNd, conv.strideNd,   conv.prePadding,
                            conv.postPadding,  conv.dilationNd, conv.paddingMode};
        if (layer.has(1)) {
            same_types(layer, 0, 1);
        }
        layer.gives(slid(layer.shape(0), conv.nbOutputMaps, window), layer.type(0));
    });
}

IDeconvolutionLayer* Network::addDeconvolutionNd(ITensor& input, int32_t maps, Dims kernel, Weights weights,
                                                 Weights bias) noexcept {
    auto const made = with_kernel<apiv::VDeconvolutionLayer>(maps, kernel, weights, bias);
    return add<IDeconvolutionLayer>(LayerType::kDECONVOLUTION, {&input}, 1, made, [](Layer& layer, auto& deconv) {
        Dims shape = layer.shape(0);
        shape.d[1] = deconv.nbOutputMaps;
        auto const or_else = [](Dims const& given, int32_t axis, int32_t usual) {
            return given.nbDims > axis ? given.d[axis] : usual;
        };
        for (int32_t axis = 0; axis < deconv.kernelSizeNd.nbDims; ++axis) {
            int32_t& size = shape.d[axis + 2];
            int32_t const reach = or_else(deconv.dilationNd, axis, 1) * (deconv.kernelSizeNd.d[axis] - 1) + 1;
            int32_t const cut = or_else(deconv.prePadding, axis, 0) + or_else(deconv.postPadding, axis, 0);
            size = size < 0 ? -1 : (size - 1) * or_else(deconv.strideNd, axis, 1) + reach - cut;
        }
        if (layer.has(1)) {
            same_types(layer, 0, 1);
        }
        layer.gives(shape, layer.type(0));
    });
}

IDequantizeLayer* Network::addDequantize(ITensor& input, ITensor& scale) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VDequantizeLayer>>();
    return add<IDequantizeLayer>(LayerType::kDEQUANTIZE, {&input, &scale}, 1, made, [](Layer& layer, auto&) {
        if (layer.type(0) != DataType::kINT8) {
            layer.wrong("dequantises what is not INT8");
        }
        layer.gives(layer.shape(0), layer.type(1));
    });
}

IElementWiseLayer* Network::addElementWise(ITensor& first, ITensor& second, ElementWiseOperation operation) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VElementWiseLayer>>();
    made->operation = operation;
    auto const infer = [](Layer& layer, auto& pairs) {
        same_types(layer, 0, 1);
        ElementWiseOperation const does = pairs.operation;
        bool const compares = does == ElementWiseOperation::kEQUAL || does == ElementWiseOperation::kLESS ||
                              does == ElementWiseOperation::kGREATER;
        layer.gives(broadcast(layer, layer.shape(0), layer.shape(1)), compares ? DataType::kBOOL : layer.type(0));
        auto const first = layer.held(0), second = layer.held(1);
        if (first && second && layer.shape(0).nbDims <= 1) {
            Numbers numbers(first->size() == 1 ? second->size() : first->size());
            for (std::size_t index = 0; index < numbers.size(); ++index) {
                numbers[index] = paired(does, at(*first, index), at(*second, index));
            }
            layer.holds(std::move(numbers));
        }
    };
    return add<IElementWiseLayer>(LayerType::kELEMENTWISE, {&first, &second}, 1, made, infer);
}

IFillLayer* Network::addFill(Dims dimensions, FillOperation operation) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VFillLayer>>();
    made->dimensions = dimensions;
    made->operation = operation;
    return add<IFillLayer>(LayerType::kFILL, {}, 1, made, [](Layer& layer, auto& fill) {
        // The first input, where there is one, is the shape; the second the first value.
        layer.gives(layer.has(0) ? held_shape(layer, 0) : fill.dimensions,
                    layer.has(1) ? layer.type(1) : DataType::kFLOAT);
    });
}

IGatherLayer* Network::gather(ITensor& data, ITensor& indices, int32_t axis, GatherMode mode) {
    auto const made = std::make_shared<Recorded<apiv::VGatherLayer>>();
    made->gatherAxis = axis;
    made->mode = mode;
    auto const infer = [](Layer& layer, auto& gathering) {
        if (layer.type(1) != DataType::kINT32) {
            layer.wrong("its indices are not INT32");
        }
        Dims const from = layer.shape(0), at = layer.shape(1);
        int32_t const batches = gathering.nbElementWiseDims;
        Dims shape{};
        if (gathering.mode == GatherMode::kELEMENT) {
            shape = at;
        } else if (gathering.mode == GatherMode::kND) {
            int32_t const last = at.nbDims - 1;
            std::for_each(at.d, at.d + last, [&](int32_t size) { append(shape, size); });
            std::for_each(from.d + batches + at.d[last], from.d + from.nbDims,
                          [&](int32_t size) { append(shape, size); });
        } else {
            std::for_each(from.d, from.d + gathering.gatherAxis, [&](int32_t size) { append(shape, size); });
            std::for_each(at.d + batches, at.d + at.nbDims, [&](int32_t size) { append(shape, size); });
            std::for_each(from.d + gathering.gatherAxis + 1, from.d + from.nbDims,
                          [&](int32_t size) { append(shape, size); });
        }
        layer.gives(shape, layer.type(0));
        auto const numbers = layer.held(0), places = layer.held(1);
        bool const plain = gathering.mode == GatherMode::kDEFAULT && from.nbDims == 1;
        if (plain && numbers && places) {
            Numbers picked;
            for (auto const place : *places) {
                // A negative one counts from the end.
                auto const count = static_cast<int32_t>(numbers->size());
                bool const inside = place && *place >= -count && *place < count;
                picked.push_back(inside ? (*numbers)[*place < 0 ? *place + count : *place] : std::nullopt);
            }
            layer.holds(std::move(picked));
        }
    };
    return add<IGatherLayer>(LayerType::kGATHER, {&data, &indices}, 1, made, infer);
}

IGatherLayer* Network::addGather(ITensor& data, ITensor& indices, int32_t axis) noexcept {
    return gather(data, indices, axis, GatherMode::kDEFAULT);
}

IGatherLayer* Network::addGatherV2(ITensor& data, ITensor& indices, GatherMode mode) noexcept {
    return gather(data, indices, 0, mode);
}

IGridSampleLayer* Network::addGridSample(ITensor& input, ITensor& grid) noexcept {
    struct Sampling final : Recorded<apiv::VGridSampleLayer> {
        bool setSampleMode(SampleMode given) noexcept override {
            mode = given;
            changed();
            return true;
        }
        SampleMode getSampleMode() const noexcept override { return mode; }
        SampleMode mode{};
    };
    auto const made = std::make_shared<Sampling>();
    return add<IGridSampleLayer>(LayerType::kGRID_SAMPLE, {&input, &grid}, 1, made, [](Layer& layer, Sampling&) {
        same_types(layer, 0, 1);
        Dims shape = layer.shape(0);
        Dims const places = layer.shape(1);
        if (shape.nbDims != 4 || places.nbDims != 4 || places.d[0] != shape.d[0] || places.d[3] != 2) {
            layer.wrong("samples " + written(shape) + " at " + written(places));
        }
        shape.d[2] = places.d[1];
        shape.d[3] = places.d[2];
        layer.gives(shape, layer.type(0));
    });
}

IIdentityLayer* Network::addIdentity(ITensor& input) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VIdentityLayer>>();
    return add<IIdentityLayer>(LayerType::kIDENTITY, {&input}, 1, made, [](Layer& layer, auto&) {
        as_input(layer);
        hold_inputs(layer);
    });
}

IMatrixMultiplyLayer* Network::addMatrixMultiply(ITensor& first, MatrixOperation first_operation, ITensor& second,
                                                 MatrixOperation second_operation) noexcept {
    struct Product final : Recorded<apiv::VMatrixMultiplyLayer> {
        void setOperation(int32_t index, MatrixOperation given) noexcept override {
            operations[index] = given;
            changed();
        }
        MatrixOperation getOperation(int32_t index) const noexcept override { return operations[index]; }
        MatrixOperation operations[2]{};
    };
    auto const made = std::make_shared<Product>();
    made->operations[0] = first_operation;
    made->operations[1] = second_operation;
    auto const infer = [](Layer& layer, Product& product) {
        same_types(layer, 0, 1);
        Dims batches[2], rest[2];
        for (int32_t side = 0; side < 2; ++side) {
            Dims const shape = layer.shape(side);
            bool const vector = product.operations[side] == MatrixOperation::kVECTOR;
            batches[side] = shape;
            batches[side].nbDims = shape.nbDims - (vector ? 1 : 2);
            rest[side] = Dims{};
            std::for_each(shape.d + batches[side].nbDims, shape.d + shape.nbDims,
                          [&](int32_t size) { append(rest[side], size); });
            if (product.operations[side] == MatrixOperation::kTRANSPOSE) {
                std::swap(rest[side].d[0], rest[side].d[1]);
            }
        }
        Dims shape = broadcast(layer, batches[0], batches[1]);
        if (rest[0].nbDims == 2) {
            append(shape, rest[0].d[0]);
        }
        if (rest[1].nbDims == 2) {
            append(shape, rest[1].d[1]);
        }
        layer.gives(shape, layer.type(0));
    };
    return add<IMatrixMultiplyLayer>(LayerType::kMATRIX_MULTIPLY, {&first, &second}, 1, made, infer);
}

INMSLayer* Network::addNMS(ITensor& boxes, ITensor& scores, ITensor& most) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VNMSLayer>>();
    return add<INMSLayer>(LayerType::kNMS, {&boxes, &scores, &most}, 2, made, [](Layer& layer, auto&) {
        Dims found = unknown(2);
        found.d[1] = 3;  // image, class, box
        layer.gives(found, DataType::kINT32, 0);
        layer.gives(Dims{}, DataType::kINT32, 1);
    });
}

INonZeroLayer* Network::addNonZero(ITensor& input) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VNonZeroLayer>>();
    return add<INonZeroLayer>(LayerType::kNON_ZERO, {&input}, 1, made, [](Layer& layer, auto&) {
        Dims places = unknown(2);
        places.d[0] = layer.shape(0).nbDims;  // a column for each element that is not zero
        layer.gives(places, DataType::kINT32);
    });
}

IPluginV2Layer* Network::addPluginV2(ITensor* const* inputs, int32_t count, IPluginV2& plugin) noexcept {
    struct Held final : Recorded<apiv::VPluginV2Layer> {
        explicit Held(IPluginV2* own) : plugin(own) {}
        ~Held() override { plugin->destroy(); }
        IPluginV2& getPlugin() noexcept override { return *plugin; }
        IPluginV2* plugin;
    };
    // The network has a plugin of its own: the parser ends the one that it gave.
    auto const made = std::make_shared<Held>(plugin.clone());
    return add<IPluginV2Layer>(LayerType::kPLUGIN_V2, {inputs, inputs + count}, plugin.getNbOutputs(), made,
                               [](Layer& layer, Held& held) { as_plugin_says(layer, *held.plugin); });
}

IPoolingLayer* Network::addPoolingNd(ITensor& input, PoolingType type, Dims window) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VPoolingLayer>>();
    made->poolingType = type;
    made->windowSizeNd = window;
    return add<IPoolingLayer>(LayerType::kPOOLING, {&input}, 1, made, [](Layer& layer, auto& pool) {
        Dims const shape = layer.shape(0);
        Window const moving{pool.windowSizeNd, pool.strideNd, pool.prePadding, pool.postPadding, Dims{},
                            pool.paddingMode};
        layer.gives(slid(shape, shape.d[1], moving), layer.type(0));
    });
}

IQuantizeLayer* Network::addQuantize(ITensor& input, ITensor& scale) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VQuantizeLayer>>();
    return add<IQuantizeLayer>(LayerType::kQUANTIZE, {&input, &scale}, 1, made, [](Layer& layer, auto&) {
        if (!is_float(layer.type(0))) {
            layer.wrong("quantises what is not float");
        }
        layer.gives(layer.shape(0), DataType::kINT8);
    });
}

IReduceLayer* Network::addReduce(ITensor& input, ReduceOperation operation, uint32_t axes, bool keep) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VReduceLayer>>();
    made->operation = operation;
    made->reduceAxes = axes;
    made->keepDimensions = keep;
    return add<IReduceLayer>(LayerType::kREDUCE, {&input}, 1, made, [](Layer& layer, auto& reduction) {
        Dims const from = layer.shape(0);
        Dims shape{};
        for (int32_t axis = 0; axis < from.nbDims; ++axis) {
            bool const reduced = (reduction.reduceAxes >> axis & 1U) != 0;
            if (!reduced || reduction.keepDimensions) {
                append(shape, reduced ? 1 : from.d[axis]);
            }
        }
        layer.gives(shape, layer.type(0));
        // How many elements a shape has.
        if (auto const numbers = layer.held(0); numbers && from.nbDims == 1 && reduction.reduceAxes == 1 &&
                                                reduction.operation == ReduceOperation::kPROD) {
            auto const product = [](auto a, auto b) { return paired(ElementWiseOperation::kPROD, a, b); };
            layer.holds({std::accumulate(numbers->begin(), numbers->end(), std::optional<int32_t>(1), product)});
        }
    });
}

IResizeLayer* Network::addResize(ITensor& input) noexcept {
    struct Resizing final : Recorded<apiv::VResizeLayer> {
        void setScales(float const* given, int32_t count) noexcept override {
            scales.assign(given, given + count);
            changed();
        }
        int32_t getScales(int32_t size, float* found) const noexcept override {
            std::copy_n(scales.begin(), std::min<std::size_t>(size, scales.size()), found);
            return static_cast<int32_t>(scales.size());
        }
        std::vector<float> scales;
    };
    auto const made = std::make_shared<Resizing>();
    return add<IResizeLayer>(LayerType::kRESIZE, {&input}, 1, made, [](Layer& layer, Resizing& resizing) {
        Dims shape = layer.shape(0);
        if (layer.has(1)) {
            shape = held_shape(layer, 1);
        } else if (resizing.scales.empty()) {
            shape = resizing.outputDimensions;
        } else {
            for (int32_t axis = 0; axis < shape.nbDims; ++axis) {
                int32_t& size = shape.d[axis];
                size = size < 0 ? -1 : static_cast<int32_t>(static_cast<float>(size) * resizing.scales[axis]);
            }
        }
        layer.gives(shape, layer.type(0));
    });
}

IScaleLayer* Network::addScaleNd(ITensor& input, ScaleMode mode, Weights shift, Weights scale, Weights power,
                                 int32_t axis) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VScaleLayer>>();
    made->mode = mode;
    made->shift = shift;
    made->scale = scale;
    made->power = power;
    made->channelAxis = axis;
    return add<IScaleLayer>(LayerType::kSCALE, {&input}, 1, made, [](Layer& layer, auto&) { as_input(layer); });
}

IScatterLayer* Network::addScatter(ITensor& data, ITensor& indices, ITensor& updates, ScatterMode mode) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VScatterLayer>>();
    made->mode = mode;
    return add<IScatterLayer>(LayerType::kSCATTER, {&data, &indices, &updates}, 1, made,
                              [](Layer& layer, auto&) { as_input(layer); });
}

ISelectLayer* Network::addSelect(ITensor& condition, ITensor& first, ITensor& second) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VSelectLayer>>();
    return add<ISelectLayer>(LayerType::kSELECT, {&condition, &first, &second}, 1, made, [](Layer& layer, auto&) {
        if (layer.type(0) != DataType::kBOOL) {
            layer.wrong("its condition is not BOOL");
        }
        same_types(layer, 1, 2);
        layer.gives(broadcast(layer, broadcast(layer, layer.shape(0), layer.shape(1)), layer.shape(2)), layer.type(1));
        auto const chosen = layer.held(0), first = layer.held(1), second = layer.held(2);
        if (chosen && first && second && layer.shape(0).nbDims <= 1) {
            Numbers numbers(std::max({chosen->size(), first->size(), second->size()}));
            for (std::size_t index = 0; index < numbers.size(); ++index) {
                auto const which = at(*chosen, index);
                numbers[index] = which ? at(*which != 0 ? *first : *second, index) : std::nullopt;
            }
            layer.holds(std::move(numbers));
        }
    });
}

IShapeLayer* Network::addShape(ITensor& input) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VShapeLayer>>();
    return add<IShapeLayer>(LayerType::kSHAPE, {&input}, 1, made, [](Layer& layer, auto&) {
        Dims holder{};
        Dims const shape = layer.shape(0);
        append(holder, shape.nbDims);
        layer.gives(holder, DataType::kINT32);
        Numbers numbers = as_numbers(shape);
        std::replace_if(
            numbers.begin(), numbers.end(), [](auto one) { return one < 0; }, std::nullopt);
        layer.holds(std::move(numbers));
    });
}

IShuffleLayer* Network::addShuffle(ITensor& input) noexcept {
    using Shuffle = Recorded<apiv::VShuffleLayer>;
    constexpr int32_t no_reshape = -2;  // a rank that the parser never asks for
    auto const made = std::make_shared<Shuffle>();
    made->reshapeDimensions.nbDims = no_reshape;
    made->zeroIsPlaceholder = true;
    for (int32_t axis = 0; axis < Dims::MAX_DIMS; ++axis) {
        made->firstTranspose.order[axis] = made->secondTranspose.order[axis] = axis;
    }
    auto const infer = [](Layer& layer, Shuffle& shuffle) {
        auto const transposed = [](Dims const& shape, Permutation const& by) {
            Dims moved = shape;
            for (int32_t axis = 0; axis < shape.nbDims; ++axis) {
                moved.d[axis] = shape.d[by.order[axis]];
            }
            return moved;
        };
        Dims shape = transposed(layer.shape(0), shuffle.firstTranspose);
        Dims asked = shuffle.reshapeDimensions;
        if (layer.has(1)) {
            asked = held_shape(layer, 1);
        }
        if (asked.nbDims != no_reshape) {
            std::int64_t const count = volume(shape);
            std::int64_t others = 1;
            std::vector<int32_t> open;
            for (int32_t axis = 0; axis < asked.nbDims; ++axis) {
                if (asked.d[axis] == 0 && shuffle.zeroIsPlaceholder) {
                    asked.d[axis] = shape.d[axis];
                }
                if (asked.d[axis] < 0) {
                    open.push_back(axis);
                } else {
                    others *= asked.d[axis];
                }
            }
            if (open.size() == 1 && count >= 0 && others > 0) {
                asked.d[open.front()] = static_cast<int32_t>(count / others);
            }
            if (count >= 0 && volume(asked) >= 0 && volume(asked) != count) {
                layer.wrong("cannot be reshaped: " + written(shape) + " to " + written(asked));
            }
            shape = asked;
        }
        layer.gives(transposed(shape, shuffle.secondTranspose), layer.type(0));
        if (layer.shape(0).nbDims <= 1) {
            hold_inputs(layer);
        }
    };
    return add<IShuffleLayer>(LayerType::kSHUFFLE, {&input}, 1, made, infer);
}

ISliceLayer* Network::addSlice(ITensor& input, Dims start, Dims size, Dims stride) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VSliceLayer>>();
    made->start = start;
    made->size = size;
    made->stride = stride;
    return add<ISliceLayer>(LayerType::kSLICE, {&input}, 1, made, [](Layer& layer, auto& slice) {
        Dims const from = layer.shape(0);
        Dims const shape = layer.has(2) ? held_shape(layer, 2) : slice.size;
        auto const or_held = [&](std::size_t input, Dims const& given) {
            return layer.has(input) ? layer.held(input).value_or(Numbers(from.nbDims)) : as_numbers(given);
        };
        Numbers const starts = or_held(1, slice.start);
        Numbers const sizes = or_held(2, slice.size);
        Numbers const strides = or_held(3, slice.stride);
        auto const numbers = layer.held(0);
        layer.gives(shape, layer.type(0));
        for (int32_t axis = 0; axis < shape.nbDims && slice.mode == SliceMode::kDEFAULT; ++axis) {
            auto const start = starts[axis], size = sizes[axis], stride = strides[axis];
            if (!start || !size || !stride || *size <= 0 || from.d[axis] < 0) {
                continue;
            }
            int32_t const last = *start + (*size - 1) * *stride;
            if (*start < 0 || *start >= from.d[axis] || last < 0 || last >= from.d[axis]) {
                layer.wrong("slices " + written(shape) + " out of " + written(from));
            } else if (numbers && from.nbDims == 1) {
                Numbers picked;
                for (int32_t index = 0; index < *size; ++index) {
                    picked.push_back((*numbers)[*start + index * *stride]);
                }
                layer.holds(std::move(picked));
            }
        }
    });
}

ISoftMaxLayer* Network::addSoftMax(ITensor& input) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VSoftMaxLayer>>();
    return add<ISoftMaxLayer>(LayerType::kSOFTMAX, {&input}, 1, made, [](Layer& layer, auto&) { as_input(layer); });
}

ITopKLayer* Network::addTopK(ITensor& input, TopKOperation operation, int32_t k, uint32_t axes) noexcept {
    constexpr int32_t most = 3840;  // "Layers", TensorRT 8.6 documentation
    auto const made = std::make_shared<Recorded<apiv::VTopKLayer>>();
    made->operation = operation;
    made->k = k;
    made->reduceAxes = axes;
    return add<ITopKLayer>(LayerType::kTOPK, {&input}, 2, made, [](Layer& layer, auto& best) {
        int32_t count = best.k;
        if (layer.has(1)) {
            auto const numbers = layer.held(1);
            count = numbers && !numbers->empty() ? numbers->front().value_or(-1) : -1;
        }
        Dims shape = layer.shape(0);
        for (int32_t axis = 0; axis < shape.nbDims; ++axis) {
            if ((best.reduceAxes >> axis & 1U) == 0) {
                continue;
            }
            if (count > most || (shape.d[axis] >= 0 && count > shape.d[axis])) {
                layer.wrong("the best " + std::to_string(count) + " of " + std::to_string(shape.d[axis]));
            }
            shape.d[axis] = count;
        }
        layer.gives(shape, layer.type(0), 0);
        layer.gives(shape, DataType::kINT32, 1);
    });
}

IUnaryLayer* Network::addUnary(ITensor& input, UnaryOperation operation) noexcept {
    auto const made = std::make_shared<Recorded<apiv::VUnaryLayer>>();
    made->operation = operation;
    return add<IUnaryLayer>(LayerType::kUNARY, {&input}, 1, made, [](Layer& layer, auto& unary) {
        layer.gives(layer.shape(0), unary.operation == UnaryOperation::kISINF ? DataType::kBOOL : layer.type(0));
    });
}

// Loops

class Loop final : public Recorded<apiv::VLoop> {
public:
    explicit Loop(Network& network) : face_(*this), network_(network) {}

    ILoop& face() { return face_; }

    IRecurrenceLayer* addRecurrence(ITensor& first) noexcept override {
        auto const made = std::make_shared<Recorded<apiv::VRecurrenceLayer>>();
        // The value of the next round, its second input, has the shape of the first.
        return network_.add<IRecurrenceLayer>(LayerType::kRECURRENCE, {&first}, 1, made,
                                              [](Layer& layer, auto&) { as_input(layer); });
    }

    ITripLimitLayer* addTripLimit(ITensor& tensor, TripLimit limit) noexcept override {
        struct Limit final : Recorded<apiv::VTripLimitLayer> {
            TripLimit getTripLimit() const noexcept override { return limit; }
            TripLimit limit{};
        };
        auto const made = std::make_shared<Limit>();
        made->limit = limit;
        return network_.add<ITripLimitLayer>(LayerType::kTRIP_LIMIT, {&tensor}, 0, made, [](Layer& layer, Limit& one) {
            if (layer.type(0) != (one.limit == TripLimit::kWHILE ? DataType::kBOOL : DataType::kINT32)) {
                layer.wrong("its limit has the wrong type");
            }
        });
    }

    IIteratorLayer* addIterator(ITensor& tensor, int32_t axis, bool reverse) noexcept override {
        auto const made = std::make_shared<Recorded<apiv::VIteratorLayer>>();
        made->axis = axis;
        made->reverse = reverse;
        return network_.add<IIteratorLayer>(LayerType::kITERATOR, {&tensor}, 1, made, [](Layer& layer, auto& iterator) {
            Dims shape = layer.shape(0);
            std::copy(shape.d + iterator.axis + 1, shape.d + shape.nbDims, shape.d + iterator.axis);
            --shape.nbDims;
            layer.gives(shape, layer.type(0));
        });
    }

    ILoopOutputLayer* addLoopOutput(ITensor& tensor, LoopOutput output, int32_t axis) noexcept override {
        struct Output final : Recorded<apiv::VLoopOutputLayer> {
            LoopOutput getLoopOutput() const noexcept override { return output; }
            LoopOutput output{};
        };
        auto const made = std::make_shared<Output>();
        made->output = output;
        made->axis = axis;
        auto const infer = [](Layer& layer, Output& one) {
            Dims shape = layer.shape(0);
            if (one.output != LoopOutput::kLAST_VALUE) {
                std::copy_backward(shape.d + one.axis, shape.d + shape.nbDims, shape.d + shape.nbDims + 1);
                ++shape.nbDims;
                auto const rounds = layer.held(1);
                shape.d[one.axis] = rounds && rounds->size() == 1 ? rounds->front().value_or(-1) : -1;
            }
            layer.gives(shape, layer.type(0));
        };
        return network_.add<ILoopOutputLayer>(LayerType::kLOOP_OUTPUT, {&tensor}, 1, made, infer);
    }

private:
    struct Face final : ILoop {
        explicit Face(Loop& loop) { mImpl = &loop; }
    };

    Face face_;
    Network& network_;
};

ILoop* Network::addLoop() noexcept {
    auto const loop = std::make_shared<Loop>(*this);
    kept_.push_back(loop);
    return &loop->face();
}

}  // namespace standin
