/* Clients of range requests, as lean as the kernel allows: what is measured is the server.

   media_load hot    TARGETS key=value...   closed loop: every connection always has one request under way
   media_load open   TARGETS key=value...   open loop: requests are due at Poisson moments, whatever became of others
   media_load dial   TARGETS key=value...   as hot, but each request has a connection of its own; resume=1: of one session
   media_load slow   TARGETS key=value...   many connections that each read so many bytes a second

   TARGETS has a line an object: "NUMBER SIZE TARGET". Byte i of object n is a function of both, so an answer tells by
   itself whether it is right: of every answer status, length, place and the bytes that arrive with its head (up to 2 KiB)
   are compared, of every check_every-th all bytes (a connection's worth in slow). The rest of other bodies is dropped in
   the kernel by MSG_TRUNC. A wrong or refused answer ends the
   run with 1. Prints "warm" (or "held") when what counts begins, then one JSON document. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <math.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "load_tls.h"

enum { HEAD_BYTES = 2048, BODY_BYTES = 65536, SAMPLES_MAX = 4000000 };

struct object { uint64_t number, size; char *target; };
struct client {
    int fd, is_busy, is_checked, head_bytes;
    SSL *ssl;
    const struct object *object;
    uint64_t offset, left, first;
    double due_s, first_s;
    char head[HEAD_BYTES];
};

static const char *host = "127.0.0.1", *from = NULL;
static int port, connections = 64, check_every = 64, receive_buffer = 0, tls = 0, resume = 0;
static double seconds = 5, warm_s = 1, rate_per_s = 100, bytes_per_s = 32768;
static uint64_t range_bytes = 262144, chunk_bytes = 8192, seed = 20261121;
static struct object *objects;
static size_t objects_count;
static struct client *clients;
static uint64_t done, body_bytes, checked, requests, resumed;
static float *firsts_us, *totals_us;
static size_t samples;
static char scratch[BODY_BYTES];

static void fail(const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    vfprintf(stderr, format, rest);
    va_end(rest);
    fputc('\n', stderr);
    exit(1);
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static uint64_t chance(void) { /* xorshift64* */
    seed ^= seed >> 12;
    seed ^= seed << 25;
    seed ^= seed >> 27;
    return seed * 0x2545F4914F6CDD1Dull;
}

static uint64_t word(uint64_t number, uint64_t index) { /* bench/media_objects.py writes the same */
    uint64_t x = (number << 40) ^ index;
    x *= 0x9E3779B97F4A7C15ull;
    x ^= x >> 29;
    x *= 0xBF58476D1CE4E5B9ull;
    return x ^ (x >> 32);
}

static void check(struct client *client, const char *data, uint64_t count) {
    uint64_t at = client->offset, i = 0;
    while (i < count) {
        uint64_t expected = word(client->object->number, at >> 3), found;
        if ((at & 7) == 0 && count - i >= 8 && (memcpy(&found, data + i, 8), found == expected)) {
            i += 8, at += 8; /* content is little-endian, as the machine is */
            continue;
        }
        expected = expected >> (8 * (at & 7)) & 255;
        if ((unsigned char)data[i] != expected)
            fail("object %lu: byte %lu is %d, expected %lu", client->object->number, at,
                 (unsigned char)data[i], expected);
        i++, at++;
    }
}

static int dial(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
    if (fd < 0) fail("socket: %s", strerror(errno));
    if (receive_buffer) setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    if (from) {
        struct sockaddr_in own = {.sin_family = AF_INET};
        inet_pton(AF_INET, from, &own.sin_addr);
        setsockopt(fd, IPPROTO_IP, 24 /* IP_BIND_ADDRESS_NO_PORT */, &yes, sizeof yes);
        if (bind(fd, (struct sockaddr *)&own, sizeof own)) fail("bind %s: %s", from, strerror(errno));
    }
    inet_pton(AF_INET, host, &address.sin_addr);
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) fail("connect: %s", strerror(errno));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

static void ask(struct client *client, double due_s, uint64_t wanted) {
    char text[2048];
    const struct object *object = &objects[chance() % objects_count];
    uint64_t blocks = (object->size + wanted - 1) / wanted, start = wanted * (chance() % blocks);
    uint64_t end = start + wanted < object->size ? start + wanted : object->size;
    int length = snprintf(text, sizeof text,
                          "GET %s HTTP/1.1\r\nHost: bench.test\r\nUser-Agent: bench\r\nAccept: */*\r\n"
                          "Range: bytes=%lu-%lu\r\n\r\n", object->target, start, end - 1);
    client->object = object;
    client->offset = client->first = start;
    client->left = end - start;
    client->head_bytes = 0;
    client->is_busy = 1;
    client->is_checked = check_every && requests++ % (uint64_t)check_every == 0;
    client->due_s = due_s;
    client->first_s = 0;
    if ((client->ssl ? SSL_write(client->ssl, text, length) : send(client->fd, text, (size_t)length, MSG_NOSIGNAL)) != length)
        fail("send: %s", strerror(errno));
}

static ssize_t receive(struct client *client, void *into, size_t bytes_max) {
    return client->ssl ? tls_read(client->ssl, into, bytes_max) : recv(client->fd, into, bytes_max, 0);
}

static const char *field(const char *head, const char *name) {
    const char *found = strcasestr(head, name);
    return found ? found + strlen(name) : NULL;
}

static void take_body(struct client *client, const char *data, uint64_t count) {
    if (count > client->left) fail("object %lu: more bytes than were asked for", client->object->number);
    if (data) {
        check(client, data, count);
        checked += count;
    }
    client->offset += count;
    client->left -= count;
    body_bytes += count;
}

static void take_head(struct client *client, double now) {
    ssize_t got = receive(client, client->head + client->head_bytes, (size_t)(HEAD_BYTES - 1 - client->head_bytes));
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) fail("a connection ended before its answer: %s", got ? strerror(errno) : "closed");
    if (!client->first_s) client->first_s = now;
    client->head_bytes += (int)got;
    client->head[client->head_bytes] = 0;
    char *end = strstr(client->head, "\r\n\r\n");
    if (!end) {
        if (client->head_bytes == HEAD_BYTES - 1) fail("a head of over %d bytes", HEAD_BYTES);
        return;
    }
    uint64_t held = (uint64_t)(client->head + client->head_bytes - end - 4);
    end[2] = 0;
    const char *length = field(client->head, "\r\ncontent-length:"), *place = field(client->head, "\r\ncontent-range:");
    if (strncmp(client->head, "HTTP/1.1 206", 12) || !length || !place)
        fail("object %lu: not the part that was asked for:\n%s", client->object->number, client->head);
    const char *digits = strpbrk(place, "0123456789");
    if (strtoull(length, NULL, 10) != client->left || !digits || strtoull(digits, NULL, 10) != client->first)
        fail("object %lu: another part than bytes %lu and %lu on:\n%s", client->object->number,
             client->first, client->left, client->head);
    client->head_bytes = -1;
    take_body(client, end + 4, held);
}

/* Takes what has come, up to `most`; 1 when the answer is whole. */
static int take(struct client *client, double now, uint64_t most) {
    if (client->head_bytes >= 0) take_head(client, now);
    while (client->head_bytes < 0 && client->left && most) {
        uint64_t wanted = client->left < most ? client->left : most;
        ssize_t got;
        if (client->is_checked || client->ssl) {
            if (wanted > sizeof scratch) wanted = sizeof scratch;
            got = receive(client, scratch, wanted);
        } else {
            got = recv(client->fd, NULL, wanted, MSG_TRUNC);
        }
        if (got < 0 && errno == EAGAIN) return 0;
        if (got <= 0) fail("object %lu: cut at %lu: %s", client->object->number, client->offset,
                           got ? strerror(errno) : "closed");
        take_body(client, client->is_checked ? scratch : NULL, (uint64_t)got);
        most -= (uint64_t)got;
    }
    return client->head_bytes < 0 && !client->left;
}

static void settle(struct client *client, double now) {
    if (samples < SAMPLES_MAX) {
        firsts_us[samples] = (float)((client->first_s - client->due_s) * 1e6);
        totals_us[samples++] = (float)((now - client->due_s) * 1e6);
    }
    client->is_busy = 0;
    done++;
}

static int by_size(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void tell_shares(const char *name, float *values) {
    static const double shares[] = {0.5, 0.75, 0.99, 0.999};
    static const char *names[] = {"p50", "p75", "p99", "p99.9"};
    qsort(values, samples, sizeof *values, by_size);
    printf("\"%s\": {", name);
    for (int i = 0; i < 4; i++) {
        size_t at = (size_t)((double)samples * shares[i]);
        printf("%s\"%s\": %.1f", i ? ", " : "", names[i],
               samples ? values[at < samples ? at : samples - 1] : 0.0);
    }
    printf("}");
}

static void forget(void) {
    done = body_bytes = 0;
    samples = 0;
}

static void tell(double took_s) {
    printf("{\"done\": %lu, \"bytes\": %lu, \"checked_bytes\": %lu, \"seconds\": %.4f, ", done, body_bytes, checked, took_s);
    tell_shares("first_us", firsts_us);
    printf(", ");
    tell_shares("total_us", totals_us);
    printf("}\n");
}

/* The handshake, waiting for the server. */
static void begin_tls(struct client *client) {
    if (!tls) return;
    fcntl(client->fd, F_SETFL, 0);
    client->ssl = tls_of(client->fd, 0);
    if (SSL_do_handshake(client->ssl) != 1) fail("a handshake failed");
    fcntl(client->fd, F_SETFL, O_NONBLOCK);
}

static int poll_of(struct client *all, int count) {
    int poll = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < count; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &all[i]};
        all[i].fd = dial();
        begin_tls(&all[i]);
        epoll_ctl(poll, EPOLL_CTL_ADD, all[i].fd, &event);
    }
    return poll;
}

static void run_hot(void) {
    int poll = poll_of(clients, connections);
    double began = now_s(), counts_s = began + warm_s, ends_s = counts_s + seconds, now = began;
    int is_warm = 0;
    for (int i = 0; i < connections; i++) ask(&clients[i], now_s(), range_bytes);
    while (now < ends_s) {
        struct epoll_event events[256];
        int count = epoll_wait(poll, events, 256, 100);
        for (int i = 0; i < count; i++) {
            struct client *client = events[i].data.ptr;
            if (take(client, now_s(), UINT64_MAX)) {
                double at = now_s();
                settle(client, at);
                ask(client, at, range_bytes);
            }
        }
        now = now_s();
        if (!is_warm && now >= counts_s) {
            is_warm = 1;
            counts_s = now;
            forget();
            puts("warm");
            fflush(stdout);
        }
    }
    tell(now - counts_s);
}

/* Continue the handshake; then send the request. */
static void greet(struct client *client) {
    int result = SSL_do_handshake(client->ssl);
    if (result != 1 && SSL_get_error(client->ssl, result) != TLS_WANT_READ) fail("a handshake failed");
    if (result != 1) return;
    resumed += (uint64_t)SSL_session_reused(client->ssl);
    ask(client, now_s(), range_bytes);
}

static void redial(struct client *client, int poll) {
    if (client->ssl) tls_end(client->ssl);
    if (client->fd) close(client->fd);
    client->fd = dial();
    client->ssl = tls_of(client->fd, resume);
    client->is_busy = 0;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = client};
    epoll_ctl(poll, EPOLL_CTL_ADD, client->fd, &event);
    greet(client);
}

/* A connection for each request: handshake, one answer, end. */
static void run_dial(void) {
    int poll = epoll_create1(EPOLL_CLOEXEC), is_warm = 0;
    double counts_s = now_s() + warm_s, ends_s = counts_s + seconds, now = 0;
    for (int i = 0; i < connections; i++) redial(&clients[i], poll);
    while ((now = now_s()) < ends_s) {
        struct epoll_event events[256];
        int count = epoll_wait(poll, events, 256, 100);
        for (int i = 0; i < count; i++) {
            struct client *client = events[i].data.ptr;
            if (!client->is_busy) greet(client);
            if (!client->is_busy || !take(client, now_s(), UINT64_MAX)) continue;
            settle(client, now_s());
            redial(client, poll);
        }
        if (!is_warm && now >= counts_s) {
            is_warm = 1;
            counts_s = now;
            forget();
            resumed = 0;
            puts("warm");
            fflush(stdout);
        }
    }
    /* OpenSSL gives up a session that several connections began with. */
    if (resume ? resumed * 10 < done * 9 : resumed != 0) fail("%lu of %lu sessions were resumed", resumed, done);
    tell(now - counts_s);
}

static struct client *idle(void) { /* in turns: a connection that never asks is closed by a server after its deadline */
    static int last = 0;
    for (int i = 1; i <= connections; i++) {
        int at = (last + i) % connections;
        if (!clients[at].is_busy) return &clients[last = at];
    }
    return NULL;
}

static double pause_s(void) {
    double share = ((double)(chance() >> 11) + 1) / 9007199254740993.0;
    return -log(share) / rate_per_s;
}

static void run_open(void) {
    int poll = poll_of(clients, connections), timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    struct epoll_event alarm = {.events = EPOLLIN, .data.ptr = NULL};
    double began = now_s(), counts_s = began + warm_s, ends_s = counts_s + seconds, next_s = began;
    int is_warm = 0;
    epoll_ctl(poll, EPOLL_CTL_ADD, timer, &alarm);
    for (double now = began; now < ends_s; now = now_s()) {
        struct client *client;
        while (next_s <= now && (client = idle())) {
            ask(client, next_s, range_bytes);
            next_s += pause_s();
        }
        struct itimerspec at = {.it_value = {(time_t)next_s, (long)(fmod(next_s, 1) * 1e9) | 1}};
        timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
        struct epoll_event events[64];
        int count = epoll_wait(poll, events, 64, 100);
        for (int i = 0; i < count; i++) {
            client = events[i].data.ptr;
            if (client && client->is_busy && take(client, now_s(), UINT64_MAX)) settle(client, now_s());
            if (!client && read(timer, scratch, 8) < 0 && errno != EAGAIN) fail("timer: %s", strerror(errno));
        }
        if (!is_warm && now >= counts_s) {
            is_warm = 1;
            forget();
            puts("warm");
            fflush(stdout);
        }
    }
    if (samples == 0) fail("no request was answered");
    tell(seconds);
}

static void sleep_until(double at_s) {
    struct timespec at = {(time_t)at_s, (long)(fmod(at_s, 1) * 1e9)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
}

/* Each connection in turn reads a chunk; all have the same period, so their order never changes. */
static void run_slow(void) {
    double step_s = (double)chunk_bytes / bytes_per_s / connections, latest_s = 0, began = now_s();
    double dials_per_s = 4000, ends_s;
    uint64_t turn = 0, empty = 0, reads = 0;
    for (int i = 0; i < connections; i++) {
        sleep_until(began + i / dials_per_s);
        clients[i].fd = dial();
        begin_tls(&clients[i]);
        ask(&clients[i], now_s(), objects[0].size);
    }
    began = now_s();
    ends_s = began + 1e9;
    for (int is_held = 0;; turn++) {
        double due_s = began + (double)turn * step_s, now = now_s();
        struct client *client = &clients[turn % (uint64_t)connections];
        if (now < due_s - 0.001) sleep_until(due_s), now = now_s();
        if (now - due_s > latest_s) latest_s = now - due_s;
        uint64_t left = client->left;
        if (take(client, now, chunk_bytes)) {
            settle(client, now);
            ask(client, now, objects[0].size);
        } else if (client->left == left && client->head_bytes < 0) {
            empty++;
        }
        reads++;
        /* Two rounds: the first gave every connection its head. */
        if (!is_held && turn >= 2 * (uint64_t)connections) {
            for (int i = 0; i < connections; i++)
                if (clients[i].head_bytes >= 0) fail("connection %d has no answer yet", i);
            is_held = 1;
            ends_s = now + seconds;
            forget();
            reads = empty = 0;
            latest_s = 0;
            printf("held %d\n", connections);
            fflush(stdout);
        }
        if (now > ends_s) break;
    }
    printf("{\"held\": %d, \"bytes\": %lu, \"checked_bytes\": %lu, \"seconds\": %.2f, \"reads\": %lu, \"empty\": %lu, \"latest_s\": %.3f}\n",
           connections, body_bytes, checked, seconds, reads, empty, latest_s);
}

static void read_targets(const char *file) {
    FILE *lines = fopen(file, "r");
    char target[1800];
    unsigned long number, size;
    if (!lines) fail("%s: %s", file, strerror(errno));
    while (fscanf(lines, "%lu %lu %1799s", &number, &size, target) == 3) {
        objects = realloc(objects, (objects_count + 1) * sizeof *objects);
        objects[objects_count++] = (struct object){number, size, strdup(target)};
    }
    fclose(lines);
    if (!objects_count) fail("%s names no object", file);
}

static void read_option(char *text) {
    char *value = strchr(text, '=');
    if (!value) fail("%s: expected key=value", text);
    *value++ = 0;
    struct { const char *name; int *whole; double *real; uint64_t *size; const char **text; } known[] = {
        {"host", 0, 0, 0, &host}, {"from", 0, 0, 0, &from}, {"port", &port, 0, 0, 0},
        {"tls", &tls, 0, 0, 0}, {"resume", &resume, 0, 0, 0}, {"connections", &connections, 0, 0, 0}, {"check_every", &check_every, 0, 0, 0},
        {"receive_buffer", &receive_buffer, 0, 0, 0}, {"seconds", 0, &seconds, 0, 0}, {"warm_s", 0, &warm_s, 0, 0},
        {"rate_per_s", 0, &rate_per_s, 0, 0}, {"bytes_per_s", 0, &bytes_per_s, 0, 0},
        {"range_bytes", 0, 0, &range_bytes, 0}, {"chunk_bytes", 0, 0, &chunk_bytes, 0}, {"seed", 0, 0, &seed, 0},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(known[i].name, text)) continue;
        if (known[i].whole) *known[i].whole = atoi(value);
        if (known[i].real) *known[i].real = atof(value);
        if (known[i].size) *known[i].size = strtoull(value, NULL, 10);
        if (known[i].text) *known[i].text = value;
        return;
    }
    fail("%s: no such option", text);
}

int main(int count, char **words) {
    if (count < 3) fail("usage: media_load hot|dial|open|slow TARGETS key=value...");
    read_targets(words[2]);
    for (int i = 3; i < count; i++) read_option(words[i]);
    clients = calloc((size_t)connections, sizeof *clients);
    firsts_us = malloc(SAMPLES_MAX * sizeof *firsts_us);
    totals_us = malloc(SAMPLES_MAX * sizeof *totals_us);
    if (!strcmp(words[1], "hot")) run_hot();
    else if (!strcmp(words[1], "dial")) run_dial();
    else if (!strcmp(words[1], "open")) run_open();
    else if (!strcmp(words[1], "slow")) run_slow();
    else fail("%s: hot, dial, open or slow", words[1]);
    return 0;
}
