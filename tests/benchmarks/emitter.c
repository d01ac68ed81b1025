/* A server of known emission times: speaks just enough HTTP to be loaded, and writes down when it sent what.
 *
 * Every open stream gets one chunk in each tick, all in the same tick, as an engine step does; with --full-rate each
 * stream gets everything as fast as the socket takes it. One process, one epoll loop, raw sockets. --log gets one line
 * per request: when it arrived (the kernel's stamp) and was read, when each of its chunks was handed to the kernel, and
 * the CRC-32 of its body, by which a client's record is found again. Times are CLOCK_MONOTONIC nanoseconds.
 *
 * Options: --port N  --port-file PATH  --log PATH  --tick-ms X  --full-rate  --error-every N
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS 50000 /* the end of a tick is waited for awake */
#define LOG_CHUNKS 1000000
#define MAX_BODY (64u << 20)

typedef struct {
    char *data;
    size_t size, room;
} Bytes;

typedef struct Stream Stream;
struct Stream {
    int chat;
    long prompt, tokens, sent;
    int64_t kernel_ns, received_ns;
    uint32_t crc;
    int64_t *sent_ns;
    Stream *next; /* among those finished in this tick */
};

typedef struct {
    int fd, writing;
    size_t slot; /* where in `open_streams` */
    int64_t kernel_ns;
    Bytes in, out;
    size_t out_start;
    Stream *stream;
} Connection;

static int epoll_fd, listener, full_rate;
static long error_every, requests;
static int64_t tick_ns = 10000000, wall_offset;
static FILE *log_file;
static volatile sig_atomic_t stopped;
static Connection **connections; /* by descriptor */
static size_t connections_room;
static Connection **open_streams;
static size_t open_count, open_room;
static Stream *finished_streams; /* not logged yet, with `finished_chunks` */
static long finished_chunks;
static Bytes token[2], last[2]; /* completions, chat */
static uint32_t crc_table[256];

static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
static const char MODELS[] =
    "{\"object\": \"list\", \"data\": [{\"id\": \"emitter\", \"object\": \"model\", \"max_model_len\": 1048576}]}";
static const char OOPS[] = "{\"error\":{\"message\":\"the emitter was told to fail\",\"code\":500}}";

static void fail(const char *what) {
    fprintf(stderr, "emitter: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void *grown(void *memory, size_t size) {
    void *result = realloc(memory, size);
    if (result == NULL)
        fail("memory");
    return result;
}

static int64_t clock_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

static void measure_wall_offset(void) {
    int64_t best = INT64_MAX;
    for (int i = 0; i < 7; i++) {
        int64_t before = now_ns(), wall = clock_ns(CLOCK_REALTIME), width = now_ns() - before;
        if (width < best)
            best = width, wall_offset = wall - before - width / 2;
    }
}

static void append(Bytes *bytes, const char *data, size_t size) {
    if (bytes->size + size > bytes->room)
        bytes->data = grown(bytes->data, bytes->room = 2 * (bytes->size + size));
    memcpy(bytes->data + bytes->size, data, size);
    bytes->size += size;
}

static void append_http_chunk(Bytes *bytes, const char *body) {
    char size[32];
    append(bytes, size, (size_t)snprintf(size, sizeof size, "%zx\r\n", strlen(body)));
    append(bytes, body, strlen(body));
    append(bytes, "\r\n", 2);
}

static void make_event(Bytes *bytes, int chat, const char *finish) {
    char body[512];
    snprintf(body, sizeof body,
             "data: {\"id\": \"cmpl-0123456789abcdef\", \"object\": \"%s\", \"created\": 1, \"model\": \"emitter\", "
             "\"choices\": [{\"index\": 0, %s, \"logprobs\": null, \"finish_reason\": %s, \"stop_reason\": null}], "
             "\"usage\": null}\n\n",
             chat ? "chat.completion.chunk" : "text_completion",
             chat ? "\"delta\": {\"content\": \" token\"}" : "\"text\": \" token\"", finish);
    append_http_chunk(bytes, body);
}

static void append_ending(Bytes *bytes, const Stream *stream) {
    char body[512];
    snprintf(body, sizeof body,
             "data: {\"id\": \"cmpl-0123456789abcdef\", \"object\": \"%s\", \"choices\": [], \"usage\": "
             "{\"prompt_tokens\": %ld, \"completion_tokens\": %ld, \"total_tokens\": %ld}}\n\n",
             stream->chat ? "chat.completion.chunk" : "text_completion", stream->prompt, stream->tokens,
             stream->prompt + stream->tokens);
    append_http_chunk(bytes, body);
    append_http_chunk(bytes, "data: [DONE]\n\n");
    append(bytes, "0\r\n\r\n", 5);
}

static void close_stream(Connection *c) {
    if (c->stream == NULL)
        return;
    open_streams[c->slot] = open_streams[--open_count];
    open_streams[c->slot]->slot = c->slot;
    c->stream = NULL;
}

static void close_connection(Connection *c) {
    if (c->stream != NULL) {
        Stream *stream = c->stream;
        close_stream(c);
        free(stream->sent_ns);
        free(stream);
    }
    connections[c->fd] = NULL;
    close(c->fd);
    free(c->in.data);
    free(c->out.data);
    free(c);
}

/* Send what the kernel takes; the rest waits for the socket to be writable. 0 if the connection is gone. */
static int flush(Connection *c) {
    while (c->out_start < c->out.size) {
        ssize_t sent = send(c->fd, c->out.data + c->out_start, c->out.size - c->out_start, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN && errno != EINTR) {
            close_connection(c);
            return 0;
        }
        if (sent < 0)
            break;
        c->out_start += (size_t)sent;
    }
    if (c->out_start == c->out.size)
        c->out.size = c->out_start = 0;
    int writing = c->out.size > 0;
    if (writing != c->writing) {
        struct epoll_event event = {.events = EPOLLIN | (writing ? EPOLLOUT : 0), .data.fd = c->fd};
        epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
        c->writing = writing;
    }
    return 1;
}

static int write_bytes(Connection *c, const char *data, size_t size) {
    if (c->out.size == 0) { /* the usual case: nothing waits, and the kernel takes all of it */
        ssize_t sent = send(c->fd, data, size, MSG_NOSIGNAL);
        if (sent == (ssize_t)size)
            return 1;
        if (sent > 0)
            data += sent, size -= (size_t)sent;
    }
    append(&c->out, data, size);
    return flush(c);
}

static void finish(Stream *stream) {
    stream->next = finished_streams;
    finished_streams = stream;
    finished_chunks += stream->tokens;
}

/* While nothing is open, so that writing delays no chunk and no request. */
static void log_finished(void) {
    while (finished_streams != NULL) {
        Stream *stream = finished_streams;
        finished_streams = stream->next;
        if (log_file != NULL) {
            fprintf(log_file, "{\"crc\":%u,\"kernel_ns\":", stream->crc);
            if (stream->kernel_ns)
                fprintf(log_file, "%lld", (long long)stream->kernel_ns);
            else
                fputs("null", log_file);
            fprintf(log_file, ",\"received_ns\":%lld,\"sent_ns\":[", (long long)stream->received_ns);
            for (long i = 0; i < stream->sent; i++)
                fprintf(log_file, "%s%lld", i ? "," : "", (long long)stream->sent_ns[i]);
            fputs("]}\n", log_file);
        }
        free(stream->sent_ns);
        free(stream);
    }
    finished_chunks = 0;
    if (log_file != NULL)
        fflush(log_file);
}

/* The value of `"key":` in a JSON body, with blanks skipped; NULL if it is not there. */
static const char *field(const char *body, const char *key) {
    for (const char *at = body; (at = strstr(at, key)) != NULL; at++) {
        const char *value = at + strlen(key);
        if (at > body && at[-1] == '\\')
            continue;
        value += strspn(value, " \t\r\n");
        if (*value == ':')
            return value + 1 + strspn(value + 1, " \t\r\n");
    }
    return NULL;
}

/* Token ids of a list, characters of a text, objects of a list of messages. */
static long prompt_length(const char *body) {
    const char *value = field(body, "\"prompt\"");
    long count = 0;
    if (value == NULL) {
        for (const char *at = body; (at = strstr(at, "\"role\"")) != NULL; at++)
            count++;
    } else if (*value == '[') {
        count = value[1] != ']';
        for (; *value && *value != ']'; value++)
            count += *value == ',';
    } else if (*value == '"') {
        for (value++; *value && *value != '"'; value++) {
            if (*value == '\\' && value[1])
                value += value[1] == 'u' ? 5 : 1;
            count += ((unsigned char)*value & 0xC0) != 0x80;
        }
    }
    return count;
}

static uint32_t crc32_of(const char *data, size_t size) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < size; i++)
        crc = crc_table[(crc ^ (unsigned char)data[i]) & 255] ^ crc >> 8;
    return ~crc;
}

static int answer(Connection *c, const char *status, const char *body) {
    char head[256];
    int size = snprintf(head, sizeof head, "HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n",
                        status, strlen(body));
    Bytes whole = {0};
    append(&whole, head, (size_t)size);
    append(&whole, body, strlen(body));
    int there = write_bytes(c, whole.data, whole.size);
    free(whole.data);
    return there;
}

static int emit_at_once(Connection *c, Stream *stream) {
    Bytes whole = {0};
    append(&whole, STREAM_HEAD, sizeof STREAM_HEAD - 1);
    for (long i = 1; i < stream->tokens; i++)
        append(&whole, token[stream->chat].data, token[stream->chat].size);
    append(&whole, last[stream->chat].data, last[stream->chat].size);
    append_ending(&whole, stream);
    int64_t now = now_ns();
    for (; stream->sent < stream->tokens; stream->sent++)
        stream->sent_ns[stream->sent] = now;
    finish(stream);
    int there = write_bytes(c, whole.data, whole.size);
    free(whole.data);
    return there;
}

/* 0 if the connection is gone. `head` and `body` end in a zero byte each. */
static int request(Connection *c, const char *head, const char *body, size_t size) {
    int64_t now = now_ns();
    if (strncmp(head, "POST ", 5) != 0) {
        int found = strncmp(head, "GET /v1/models", 14) == 0;
        return answer(c, found ? "200 OK" : "404 Not Found", found ? MODELS : "{}");
    }
    requests++;
    if (error_every && requests % error_every == 0)
        return answer(c, "500 Oops", OOPS);
    const char *limit = field(body, "\"max_tokens\"");
    if (limit == NULL)
        limit = field(body, "\"max_completion_tokens\"");
    Stream *stream = grown(NULL, sizeof *stream);
    memset(stream, 0, sizeof *stream);
    stream->chat = strstr(head, "/chat/") != NULL && strstr(head, "/chat/") < strchr(head, '\r');
    stream->prompt = prompt_length(body);
    stream->tokens = limit != NULL && atol(limit) > 0 ? atol(limit) : 16;
    stream->received_ns = now;
    stream->kernel_ns = c->kernel_ns;
    stream->crc = log_file != NULL ? crc32_of(body, size) : 0;
    stream->sent_ns = grown(NULL, (size_t)stream->tokens * sizeof *stream->sent_ns);
    if (full_rate)
        return emit_at_once(c, stream);
    close_stream(c);
    c->stream = stream;
    c->slot = open_count;
    if (open_count == open_room)
        open_streams = grown(open_streams, (open_room = 2 * open_room + 64) * sizeof *open_streams);
    open_streams[open_count++] = c;
    return write_bytes(c, STREAM_HEAD, sizeof STREAM_HEAD - 1);
}

/* 0 if the connection is gone. */
static int requests_in(Connection *c) {
    for (;;) {
        append(&c->in, "", 1); /* strings end in a zero byte */
        c->in.size--;
        char *end = c->in.size ? strstr(c->in.data, "\r\n\r\n") : NULL;
        if (end == NULL)
            return 1;
        size_t head_size = (size_t)(end - c->in.data) + 4, length = 0;
        const char *field_at = strcasestr(c->in.data, "\r\nContent-Length:");
        if (field_at != NULL && field_at < end)
            length = strtoul(field_at + 17, NULL, 10);
        if (length > MAX_BODY) {
            close_connection(c);
            return 0;
        }
        if (c->in.size < head_size + length)
            return 1;
        char *body = c->in.data + head_size, after = body[length];
        body[length] = 0;
        body[-2] = 0;
        if (!request(c, c->in.data, body, length))
            return 0;
        body[length] = after;
        c->in.size -= head_size + length;
        memmove(c->in.data, body + length, c->in.size);
    }
}

static void readable(Connection *c) {
    static char buffer[1 << 18];
    char control[CMSG_SPACE(sizeof(struct timespec))];
    struct iovec vector = {buffer, sizeof buffer};
    struct msghdr message = {
        .msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t size = recvmsg(c->fd, &message, 0);
    if (size < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (size <= 0) {
        close_connection(c);
        return;
    }
    struct cmsghdr *stamp = CMSG_FIRSTHDR(&message);
    if (stamp != NULL && stamp->cmsg_type == SCM_TIMESTAMPNS) {
        struct timespec t;
        memcpy(&t, CMSG_DATA(stamp), sizeof t);
        c->kernel_ns = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec - wall_offset;
    }
    append(&c->in, buffer, (size_t)size);
    requests_in(c);
}

static void accept_all(void) {
    for (;;) {
        int on = 1, fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0)
            return;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);
        if ((size_t)fd >= connections_room) {
            size_t room = 2 * (size_t)fd + 64;
            connections = grown(connections, room * sizeof *connections);
            memset(connections + connections_room, 0, (room - connections_room) * sizeof *connections);
            connections_room = room;
        }
        Connection *c = grown(NULL, sizeof *c);
        memset(c, 0, sizeof *c);
        c->fd = fd;
        connections[fd] = c;
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    }
}

static void tick(void) {
    for (size_t i = open_count; i-- > 0;) { /* backwards: one that ends is replaced by the last, which had its chunk */
        Connection *c = open_streams[i];
        Stream *stream = c->stream;
        int ends = stream->sent + 1 == stream->tokens, chat = stream->chat;
        if (!ends) {
            stream->sent_ns[stream->sent++] = now_ns();
            write_bytes(c, token[chat].data, token[chat].size);
            continue;
        }
        Bytes whole = {0};
        append(&whole, last[chat].data, last[chat].size);
        append_ending(&whole, stream);
        stream->sent_ns[stream->sent++] = now_ns();
        close_stream(c);
        finish(stream);
        write_bytes(c, whole.data, whole.size);
        free(whole.data);
    }
    measure_wall_offset();
}

static void serve(void) {
    static struct epoll_event events[1024];
    int64_t next_tick = now_ns() + tick_ns;
    while (!stopped) {
        /* With streams open, the last millisecond before a tick is spent polling; without any, there are no ticks. */
        int64_t wait_ns = next_tick - now_ns() - SPIN_NS;
        int wait_ms = full_rate || open_count == 0 ? 1000 : wait_ns > 0 ? (int)(wait_ns / 1000000) : 0;
        int count = epoll_wait(epoll_fd, events, 1024, wait_ms);
        if (open_count == 0) {
            int64_t now = now_ns();
            while (next_tick <= now)
                next_tick += tick_ns;
        }
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            Connection *c = fd == listener ? NULL : connections[fd];
            if (fd == listener)
                accept_all();
            else if (c != NULL && (!(events[i].events & EPOLLOUT) || flush(c)) && events[i].events & ~EPOLLOUT)
                readable(c);
        }
        if (open_count > 0 && now_ns() >= next_tick - SPIN_NS) {
            while (now_ns() < next_tick)
                ;
            tick();
            next_tick += tick_ns;
        }
        if (open_count == 0 || finished_chunks > LOG_CHUNKS)
            log_finished();
    }
    log_finished();
}

static void end(int number) {
    (void)number;
    stopped = 1;
}

static void listen_on(long port, const char *port_file) {
    int on = 1;
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, size) < 0 || listen(listener, 4096) < 0)
        fail("listen");
    getsockname(listener, (struct sockaddr *)&address, &size);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener};
    if ((epoll_fd = epoll_create1(EPOLL_CLOEXEC)) < 0 || epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &event) < 0)
        fail("epoll");
    if (port_file != NULL) {
        FILE *file = fopen(port_file, "w");
        if (file == NULL || fprintf(file, "%d", ntohs(address.sin_port)) < 0 || fclose(file) != 0)
            fail(port_file);
    }
}

int main(int count, char **arguments) {
    long port = 0;
    const char *port_file = NULL;
    for (int i = 1; i < count; i++) {
        const char *name = arguments[i], *value = i + 1 < count ? arguments[i + 1] : NULL;
        if (strcmp(name, "--full-rate") == 0) {
            full_rate = 1;
            continue;
        }
        if (value == NULL) {
            fprintf(stderr, "emitter: %s needs a value\n", name);
            return 2;
        }
        i++;
        if (strcmp(name, "--port") == 0) {
            port = atol(value);
        } else if (strcmp(name, "--port-file") == 0) {
            port_file = value;
        } else if (strcmp(name, "--tick-ms") == 0) {
            tick_ns = (int64_t)(atof(value) * 1e6);
        } else if (strcmp(name, "--error-every") == 0) {
            error_every = atol(value);
        } else if (strcmp(name, "--log") == 0) {
            if ((log_file = fopen(value, "a")) == NULL)
                fail(value);
        } else {
            fprintf(stderr, "emitter: unknown option %s\n", name);
            return 2;
        }
    }
    if (tick_ns <= 0) {
        fprintf(stderr, "emitter: --tick-ms must be positive\n");
        return 2;
    }
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? 0xEDB88320u ^ crc >> 1 : crc >> 1;
        crc_table[i] = crc;
    }
    for (int chat = 0; chat < 2; chat++) {
        make_event(&token[chat], chat, "null");
        make_event(&last[chat], chat, "\"length\"");
    }
    struct sigaction action = {.sa_handler = end};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    measure_wall_offset();
    listen_on(port, port_file);
    serve();
    return 0;
}
