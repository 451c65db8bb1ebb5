/* The native data plane of a media worker: it answers the common requests, the control plane the rest.

   One thread runs one edge-triggered epoll loop over the client sockets of a worker process. It
   answers a GET of an object whose blocks are in memory on this node's disks: it parses the head,
   checks signature and expiry, looks the block up in the shared frame table and sends it.
   Everything else is handed to the control plane (Python) with its socket and the bytes received so
   far: other methods, conditions, malformed heads, missing or unverified blocks, traces, tags, and
   connections that end. So the plane contains no error answer: whatever it does not recognize as
   plain, the control plane judges. A socket comes back with `plane_adopt` after such an answer.

   Clients of HTTPS are served alike: the plane encrypts (tls.h). A connection is passed with its TLS
   state, through which the control plane receives and sends (plane_tls_receive and so on).

     control plane  -- commands (objects, keys, disks, sockets) -->  plane
     control plane  <-- events (requests, bodies to continue)   --   plane

   Both directions are queues with an eventfd. All other state belongs to the thread of the loop, so
   nothing else is locked. Functions of this header may be called by any one thread of the control
   plane; none blocks.

   Safety of blocks. A frame is used only inside an epoch: the plane owns a cell of the node's board
   (media/cache/epochs.py), odd while a batch of events is handled. A body that is sent over several
   batches looks its block up again by key. Only frames marked as verified are sent.

   No dependency besides the C library and Linux; for HTTPS, OpenSSL 3 at run time. */
#ifndef HEADRACE_PLANE_H
#define HEADRACE_PLANE_H

#include <stddef.h>
#include <stdint.h>

#define PLANE_BUCKETS 14 /* bounds of the histogram of first bytes; one more bucket is above them */
#define PLANE_SLOTS 8192 /* parts of the key space, see media/cache/layout.py */

struct access_log;
struct log_entry;
struct plane;
struct tls;

/* Settings that stay for the life of a plane. */
struct plane_config {
  int32_t header_timeout_ms;
  int32_t idle_timeout_ms;
  int32_t send_timeout_ms;
  int32_t connections_max;
  int64_t send_progress_bytes;   /* what a client must receive within send_timeout_ms */
  int32_t is_signature_required; /* otherwise a query without a signature is ignored */
  int32_t is_origin_relevant;    /* answers depend on the Origin field: requests with it are handed over */
  const uint8_t *ticket_seed; /* 32 bytes, the same in all workers of a node; NULL: no HTTPS */
  const char *folder; /* of objects that are files; NULL: blocks of disks */
  struct access_log *log; /* NULL: none */
  uint64_t *board; /* the node's board of epochs; word 0 is the manifest's revision; NULL: no disks */
  uint64_t *epoch; /* the plane's own word of the board */
};

/* A disk whose blocks may be sent. `index`, `visited` and `verified` are shared memory. */
struct plane_disk {
  uint8_t *index;
  uint8_t *visited;
  uint8_t *verified;
  uint64_t sets; /* 0: its blocks are not sent from here */
  int64_t data_at;
  int32_t reader; /* descriptor for sendfile and preadv; stays open until the disk is replaced */
};

/* What the plane needs to answer for one object, valid until `expires_ms` of CLOCK_MONOTONIC. */
struct plane_object {
  const char *key;     /* without "/m/" */
  const char *version; /* part of the keys of its blocks */
  const char *lines;   /* header lines from ETag to Accept-Ranges */
  const char *tail;    /* header lines from Cache-Status to those of a rule */
  int64_t size_bytes;
  int64_t expires_ms;
  int32_t fresh_s; /* max-age without a signature */
  int32_t is_immutable;
  int32_t peer; /* the number of the node that keeps its blocks; 0: this one */
  int32_t is_for_peers; /* this node is no replica: only requests of other nodes are answered */
  const char *cache_control; /* without a signature; empty: from the two above */
};

/* Events with a socket pass it to the control plane, which closes it or brings it back. */
enum plane_event_kind {
  PLANE_REQUEST = 1, /* answer the request in `data` */
  PLANE_BODY = 2,    /* send `left` bytes from `start` of object `key`; `data` holds further requests */
  PLANE_REFUSED = 3, /* one client too many: answer 503 and close */
  PLANE_LATE = 4,    /* the head in `data` was not complete in time: answer 408 and close */
  PLANE_SWAPPED = 5, /* the disks of the last plane_set_disks are in use, earlier ones no more */
  PLANE_SLOW = 6,    /* the peer with the number `start` has not answered in half a second */
};

struct plane_event {
  int32_t kind;
  int32_t fd;
  int32_t file; /* PLANE_BODY of a file: its descriptor, which the control plane closes; else -1 */
  int32_t data_bytes;
  int32_t peer; /* PLANE_BODY: the bytes were from a peer */
  const uint8_t *data; /* valid until plane_event_done */
  const char *key;     /* PLANE_BODY */
  const char *version; /* PLANE_BODY */
  int64_t start;
  int64_t left;
  int64_t rate; /* PLANE_BODY: bytes per second; 0: unlimited */
  int64_t sent_bytes;
  struct tls *tls; /* NULL: a plain connection. It is passed on with the socket */
  struct log_entry *entry; /* PLANE_BODY: for access_log_end; NULL: without a log */
};

/* Counters since the start. Read them at any time. */
struct plane_counters {
  uint64_t answers_200;
  uint64_t answers_206;
  uint64_t hits;       /* blocks sent from memory */
  uint64_t sent_bytes; /* bytes of bodies */
  uint64_t handed_over;
  uint64_t connections; /* held now */
  uint64_t clients;     /* held now, or handed over and neither closed nor brought back */
  uint64_t is_stopped;  /* plane_stop_listening took effect */
  uint64_t cuts_client;
  uint64_t cuts_stalled;
  uint64_t first_bytes[PLANE_BUCKETS + 1]; /* seconds to the first byte, as FINE_BUCKETS_S */
  uint64_t first_bytes_ns;
  uint64_t passed;      /* blocks of peers sent on */
  uint64_t peer_bytes;  /* bytes of bodies that peers sent */
  uint64_t hop_faults;  /* requests to peers without a complete valid answer */
  uint64_t hops[PLANE_BUCKETS + 1]; /* seconds from a request to a peer to its complete answer */
  uint64_t hops_ns;
};

struct plane *plane_start(const struct plane_config *config);
/* End the thread and free everything. Sockets that are still held are reset. */
void plane_close(struct plane *plane);

/* The descriptor that is readable while events wait. */
int plane_event_fd(const struct plane *plane);
/* The next event, or NULL. Release it with plane_event_done. */
const struct plane_event *plane_next_event(struct plane *plane);
void plane_event_done(const struct plane_event *event);
const struct plane_counters *plane_counters(const struct plane *plane);
/* Move the keys of sampled answers, about one in 16, each with a line feed, to `into`. Returns bytes. */
int plane_take_samples(struct plane *plane, char *into, int bytes_max);

/* Commands. Each returns 0, or -1 if memory is missing. They take effect before later commands. */
int plane_listen(struct plane *plane, int listener, int is_tls);
int plane_stop_listening(struct plane *plane);
int plane_adopt(struct plane *plane, int fd, struct tls *tls, int64_t sent_bytes); /* an idle connection comes back */
int plane_released(struct plane *plane);                          /* a handed-over one was closed */
int plane_put_object(struct plane *plane, const struct plane_object *object);
int plane_forget_object(struct plane *plane, const char *key);
int plane_forget_objects(struct plane *plane);
int plane_set_keys(struct plane *plane, const char *ids, const uint8_t *secrets, int count);
/* PEM files for later handshakes. -1: they are refused for the reason in `why`, and the last ones stay. */
int plane_set_certificate(struct plane *plane, const char *certificate, const char *key, char *why, int why_bytes);
/* Accept requests of other nodes to this node, `name`. */
int plane_set_hop_keys(struct plane *plane, const char *name, const char *ids, const uint8_t *secrets, int count);
/* Let objects be requested from the node `name`, whose Host is `address`, at `ip` and `port`. */
int plane_put_peer(struct plane *plane, int32_t number, const char *name, const char *address, const char *ip, int port,
                   int timeout_ms);
/* Request nothing from it any more; clients that wait for it are handed over. */
int plane_drop_peer(struct plane *plane, int32_t number);
/* Not a command: record the counter of a request of a peer now; 0: it was used before. */
int plane_hop_advance(struct plane *plane, uint64_t connection, uint64_t counter);
int plane_set_disks(struct plane *plane, uint64_t revision, const struct plane_disk *disks, int count,
                    const uint8_t *owners, const uint8_t *owners_before, const uint8_t *hash_key,
                    int hash_key_bytes);

/* TLS of a connection that was passed on. All return -1 to wait for the socket, -2 if it is broken. */
int64_t plane_tls_receive(struct tls *tls, uint8_t *into, int64_t bytes_max); /* 0: the client ended */
/* After -1 the same bytes must be offered again; the result then is the number that was offered first. */
int64_t plane_tls_send(struct tls *tls, const uint8_t *data, int64_t bytes);
/* Send close_notify, so that the client does not take the end for an attacker's. */
void tls_end(struct tls *tls);
/* Before the socket is closed, which stays open. Accepts NULL. */
void tls_free(struct tls *tls);
/* NULL: TLS works here, or the reason why not; the same for kernel TLS. */
const char *tls_missing(void);
const char *tls_kernel_missing(void);
#endif
