/* A stub upstream: serves JSON-RPC over HTTP/1.1 on one core, fast enough never to be the bottleneck.
 *
 * Every POST with a Content-Length is read as one call or a batch; replies come in order with the caller's ids, and
 * notifications get none. Methods used by health checks (head, chain id, blocks, client version) return consistent
 * values: there is a block every 12 seconds since 1970, and block n's hash contains n, so all stubs serve one chain.
 * eth_getCode returns as many bytes as the last 16 digits of its address say, without delaying other connections.
 * The same chain is one of Bitcoin and a beacon chain too: its lookups are answered, and GET returns headers and blocks of the
 * beacon node API, all of them final.
 * Every other method returns a hex string of --size bytes. --delay-us delays each reply. With --at-once N it works on so many
 * requests at a time, each for the delay; the others wait their turn, and a client that leaves changes nothing. With
 * --late-every N, each Nth request takes ten times the delay. stub_calls returns how many requests were delayed so far,
 * answered or not.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NS 1000000000LL
#define HEAD_MAX 65536
#define BLOCK_S 12
#define FILLS_MAX 64                /* large results in one reply */
#define FILL_MAX (64 << 20)         /* bytes of one of them */
#define FILL_TURN (256 << 10)       /* bytes of them that are sent before other connections have their turn */

struct fill { size_t at, left; };    /* a large result: digits to send before the byte at this place */

struct conn {
    int fd;
    char *in; size_t in_n, in_cap;
    char *out; size_t out_n, out_at, out_cap;
    struct fill fill[FILLS_MAX]; int fills, fill_at;
    int want_out;
    int queued;                     /* delayed replies that still point here */
};

struct text { const char *at; size_t n; };
struct call { struct text id, method, params; };

struct delayed { struct delayed *next; int64_t due; struct conn *conn; size_t n; char body[]; };

struct line { struct delayed *first, **last; };      /* delayed replies, in the order in which they are due */

#define LATE 10
static struct { int port, cpu; size_t size; long delay_us; int at_once, late_every; } opt = {.cpu = -1, .size = 66};
static char *result; static size_t result_n;
static char filler[65536];
static int ep, listener;
static struct line usual = {NULL, &usual.first}, late = {NULL, &late.first};
static uint64_t requests;                           /* delayed so far */
static int64_t *busy_until; static int turn;        /* with --at-once: when each place is free, in order */

static void fail(const char *what) {
    fprintf(stderr, "stub: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * NS + t.tv_nsec;
}

/* ---- reading calls: a walk over the top-level members, so that an "id" inside params is never mistaken for the call's */

static const char *skip_space(const char *p, const char *end) {
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')) p++;
    return p;
}

static const char *skip_string(const char *p, const char *end) {         /* p is at the opening quote */
    for (p++; p < end;) {
        const char *quote = memchr(p, '"', (size_t)(end - p));
        if (!quote) return end;
        int escapes = 0;
        for (const char *q = quote; q > p && q[-1] == '\\'; q--) escapes++;
        p = quote + 1;
        if (escapes % 2 == 0) return p;
    }
    return end;
}

static const char *skip_value(const char *p, const char *end) {
    int depth = 0;
    while (p < end) {
        if (*p == '"') p = skip_string(p, end);
        else if (*p == '{' || *p == '[') { depth++; p++; }
        else if (*p == '}' || *p == ']') { if (!depth) return p; depth--; p++; }
        else if (!depth && *p == ',') return p;
        else { p++; continue; }
        if (!depth) return p;
    }
    return end;
}

static int is(struct text t, const char *s) { return t.n == strlen(s) && !memcmp(t.at, s, t.n); }

/* Reads one object at p and returns the position after it. Missing members stay empty. */
static const char *read_call(const char *p, const char *end, struct call *call) {
    memset(call, 0, sizeof *call);
    if (p >= end || *p != '{') return skip_value(p, end);
    for (p = skip_space(p + 1, end); p < end && *p == '"';) {
        struct text name = {p, 0}, value;
        p = skip_string(p, end);
        name.n = (size_t)(p - name.at);
        p = skip_space(p, end);
        if (p < end && *p == ':') p++;
        value.at = p = skip_space(p, end);
        p = skip_value(p, end);
        value.n = (size_t)(p - value.at);
        while (value.n && strchr(" \r\n\t", value.at[value.n - 1])) value.n--;
        if (is(name, "\"id\"")) call->id = value;
        else if (is(name, "\"method\"")) call->method = value;
        else if (is(name, "\"params\"")) call->params = value;
        p = skip_space(p, end);
        if (p < end && *p == ',') p = skip_space(p + 1, end);
    }
    return p < end && *p == '}' ? p + 1 : end;
}

/* ---- answers ----------------------------------------------------------------------------------------------------- */

static char *room(struct conn *c, size_t n) {
    if (c->out_n + n > c->out_cap) {
        c->out_cap = (c->out_n + n) * 2;
        c->out = realloc(c->out, c->out_cap);
        if (!c->out) fail("realloc");
    }
    return c->out + c->out_n;
}

static void put(struct conn *c, const char *s, size_t n) { memcpy(room(c, n), s, n); c->out_n += n; }

static uint64_t head_number(void) { return (uint64_t)time(NULL) / BLOCK_S; }

static size_t write_block(char *o, uint64_t n, const char *hash) {
    return (size_t)sprintf(o,
        "{\"number\":\"0x%lx\",\"hash\":\"0x%.64s\",\"parentHash\":\"0xb10c%060lx\",\"timestamp\":\"0x%lx\","
        "\"gasLimit\":\"0x1c9c380\",\"gasUsed\":\"0xe4e1c0\",\"baseFeePerGas\":\"0x3b9aca00\",\"miner\":\"0x%040x\","
        "\"transactions\":[],\"uncles\":[]}", n, hash, n ? n - 1 : 0, n * BLOCK_S, 7);
}

/* The last 16 digits of a hash are the block number; the others are arbitrary, so that a bench can request many blocks. */
static size_t answer_by_hash(char *o, struct text params) {
    const char *word = params.n > 68 ? memchr(params.at, '"', params.n - 67) : NULL;
    char low[17] = {0};
    if (!word) return (size_t)sprintf(o, "null");
    memcpy(low, word + 51, 16);
    return write_block(o, strtoull(low, NULL, 16), word + 3);
}

static size_t answer_by_number(char *o, struct text params) {
    uint64_t head = head_number(), n = head;
    char word[24] = {0}, hash[80];
    const char *quote = params.n ? memchr(params.at, '"', params.n) : NULL;
    if (quote) {
        size_t have = params.n - (size_t)(quote + 1 - params.at);
        memcpy(word, quote + 1, have < 23 ? have : 23);
        if (!strncmp(word, "0x", 2)) n = strtoull(word, NULL, 16);
        else if (!strncmp(word, "finalized", 9)) n = head - 64;
        else if (!strncmp(word, "safe", 4)) n = head - 32;
        else if (!strncmp(word, "earliest", 8)) n = 0;
    }
    if (n > head) return (size_t)sprintf(o, "null");
    sprintf(hash, "b10c%060lx", n);
    return write_block(o, n, hash);
}

#define BITCOIN_GENESIS "0f9188f13cb7b2c71f2a335e3a4fc328bf5beb436012afca590b1a11466e2206"
#define BEACON_GENESIS "0x4b363db94e286120d76eb905340fdd4e54bfe9f06bf33ff6cf5ad27f511bfe95"

/* The lookups of Bitcoin's family; 0 for another method. */
static size_t answer_bitcoin(char *o, const struct call *call) {
    uint64_t head = head_number(), n;
    if (is(call->method, "\"getblockcount\"")) return (size_t)sprintf(o, "%lu", head);
    if (is(call->method, "\"getbestblockhash\"")) return (size_t)sprintf(o, "\"%064lx\"", head);
    if (is(call->method, "\"getblockchaininfo\"")) return (size_t)sprintf(o, "{\"blocks\":%lu,\"initialblockdownload\":false}", head);
    if (is(call->method, "\"getindexinfo\"")) return (size_t)sprintf(o, "{\"txindex\":{\"synced\":true}}");
    if (is(call->method, "\"getblockhash\"")) {
        n = call->params.n > 1 ? strtoull(call->params.at + 1, NULL, 10) : 0;
        return n ? (size_t)sprintf(o, "\"%064lx\"", n) : (size_t)sprintf(o, "\"" BITCOIN_GENESIS "\"");
    }
    if (is(call->method, "\"getblockheader\"")) {
        char low[17] = {0};
        if (call->params.n > 66) memcpy(low, call->params.at + 50, 16);
        n = strtoull(low, NULL, 16);
        return (size_t)sprintf(o, "{\"height\":%lu,\"previousblockhash\":\"%064lx\",\"confirmations\":1}", n, n ? n - 1 : 0);
    }
    return 0;
}

/* Writes the method's result; o has room for the configured result and 1 KB. */
static size_t answer(char *o, const struct call *call) {
    size_t n = call->method.n > 4 && !memcmp(call->method.at, "\"get", 4) ? answer_bitcoin(o, call) : 0;
    if (n) return n;
    if (is(call->method, "\"eth_blockNumber\"")) return (size_t)sprintf(o, "\"0x%lx\"", head_number());
    if (is(call->method, "\"eth_chainId\"")) return (size_t)sprintf(o, "\"0x1\"");
    if (is(call->method, "\"net_version\"")) return (size_t)sprintf(o, "\"1\"");
    if (is(call->method, "\"eth_syncing\"")) return (size_t)sprintf(o, "false");
    if (is(call->method, "\"web3_clientVersion\"")) return (size_t)sprintf(o, "\"stub/1.0\"");
    if (is(call->method, "\"eth_getBlockByNumber\"")) return answer_by_number(o, call->params);
    if (is(call->method, "\"eth_getBlockByHash\"")) return answer_by_hash(o, call->params);
    if (is(call->method, "\"stub_calls\"")) return (size_t)sprintf(o, "%lu", requests);
    memcpy(o, result, result_n);
    return result_n;
}

/* The size of a large result, or 0. */
static size_t fill_of(const struct call *call) {
    char low[17] = {0};
    const char *word = call->params.n > 44 ? memchr(call->params.at, '"', call->params.n - 43) : NULL;
    if (!word || !is(call->method, "\"eth_getCode\"")) return 0;
    memcpy(low, word + 27, 16);
    size_t n = strtoull(low, NULL, 16);
    return n > FILL_MAX ? FILL_MAX : n;
}

static int put_reply(struct conn *c, const struct call *call, int comma) {
    if (!call->id.n) return 0;                                            /* a notification */
    size_t fill = c->fills < FILLS_MAX ? fill_of(call) : 0;
    char *o = room(c, call->id.n + result_n + 2048);
    if (comma) *o++ = ',';
    o = mempcpy(o, "{\"jsonrpc\":\"2.0\",\"id\":", 22);
    o = mempcpy(o, call->id.at, call->id.n);
    o = mempcpy(o, ",\"result\":", 10);
    if (fill) {
        o = mempcpy(o, "\"0x\"", 4);
        c->fill[c->fills++] = (struct fill){(size_t)(o - c->out) - 1, fill};
    } else o += answer(o, call);
    *o++ = '}';
    c->out_n = (size_t)(o - c->out);
    return 1;
}

static const char *date(void) {
    static char text[64];
    static time_t made;
    time_t t = time(NULL);
    if (t != made) {
        struct tm g;
        strftime(text, sizeof text, "%a, %d %b %Y %H:%M:%S GMT", gmtime_r(&t, &g));
        made = t;
    }
    return text;
}

static void put_body(struct conn *c, const char *p, const char *end) {
    struct call call;
    p = skip_space(p, end);
    if (p == end || *p != '[') { read_call(p, end, &call); put_reply(c, &call, 0); return; }
    size_t begin = c->out_n;
    int replies = 0;
    put(c, "[", 1);
    for (p = skip_space(p + 1, end); p < end && *p != ']';) {
        p = read_call(p, end, &call);
        replies += put_reply(c, &call, replies > 0);
        p = skip_space(p, end);
        if (p < end && *p == ',') p = skip_space(p + 1, end);
    }
    put(c, "]", 1);
    if (!replies) c->out_n = begin;
}

/* Content-Length precedes the body it measures. It is first written with the previous reply's length, which is almost
 * always right; if not, it is corrected and the body moved. */
static void respond(struct conn *c, const char *body, size_t n) {
    static size_t guess;
    size_t at = c->out_n;
    int fills = c->fills;
    char *head = room(c, 512);
    int guessed_n = sprintf(head, "HTTP/1.1 200 OK\r\nDate: %s\r\nContent-Type: application/json\r\nVary: Origin\r\n"
                            "Content-Length: %zu\r\n\r\n", date(), guess);
    c->out_n += (size_t)guessed_n;
    put_body(c, body, body + n);
    size_t own = c->out_n - at - (size_t)guessed_n, length = own;
    for (int i = fills; i < c->fills; i++) length += c->fill[i].left;
    if (length == guess) return;
    char digits[32];
    int wide = sprintf(digits, "%zu\r\n\r\n", length), was = snprintf(NULL, 0, "%zu\r\n\r\n", guess);
    room(c, 32);
    memmove(c->out + at + guessed_n - was + wide, c->out + at + guessed_n, own);
    memcpy(c->out + at + guessed_n - was, digits, (size_t)wide);
    c->out_n += (size_t)wide - (size_t)was;
    for (int i = fills; i < c->fills; i++) c->fill[i].at += (size_t)wide - (size_t)was;
    if (c->fills == fills) guess = length;
}

static void refuse(struct conn *c, const char *status) {
    char head[128];
    put(c, head, (size_t)sprintf(head, "HTTP/1.1 %s\r\nContent-Length: 0\r\n\r\n", status));
}

/* Answers a GET of the beacon node API. The last number in the path is a slot. */
static void respond_to_get(struct conn *c, const char *p, size_t n) {
    char body[2048], head[160], path[512] = {0};
    memcpy(path, p, n < 511 ? n : 511);
    uint64_t slot = head_number();
    const char *last = strrchr(path, '/');
    if (strstr(path, "/finalized")) slot -= 64;
    else if (last && last[1] >= '0' && last[1] <= '9') slot = strtoull(last + 1, NULL, 10);
    int size;
    if (strstr(path, "/genesis"))
        size = sprintf(body, "{\"data\":{\"genesis_time\":\"0\",\"genesis_validators_root\":\"" BEACON_GENESIS "\"}}");
    else if (strstr(path, "/syncing"))
        size = sprintf(body, "{\"data\":{\"head_slot\":\"%lu\",\"is_syncing\":false}}", slot);
    else
        size = sprintf(body, "{\"execution_optimistic\":false,\"finalized\":%s,\"data\":{\"root\":\"0x%064lx\",\"header\":{\"message\":"
            "{\"slot\":\"%lu\",\"parent_root\":\"0x%064lx\"}},\"filler\":\"%.700s\"}}",
            strstr(path, "/head") && !strstr(path, "/headers/") ? "false" : "true", slot, slot, slot ? slot - 1 : 0, filler);
    put(c, head, (size_t)sprintf(head, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", size));
    put(c, body, (size_t)size);
}

/* ---- connections ------------------------------------------------------------------------------------------------- */

static void arm(struct conn *c, int want_out) {
    if (c->want_out == want_out) return;
    c->want_out = want_out;                                              /* no reading until the reply is sent */
    struct epoll_event e = {.events = want_out ? EPOLLOUT : EPOLLIN, .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &e);
}

static void release(struct conn *c) {
    if (c->queued) return;                                               /* the last delayed reply frees it */
    free(c->in);
    free(c->out);
    free(c);
}

static void drop(struct conn *c) {
    close(c->fd);
    c->fd = -1;
    release(c);
}

/* Sends what is next, at most `most` bytes of a large result. Returns the bytes sent, 0 at the end, -1 for an error. */
static ssize_t send_next(struct conn *c, size_t most) {
    struct fill *f = c->fill_at < c->fills ? c->fill + c->fill_at : NULL;
    size_t end = f ? f->at : c->out_n;
    if (c->out_at < end) {
        ssize_t w = send(c->fd, c->out + c->out_at, end - c->out_at, MSG_NOSIGNAL);
        if (w > 0) c->out_at += (size_t)w;
        return w;
    }
    if (!f) return 0;
    size_t n = f->left < sizeof filler ? f->left : sizeof filler;
    ssize_t w = send(c->fd, filler, n < most ? n : most, MSG_NOSIGNAL);
    if (w > 0 && !(f->left -= (size_t)w)) c->fill_at++;
    return w;
}

static int flush(struct conn *c) {
    size_t left = FILL_TURN;
    for (ssize_t w; (w = send_next(c, left));) {
        if (w < 0 && errno != EAGAIN) return -1;
        if (w < 0 || (c->fills && (size_t)w >= left)) {
            arm(c, 1);
            return 0;
        }
        if (c->fills) left -= (size_t)w;
    }
    c->out_at = c->out_n = 0;
    c->fills = c->fill_at = 0;
    arm(c, 0);
    return 0;
}

static int64_t begins(void) {
    int64_t t = now();
    return busy_until && busy_until[turn] > t ? busy_until[turn] : t;
}

static void delay(struct conn *c, const char *body, size_t n) {
    struct delayed *d = malloc(sizeof *d + n);
    if (!d) fail("malloc");
    requests++;
    struct line *line = opt.late_every && requests % (uint64_t)opt.late_every == 0 ? &late : &usual;
    *d = (struct delayed){.due = begins() + opt.delay_us * 1000 * (line == &late ? LATE : 1), .conn = c, .n = n};
    if (busy_until) { busy_until[turn] = d->due; turn = (turn + 1) % opt.at_once; }
    memcpy(d->body, body, n);
    c->queued++;
    *line->last = d;
    line->last = &d->next;
}

static void answer_due(struct line *line) {
    for (int64_t t = now(); line->first && line->first->due <= t;) {
        struct delayed *d = line->first;
        struct conn *c = d->conn;
        line->first = d->next;
        if (!line->first) line->last = &line->first;
        c->queued--;
        if (c->fd < 0) release(c);
        else { respond(c, d->body, d->n); if (flush(c)) drop(c); }
        free(d);
    }
}

/* Takes one request from [p, end); returns its length, 0 if it is incomplete, -1 if it is malformed. */
static ssize_t take(struct conn *c, const char *p, const char *end) {
    const char *body = memmem(p, (size_t)(end - p), "\r\n\r\n", 4);
    size_t length = 0;
    if (!body) return end - p > HEAD_MAX ? -1 : 0;
    body += 4;
    int chunked = 0;
    for (const char *q = memchr(p, '\n', (size_t)(body - p)) + 1; q < body; q = memchr(q, '\n', (size_t)(body - q)) + 1) {
        if ((*q | 32) == 'c' && !strncasecmp(q, "content-length:", 15)) length = strtoull(q + 15, NULL, 10);
        if ((*q | 32) == 't' && !strncasecmp(q, "transfer-encoding:", 18)) chunked = 1;
    }
    if (chunked) return -1;
    if ((size_t)(end - body) < length) return 0;
    if (!strncmp(p, "GET ", 4)) respond_to_get(c, p + 4, strcspn(p + 4, " \r\n"));
    else if (strncmp(p, "POST ", 5)) refuse(c, "405 Method Not Allowed");
    else if (opt.delay_us) delay(c, body, length);
    else respond(c, body, length);
    return body + length - p;
}

static void readable(struct conn *c) {
    if (c->in_cap - c->in_n < 65536) {
        c->in_cap = c->in_cap ? c->in_cap * 2 : 131072;
        c->in = realloc(c->in, c->in_cap);
        if (!c->in) fail("realloc");
    }
    ssize_t r = recv(c->fd, c->in + c->in_n, c->in_cap - c->in_n, 0);
    if (r < 0 && errno == EAGAIN) return;
    if (r <= 0) { drop(c); return; }
    c->in_n += (size_t)r;
    size_t used = 0;
    for (ssize_t n; used < c->in_n && (n = take(c, c->in + used, c->in + c->in_n)); used += (size_t)n)
        if (n < 0) { refuse(c, "411 Length Required"); flush(c); drop(c); return; }
    c->in_n -= used;
    memmove(c->in, c->in + used, c->in_n);
    if (flush(c)) drop(c);
}

static void accept_all(void) {
    int one = 1;
    for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
        struct conn *c = calloc(1, sizeof *c);
        if (!c) fail("calloc");
        c->fd = fd;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
    }
}

static int wait_for(struct epoll_event *events, int n) {
    struct delayed *first = usual.first;
    if (!first || (late.first && late.first->due < first->due)) first = late.first;
    if (!first) return epoll_wait(ep, events, n, -1);
    int64_t left = first->due - now();
    if (left < 0) left = 0;
#ifdef SYS_epoll_pwait2
    static int missing;
    if (!missing) {
        struct timespec ts = {left / NS, left % NS};
        int got = (int)syscall(SYS_epoll_pwait2, ep, events, n, &ts, NULL, 0);
        if (got >= 0 || errno != ENOSYS) return got;
        missing = 1;
    }
#endif
    return epoll_wait(ep, events, n, (int)(left / 1000000));
}

static void options(int argc, char **argv) {
    static const struct option names[] = {
        {"port", 1, 0, 'p'}, {"size", 1, 0, 's'}, {"delay-us", 1, 0, 'd'}, {"cpu", 1, 0, 'u'},
        {"at-once", 1, 0, 'a'}, {"late-every", 1, 0, 'l'}, {0, 0, 0, 0}};
    for (int o; (o = getopt_long(argc, argv, "", names, NULL)) != -1;) switch (o) {
        case 'p': opt.port = atoi(optarg); break;
        case 's': opt.size = strtoull(optarg, NULL, 10); break;
        case 'd': opt.delay_us = atol(optarg); break;
        case 'u': opt.cpu = atoi(optarg); break;
        case 'a': opt.at_once = atoi(optarg); break;
        case 'l': opt.late_every = atoi(optarg); break;
        default: fputs("stub [--port N] [--size BYTES] [--delay-us N] [--at-once N] [--late-every N] [--cpu N]\n", stderr); exit(2);
    }
    if (opt.size < 2) opt.size = 2;
    if (opt.at_once > 0 && !(busy_until = calloc((size_t)opt.at_once, sizeof *busy_until))) fail("calloc");
}

static void listen_on(int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    int one = 1;
    listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&a, sizeof a) || listen(listener, 4096)) fail("listen");
    getsockname(listener, (struct sockaddr *)&a, &n);
    printf("%d\n", ntohs(a.sin_port));
    fflush(stdout);
}

int main(int argc, char **argv) {
    options(argc, argv);
    if (opt.cpu >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(opt.cpu, &set);
        if (sched_setaffinity(0, sizeof set, &set)) fail("--cpu");
    }
    prctl(PR_SET_PDEATHSIG, SIGTERM);                                     /* never outlives the bench */
    prctl(PR_SET_TIMERSLACK, 1UL);
    result_n = opt.size + 2;
    result = malloc(result_n + 1);
    if (!result) fail("malloc");
    for (size_t i = 0; i < opt.size; i++) result[i + 1] = "0123456789abcdef"[i % 16];
    memcpy(result, "\"0x", 3);
    result[result_n - 1] = '"';
    memset(filler, 'a', sizeof filler);
    ep = epoll_create1(EPOLL_CLOEXEC);
    listen_on(opt.port);
    struct epoll_event events[512], e = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(ep, EPOLL_CTL_ADD, listener, &e);
    for (;;) {
        int n = wait_for(events, 512);
        for (int i = 0; i < n; i++) {
            struct conn *c = events[i].data.ptr;
            if (!c) accept_all();
            else if (events[i].events & EPOLLOUT) { if (flush(c)) drop(c); }
            else readable(c);
        }
        answer_due(&usual);
        answer_due(&late);
    }
}
