/* A load generator for HTTP/1.1 on one core.
 *
 * Closed loop (default): every connection keeps one request in flight, so the server determines the rate.
 * Open loop (--rate R): request n is due at start + n/R whether or not earlier ones got a reply, and its latency
 * counts from that instant: requests that wait for a stalled server count in full (no coordinated omission).
 *
 * The request is sent as it is in the file, except that every occurrence of --marker is replaced by a unique decimal
 * number of the same width. It always starts with 1, so it is a valid JSON number, hex string and header value, and
 * lengths do not change. --expect may contain the marker too: the reply's body must then contain this request's number,
 * which proves that replies reach the right caller.
 *
 * Turns (--slice S): a closed loop that pauses. For each byte on standard input it runs for S seconds and until every request
 * has its reply, then prints a line. The end of the input ends the run. The first turn warms up and is not counted.
 *
 * --refusals: replies other than 200 are refusals of an overloaded server. They are counted, but their latency is not.
 *
 * A reply counts only when it is complete (Content-Length or chunked) and nothing follows it. Prints one JSON object.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
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
#define READ_BYTES (1 << 20)   /* one read buffer for all connections, large enough for big replies */
#define HEAD_MAX 16384         /* a longer reply head or chunk line is an error */
#define EXPECT_MAX 256
#define MARKERS_MAX 256
#define FAULTS_MAX 10000       /* stop loading a server that fails every request */
#define DRAIN_NS (20 * NS)     /* how long the last replies of a turn may take */

enum phase { HEAD, BODY, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER };

struct conn {
    int fd;
    int busy;                  /* a request is out and its reply is not complete */
    int want_out;              /* EPOLLOUT is armed */
    char *request;             /* this connection's copy, so that a half-sent request keeps its number */
    size_t sent;
    int64_t due;               /* when the request was due (open loop) or sent (closed loop) */
    uint64_t number;
    enum phase phase;
    int status, close_after, interim;
    uint64_t left;             /* bytes left of the body or chunk */
    char *pending;             /* an incomplete head or chunk line, kept for the next read */
    size_t pending_n;
    char expect[EXPECT_MAX];
    char tail[EXPECT_MAX];     /* the last bytes of the body seen, so that --expect may straddle two reads */
    size_t tail_n;
    int found;
};

/* Log-linear histogram of nanoseconds: 128 steps per power of two, an error below 1 %. */
#define STEPS 128
static uint64_t histogram[64 * STEPS];

static struct {
    const char *host, *file, *marker, *expect;
    int port, connections, cpu, refusals;
    double seconds, warmup, rate, slice;
    uint64_t count;
} opt = {.host = "127.0.0.1", .connections = 64, .cpu = -1, .seconds = 2, .warmup = 0.3};

static struct { uint64_t ok, other, mismatched, errors, reconnects, bytes, late; int64_t max; } tally;

static char *request; static size_t request_n, marker_n, expect_n;
static size_t marks[MARKERS_MAX]; static int marks_n;
static size_t expect_mark; static int expect_has_mark;
static struct conn *conns; static struct conn **idle; static int idle_n;
static int ep; static uint64_t next_number; static uint64_t faults; static uint64_t finished;
static uint64_t issued; static int64_t start; static double gap;
static char *buffer; static int pausing;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * NS + t.tv_nsec;
}

static void fail(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void record(int64_t ns) {
    uint64_t v = ns < 1 ? 1 : (uint64_t)ns;
    int top = 63 - __builtin_clzll(v);
    size_t i = top < 7 ? v : (size_t)(top - 6) * STEPS + ((v >> (top - 7)) & (STEPS - 1));
    histogram[i]++;
    if (ns > tally.max) tally.max = ns;
}

static double percentile(double p, uint64_t total) {
    uint64_t rank = (uint64_t)(p * (double)total), seen = 0;
    for (size_t i = 0; i < sizeof histogram / sizeof *histogram; i++) {
        seen += histogram[i];
        if (histogram[i] && seen > rank) {
            if (i < STEPS) return (double)i / 1e3;
            double step = (double)(1ULL << (i / STEPS - 1));      /* the middle of the step */
            return ((double)(STEPS + i % STEPS) + 0.5) * step / 1e3;
        }
    }
    return (double)tally.max / 1e3;
}

/* ---- requests ---------------------------------------------------------------------------------------------------- */

static void read_request(void) {
    FILE *f = fopen(opt.file, "rb");
    if (!f) fail(opt.file);
    fseek(f, 0, SEEK_END);
    request_n = (size_t)ftell(f);
    rewind(f);
    request = malloc(request_n + 1);
    if (!request || fread(request, 1, request_n, f) != request_n) fail(opt.file);
    fclose(f);
    if (opt.expect && (expect_n = strlen(opt.expect)) >= EXPECT_MAX) { errno = E2BIG; fail("--expect"); }
    if (!opt.marker) return;
    marker_n = strlen(opt.marker);
    if (marker_n < 8 || marker_n > 19) { errno = EINVAL; fail("--marker must be 8 to 19 characters wide"); }
    for (char *p = request, *end = request + request_n; (p = memmem(p, (size_t)(end - p), opt.marker, marker_n)); p += marker_n) {
        if (marks_n == MARKERS_MAX) { errno = E2BIG; fail("too many markers"); }
        marks[marks_n++] = (size_t)(p - request);
    }
    const char *in_expect = opt.expect ? strstr(opt.expect, opt.marker) : NULL;
    if (in_expect) { expect_has_mark = 1; expect_mark = (size_t)(in_expect - opt.expect); }
}

static void number_request(struct conn *c) {
    char digits[24];
    uint64_t n = c->number = next_number++;
    for (size_t i = marker_n; i-- > 1; n /= 10) digits[i] = (char)('0' + n % 10);
    digits[0] = '1';
    for (int i = 0; i < marks_n; i++) memcpy(c->request + marks[i], digits, marker_n);
    if (expect_has_mark) memcpy(c->expect + expect_mark, digits, marker_n);
}

static void arm(struct conn *c, int want_out) {
    if (c->want_out == want_out) return;
    c->want_out = want_out;
    struct epoll_event e = {.events = EPOLLIN | (want_out ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &e);
}

static int push(struct conn *c) {
    while (c->sent < request_n) {
        ssize_t w = send(c->fd, c->request + c->sent, request_n - c->sent, MSG_NOSIGNAL);
        if (w < 0) {
            if (errno == EAGAIN) { arm(c, 1); return 0; }
            return -1;
        }
        c->sent += (size_t)w;
    }
    arm(c, 0);
    return 0;
}

static void dial(struct conn *c) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)opt.port)};
    int one = 1;
    if (inet_pton(AF_INET, opt.host, &a.sin_addr) != 1) { errno = EINVAL; fail("--host must be an IPv4 address"); }
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0) fail("socket");
    if (connect(c->fd, (struct sockaddr *)&a, sizeof a)) fail("connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_ADD, c->fd, &e);
    c->want_out = 0;
    c->pending_n = 0;
    c->busy = 0;
}

static void start_request(struct conn *c, int64_t due);

/* After any error on a connection, the next request uses a new one. */
static void redial(struct conn *c, int is_error) {
    close(c->fd);
    if (is_error) { tally.errors++; if (++faults > FAULTS_MAX) { errno = EIO; fail("too many faults"); } }
    else tally.reconnects++;
    dial(c);
}

static int more_to_send(void) { return !opt.count || issued < opt.count; }

static void start_request(struct conn *c, int64_t due) {
    issued++;
    c->busy = 1;
    c->sent = 0;
    c->due = due;
    c->phase = HEAD;
    c->found = expect_n == 0;
    c->tail_n = 0;
    number_request(c);
    if (push(c) < 0) { redial(c, 1); idle[idle_n++] = c; }
}

/* ---- replies ----------------------------------------------------------------------------------------------------- */

static void look(struct conn *c, const char *p, size_t n) {
    if (c->found || !n) return;
    if (memmem(p, n, c->expect, expect_n)) { c->found = 1; return; }
    char joint[2 * EXPECT_MAX];
    size_t keep = expect_n - 1, head = n < keep ? n : keep;
    memcpy(joint, c->tail, c->tail_n);
    memcpy(joint + c->tail_n, p, head);
    size_t joint_n = c->tail_n + head;
    if (c->tail_n && memmem(joint, joint_n, c->expect, expect_n)) { c->found = 1; return; }
    if (n >= keep) { c->tail_n = keep; memcpy(c->tail, p + n - keep, keep); return; }
    size_t drop = joint_n > keep ? joint_n - keep : 0;
    c->tail_n = joint_n - drop;
    memmove(c->tail, joint + drop, c->tail_n);
}

/* Reads the head in [p, end); end is just after the empty line. Returns -1 when the reply cannot be framed. */
static int read_head(struct conn *c, const char *p, const char *end) {
    int has_length = 0, chunked = 0;
    if (end - p < 13 || memcmp(p, "HTTP/1.1 ", 9)) return -1;
    c->status = atoi(p + 9);
    c->close_after = 0;
    c->left = 0;
    for (const char *q = memchr(p, '\n', (size_t)(end - p)) + 1; q < end; q = memchr(q, '\n', (size_t)(end - q)) + 1) {
        char k = *q | 32;
        if (k == 'c' && !strncasecmp(q, "content-length:", 15)) { has_length = 1; c->left = strtoull(q + 15, NULL, 10); }
        else if (k == 'c' && !strncasecmp(q, "connection: close", 17)) c->close_after = 1;
        else if (k == 't' && !strncasecmp(q, "transfer-encoding: chunked", 26)) chunked = 1;
    }
    c->interim = c->status >= 100 && c->status < 200;
    if (c->interim || c->status == 204 || c->status == 304) c->left = 0;
    else if (!has_length && !chunked) return -1;
    c->phase = chunked && !c->interim ? CHUNK_SIZE : BODY;
    return 0;
}

static void complete(struct conn *c) {
    int refused = opt.refusals && c->status != 200;
    if (!refused) record(now() - c->due);
    finished++;
    if (refused) tally.other++;
    else if (!c->found) tally.mismatched++;
    else if (c->status == 200) tally.ok++;
    else tally.other++;
    c->busy = 0;
}

/* Consumes [p, p+n). Returns how much was used, or -1 on bytes that are not a reply. Stops at the reply's end. */
static ssize_t consume(struct conn *c, const char *p, size_t n) {
    const char *at = p, *end = p + n;
    while (at < end || (c->phase == BODY && c->left == 0)) {
        size_t have = (size_t)(end - at);
        const char *line;
        switch (c->phase) {
        case HEAD:
            line = memmem(at, have, "\r\n\r\n", 4);
            if (!line) return have > HEAD_MAX ? -1 : at - p;
            if (read_head(c, at, line + 4)) return -1;
            at = line + 4;
            if (c->interim) c->phase = HEAD;
            break;
        case BODY:
        case CHUNK_DATA: {
            size_t take = have < c->left ? have : (size_t)c->left;
            look(c, at, take);
            at += take;
            c->left -= take;
            if (c->left) return at - p;
            if (c->phase == BODY) { complete(c); return at - p; }
            c->phase = CHUNK_END;
            break;
        }
        case CHUNK_SIZE: {
            char *after;
            line = memmem(at, have, "\r\n", 2);
            if (!line) return have > HEAD_MAX ? -1 : at - p;
            c->left = strtoull(at, &after, 16);
            if (after == at) return -1;
            at = line + 2;
            c->phase = c->left ? CHUNK_DATA : TRAILER;
            break;
        }
        case CHUNK_END:
            if (have < 2) return at - p;
            if (memcmp(at, "\r\n", 2)) return -1;
            at += 2;
            c->phase = CHUNK_SIZE;
            break;
        case TRAILER:
            line = memmem(at, have, "\r\n", 2);
            if (!line) return have > HEAD_MAX ? -1 : at - p;
            int last = line == at;
            at = line + 2;
            if (last) { complete(c); return at - p; }
            break;
        }
    }
    return at - p;
}

static void next(struct conn *c) {
    if (opt.rate > 0 || pausing) idle[idle_n++] = c;
    else if (more_to_send()) start_request(c, now());
}

static void readable(struct conn *c) {
    if (c->pending_n) memcpy(buffer, c->pending, c->pending_n);
    ssize_t r = recv(c->fd, buffer + c->pending_n, READ_BYTES, 0);
    if (r < 0 && errno == EAGAIN) return;
    if (r <= 0) {
        int was_busy = c->busy;
        redial(c, was_busy);
        if (was_busy) next(c);
        return;
    }
    tally.bytes += (uint64_t)r;
    size_t n = c->pending_n + (size_t)r;
    c->pending_n = 0;
    ssize_t used = c->busy ? consume(c, buffer, n) : -1;
    if (used < 0 || (!c->busy && (size_t)used < n)) {          /* not a reply, or extra bytes after it */
        int was_busy = c->busy || used >= 0;
        redial(c, 1);
        if (was_busy) next(c);
        return;
    }
    if (c->busy) {
        c->pending_n = n - (size_t)used;
        if (c->pending_n > 2 * HEAD_MAX) { redial(c, 1); next(c); return; }
        memcpy(c->pending, buffer + used, c->pending_n);
        return;
    }
    if (c->close_after) redial(c, 0);
    next(c);
}

/* ---- the run ----------------------------------------------------------------------------------------------------- */

static int64_t due_at(uint64_t n) { return start + (int64_t)((double)n * gap); }

static void send_due(int64_t end) {
    int64_t t = now();
    while (idle_n && more_to_send() && due_at(issued) <= t && due_at(issued) < end) {
        struct conn *c = idle[--idle_n];
        start_request(c, due_at(issued));
    }
}

static int wait_for(struct epoll_event *events, int n, int64_t until) {
    int64_t left = until - now();
    struct timespec ts = {0};
    if (left > 0) { ts.tv_sec = left / NS; ts.tv_nsec = left % NS; }
#ifdef SYS_epoll_pwait2
    static int missing;
    if (!missing) {
        int got = (int)syscall(SYS_epoll_pwait2, ep, events, n, &ts, NULL, 0);
        if (got >= 0 || errno != ENOSYS) return got;
        missing = 1;
    }
#endif
    return epoll_wait(ep, events, n, left > 0 ? (int)(left / 1000000) : 0);
}

static void reset_tally(void) {
    memset(&tally, 0, sizeof tally);
    memset(histogram, 0, sizeof histogram);
}

static int finished_early(void) { return opt.count && finished >= opt.count; }

static void handle_events(int64_t until) {
    struct epoll_event events[512];
    int n = wait_for(events, 512, until);
    for (int i = 0; i < n; i++) {
        struct conn *c = events[i].data.ptr;
        if (events[i].events & EPOLLOUT && push(c) < 0) { redial(c, 1); next(c); continue; }
        if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(c);
    }
}

static int64_t take_turn(void) {
    int64_t begun = now(), end = begun + (int64_t)(opt.slice * NS), t = begun;
    for (pausing = 0; t < end; t = now()) {
        while (idle_n) start_request(idle[--idle_n], t);
        handle_events(end);
    }
    for (pausing = 1; idle_n < opt.connections; t = now()) {
        if (t > end + DRAIN_NS) { errno = ETIMEDOUT; fail("replies did not arrive"); }
        handle_events(end + DRAIN_NS);
    }
    return now() - begun;
}

static double run_in_turns(void) {
    int64_t elapsed = 0;
    char byte;
    for (int turn = 0; read(0, &byte, 1) == 1; turn++) {
        int64_t took = take_turn();
        if (turn) elapsed += took;
        else reset_tally();
        puts("done");
        fflush(stdout);
    }
    return (double)elapsed / 1e9;
}

static double run(void) {
    start = now();
    int64_t counted_from = start + (int64_t)(opt.warmup * NS), end = counted_from + (int64_t)(opt.seconds * NS);
    int warm = opt.warmup <= 0;
    gap = opt.rate > 0 ? NS / opt.rate : 0;
    if (opt.rate > 0) for (int i = 0; i < opt.connections; i++) idle[idle_n++] = &conns[i];
    else for (int i = 0; i < opt.connections && more_to_send(); i++) start_request(&conns[i], now());
    int64_t t = now();
    for (; t < end && !finished_early(); t = now()) {
        if (!warm && t >= counted_from) { warm = 1; reset_tally(); counted_from = t; }
        if (opt.rate > 0) send_due(end);
        else while (idle_n) start_request(idle[--idle_n], t);             /* connections that failed to send start again */
        int64_t until = warm ? end : counted_from;
        if (opt.rate > 0 && idle_n && due_at(issued) < until) until = due_at(issued);
        handle_events(until);
    }
    if (opt.rate > 0) {                                         /* due without a reply: they waited at least this long */
        for (int i = 0; i < opt.connections; i++) if (conns[i].busy && t - conns[i].due > 0) { record(t - conns[i].due); tally.late++; }
        for (; due_at(issued) < end; issued++) { record(t - due_at(issued)); tally.late++; }
    }
    return (double)(t - counted_from) / 1e9;
}

static void usage(void) {
    fputs("load --port N --request FILE [--host A] [--connections N] [--seconds S] [--warmup S] [--rate R] [--count N]\n"
          "     [--marker STR] [--expect STR] [--first N] [--cpu N] [--slice S] [--refusals]\n", stderr);
    exit(2);
}

static void options(int argc, char **argv) {
    static const struct option names[] = {
        {"host", 1, 0, 'h'}, {"port", 1, 0, 'p'}, {"connections", 1, 0, 'c'}, {"seconds", 1, 0, 's'},
        {"warmup", 1, 0, 'w'}, {"rate", 1, 0, 'r'}, {"count", 1, 0, 'n'}, {"request", 1, 0, 'f'},
        {"marker", 1, 0, 'm'}, {"expect", 1, 0, 'e'}, {"first", 1, 0, 'i'}, {"cpu", 1, 0, 'u'},
        {"refusals", 0, 0, 'x'}, {"slice", 1, 0, 'l'}, {0, 0, 0, 0}};
    for (int o; (o = getopt_long(argc, argv, "", names, NULL)) != -1;) switch (o) {
        case 'h': opt.host = optarg; break;
        case 'p': opt.port = atoi(optarg); break;
        case 'c': opt.connections = atoi(optarg); break;
        case 's': opt.seconds = atof(optarg); break;
        case 'w': opt.warmup = atof(optarg); break;
        case 'r': opt.rate = atof(optarg); break;
        case 'n': opt.count = strtoull(optarg, NULL, 10); break;
        case 'f': opt.file = optarg; break;
        case 'm': opt.marker = optarg; break;
        case 'e': opt.expect = optarg; break;
        case 'i': next_number = strtoull(optarg, NULL, 10); break;
        case 'u': opt.cpu = atoi(optarg); break;
        case 'l': opt.slice = atof(optarg); break;
        case 'x': opt.refusals = 1; break;
        default: usage();
    }
    if (!opt.file || opt.port < 1 || opt.connections < 1) usage();
}

int main(int argc, char **argv) {
    options(argc, argv);
    if (opt.cpu >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(opt.cpu, &set);
        if (sched_setaffinity(0, sizeof set, &set)) fail("--cpu");
    }
    prctl(PR_SET_TIMERSLACK, 1UL);                              /* the default of 50 us would be charged to the server */
    read_request();
    ep = epoll_create1(EPOLL_CLOEXEC);
    conns = calloc((size_t)opt.connections, sizeof *conns);
    idle = calloc((size_t)opt.connections, sizeof *idle);
    buffer = malloc(READ_BYTES + 2 * HEAD_MAX);
    for (int i = 0; i < opt.connections; i++) {
        struct conn *c = &conns[i];
        c->request = malloc(request_n + 1);
        c->pending = malloc(2 * HEAD_MAX + 1);
        memcpy(c->request, request, request_n);
        if (opt.expect) memcpy(c->expect, opt.expect, expect_n);
        dial(c);
        if (opt.slice > 0) idle[idle_n++] = c;
    }
    double elapsed = opt.slice > 0 ? run_in_turns() : run();
    uint64_t total = tally.ok + (opt.refusals ? 0 : tally.other) + tally.mismatched + tally.late;
    printf("{\"requests\":%lu,\"non_200\":%lu,\"mismatched\":%lu,\"errors\":%lu,\"reconnects\":%lu,\"late\":%lu,"
           "\"bytes\":%lu,\"elapsed_s\":%.6f,\"p50_us\":%.1f,\"p90_us\":%.1f,\"p99_us\":%.1f,\"max_us\":%.1f}\n",
           tally.ok, tally.other, tally.mismatched, tally.errors, tally.reconnects, tally.late, tally.bytes, elapsed,
           percentile(0.5, total), percentile(0.9, total), percentile(0.99, total), (double)tally.max / 1e3);
    return 0;
}
