// The endpoints, on plain requests and answers: nothing here knows of sockets.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "context.hpp"
#include "log.hpp"
#include "metrics.hpp"
#include "request.hpp"
#include "trtdet/detector.hpp"

namespace trtdet::serve {

// Any thread may call any member at any time, but for the destructor.
class Service {
public:
    // models: at least one, each name once. Log and metrics must live longer than this.
    Service(ServiceOptions options, std::vector<ModelSource> models, Log& log, Metrics& metrics);

    // Waits for the threads; handle() must not be called any more.
    ~Service();

    Service(const Service&) = delete;
    Service& operator=(const Service&) = delete;

    const ServiceOptions& options() const;

    // What is to be answered without reading the body: a wrong path or method, a body that is too large or of another
    // kind, a query that is wrong, too much to do. Nothing where the body should be read and handle() be called.
    std::optional<Response> refuse(const Head& head) const;

    // The addresses that requests come from.
    Clients& clients() const;

    // For what arrives of the request's body, at first nothing.
    std::shared_ptr<MemoryBudget::Share> body_of(const Head& head) const;

    // Does it soon, by the threads that decode, in the client's turn.
    //
    // Throws std::bad_alloc: it is not done.
    void post(const Head& head, std::function<void()> task) const;

    // Works on a request that refuse() has let pass; nobody may be interested in the answer by then.
    void handle(Request request, Done done);

    // Counts and logs an answer, whoever made it, and gives an error the form that belongs to the path. took: from the
    // request's last byte.
    void answered(const Head& head, Response& response, Clock::duration took) const;

    // From now on /readyz says no; everything else goes on.
    void leave();

private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace trtdet::serve
