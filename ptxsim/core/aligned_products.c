// A product as Hopper's tensor cores sum it, see machine/aligned_products.py.
#include <math.h>
#include <stdint.h>
#include <string.h>

#define MAX_K 32
#define NOTHING -4096  // exponent of a zero: no other is less

static double power_of_two(int exponent) {
  int64_t bits = (int64_t)(exponent + 1023) << 52;
  double value;
  memcpy(&value, &bits, 8);
  return value;
}

static int exponent_of(double value, int least) {
  int64_t bits;
  memcpy(&bits, &value, 8);
  int exponent = (int)(bits >> 52 & 2047) - 1023;
  if (value == 0) return NOTHING;
  return exponent < least ? least : exponent;
}

static void exponents(const double* values, int count, int least, int32_t* result) {
  for (int i = 0; i < count; i++) result[i] = exponent_of(values[i], least);
}

// d[i][j] = sum over k of a[i][k] b[j][k], plus d[i][j], each term cut to `fraction` bits behind the largest exponent;
// the sum cut to `kept` bits behind its own, or as it is if kept < 0. Terms and sums are exact in double.
void aligned_products(const double* a, const double* b, double* d, int m, int n, int k, int fraction, int kept,
                      int least_a, int least_b, int least_d) {
  int32_t a_exponents[64 * MAX_K], b_exponents[256 * MAX_K];
  exponents(a, m * k, least_a, a_exponents);
  exponents(b, n * k, least_b, b_exponents);
  for (int i = 0; i < m; i++) {
    for (int j = 0; j < n; j++) {
      const double *row = a + i * k, *column = b + j * k;
      const int32_t *x = a_exponents + i * k, *y = b_exponents + j * k;
      double* result = d + i * n + j;
      int32_t largest = exponent_of(*result, least_d);
      for (int l = 0; l < k; l++) largest = x[l] + y[l] > largest ? x[l] + y[l] : largest;
      if (largest < NOTHING / 2) {  // every term is zero
        *result = 0;
        continue;
      }
      double up = power_of_two(fraction - largest), sum = trunc(*result * up);
      for (int l = 0; l < k; l++) sum += trunc(row[l] * column[l] * up);
      sum *= power_of_two(largest - fraction);
      if (kept >= 0 && sum != 0) {
        int exponent = exponent_of(sum, -1022);
        sum = trunc(sum * power_of_two(kept - exponent)) * power_of_two(exponent - kept);
      }
      *result = sum;
    }
  }
}
