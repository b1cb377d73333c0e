/* The methods of FedMLS, Figure 1, on the support vector machine, with the step rules of the authors' code.
 *
 * Round k has k local steps, so 10,000 rounds are 5e7 steps of each client: a loop of tiny vectors, hence compiled.
 * fedmls_fig1.py calls it; tests/test_papers.py compares it with the package's own methods.
 *
 * rows holds the clients' samples times their labels, W numbers each (the rest of the features is zero), client after
 * client. A subgradient of client i's sum of hinge losses is that of ceil(share * m_i) of its m_i samples, drawn without
 * replacement, times m_i over their number.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define Q 3          /* vectors of four numbers */
#define W (4 * Q)    /* features, the bias among them, and zeros */

typedef double v4 __attribute__((vector_size(32), aligned(8)));
typedef struct { v4 q[Q]; } vec;

enum { FEDAVG, SCAFFOLD, SCAFFNEW, FEDMLS };

typedef struct {
    int n, batch, size;      /* of one client: unused, samples of a minibatch, samples */
    const vec *rows;
    int *order;              /* a permutation of the samples; its head is the minibatch */
    uint64_t state;          /* splitmix64 */
} client;

static uint64_t next(uint64_t *s) {
    uint64_t z = (*s += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

static double uniform(uint64_t *s) { return (double)(next(s) >> 11) * 0x1p-53; }

static double dot(const vec *a, const vec *b) {
    v4 p = a->q[0] * b->q[0];
    for (int j = 1; j < Q; j++) p += a->q[j] * b->q[j];
    return p[0] + p[1] + p[2] + p[3];
}

static void add(vec *a, double s, const vec *b) {
    for (int j = 0; j < Q; j++) a->q[j] += s * b->q[j];
}

static void mix(vec *a, double s, const vec *b) {  /* a <- (1 - s) a + s b */
    for (int j = 0; j < Q; j++) a->q[j] += s * (b->q[j] - a->q[j]);
}

static vec mean(const vec *all, int n) {
    vec m = {{{0}}};
    for (int i = 0; i < n; i++) add(&m, 1.0 / n, &all[i]);
    return m;
}

/* x <- x - step * subgradient(x) on a new minibatch */
static void descend(client *c, vec *x, double step) {
    const vec at = *x;
    vec sum = {{{0}}};
    if (c->batch < c->size) {
        for (int j = 0; j < c->batch; j++) {
            int other = j + (int)(((next(&c->state) >> 32) * (uint64_t)(c->size - j)) >> 32), kept = c->order[j];
            c->order[j] = c->order[other];
            c->order[other] = kept;
        }
    }
    for (int j = 0; j < c->batch; j++) {
        const vec *row = &c->rows[c->order[j]];
        double wrong = dot(row, &at) < 1 ? 1.0 : 0.0;
        add(&sum, wrong, row);
    }
    add(x, step * c->size / c->batch, &sum);  /* the subgradient is minus this sum */
}

static void keep(long done, long total, const long *kept, int *next_kept, const vec *x, vec *models) {
    while (kept[*next_kept] == done && done <= total) models[(*next_kept)++] = *x;
}

static void fedavg(client *c, int n, double first, long rounds, const long *kept, vec *models) {
    vec x = {{{0}}}, *y = calloc(n, sizeof(vec));
    int at = 0;
    keep(0, rounds, kept, &at, &x, models);
    for (long k = 1; k <= rounds; k++) {
        for (int i = 0; i < n; i++) {
            y[i] = x;
            for (long t = 0; t < k; t++) descend(&c[i], &y[i], first / sqrt((double)k));
        }
        x = mean(y, n);
        keep(k, rounds, kept, &at, &x, models);
    }
    free(y);
}

static void scaffold(client *c, int n, double first, long rounds, const long *kept, vec *models) {
    vec x = {{{0}}}, common = {{{0}}}, *y = calloc(n, sizeof(vec)), *own = calloc(n, sizeof(vec));
    double global = sqrt((double)n);
    int at = 0;
    keep(0, rounds, kept, &at, &x, models);
    for (long k = 1; k <= rounds; k++) {
        double eta = first / (global * k);
        for (int i = 0; i < n; i++) {
            vec drift = own[i];
            add(&drift, -1, &common);
            y[i] = x;
            for (long t = 0; t < k; t++) {
                descend(&c[i], &y[i], eta);
                add(&y[i], eta, &drift);
            }
            add(&own[i], -1, &common);  /* option II: own - common + (x - y) / (k eta) */
            add(&own[i], 1 / (k * eta), &x);
            add(&own[i], -1 / (k * eta), &y[i]);
        }
        vec where = mean(y, n);
        mix(&x, global, &where);
        common = mean(own, n);
        keep(k, rounds, kept, &at, &x, models);
    }
    free(y);
    free(own);
}

static void scaffnew(client *c, int n, double first, long rounds, int corrected, uint64_t coins, const long *kept,
                     vec *models) {
    vec *x = calloc(n, sizeof(vec)), *own = calloc(n, sizeof(vec)), zero = {{{0}}};
    int at = 0;
    keep(0, rounds, kept, &at, &zero, models);
    for (long k = 1, t = 1; k <= rounds; k++) {
        long last = t;
        while (uniform(&coins) >= 1 / sqrt((double)last)) last++;  /* the iteration of the next communication */
        for (int i = 0; i < n; i++)
            for (long s = t; s <= last; s++) {
                double gamma = first / sqrt((double)s);
                descend(&c[i], &x[i], gamma);
                add(&x[i], gamma, &own[i]);
            }
        vec m = mean(x, n);
        double rate = (1 / sqrt((double)last)) / (first / sqrt((double)last));
        for (int i = 0; i < n; i++) {
            if (corrected) {
                add(&own[i], rate, &m);
                add(&own[i], -rate, &x[i]);
            }
            x[i] = m;
        }
        t = last + 1;
        keep(k, rounds, kept, &at, &m, models);
    }
    free(x);
    free(own);
}

static void fedmls(client *c, int n, double first, long rounds, const long *kept, vec *models) {
    vec x = {{{0}}}, y = x, z = x;
    vec *xi = calloc(n, sizeof(vec)), *yi = calloc(n, sizeof(vec)), *zi = calloc(n, sizeof(vec));
    double beta = 4 / first;  /* 4 / (lambda_k k), lambda_k = first / k */
    int at = 0;
    keep(0, rounds, kept, &at, &x, models);
    for (long k = 1; k <= rounds; k++) {
        double gamma = 2.0 / (k + 1), ahead = 2.0 / (k + 2);
        for (int i = 0; i < n; i++) {
            vec v = zi[i], u = v, averaged = v;
            add(&v, -k / 4.0, &yi[i]);
            add(&v, k / 4.0, &y);
            for (long t = 1; t <= k; t++) {
                double s = 1 / (1 + t / 2.0);
                vec from = u;
                descend(&c[i], &u, s / (n * beta));
                add(&u, -s, &from);
                add(&u, s, &v);
                mix(&averaged, 2.0 * (t + 1) / ((double)t * (t + 3)), &u);
            }
            zi[i] = u;
            mix(&xi[i], gamma, &averaged);
            yi[i] = xi[i];
            mix(&yi[i], ahead, &zi[i]);
        }
        mix(&x, gamma, &z);
        y = x;
        mix(&y, ahead, &z);
        vec m = mean(yi, n);
        add(&z, -(k + 1) / 4.0, &y);
        add(&z, (k + 1) / 4.0, &m);
        keep(k, rounds, kept, &at, &x, models);
    }
    free(xi);
    free(yi);
    free(zi);
}

/* Write the models after the rounds ``kept`` (ascending, ended by -1) to ``models``. */
void follow(int method, int n, const int *sizes, const double *rows, double share, double first, long rounds,
            int corrected, uint64_t seed, const long *kept, double *models) {
    client *c = calloc(n, sizeof(client));
    const vec *from = (const vec *)rows;
    for (int i = 0; i < n; i++) {
        c[i].size = sizes[i];
        c[i].batch = (int)ceil(share * sizes[i] - 1e-9);
        c[i].rows = from;
        c[i].order = malloc(sizes[i] * sizeof(int));
        for (int j = 0; j < sizes[i]; j++) c[i].order[j] = j;
        c[i].state = seed * 0x100000001b3ULL + (uint64_t)i * 0xd1342543de82ef95ULL;
        from += sizes[i];
    }
    uint64_t coins = seed ^ 0xa0761d6478bd642fULL;
    if (method == FEDAVG) fedavg(c, n, first, rounds, kept, (vec *)models);
    if (method == SCAFFOLD) scaffold(c, n, first, rounds, kept, (vec *)models);
    if (method == SCAFFNEW) scaffnew(c, n, first, rounds, corrected, coins, kept, (vec *)models);
    if (method == FEDMLS) fedmls(c, n, first, rounds, kept, (vec *)models);
    for (int i = 0; i < n; i++) free(c[i].order);
    free(c);
}
