// A request that is run: from its images to its answer, whatever the endpoint.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "context.hpp"
#include "encoding.hpp"
#include "memory_budget.hpp"
#include "request.hpp"
#include "trtdet/detector.hpp"
#include "trtdet/image.hpp"

namespace trtdet::serve {

// Has an outcome for each image, and answers when the last is there. Whatever works on it keeps it alive.
class Work : public std::enable_shared_from_this<Work> {
public:
    virtual ~Work() = default;

    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;

    // Calls prepare() for each image, by the workers; or answers that the client has too many.
    void start(std::size_t images);

protected:
    Work(std::shared_ptr<Context> context, Served& model, std::unique_ptr<Place> place, Request request, Done done);

    // Hands an image over to the detector with settled(index); what it throws becomes the image's outcome.
    virtual void prepare(std::size_t index) = 0;

    // Whether complete() is to be called.
    virtual bool has_more() const { return false; }

    // What is left to be done for an image that was detected, by the workers, as lanes have batches to run. What it
    // throws becomes the image's outcome.
    virtual void complete(std::size_t index, const Found& found) {
        static_cast<void>(index);
        static_cast<void>(found);
    }

    // When all are settled. The request's place is free again by then.
    virtual Response answer() = 0;

    // Which image a message is about, ending in ": "; empty where that is clear.
    virtual std::string which(std::size_t index) const = 0;

    // What a detector is to call with the image's outcome.
    std::function<void(Outcome)> settled(std::size_t index);

    // Whether an image that fails makes the others useless.
    virtual bool all_or_nothing() const { return true; }

    // Answers at once, instead of start().
    void refuse(Response response);

    // Whether an image failed; the first that did.
    bool failed() const { return first_failed_ < outcomes_.size(); }
    std::size_t first_failed() const { return first_failed_; }
    bool failed(std::size_t index) const { return outcomes_[index].error != nullptr; }

    // The answer for an image that failed. What an engine failed of is logged.
    Response failure(std::size_t index) const;

    const Found& found(std::size_t index) const { return outcomes_[index].found; }

    // Whether somebody still waits for the answer.
    bool wanted() const noexcept { return Clock::now() < deadline() && !(request_.abandoned && *request_.abandoned); }

    // Ends a request for which there is no memory; needs none.
    void end_without_memory() noexcept;

    // Decodes an image, and charges to the memory what the decoder takes; by the workers.
    //
    // Throws ImageError, ImageTooLargeError: as decode_image(). MemoryLimitError, DeadlineError: there is no memory for
    // it, or none in time.
    Image decode(std::string_view file, MemoryBudget::Share& memory) const;

    // Takes the Content-Encoding from the body, by the workers; nothing where it has none. Returns whether the body is
    // there now; else the request is refused: it is not what the encoding says, or too large.
    bool unpack();

    // Whether unpack() has anything to do.
    bool is_packed() const { return is_packing(request_.head.content_encoding); }

    // Nothing of the body is needed any more; in the thread that alone works on the request.
    void release_body();

    // Does it after what else was posted for this client.
    void post(std::function<void()> task);

    // From when on nobody wants the answer.
    Clock::time_point deadline() const { return request_.arrived + context_->options.request_timeout; }

    const std::shared_ptr<Context> context_;
    Served& model_;  // of the context
    Request request_;
    const std::shared_ptr<Client> client_;
    const std::shared_ptr<Detector> detector_;  // the same for all images, empty where the model was unloaded

private:
    void run(std::size_t index) noexcept;
    void complete_later(std::size_t index, Outcome outcome) noexcept;
    void settle(std::size_t index, Outcome outcome) noexcept;
    void finish() noexcept;
    void count() const;
    Response finished();

    std::unique_ptr<Place> place_;
    const Done done_;
    std::vector<Outcome> outcomes_;
    std::atomic<Clock::rep> preparing_{0};  // the time that it took for all images
    std::atomic<std::size_t> waiting_{0};
    std::atomic<std::size_t> first_failed_{0};
};

}  // namespace trtdet::serve
