/* The event loop: accepting, deadlines, turns and commands. */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <linux/sockios.h>

#include "loop.h"
#include "stream.h"

enum {
  EVENTS_MAX = 512,
  QUEUED_MAX = 16, /* clients that continue their bodies before new requests are looked for: 0.2 ms */
  ACCEPTS_MAX = 64,
  REFUSED_MAX = 64,
  TICK_MS = 250,
  HANDSHAKES_MAX = 4,        /* clients that continue their handshakes in a batch: some 0.1 ms each */
  NOTSENT_BYTES = 64 * 1024, /* see media/worker/node.py */
};
static const uint32_t EDGES = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;

int64_t loop_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

void loop_refresh_time(struct plane *plane) {
  struct timespec now;
  plane->now_ms = loop_now_ns() / 1000000;
  clock_gettime(CLOCK_REALTIME, &now);
  plane->now_s = now.tv_sec;
  plane->unix_ms = now.tv_sec * 1000ll + now.tv_nsec / 1000000;
  if (plane->date_s == plane->now_s) return;
  static const char DAYS[] = "SunMonTueWedThuFriSat", MONTHS[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
  struct tm utc;
  gmtime_r(&now.tv_sec, &utc);
  snprintf(plane->date, sizeof plane->date, "%.3s, %02d %.3s %04d %02d:%02d:%02d GMT", DAYS + 3 * utc.tm_wday, utc.tm_mday,
           MONTHS + 3 * utc.tm_mon, utc.tm_year + 1900, utc.tm_hour, utc.tm_min, utc.tm_sec);
  plane->date_s = plane->now_s;
}

int bytes_set(struct bytes *bytes, const void *data, size_t count) {
  uint8_t *copy = NULL;
  if (count && (copy = malloc(count)) == NULL) return -1;
  if (count) memcpy(copy, data, count);
  free(bytes->data);
  *bytes = (struct bytes){copy, count};
  return 0;
}

void bytes_free(struct bytes *bytes) {
  free(bytes->data);
  *bytes = (struct bytes){0};
}

/* Deadlines */

static void unwatch(struct plane *plane, struct connection *connection) {
  struct deadlines *list = &plane->deadlines[connection->deadline];
  if (connection->earlier) connection->earlier->later = connection->later;
  else list->first = connection->later;
  if (connection->later) connection->later->earlier = connection->earlier;
  else list->last = connection->earlier;
}

static void watch(struct plane *plane, struct connection *connection, enum deadline deadline) {
  struct deadlines *list = &plane->deadlines[deadline];
  connection->deadline = (uint8_t)deadline;
  connection->deadline_ms = plane->now_ms + list->timeout_ms;
  connection->earlier = list->last;
  connection->later = NULL;
  if (list->last) list->last->later = connection;
  else list->first = connection;
  list->last = connection;
}

void connection_watch(struct plane *plane, struct connection *connection, enum deadline deadline) {
  unwatch(plane, connection);
  watch(plane, connection, deadline);
}

/* A client must acknowledge enough bytes within the time, or it is cut. Bytes in the kernel's buffer
   do not count: it may grow to megabytes. */
static void require_progress(struct plane *plane, struct connection *connection) {
  int queued = 0;
  ioctl(connection->fd, SIOCOUTQ, &queued);
  int64_t acked = connection->sent_bytes - queued, wanted = plane->config.send_progress_bytes;
  int64_t at_its_rate = connection->rate.per_s * plane->config.send_timeout_ms / 2000;
  if (connection->rate.per_s && at_its_rate < wanted) wanted = at_its_rate;
  int is_waiting = connection->is_paused || (connection->fetch != NULL && connection->fetch->at == connection->fetch->end);
  if (queued && !is_waiting && acked - connection->acked_mark < wanted) {
    connection_cut(plane, connection, &plane->counters.cuts_stalled);
    return;
  }
  connection->acked_mark = acked;
  connection_watch(plane, connection, DEADLINE_SEND);
  /* A write may be short although the socket was not full: then no edge follows. */
  if (!queued && !connection->is_paused) connection_advance(plane, connection);
}

static void expire(struct plane *plane, struct connection *connection) {
  if (connection->state == SENDING) require_progress(plane, connection);
  else if (connection->in.count) connection_hand_over(plane, connection, PLANE_LATE, connection->in.data, connection->in.count);
  else connection_close(plane, connection);
}

static void expire_due(struct plane *plane) {
  for (int i = 0; i < DEADLINES; i++)
    while (plane->deadlines[i].first && plane->deadlines[i].first->deadline_ms <= plane->now_ms)
      expire(plane, plane->deadlines[i].first);
}

/* Connections */

static struct connection *add_connection(struct plane *plane, int fd, enum deadline deadline) {
  struct connection *connection = calloc(1, sizeof *connection);
  struct epoll_event event = {.events = EDGES, .data.ptr = connection};
  if (connection == NULL || epoll_ctl(plane->epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
    free(connection);
    close(fd);
    return NULL;
  }
  connection->fd = fd;
  connection->file = -1;
  watch(plane, connection, deadline);
  plane->held++;
  return connection;
}

/* Ended connections are freed after the batch: an event may still name them. */
static void free_later(struct plane *plane, struct connection *connection) {
  connection->later = plane->ended;
  plane->ended = connection;
}

static void free_ended(struct plane *plane) {
  while (plane->ended != NULL) {
    struct connection *connection = plane->ended;
    plane->ended = connection->later;
    free(connection);
  }
}

void connection_close(struct plane *plane, struct connection *connection) {
  unwatch(plane, connection);
  if (connection->fetch != NULL) fetch_end(plane, connection);
  if (connection->tls != NULL && connection->state == READING && connection->out.count == 0) tls_end(connection->tls);
  tls_free(connection->tls);
  connection->tls = NULL;
  if (connection->fd >= 0) {
    /* A close alone leaves events of a socket that a child process has inherited until its exec. */
    epoll_ctl(plane->epoll, EPOLL_CTL_DEL, connection->fd, NULL);
    close(connection->fd);
  }
  if (connection->file >= 0) close(connection->file);
  connection->fd = connection->file = -1;
  if (connection->entry != NULL && connection->entry->is_begun)
    access_log_end(plane->config.log, connection->entry, connection->start - connection->entry->start);
  else log_entry_free(connection->entry);
  connection->entry = NULL;
  if (connection->object != NULL) object_release(connection->object);
  bytes_free(&connection->in);
  bytes_free(&connection->out);
  connection->is_ended = 1;
  plane->held--;
  if (!connection->is_queued && !connection->is_paused) free_later(plane, connection);
}

/* Close so that the client receives an error instead of an end. */
void connection_cut(struct plane *plane, struct connection *connection, uint64_t *counter) {
  struct linger reset = {1, 0};
  if (connection->state == SENDING) ++*counter;
  setsockopt(connection->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  tls_free(connection->tls);
  connection->tls = NULL;
  connection_close(plane, connection);
}

static void enqueue(struct queue *queue, struct connection *connection) {
  if (connection->is_queued) return;
  connection->is_queued = 1;
  connection->next_queued = NULL;
  if (queue->first) queue->last->next_queued = connection;
  else queue->first = connection;
  queue->last = connection;
}

void connection_enqueue(struct plane *plane, struct connection *connection) { enqueue(&plane->queued, connection); }

/* Go on with a connection that left the queue or a pause. */
static void resume(struct plane *plane, struct connection *connection) {
  if (connection->is_ended) free_later(plane, connection);
  else connection_advance(plane, connection);
}

static void advance(struct plane *plane, struct queue *queue, int count_max) {
  for (int i = 0; i < count_max && queue->first; i++) {
    struct connection *connection = queue->first;
    queue->first = connection->next_queued;
    connection->is_queued = 0;
    resume(plane, connection);
  }
}

/* A longer delay than all slots cover ends early: the connection then pauses again. */
void connection_pause(struct plane *plane, struct connection *connection, int64_t delay_ms) {
  if (connection->is_queued) return; /* it goes on soon, and will pause then */
  int64_t slots = delay_ms / PAUSE_SLOT_MS + 1;
  if (slots >= PAUSE_SLOTS) slots = PAUSE_SLOTS - 1;
  if (plane->paused_count == 0) plane->paused_ms = plane->now_ms;
  struct connection **slot = &plane->paused[(plane->now_ms / PAUSE_SLOT_MS + slots) % PAUSE_SLOTS];
  connection->is_paused = 1;
  connection->next_queued = *slot;
  *slot = connection;
  plane->paused_count++;
}

static void end_pauses(struct plane *plane, int64_t until_ms) {
  while (plane->paused_count && plane->paused_ms / PAUSE_SLOT_MS <= until_ms / PAUSE_SLOT_MS) {
    struct connection **slot = &plane->paused[plane->paused_ms / PAUSE_SLOT_MS % PAUSE_SLOTS];
    struct connection *connection = *slot;
    *slot = NULL;
    plane->paused_ms += PAUSE_SLOT_MS;
    while (connection != NULL) {
      struct connection *next = connection->next_queued;
      connection->is_paused = 0;
      plane->paused_count--;
      resume(plane, connection);
      connection = next;
    }
  }
}

static void handle_event(struct plane *plane, struct connection *connection, uint32_t mask) {
  if (connection->is_ended) return;
  if (mask & (EPOLLERR | EPOLLHUP)) connection_lose(plane, connection);
  else if (connection->is_paused) return;
  else if (connection->tls != NULL && !connection->tls->is_open) {
    /* Handshakes cost far more than answers: a flood of them must not delay answers. */
    if (mask & EPOLLIN || connection->tls->ssl != NULL) enqueue(&plane->handshakes, connection);
  }
  /* Thousands of slow clients that read at once would delay new requests. */
  else if (mask == EPOLLOUT) connection_enqueue(plane, connection);
  else connection_advance(plane, connection);
}

/* Accepting */

static void set_options(struct plane *plane, int fd) {
  int yes = 1, unsent = NOTSENT_BYTES, silent_ms = plane->config.send_timeout_ms;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &silent_ms, sizeof silent_ms);
}

static void welcome(struct plane *plane, int fd, int is_tls) {
  int64_t all = plane->held + plane->handed_over;
  if (all >= plane->config.connections_max + REFUSED_MAX) {
    close(fd);
    return;
  }
  set_options(plane, fd);
  struct connection *connection = add_connection(plane, fd, DEADLINE_HEADER);
  if (connection != NULL && is_tls && (connection->tls = tls_make(fd)) == NULL) connection_close(plane, connection);
  else if (connection != NULL && all >= plane->config.connections_max)
    connection_hand_over(plane, connection, PLANE_REFUSED, NULL, 0);
}

static void watch_listeners(struct plane *plane, int operation) {
  for (int i = 0; i < plane->listeners_count; i++) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &plane->listeners[i]};
    epoll_ctl(plane->epoll, operation, plane->listeners[i].fd, &event);
  }
}

static void accept_clients(struct plane *plane, const struct listener *listener) {
  for (int i = 0; i < ACCEPTS_MAX; i++) {
    int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      welcome(plane, fd, listener->is_tls);
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      plane->is_accepting_paused = 1; /* until the next tick */
      watch_listeners(plane, EPOLL_CTL_DEL);
      return;
    } else if (errno != ECONNABORTED && errno != EINTR) {
      return;
    }
  }
}

/* Commands */

static void stop_listening(struct plane *plane) {
  /* Clients in the accept queue may have sent a request, and would be reset. */
  for (int i = 0; i < plane->listeners_count; i++) accept_clients(plane, &plane->listeners[i]);
  watch_listeners(plane, EPOLL_CTL_DEL);
  for (int i = 0; i < plane->listeners_count; i++) close(plane->listeners[i].fd);
  plane->listeners_count = 0;
  plane->is_stopping = 1;
  for (int list = 0; list < DEADLINE_SEND; list++) {
    struct connection *next = plane->deadlines[list].first;
    for (struct connection *connection = next; connection != NULL; connection = next) {
      next = connection->later;
      connection_advance(plane, connection); /* closes it if no request was received */
    }
  }
}

static void listen_on(struct plane *plane, int fd, int is_tls) {
  if (plane->listeners_count == LISTENERS_MAX) return;
  struct listener *listener = &plane->listeners[plane->listeners_count++];
  *listener = (struct listener){fd, is_tls};
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = listener};
  epoll_ctl(plane->epoll, EPOLL_CTL_ADD, fd, &event);
}

static void adopt(struct plane *plane, int fd, struct tls *tls, int64_t sent_bytes) {
  plane->handed_over--;
  struct connection *connection = add_connection(plane, fd, DEADLINE_IDLE);
  if (connection == NULL) {
    tls_free(tls);
    return;
  }
  connection->tls = tls;
  if (tls != NULL) {
    tls->buffer = &plane->tls->loop;
    connection->out = tls->held;
    tls->held = (struct bytes){0};
  }
  connection->sent_bytes = connection->acked_mark = sent_bytes;
  connection_advance(plane, connection); /* bytes may have arrived before it was registered */
}

/* Disks of another manifest than the filler's newest may be reused: the control plane replaces them. */
static void look_at_revision(struct plane *plane) {
  if (plane->blocks == NULL || plane->config.board == NULL) return;
  uint64_t revision = atomic_load_explicit((const _Atomic uint64_t *)plane->config.board, memory_order_acquire);
  plane->is_outdated = plane->blocks->revision != revision;
}

static void set_blocks(struct plane *plane, struct blocks *blocks) {
  free(plane->blocks);
  plane->blocks = blocks;
  look_at_revision(plane);
  plane_report(plane, PLANE_SWAPPED, (int64_t)blocks->revision);
}

static void run_command(struct plane *plane, struct command *command) {
  switch (command->kind) {
    case COMMAND_LISTEN: listen_on(plane, command->fd, (int)command->number); break;
    case COMMAND_STOP_LISTENING: stop_listening(plane); break;
    case COMMAND_ADOPT: adopt(plane, command->fd, command->data, command->number); break;
    case COMMAND_RELEASED: plane->handed_over--; break;
    case COMMAND_PUT_OBJECT: objects_put(&plane->objects, command->data); break;
    case COMMAND_FORGET_OBJECT:
      objects_remove(&plane->objects, command->data);
      free(command->data);
      break;
    case COMMAND_FORGET_OBJECTS: objects_clear(&plane->objects); break;
    case COMMAND_SET_KEYS:
      free(plane->keys);
      plane->keys = command->data;
      break;
    case COMMAND_SET_HOP_KEYS:
      free(plane->hop_keys);
      plane->hop_keys = command->data;
      break;
    case COMMAND_PUT_PEER: peers_put(plane, command->data); break;
    case COMMAND_DROP_PEER: peers_drop(plane, (int32_t)command->number); break;
    case COMMAND_SET_CERTIFICATE: /* older connections keep theirs */
      tls_context_free(plane->tls->context);
      plane->tls->context = command->data;
      break;
    case COMMAND_SET_BLOCKS: set_blocks(plane, command->data); break;
    case COMMAND_CLOSE: plane->is_closing = 1; break;
  }
  free(command);
}

static void run_commands(struct plane *plane) {
  struct command *command = plane_take_commands(plane);
  while (command != NULL) {
    struct command *next = command->next;
    run_command(plane, command);
    command = next;
  }
}

/* The loop */

static void move_epoch(struct plane *plane) {
  /* The filler orders the stores and loads of this thread by a barrier in all processes. */
  uint64_t *epoch = plane->config.epoch;
  atomic_signal_fence(memory_order_seq_cst);
  if (epoch != NULL) atomic_store_explicit((_Atomic uint64_t *)epoch, *epoch + 1, memory_order_release);
  atomic_signal_fence(memory_order_seq_cst);
}

static int is_listener(const struct plane *plane, const void *of_event) {
  const struct listener *listener = of_event;
  return listener >= plane->listeners && listener < plane->listeners + LISTENERS_MAX;
}

static void handle_batch(struct plane *plane, const struct epoll_event *events, int count) {
  const struct listener *accepts[LISTENERS_MAX];
  int accepts_count = 0, has_commands = 0;
  look_at_revision(plane);
  move_epoch(plane);
  for (int i = 0; i < count; i++) {
    void *of_event = events[i].data.ptr;
    if (of_event == &plane->commands_fd) has_commands = 1;
    else if (peers_has_event(of_event)) peers_handle(plane, of_event);
    else if (is_listener(plane, of_event)) accepts[accepts_count++] = of_event;
    else handle_event(plane, of_event, events[i].events);
  }
  if (has_commands) run_commands(plane);
  end_pauses(plane, plane->now_ms);
  advance(plane, &plane->queued, QUEUED_MAX);
  advance(plane, &plane->handshakes, HANDSHAKES_MAX);
  move_epoch(plane);
  free_ended(plane);
  peers_free_ended(plane);
  /* Last, so that a descriptor closed above is not reused while its old events are handled. */
  for (int i = 0; i < accepts_count && !plane->is_stopping; i++) accept_clients(plane, accepts[i]);
}

static void tick(struct plane *plane) {
  move_epoch(plane);
  expire_due(plane);
  peers_expire(plane);
  move_epoch(plane);
  files_close_unused(&plane->files, plane->now_ms - FILES_UNUSED_MS);
  free_ended(plane);
  peers_free_ended(plane);
  if (plane->is_accepting_paused) watch_listeners(plane, EPOLL_CTL_ADD);
  plane->is_accepting_paused = 0;
}

void *loop_run(void *of_plane) {
  struct plane *plane = of_plane;
  struct epoll_event events[EVENTS_MAX];
  int64_t tick_ms = 0;
  while (!plane->is_closing) {
    int wait_ms = plane->queued.first || plane->handshakes.first ? 0 : plane->paused_count ? PAUSE_SLOT_MS : TICK_MS;
    int count = epoll_wait(plane->epoll, events, EVENTS_MAX, wait_ms);
    loop_refresh_time(plane);
    handle_batch(plane, events, count < 0 ? 0 : count);
    plane->counters.connections = (uint64_t)plane->held;
    /* One number: a reader of two could miss a client that moves between them. */
    plane->counters.clients = (uint64_t)(plane->held + plane->handed_over);
    atomic_signal_fence(memory_order_seq_cst);
    plane->counters.is_stopped = (uint64_t)plane->is_stopping;
    if (plane->now_ms < tick_ms) continue;
    tick(plane);
    tick_ms = plane->now_ms + TICK_MS;
  }
  for (int i = 0; i < DEADLINES; i++)
    while (plane->deadlines[i].first) connection_lose(plane, plane->deadlines[i].first);
  end_pauses(plane, plane->now_ms + PAUSE_SLOTS * PAUSE_SLOT_MS);
  while (plane->queued.first) advance(plane, &plane->queued, QUEUED_MAX);
  while (plane->handshakes.first) advance(plane, &plane->handshakes, HANDSHAKES_MAX);
  free_ended(plane);
  return NULL;
}
