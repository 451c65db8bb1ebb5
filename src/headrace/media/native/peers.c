#include "peers.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <unistd.h>

#include "loop.h"

enum {
  CONNECTIONS_MAX = 128, /* with one peer, as media/cluster/peers.py */
  SLOW_MS = 500,
  FRESH_MS = 2000, /* SHAPE_KEPT_S of media/cluster/routing.py */
};
static const uint32_t EDGES = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;

/* Peers */

struct peer *peer_make(int32_t number, const char *name, const char *address, const char *ip, int port,
                       int timeout_ms) {
  size_t bytes = strlen(address) + 1;
  if (strlen(name) > HOP_NAME_MAX) return NULL;
  struct peer *peer = calloc(1, sizeof *peer + bytes);
  if (peer == NULL) return NULL;
  struct sockaddr_in *v4 = (struct sockaddr_in *)&peer->at;
  struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&peer->at;
  peer->number = number;
  peer->timeout_ms = timeout_ms;
  strcpy(peer->name, name);
  memcpy(peer->address, address, bytes);
  if (inet_pton(AF_INET, ip, &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons((uint16_t)port);
    peer->at_bytes = sizeof *v4;
  } else if (inet_pton(AF_INET6, ip, &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons((uint16_t)port);
    peer->at_bytes = sizeof *v6;
  } else {
    free(peer);
    return NULL;
  }
  return peer;
}

static struct peer *find_peer(const struct plane *plane, int32_t number) {
  struct peer *peer = plane->peers.first;
  while (peer != NULL && peer->number != number) peer = peer->next;
  return peer;
}

void peers_put(struct plane *plane, struct peer *peer) {
  peer->next = plane->peers.first;
  plane->peers.first = peer;
}

/* Connections */

static void unlink_connection(struct peer_connection *to) {
  struct peer_connection **list = to->fetch != NULL ? &to->peer->busy : &to->peer->idle;
  if (to->earlier != NULL) to->earlier->later = to->later;
  else *list = to->later;
  if (to->later != NULL) to->later->earlier = to->earlier;
}

/* Put a connection into the list of busy or idle ones, by its fetch. */
static void link_connection(struct peer_connection *to) {
  struct peer_connection **list = to->fetch != NULL ? &to->peer->busy : &to->peer->idle;
  to->earlier = NULL;
  to->later = *list;
  if (*list != NULL) (*list)->earlier = to;
  *list = to;
}

static void close_connection(struct plane *plane, struct peer_connection *to) {
  unlink_connection(to);
  to->peer->connections--;
  close(to->fd);
  to->fd = -1;
  to->fetch = NULL;
  to->later = plane->peers.ended; /* an event of this batch may still name it */
  plane->peers.ended = to;
}

void peers_free_ended(struct plane *plane) {
  while (plane->peers.ended != NULL) {
    struct peer_connection *to = plane->peers.ended;
    plane->peers.ended = to->later;
    free(to);
  }
}

/* Events of listeners, clients and the queue have even addresses. */
static void *event_of(struct peer_connection *to) { return (char *)to + 1; }
int peers_has_event(const void *of_event) { return (uintptr_t)of_event & 1; }

static struct peer_connection *open_connection(struct plane *plane, struct peer *peer) {
  int yes = 1;
  if (peer->connections >= CONNECTIONS_MAX) return NULL;
  struct peer_connection *to = calloc(1, sizeof *to);
  int fd = socket(peer->at.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  struct epoll_event event = {.events = EDGES, .data.ptr = to != NULL ? event_of(to) : NULL};
  int is_open = to != NULL && fd >= 0 && getrandom(&to->number, sizeof to->number, 0) == sizeof to->number &&
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes) == 0 &&
                (connect(fd, (struct sockaddr *)&peer->at, peer->at_bytes) == 0 || errno == EINPROGRESS) &&
                epoll_ctl(plane->epoll, EPOLL_CTL_ADD, fd, &event) == 0;
  if (!is_open) {
    if (fd >= 0) close(fd);
    free(to);
    return NULL;
  }
  to->fd = fd;
  to->peer = peer;
  peer->connections++;
  link_connection(to);
  return to;
}

static void take(struct peer_connection *to, struct fetch *fetch) {
  unlink_connection(to);
  to->fetch = fetch;
  fetch->from = to;
  to->is_slow = 0;
  link_connection(to);
}

/* The whole answer was received: keep the connection for the next request. */
static void release(struct plane *plane, struct peer_connection *to) {
  unlink_connection(to);
  to->fetch->from = NULL;
  to->fetch = NULL;
  link_connection(to);
  if (to->is_last) close_connection(plane, to);
}

/* Fetches */

static size_t write_request(struct plane *plane, const struct object *object, const struct peer *peer,
                            struct fetch *fetch, struct peer_connection *to, char *into) {
  char target[HEAD_LINE_MAX], range[64], if_match[1024], field[HOP_VALUE_MAX];
  struct hop hop = {.moment_ms = plane->unix_ms, .connection = to->number, .counter = ++to->counter,
                    .generation = object->generation};
  int lengths[] = {
      snprintf(target, sizeof target, "/m/%s", object->key),
      snprintf(if_match, sizeof if_match, "\"%s\"", object->etag),
  };
  if (lengths[0] >= (int)sizeof target || lengths[1] >= (int)sizeof if_match) return 0;
  snprintf(range, sizeof range, "bytes=%lld-%lld", (long long)fetch->start, (long long)(fetch->start + fetch->bytes - 1));
  if (!hop_sign(plane->hop_keys, peer->name, target, range, if_match, &hop, field)) return 0;
  memcpy(fetch->mac, hop.mac, sizeof fetch->mac);
  fetch->key = hop.key;
  int bytes = snprintf(into, PEER_HEAD_MAX,
                       "GET %s HTTP/1.1\r\nHost: %s\r\nIf-Match: %s\r\nRange: %s\r\nX-Headrace-Hop: %s\r\n\r\n", target,
                       peer->address, if_match, range, field);
  return bytes > 0 && bytes < PEER_HEAD_MAX ? (size_t)bytes : 0;
}

/* Send the rest of the request; 0: the peer is gone. */
static int send_request(struct fetch *fetch) {
  if (fetch->unsent == 0) return 1;
  ssize_t sent = send(fetch->from->fd, fetch->buffer + fetch->at, fetch->unsent, MSG_NOSIGNAL);
  if (sent < 0) return errno == EAGAIN || errno == EINTR;
  fetch->at += (size_t)sent;
  fetch->unsent -= (size_t)sent;
  if (fetch->unsent == 0) fetch->at = fetch->end;
  return 1;
}

struct fetch *fetch_start(struct plane *plane, struct connection *connection, const char *head, size_t head_bytes) {
  const struct object *object = connection->object;
  struct peer *peer = find_peer(plane, object->peer);
  int64_t bytes = BLOCK_BYTES - connection->start % BLOCK_BYTES;
  if (bytes > connection->left) bytes = connection->left;
  struct peer_connection *to = peer == NULL ? NULL : peer->idle != NULL ? peer->idle : open_connection(plane, peer);
  if (to == NULL) return NULL;
  size_t buffer = HEAD_OUT_MAX + PEER_HEAD_MAX + (size_t)bytes;
  struct fetch *fetch = malloc(sizeof *fetch + buffer);
  if (fetch == NULL) return NULL;
  *fetch = (struct fetch){.client = connection, .start = connection->start, .bytes = bytes, .missing = bytes,
                          .head_left = head_bytes, .at = HEAD_OUT_MAX, .end = HEAD_OUT_MAX,
                          .began_ns = plane->began_ns, .asked_ns = loop_now_ns(), .buffer_bytes = buffer};
  fetch->unsent = write_request(plane, object, peer, fetch, to, fetch->buffer + HEAD_OUT_MAX);
  if (fetch->unsent == 0) {
    free(fetch);
    return NULL;
  }
  take(to, fetch);
  to->began_ms = plane->now_ms;
  connection->fetch = fetch;
  if (send_request(fetch)) {
    if (head_bytes) memcpy(fetch->buffer, head, head_bytes);
    return fetch;
  }
  fetch_end(plane, connection);
  return NULL;
}

void fetch_end(struct plane *plane, struct connection *connection) {
  struct fetch *fetch = connection->fetch;
  connection->fetch = NULL;
  if (fetch->from != NULL) close_connection(plane, fetch->from);
  free(fetch);
}

/* The head of the answer: INCOMPLETE, PART once it is valid, or OTHER. */
static enum peer_head_result read_answer(struct plane *plane, struct fetch *fetch) {
  struct peer_head head;
  struct object *object = fetch->client->object;
  char *data = fetch->buffer + HEAD_OUT_MAX, reply[HOP_MAC + 1];
  struct hop hop = {.key = fetch->key, .mac = fetch->mac};
  enum peer_head_result result = peer_head_read(data, fetch->filled, &head);
  if (result != PEER_HEAD_PART) return result;
  hop_sign_reply(&hop, object->etag, fetch->start, fetch->bytes, reply);
  if (!peer_head_is_for(&head, object->etag, object->size_bytes, fetch->start, fetch->bytes, reply)) return PEER_HEAD_OTHER;
  fetch->from->is_last = (uint8_t)head.is_last;
  /* The owner has confirmed the version, as it would in its answer to a HEAD. */
  if (object->expires_ms < plane->now_ms + FRESH_MS) object->expires_ms = plane->now_ms + FRESH_MS;
  size_t body = HEAD_OUT_MAX + head.bytes;
  fetch->at = body - fetch->head_left;
  memmove(fetch->buffer + fetch->at, fetch->buffer, fetch->head_left);
  fetch->end = body;
  fetch->filled -= head.bytes;
  return PEER_HEAD_PART;
}

/* Receive what has arrived; 0: a fault. `*is_more`: there may be more. */
static int receive(struct plane *plane, struct fetch *fetch, int *is_more) {
  int has_head = fetch->end > HEAD_OUT_MAX;
  size_t at = has_head ? fetch->end : HEAD_OUT_MAX + fetch->filled;
  size_t room = has_head ? (size_t)fetch->missing : fetch->buffer_bytes - at;
  ssize_t got = recv(fetch->from->fd, fetch->buffer + at, room, 0);
  *is_more = got > 0;
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got == 0) return 0;
  if (has_head) {
    fetch->end += (size_t)got;
    fetch->missing -= got;
    return 1;
  }
  fetch->filled += (size_t)got;
  enum peer_head_result result = read_answer(plane, fetch);
  if (result != PEER_HEAD_PART) return result == PEER_HEAD_INCOMPLETE;
  if ((int64_t)fetch->filled > fetch->missing) return 0;
  fetch->end += fetch->filled;
  fetch->missing -= (int64_t)fetch->filled;
  return 1;
}

/* Unrequested bytes, or the end of the connection. */
static void check_idle(struct plane *plane, struct peer_connection *to) {
  char byte;
  if (recv(to->fd, &byte, 1, MSG_PEEK) >= 0 || errno != EAGAIN) close_connection(plane, to);
}

void peers_handle(struct plane *plane, void *of_event) {
  struct peer_connection *to = (struct peer_connection *)(void *)((char *)of_event - 1);
  struct fetch *fetch = to->fetch;
  if (to->fd < 0) return;
  if (fetch == NULL) {
    check_idle(plane, to);
    return;
  }
  struct connection *client = fetch->client;
  int is_more = 1;
  while (is_more) {
    if (!send_request(fetch) || (fetch->unsent == 0 && !receive(plane, fetch, &is_more))) {
      fetch_fail(plane, client);
      return;
    }
    if (fetch->unsent) return;
    if (fetch->missing == 0) {
      count_time(plane->counters.hops, &plane->counters.hops_ns, loop_now_ns() - fetch->asked_ns);
      release(plane, to);
      is_more = 0;
    }
    if (fetch->at < fetch->end && !client->is_paused) connection_advance(plane, client);
    if (to->fetch != fetch) return; /* it ended, or the client did */
  }
}

/* Deadlines and end */

static void expire_peer(struct plane *plane, struct peer *peer) {
  for (struct peer_connection *to = peer->busy, *later; to != NULL; to = later) {
    int64_t waited_ms = plane->now_ms - to->began_ms;
    later = to->later;
    if (waited_ms >= peer->timeout_ms || (waited_ms >= SLOW_MS && to->fetch->unsent)) {
      fetch_fail(plane, to->fetch->client);
    } else if (waited_ms >= SLOW_MS && !to->is_slow) {
      to->is_slow = 1;
      plane_report(plane, PLANE_SLOW, peer->number);
    }
  }
}

void peers_expire(struct plane *plane) {
  for (struct peer *peer = plane->peers.first; peer != NULL; peer = peer->next) expire_peer(plane, peer);
}

void peers_drop(struct plane *plane, int32_t number) {
  struct peer **at = &plane->peers.first;
  while (*at != NULL && (*at)->number != number) at = &(*at)->next;
  struct peer *peer = *at;
  if (peer == NULL) return;
  *at = peer->next; /* first, so that its clients are not served by it again */
  while (peer->busy != NULL) fetch_fail(plane, peer->busy->fetch->client);
  while (peer->idle != NULL) close_connection(plane, peer->idle);
  free(peer);
}

void peers_close(struct plane *plane) {
  while (plane->peers.first != NULL) peers_drop(plane, plane->peers.first->number);
  peers_free_ended(plane);
}
