/* Sums of pages with coefficients of GF(2^32) = GF(2)[x] / (x^32 + x^7 + x^3 + x^2 + 1): see docs/erasure_code.md.
 * Built at first use, for the processor it runs on (compiler.py). WIDTH 128, 256, 512: carry-less products in vectors of
 * so many bits; 0: plain C. All make the same bytes. A null address is a page of zeros. start and stop are words,
 * multiples of 512. */
#include <stdint.h>
#include <string.h>
#if WIDTH
#include <immintrin.h>
#endif
#if WIDTH == 512
typedef __m512i integer;
#define CLMUL _mm512_clmulepi64_epi128
#define M(name) _mm512_##name
#elif WIDTH == 256
typedef __m256i integer;
#define CLMUL _mm256_clmulepi64_epi128
#define M(name) _mm256_##name
#elif WIDTH == 128
typedef __m128i integer;
#define CLMUL _mm_clmulepi64_si128
#define M(name) _mm_##name
#endif
#if defined(__AVX512F__) && WIDTH == 0 || WIDTH == 512
enum { BYTES = 64 };
#elif defined(__AVX2__) && WIDTH == 0 || WIDTH == 256
enum { BYTES = 32 };
#else
enum { BYTES = 16 };
#endif
enum { BLOCK = 16, FACTORS = 15, STRIP = 512, ROWS = 64 };

typedef uint32_t word;
typedef const word *const *pages;
static const word zeros[STRIP];
static inline const word *at(pages p, long i, long offset) { return p && p[i] ? p[i] + offset : zeros; }

/* `product` holds unreduced products of the words of a vector V, `factor` a constant. */
typedef word V __attribute__((vector_size(BYTES), aligned(4), may_alias));
#if WIDTH
typedef uint64_t pairs __attribute__((vector_size(BYTES)));
typedef integer factor;
typedef struct { integer p[4]; } product; /* p[i]: 64-bit products of words i of each 128 bits, lower halves */
static inline factor prepare(word w) { return (integer)((pairs){0} ^ w); }
static inline void multiply(product *sum, V v, const factor *w) {
    integer even = (integer)((pairs)v & 0xffffffff), odd = (integer)((pairs)v >> 32);
    sum->p[0] ^= CLMUL(even, *w, 0x00), sum->p[2] ^= CLMUL(even, *w, 0x01);
    sum->p[1] ^= CLMUL(odd, *w, 0x00), sum->p[3] ^= CLMUL(odd, *w, 0x01);
}
static inline V reduce(const product *sum) {
    integer first = M(unpacklo_epi32)(sum->p[0], sum->p[1]), second = M(unpacklo_epi32)(sum->p[2], sum->p[3]);
    V low = (V)M(unpacklo_epi64)(first, second), high = (V)M(unpackhi_epi64)(first, second);
    high ^= high >> 30 ^ high >> 29 ^ high >> 25; /* what the shifts below push out */
    return low ^ high ^ high << 2 ^ high << 3 ^ high << 7;
}
#else
typedef int32_t mask __attribute__((vector_size(BYTES)));
typedef struct { word times_power_of_x[32]; } factor;
typedef V product;
static inline factor prepare(word w) {
    factor f;
    for (int k = 0; k < 32; w = w << 1 ^ (w >> 31) * 0x8d) f.times_power_of_x[k++] = w;
    return f;
}
static inline void multiply(product *sum, V v, const factor *w) {
    for (int k = 0; k < 32; k++) *sum ^= (V)((mask)(v << (31 - k)) >> 31) & w->times_power_of_x[k];
}
static inline V reduce(const product *sum) { return *sum; }
#endif

static inline V times(V v, const factor *w) {
    product sum;
    memset(&sum, 0, sizeof sum);
    multiply(&sum, v, w);
    return reduce(&sum);
}

/* out[j] = base[j] + what blocks of 16 pages new + old add to parity page j of 16. factors: 15 of the closing FFT, then
 * 15 a block, ordered as in additive_fft.py. old and base may be null; base may be out. */
void leto_encode(long blocks, const word *factors, pages new, pages old, pages base, word *const *out, long start, long stop) {
    word sums[BLOCK][STRIP];
    for (; start < stop; start += STRIP) {
        memset(sums, 0, sizeof sums);
        for (long b = 0; b <= blocks; b++) { /* the last round is the closing FFT */
            int closing = b == blocks;
            const word *page[BLOCK], *other[BLOCK];
            factor w[FACTORS];
            for (int t = 0; t < BLOCK; t++) {
                page[t] = closing ? sums[t] : at(new, b * BLOCK + t, start);
                other[t] = closing ? at(base, t, start) : at(old, b * BLOCK + t, start);
            }
            for (int f = 0; f < FACTORS; f++) w[f] = prepare(factors[closing ? f : (b + 1) * FACTORS + f]);
            for (int i = 0; i < STRIP; i += BYTES / 4) {
                V d[BLOCK];
                for (int t = 0; t < BLOCK; t++) d[t] = *(const V *)(page[t] + i);
                if (!closing && old)
                    for (int t = 0; t < BLOCK; t++) d[t] ^= *(const V *)(other[t] + i);
                for (int k = 0, f = 0; !closing && k < 4; f += BLOCK >> ++k)
                    for (int t = 0, h = 1 << k; t < BLOCK; t++)
                        if (!(t & h)) d[t + h] ^= d[t], d[t] ^= times(d[t + h], w + f + (t >> k >> 1));
                for (int k = 3, f = 14; closing && k >= 0; f -= BLOCK >> k--)
                    for (int t = 0, h = 1 << k; t < BLOCK; t++)
                        if (!(t & h)) d[t] ^= times(d[t + h], w + f + (t >> k >> 1)), d[t + h] ^= d[t];
                for (int t = 0; t < BLOCK; t++)
                    if (closing) *(V *)(out[t] + start + i) = d[t] ^ *(const V *)(other[t] + i);
                    else *(V *)(sums[t] + i) ^= d[t];
            }
        }
    }
}

/* out[r] = base[r] + sum over k of matrix[r * columns + k] (new[k] + old[k]), for at most 64 rows. */
void leto_combine(long rows, long columns, const word *matrix, pages new, pages old, pages base, word *const *out,
                  long start, long stop) {
    word sums[ROWS][STRIP], d[BLOCK][STRIP];
    for (; start < stop; start += STRIP) {
        for (long r = 0; r < rows; r++) memcpy(sums[r], at(base, r, start), sizeof sums[r]);
        for (long c = 0; c < columns; c += BLOCK) {
            int count = columns - c < BLOCK ? columns - c : BLOCK;
            for (int t = 0; t < count; t++) {
                const word *page = at(new, c + t, start), *other = at(old, c + t, start);
                for (int i = 0; i < STRIP; i++) d[t][i] = page[i] ^ other[i];
            }
            for (long r = 0; r < rows; r++) {
                factor w[BLOCK];
                for (int t = 0; t < count; t++) w[t] = prepare(matrix[r * columns + c + t]);
                for (int i = 0; i < STRIP; i += BYTES / 4) {
                    product sum;
                    memset(&sum, 0, sizeof sum);
                    for (int t = 0; t < count; t++) multiply(&sum, *(const V *)(d[t] + i), w + t);
                    *(V *)(sums[r] + i) ^= reduce(&sum);
                }
            }
        }
        for (long r = 0; r < rows; r++) memcpy(out[r] + start, sums[r], sizeof sums[r]);
    }
}
