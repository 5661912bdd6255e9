// Values of float that no measurement gives.
#pragma once

#include <limits>

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float infinite = std::numeric_limits<float>::infinity();
