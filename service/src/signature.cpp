#include "signature.hpp"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>

#include <fstream>
#include <memory>
#include <new>
#include <optional>
#include <string>

#include "text.hpp"
#include "trtdet/errors.hpp"

namespace trtdet {

namespace {

constexpr const char* signature_file = "manifest.sig";
constexpr std::size_t largest = 1 << 16;

// What OpenSSL gives away, and its notes of what failed, which would stay in the thread.
template <typename T>
using Owned = std::unique_ptr<T, void (*)(T*)>;

struct NoErrorsLeft {
    ~NoErrorsLeft() { ERR_clear_error(); }
};

// The first bytes of a file; nothing where it is not a regular file that can be read.
std::optional<std::string> read_some(const std::filesystem::path& file) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(file, error)) {
        return std::nullopt;
    }
    std::ifstream stream(file, std::ios::binary);
    std::string bytes(largest, '\0');
    stream.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (stream.bad() || (!stream && !stream.eof())) {
        return std::nullopt;
    }
    bytes.resize(static_cast<std::size_t>(stream.gcount()));
    return bytes;
}

Owned<EVP_PKEY> read_key(const std::filesystem::path& file) {
    const auto text = read_some(file);
    if (!text) {
        throw BundleError("the key " + in_quotes(file.string()) + " cannot be read");
    }
    const Owned<BIO> source(
        BIO_new_mem_buf(text->data(), static_cast<int>(text->size())), [](BIO* bio) { BIO_free(bio); });
    if (!source) {
        throw std::bad_alloc();
    }
    Owned<EVP_PKEY> key(PEM_read_bio_PUBKEY(source.get(), nullptr, nullptr, nullptr), EVP_PKEY_free);
    if (!key || EVP_PKEY_base_id(key.get()) != EVP_PKEY_ED25519) {
        throw BundleError(
            in_quotes(file.string()) +
            " is not a public Ed25519 key in PEM; write it from the private key: openssl pkey -in key.pem -pubout "
            "-out public.pem");
    }
    return key;
}

}  // namespace

void check_signature(
    const std::filesystem::path& folder, std::string_view manifest, const std::filesystem::path& public_key) {
    const NoErrorsLeft cleared;
    const auto key = read_key(public_key);
    const auto signature = read_some(folder / signature_file);
    if (!signature) {
        throw BundleError("is not signed; sign it with 'trtdet sign'");
    }
    const auto bytes = [](std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); };
    const Owned<EVP_MD_CTX> context(EVP_MD_CTX_new(), EVP_MD_CTX_free);
    if (!context || EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key.get()) != 1) {
        throw std::bad_alloc();
    }
    if (EVP_DigestVerify(context.get(), bytes(*signature), signature->size(), bytes(manifest), manifest.size()) != 1) {
        throw BundleError(
            "is not signed by the key of " + in_quotes(public_key.string()) +
            ", or was altered afterwards; do not run it, and get it again from whoever signed it");
    }
}

}  // namespace trtdet
