// Numbers of the PTX ISA on lanes of 64 bits. F, D, BF, HF read bits as a float; UF, UD, F2BF, F2HF give bits back.
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float F(uint64_t bits) {
  uint32_t word = (uint32_t)bits;
  float value;
  memcpy(&value, &word, 4);
  return value;
}

static inline uint64_t UF(float value) {
  uint32_t word;
  memcpy(&word, &value, 4);
  return word;
}

static inline double D(uint64_t bits) {
  double value;
  memcpy(&value, &bits, 8);
  return value;
}

static inline uint64_t UD(double value) {
  uint64_t bits;
  memcpy(&bits, &value, 8);
  return bits;
}

static inline float BF(uint64_t bits) { return F((bits & 0xffff) << 16); }

static inline uint64_t F2BF(float value) {  // to nearest, ties to even; NaN is 0x7fff
  uint32_t word = (uint32_t)UF(value);
  return value != value ? 0x7fff : (word + 0x7fffu + ((word >> 16) & 1)) >> 16;
}

static inline float HF(uint64_t bits) {
  uint16_t half = (uint16_t)bits;
  _Float16 value;
  memcpy(&value, &half, 2);
  return (float)value;
}

static inline uint64_t F2HF(float value) {
  _Float16 half = (_Float16)value;
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return value != value ? 0x7fff : bits;
}

static inline float FTZ(float value) { return fabsf(value) < 1.17549435e-38f ? copysignf(0.0f, value) : value; }

static inline float within(float value, float greatest) {  // NaN stays
  return value > greatest ? greatest : value < -greatest ? -greatest : value;
}

static inline float saturate(float value) { return !(value > 0.0f) ? 0.0f : (value > 1.0f ? 1.0f : value); }

// ---- add, sub, mul, fma with the rounding modes rn, rz, rm, rp. The directed modes take the rounded double result and
// its error, and step one unit when the nearest float lies on the wrong side.

static inline float toward(double sum, double error, int up) {
  float nearest = (float)sum;
  double back = (double)nearest;
  if (up && (back < sum || (back == sum && error > 0))) nearest = nextafterf(nearest, INFINITY);
  if (!up && (back > sum || (back == sum && error < 0))) nearest = nextafterf(nearest, -INFINITY);
  return nearest;
}

static inline double sum_error(double a, double b) {  // of a + b in double (Knuth's two-sum)
  double sum = a + b, t = sum - a;
  return (a - (sum - t)) + (b - t);
}

static inline float add_rn(float a, float b) { return a + b; }
static inline float sub_rn(float a, float b) { return a - b; }
static inline float mul_rn(float a, float b) { return a * b; }
static inline float fma_rn(float a, float b, float c) { return fmaf(a, b, c); }

// UP may look at `sum`, the double result.
#define DIRECTED(MODE, UP)                                                                                        \
  static inline float add_##MODE(float a, float b) {                                                              \
    double sum = (double)a + b;                                                                                   \
    return toward(sum, sum_error(a, b), UP);                                                                      \
  }                                                                                                               \
  static inline float sub_##MODE(float a, float b) { return add_##MODE(a, -b); }                                  \
  static inline float mul_##MODE(float a, float b) {                                                              \
    double sum = (double)a * b;                                                                                   \
    return toward(sum, 0, UP);                                                                                    \
  }                                                                                                               \
  static inline float fma_##MODE(float a, float b, float c) {                                                     \
    double product = (double)a * b, sum = product + c;                                                            \
    return toward(sum, sum_error(product, c), UP);                                                                \
  }
DIRECTED(rm, 0)
DIRECTED(rp, 1)
DIRECTED(rz, sum < 0)
#undef DIRECTED

static inline float fmax_(float a, float b) { return a != a ? b : (b != b ? a : (a > b ? a : b)); }
static inline float fmin_(float a, float b) { return a != a ? b : (b != b ? a : (a < b ? a : b)); }
static inline float fmaxn_(float a, float b) { return a != a || b != b ? F(0x7fffffff) : (a > b ? a : b); }
static inline float fminn_(float a, float b) { return a != a || b != b ? F(0x7fffffff) : (a < b ? a : b); }
static inline uint64_t xorsign(uint64_t a, uint64_t b, float magnitude) {
  return (UF(magnitude) & 0x7fffffff) | ((a ^ b) & 0x80000000ull);
}

// ---- eight-bit floats: to nearest, ties to even, saturating at the largest finite value; NaN is 0x7f

static inline uint64_t to_float8(float value, int mantissa_bits, int bias, uint32_t largest) {
  if (value != value) return 0x7f;
  uint32_t sign = signbit(value) ? 0x80 : 0;
  float magnitude = fabsf(value);
  if (magnitude == 0) return sign;
  if (isinf(magnitude)) return sign | largest;
  int exponent;
  frexpf(magnitude, &exponent);
  exponent -= 1;
  if (exponent < 1 - bias) exponent = 1 - bias;
  float steps = rintf(ldexpf(magnitude, mantissa_bits - exponent));
  if (steps >= (float)(2 << mantissa_bits)) {
    steps *= 0.5f;
    exponent += 1;
  }
  int one = 1 << mantissa_bits;
  uint32_t code = steps < one ? (uint32_t)steps : (uint32_t)(((exponent + bias) << mantissa_bits) + ((int)steps - one));
  return sign | (code > largest ? largest : code);
}

static inline uint64_t F2E4M3(float value) { return to_float8(value, 3, 7, 0x7e); }
static inline uint64_t F2E5M2(float value) { return to_float8(value, 2, 15, 0x7b); }

static inline uint64_t E5M22HF(uint64_t code) { return (code & 255) << 8; }  // e5m2 is the high byte of f16

static inline uint64_t E4M32HF(uint64_t code) {
  uint64_t sign = (code & 0x80) << 8, exponent = (code >> 3) & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return 0x7fff;
  if (exponent == 0) return sign | F2HF(ldexpf((float)mantissa, -9));
  return sign | ((exponent + 8) << 10) | (mantissa << 7);
}

// ue8m0 is 2^(code − 127), 255 is NaN. UP: the least power of two that is not below the magnitude.
static inline uint64_t F2E8_UP(float value) {
  if (value != value) return 255;
  uint32_t word = (uint32_t)UF(fabsf(value)), exponent = word >> 23, mantissa = word & 0x7fffff;
  if (exponent == 0) return mantissa > 0x400000 ? 1 : 0;
  exponent += mantissa != 0;
  return exponent > 254 ? 254 : exponent;
}

static inline uint64_t F2E8_DOWN(float value) {
  if (value != value) return 255;
  uint32_t exponent = (uint32_t)UF(fabsf(value)) >> 23;
  return exponent > 254 ? 254 : exponent;
}

static inline uint64_t E82BF(uint64_t code) { return code == 255 ? 0x7fff : (code == 0 ? 0x0040 : code << 7); }

// ---- float to integer: saturating, NaN is 0 (64 bits: the sign bit alone)

static inline uint64_t f2s32(float value) {
  if (value != value) return 0;
  if (value >= 2147483648.0f) return 0x7fffffff;
  return value < -2147483648.0f ? 0x80000000u : (uint32_t)(int32_t)value;
}

static inline uint64_t f2u32(float value) {
  if (!(value > 0)) return 0;
  return value >= 4294967296.0f ? 0xffffffffu : (uint32_t)value;
}

static inline uint64_t f2s64(float value) {
  if (value != value || value < -9223372036854775808.0f) return 0x8000000000000000ull;
  return value >= 9223372036854775808.0f ? 0x7fffffffffffffffull : (uint64_t)(int64_t)value;
}

static inline uint64_t f2u64(float value) {
  if (!(value > 0)) return value != value ? 0x8000000000000000ull : 0;
  return value >= 18446744073709551616.0f ? ~0ull : (uint64_t)value;
}

// ---- bits

static inline uint64_t brev32(uint64_t value) {
  uint32_t reversed = 0;
  for (int i = 0; i < 32; i++) reversed |= ((value >> i) & 1u) << (31 - i);
  return reversed;
}

static inline uint64_t brev64(uint64_t value) { return brev32(value) << 32 | brev32(value >> 32); }

static inline uint64_t bfe_u32(uint64_t a, uint64_t b, uint64_t c) {
  uint32_t position = b & 255, length = c & 255;
  if (position > 31 || length == 0) return 0;
  uint32_t field = (uint32_t)a >> position;
  return length >= 32 ? field : field & ((1u << length) - 1);
}

static inline uint64_t bfe_s32(uint64_t a, uint64_t b, uint64_t c) {
  uint32_t position = b & 255, length = c & 255;
  if (length == 0) return 0;
  uint32_t last = position + length - 1;
  uint32_t sign = ((uint32_t)a >> (last > 31 ? 31 : last)) & 1;
  uint32_t field = position > 31 ? 0 : (uint32_t)a >> position;
  uint32_t present = position > 31 ? 0 : 32 - position;
  uint32_t kept = length < present ? length : present;
  uint32_t mask = kept >= 32 ? ~0u : (1u << kept) - 1;
  return (field & mask) | (sign ? ~mask : 0);
}

static inline uint64_t prmt(uint64_t a, uint64_t b, uint64_t selector) {
  uint64_t bytes = (a & 0xffffffffu) | (b << 32);
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t pick = (selector >> (4 * i)) & 15, byte = (bytes >> (8 * (pick & 7))) & 255;
    if (pick & 8) byte = byte & 0x80 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}
