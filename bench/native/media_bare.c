/* The limit: what sendfile over loopback gives when nothing is decided, looked up, checked or counted.

   media_bare PORT FILE ANSWER_BYTES: every request is answered by one head made beforehand and ANSWER_BYTES of FILE, from
   the place that its Range names (the only thing read of it). One thread, one edge-triggered epoll. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CLIENTS_MAX = 16384 };

static struct { off_t at; size_t head_left, left; char head[256]; size_t head_length; } clients[CLIENTS_MAX];
static int file;
static size_t answer_bytes;

static int begin(int fd) {
    char request[2048];
    ssize_t got = recv(fd, request, sizeof request - 1, 0);
    if (got < 0) return 0;
    if (got == 0) {
        close(fd);
        return 0;
    }
    request[got] = 0;
    char *place = strstr(request, "bytes=");
    clients[fd].at = place ? (off_t)strtoull(place + 6, NULL, 10) : 0;
    clients[fd].left = answer_bytes;
    clients[fd].head_length = clients[fd].head_left = (size_t)snprintf(
        clients[fd].head, sizeof clients[fd].head,
        "HTTP/1.1 206 Partial Content\r\nContent-Length: %zu\r\nContent-Range: bytes %ld-%ld/*\r\n\r\n", answer_bytes,
        (long)clients[fd].at, (long)(clients[fd].at + (off_t)answer_bytes - 1));
    return 1;
}

static void go_on(int fd) {
    for (;;) {
        if (!clients[fd].left && !begin(fd)) return;
        if (clients[fd].head_left) {
            send(fd, clients[fd].head, clients[fd].head_length, MSG_MORE | MSG_NOSIGNAL);
            clients[fd].head_left = 0;
        }
        while (clients[fd].left) {
            ssize_t sent = sendfile(fd, file, &clients[fd].at, clients[fd].left);
            if (sent < 0 && errno == EAGAIN) return;
            if (sent <= 0) {
                close(fd);
                clients[fd].left = 0;
                return;
            }
            clients[fd].left -= (size_t)sent;
        }
    }
}

int main(int count, char **words) {
    if (count != 4) return 2;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(words[1]))};
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), poll = epoll_create1(0), yes = 1;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener};
    file = open(words[2], O_RDONLY);
    answer_bytes = strtoull(words[3], NULL, 10);
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (file < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1024)) return 1;
    epoll_ctl(poll, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        struct epoll_event events[256];
        int ready = epoll_wait(poll, events, 256, -1);
        for (int i = 0; i < ready; i++) {
            int fd = events[i].data.fd;
            if (fd != listener) {
                go_on(fd);
                continue;
            }
            while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                struct epoll_event edges = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.fd = fd};
                if (fd >= CLIENTS_MAX) {
                    close(fd);
                    continue;
                }
                clients[fd].left = 0;
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
                epoll_ctl(poll, EPOLL_CTL_ADD, fd, &edges);
            }
        }
    }
}
