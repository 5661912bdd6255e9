// Which endpoint a request is for, and the refusals that all of them share.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "request.hpp"

namespace trtdet::serve {

// What stands in a path for the words in braces of an endpoint's, decoded.
using Words = std::vector<std::string>;

// Where an endpoint is to be had: of the service's own port and the admin port.
enum class Ports { service, both, admin };

// What answers requests to a path.
struct Endpoint {
    std::string path;   // "/v1/models/{model}": a word in braces stands for any part but an empty one
    std::string allow;  // the methods, as the header Allow lists them
    std::string what;   // for the list of endpoints

    // What is to be answered without reading the body. Nothing where handle() is to be called with it.
    std::function<std::optional<Response>(const Head& head, const Words& words)> refuse;

    std::function<void(Request request, const Words& words, Done done)> handle;

    bool runs = false;  // images; the time until the answer is measured
    Ports ports = Ports::service;
};

// An endpoint for GET and HEAD, on both ports: it takes no body, and its answer is made at once.
Endpoint page(std::string path, std::string what, std::function<Response(const Words& words)> answer);

// What each endpoint with a body refuses: an unknown length, one over the limit in bytes, a Content-Encoding.
std::optional<Response> refuse_body(const Head& head, std::uint64_t limit);

class Router {
public:
    explicit Router(std::vector<Endpoint> endpoints) : endpoints_(std::move(endpoints)) {}

    // 403, 404, 405, or the endpoint's own refusal.
    std::optional<Response> refuse(const Head& head) const;

    // For a request that refuse() has let pass.
    void handle(Request request, Done done) const;

    // Null where there is no such path. words: those of the path, where they are wanted.
    const Endpoint* find(std::string_view path, Words* words = nullptr) const;

    const std::vector<Endpoint>& endpoints() const { return endpoints_; }

private:
    std::vector<Endpoint> endpoints_;
};

}  // namespace trtdet::serve
