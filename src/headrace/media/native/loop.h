/* Internal: the state of a plane and of its connections. Only the thread of the loop uses it, but for
   the two queues. */
#ifndef HEADRACE_LOOP_H
#define HEADRACE_LOOP_H

#include <pthread.h>
#include <stdint.h>

#include "access_log.h"
#include "blocks.h"
#include "bytes.h"
#include "files.h"
#include "head.h"
#include "hop.h"
#include "objects.h"
#include "peers.h"
#include "plane.h"
#include "tls.h"
#include "url.h"

#define LISTENERS_MAX 4
#define BURST_BYTES_MIN (64 * 1024)
#define FILES_UNUSED_MS 1000 /* then they are closed */
#define QUANTUM_BYTES (1024 * 1024) /* sent to one client before the next one is served */
#define PAUSE_SLOTS 256
#define PAUSE_SLOT_MS 4
#define SAMPLES_BYTES (64 * 1024)
#define SAMPLED_EVERY 16 /* as media/hottest.py */
#define REQUEST_COST_BYTES (16 * 1024)
#define HEAD_OUT_MAX 4096

enum state { READING, SENDING };
enum step { STEP_MORE, STEP_WAIT, STEP_ENDED }; /* go on; wait for the socket; the connection left the plane */
enum deadline { DEADLINE_HEADER, DEADLINE_IDLE, DEADLINE_SEND, DEADLINES };

/* The rate limit of one answer: a client may be ahead by one burst. Unused rate is not saved. */
struct rate {
  int64_t per_s; /* 0: unlimited */
  int64_t left, seen_ms;
};

struct connection {
  int fd;
  uint8_t state;
  uint8_t deadline; /* the list it is in */
  uint8_t is_queued;
  uint8_t is_paused; /* for the rate limit of its answer */
  uint8_t is_visited; /* the current block was marked as visited */
  uint8_t is_ended;
  int64_t deadline_ms;
  struct connection *earlier, *later; /* in the list of its deadline */
  struct connection *next_queued;
  struct bytes in;  /* received and not answered: part of a head, or pipelined requests */
  struct bytes out; /* as sent: the rest of a head, or encrypted bytes, that the socket has not taken */
  struct tls *tls;  /* NULL: plain */
  struct object *object;
  struct fetch *fetch; /* of bytes that a peer keeps; NULL: none was requested */
  int file; /* that is sent; -1: blocks are */
  int64_t start, left; /* of the body */
  int64_t sent_bytes, acked_mark;
  struct rate rate;
  struct address address;
  struct log_entry *entry; /* of the answer; NULL: it has none */
};

/* Connections that are advanced in turn. */
struct queue {
  struct connection *first, *last;
};

struct listener {
  int fd;
  int is_tls; /* its clients use TLS */
};

/* Connections with one timeout, by deadline: a new deadline is always the last one. */
struct deadlines {
  struct connection *first, *last;
  int32_t timeout_ms;
};

/* What the control plane can request of the loop. */
enum command_kind {
  COMMAND_LISTEN,
  COMMAND_STOP_LISTENING,
  COMMAND_ADOPT,
  COMMAND_RELEASED,
  COMMAND_PUT_OBJECT,
  COMMAND_FORGET_OBJECT,
  COMMAND_FORGET_OBJECTS,
  COMMAND_SET_KEYS,
  COMMAND_SET_HOP_KEYS,
  COMMAND_PUT_PEER,
  COMMAND_DROP_PEER,
  COMMAND_SET_BLOCKS,
  COMMAND_SET_CERTIFICATE,
  COMMAND_CLOSE,
};

struct command {
  struct command *next;
  enum command_kind kind;
  int fd;
  int64_t number;
  void *data;
};

struct queued_event {
  struct plane_event event;
  struct queued_event *next;
  uint8_t bytes[]; /* data, then key and version of PLANE_BODY */
};

struct plane {
  struct plane_config config;
  char *folder;
  pthread_t thread;
  int epoll, commands_fd, events_fd;
  int is_closing;

  pthread_mutex_t lock; /* of the two queues */
  struct command *first_command, *last_command;
  struct queued_event *first_event, *last_event;
  char samples[SAMPLES_BYTES];
  size_t samples_bytes;

  struct objects objects;
  struct blocks *blocks;
  struct files files;
  struct url_keys *keys;
  struct hop_keys *hop_keys;
  struct hop_counters hop_counters;
  struct peers peers;
  struct listener listeners[LISTENERS_MAX];
  int listeners_count;
  struct tls_server *tls;
  int is_stopping, is_accepting_paused, is_outdated;
  int64_t held, handed_over; /* connections here and at the control plane */
  struct deadlines deadlines[DEADLINES];
  struct queue queued, handshakes;
  struct connection *paused[PAUSE_SLOTS]; /* by the time at which they go on */
  int64_t paused_count, paused_ms;        /* slots before paused_ms are empty */
  struct connection *ended; /* to be freed after the batch */

  int64_t now_ms, now_s, began_ns;
  int64_t unix_ms;
  int64_t date_s;
  uint32_t random, sample_left;
  char date[40];
  struct plane_counters counters;
  uint8_t input[HEAD_BYTES_MAX];
};

/* loop.c */
void *loop_run(void *plane);
void loop_refresh_time(struct plane *plane);
int64_t loop_now_ns(void);
void connection_watch(struct plane *plane, struct connection *connection, enum deadline deadline);
void connection_close(struct plane *plane, struct connection *connection);
void connection_cut(struct plane *plane, struct connection *connection, uint64_t *counter);
void connection_enqueue(struct plane *plane, struct connection *connection);
void connection_pause(struct plane *plane, struct connection *connection, int64_t delay_ms);

/* answer.c */
int64_t rate_burst(const struct rate *rate);
/* The bytes that may be sent now; 0: the connection pauses. */
int64_t rate_allow(struct plane *plane, struct connection *connection, int64_t count);
/* Add a time to a histogram of the counters. */
void count_time(uint64_t *buckets, uint64_t *sum_ns, int64_t waited_ns);
void answer_count(struct plane *plane, int is_part, int64_t began_ns);
void answer_sample(struct plane *plane, const struct object *object);
void answer_finish(struct plane *plane, struct connection *connection);
void connection_advance(struct plane *plane, struct connection *connection);
/* Both return STEP_ENDED. A connection is lost by a fault of its client or of this machine. */
enum step connection_lose(struct plane *plane, struct connection *connection);
enum step connection_hand_over(struct plane *plane, struct connection *connection, int kind, const void *data,
                               size_t bytes);

/* fetch.c: the client's side of an answer with bytes of another node; see peers.h.
   Begin the answer of `connection`, whose object, range and rate are set. `head` goes before its
   first bytes. 0: it must be handed over. */
int fetch_begin(struct plane *plane, struct connection *connection, const char *head, size_t head_bytes,
                size_t request_bytes, int is_part);
/* Send received bytes, and request the next block. */
enum step fetch_send(struct plane *plane, struct connection *connection);
/* The peer failed: hand the client over. */
void fetch_fail(struct plane *plane, struct connection *connection);

/* plane.c */
void plane_push_event(struct plane *plane, struct queued_event *event);
void plane_report(struct plane *plane, int kind, int64_t number); /* an event without a socket */
struct command *plane_take_commands(struct plane *plane);
void plane_add_sample(struct plane *plane, const struct object *object);
#endif
