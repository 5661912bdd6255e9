// Has TensorRT's own ONNX parser read a model, and says what it made of it.
//
//     parse MODEL.onnx [PLUGIN_LIBRARY...]
//     parse --unknown OPERATOR...
//
// One JSON object on standard output; the second form gives a list of those operators that the parser does not know.
// Exit 0: it was read; 1: the parser refused it; 2: wrong usage, or a library that cannot be loaded; 3: the parser
// asked the network for what is not written here, which "lacks" names.
#include "network.h"

#include <NvInferPlugin.h>
#include <NvOnnxParser.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>

namespace {

using namespace nvinfer1;

std::string quoted(std::string const& text) {
    std::string result = "\"";
    for (char const one : text) {
        if (one == '"' || one == '\\') {
            result += '\\';
            result += one;
        } else if (static_cast<unsigned char>(one) < 0x20) {
            char escaped[8];
            std::snprintf(escaped, sizeof escaped, "\\u%04x", one);
            result += escaped;
        } else {
            result += one;
        }
    }
    return result + "\"";
}

// A JSON list of what a function gives for each.
template <class Range, class Function>
std::string listed(Range&& range, Function&& function) {
    std::string text = "[";
    for (auto&& one : range) {
        text += (text.size() > 1 ? ", " : "") + function(one);
    }
    return text + "]";
}

class Log final : public ILogger {
public:
    void log(Severity severity, char const* message) noexcept override {
        if (severity <= Severity::kWARNING) {
            messages.emplace_back(message);
        }
    }

    std::vector<std::string> messages;
};

std::string described(standin::Tensor const& tensor) {
    return "{\"name\": " + quoted(tensor.getName()) + ", \"shape\": " + standin::written(tensor.getDimensions()) +
           ", \"type\": " + std::to_string(static_cast<int>(tensor.getType())) + "}";
}

// What a plugin was made of, its state in hexadecimal digits.
std::string described(IPluginV2& plugin) {
    std::vector<unsigned char> state(plugin.getSerializationSize());
    plugin.serialize(state.data());
    std::string digits;
    for (unsigned char const one : state) {
        char two[3];
        std::snprintf(two, sizeof two, "%02x", one);
        digits += two;
    }
    return "{\"type\": " + quoted(plugin.getPluginType()) + ", \"version\": " + quoted(plugin.getPluginVersion()) +
           ", \"namespace\": " + quoted(plugin.getPluginNamespace()) + ", \"state\": " + quoted(digits) + "}";
}

std::string described(standin::Network const& network, standin::Layer const& layer) {
    auto const name = [](standin::Tensor const* tensor) { return tensor ? quoted(tensor->getName()) : "null"; };
    bool const plugin = layer.getType() == LayerType::kPLUGIN_V2;
    return "{\"name\": " + quoted(layer.getName()) +
           ", \"type\": " + std::to_string(static_cast<int>(layer.getType())) +
           ", \"inputs\": " + listed(layer.inputs, name) +
           ", \"outputs\": " + listed(layer.outputs, [](auto const& one) { return described(one); }) +
           ", \"plugin\": " + (plugin ? described(network.plugin(layer)) : "null") + "}";
}

std::string described(nvonnxparser::IParserError const& error) {
    return "{\"code\": " + std::to_string(static_cast<int>(error.code())) +
           ", \"node\": " + std::to_string(error.node()) + ", \"function\": " + quoted(error.func()) +
           ", \"words\": " + quoted(error.desc()) + "}";
}

// What one parse works with.
struct Session {
    Log log;
    standin::Network network;
    // The parser holds the weights that the network's constants point to, and so it lives as long. Its destructor is
    // not where the header has it: the header's flags came after 8.6.0, and its destructor stands behind them.
    static void destroy(nvonnxparser::IParser* parser) { parser->destroy(); }
    std::unique_ptr<nvonnxparser::IParser, decltype(&destroy)> parser{
        nvonnxparser::createParser(network.face(), log), destroy};
};

int report_unknown(std::vector<std::string> const& operators) {
    Session session;
    std::vector<std::string> unknown;
    std::copy_if(operators.begin(), operators.end(), std::back_inserter(unknown),
                 [&](auto const& one) { return !session.parser->supportsOperator(one.c_str()); });
    std::cout << listed(unknown, quoted) << std::endl;
    return 0;
}

int report(std::string const& model) {
    Session session;
    auto& [log, network, parser] = session;
    initLibNvInferPlugins(&log, "");
    bool parsed = false;
    std::vector<std::string> errors;
    try {
        parsed = parser->parse(model.data(), model.size());
        for (int index = 0; index < parser->getNbErrors(); ++index) {
            errors.push_back(described(*parser->getError(index)));
        }
    } catch (std::exception const& thrown) {
        // Where it wants a library that its package lacks, it throws instead.
        errors.push_back("{\"words\": " + quoted(thrown.what()) + "}");
    }
    // A network that was left half made may have layers without their inputs.
    auto const findings = parsed ? network.findings() : std::set<std::string>{};
    auto const layer = [&](auto const& one) { return described(network, one); };
    std::cout << "{\"parsed\": " << (parsed ? "true" : "false")
              << ", \"errors\": " << listed(errors, [](auto const& one) { return one; })
              << ", \"messages\": " << listed(log.messages, quoted) << ", \"findings\": " << listed(findings, quoted);
    if (parsed) {
        auto const tensor = [](auto const& one) { return described(one); };
        auto const output = [](auto const* one) { return described(*one); };
        std::cout << ", \"inputs\": " << listed(network.inputs(), tensor)
                  << ", \"outputs\": " << listed(network.outputs(), output)
                  << ", \"layers\": " << listed(network.layers(), layer);
    }
    std::cout << "}" << std::endl;
    return parsed ? 0 : 1;
}

}  // namespace

int main(int count, char** words) {
    std::vector<std::string> const given(words + 1, words + count);
    if (!given.empty() && given.front() == "--unknown") {
        return report_unknown({given.begin() + 1, given.end()});
    }
    std::ifstream file(given.empty() ? "" : given.front(), std::ios::binary);
    if (!file) {
        std::cerr << "parse MODEL.onnx [PLUGIN_LIBRARY...] | parse --unknown OPERATOR...\n";
        return 2;
    }
    for (std::size_t index = 1; index < given.size(); ++index) {
        // Where libnvinfer is open to all, as here, a library of plugins enters them itself.
        if (dlopen(given[index].c_str(), RTLD_NOW) == nullptr) {
            std::cerr << dlerror() << "\n";
            return 2;
        }
    }
    return report({std::istreambuf_iterator<char>(file), {}});
}
