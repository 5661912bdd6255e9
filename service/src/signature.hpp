// Signatures of bundles: Ed25519 (RFC 8032) of manifest.json, which has the SHA-256 of every other file.
#pragma once

#include <filesystem>
#include <string_view>

namespace trtdet {

// Compares the signature manifest.sig in a bundle's folder with the bytes of its manifest.
//
// public_key: a PEM file with an Ed25519 key, as 'openssl pkey -pubout' writes it.
//
// Throws BundleError: the key cannot be used, there is no signature, or it is not this key's of this manifest.
void check_signature(
    const std::filesystem::path& folder, std::string_view manifest, const std::filesystem::path& public_key);

}  // namespace trtdet
